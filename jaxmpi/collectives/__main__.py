"""`python -m jaxmpi.collectives`: the operations, and what each sends."""

from jaxmpi.collectives.table import list_operations

if __name__ == "__main__":
    print("w ranks, of which this is r; n bytes of x; ⊕ is the operation asked for.\n")
    for name, equation, sends, transpose in list_operations():
        print(f"{name:15} {equation}\n{'':15} sends {sends}\n{'':15} transpose: {transpose}\n")
