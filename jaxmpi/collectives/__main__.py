"""`python -m jaxmpi.collectives`: the operations, and what each sends."""

import inspect

from jaxmpi.collectives import api
from jaxmpi.collectives.table import OPERATIONS

if __name__ == "__main__":
    print("w ranks, of which this is r; n bytes of x; ⊕ is the operation asked for.\n")
    for name in OPERATIONS:
        print(f"{name}: {inspect.getdoc(getattr(api, name))}\n")
