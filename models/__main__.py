"""`jaxmpi models`: cost of each model, from shapes; nothing is allocated.

`jaxmpi models --tree alexnet vgg16` prints the shapes of their params, and so of their gradients, as JSON.
"""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core
from rich.console import Console
from rich.table import Table

from jaxmpi.config import experiment_file
from jaxmpi.core.errors import UsageError, check, lookup
from jaxmpi.core.pytrees import named_leaves
from jaxmpi.model import Model
from jaxmpi.models import MODELS
from jaxmpi.tools import options

CAPTION = (
    "depth: weight layers on the longest path; GFLOP: of one forward pass, 2 a multiply-add, as XLA counts it "
    "before it compiles (nothing for zero padding); gradient bytes: in float32"
)
WEIGHT_LAYERS = ("conv_general_dilated", "dot_general")


def depth(jaxpr: Any) -> int:
    """Weight layers on a jaxpr's longest path from inputs to outputs."""
    return max(_depths(jaxpr, [0] * len(jaxpr.invars)), default=0)


def _depths(jaxpr: Any, inputs: list[int]) -> list[int]:
    at = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> int:
        return 0 if hasattr(atom, "val") else at.get(atom, 0)  # literals have no depth

    for equation in jaxpr.eqns:
        before = [read(atom) for atom in equation.invars]
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        if inner is not None and len(inner.invars) == len(before):
            after = _depths(inner, before)
        else:
            layer = equation.primitive.name in WEIGHT_LAYERS
            after = [max(before, default=0) + layer] * len(equation.outvars)
        at.update(zip(equation.outvars, after, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def flop(jaxpr: Any) -> float:
    """FLOP of a jaxpr as XLA counts it before compilation.

    XLA counts a loop's body once; all turns count here.
    """
    cost: Any = jax.jit(core.jaxpr_as_fun(jaxpr)).lower(*jaxpr.in_avals).cost_analysis()
    turns = ((each.params["length"], each.params["jaxpr"]) for each in scans(jaxpr.jaxpr))
    return cost.get("flops", 0.0) + sum((length - 1) * flop(body) for length, body in turns)


def scans(jaxpr: Any) -> Iterator[Any]:
    """Outermost loops of a jaxpr and of the functions that it calls."""
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if equation.primitive.name == "scan":
            yield equation
        elif inner is not None:
            yield from scans(getattr(inner, "jaxpr", inner))


def shapes(model: Model) -> tuple[Any, Any, jax.ShapeDtypeStruct]:
    """The abstract (params, model_state, image or tokens) of one example."""
    image = model.example()
    key = jax.eval_shape(lambda: jax.random.key(0))
    return (*jax.eval_shape(model.init, key, image), image)


def row(model: Model) -> list[str]:
    """Name, depth, params, input, GFLOP of one image's forward pass, gradient bytes."""
    params, state, image = shapes(model)

    def forward(params: Any, state: Any, image: jax.Array) -> jax.Array:
        return model.apply(params, state, image, jax.random.key(0), False)[0]

    traced = jax.jit(forward).trace(params, state, image)
    leaves = jax.tree.leaves(params)
    return [
        model.name,
        str(depth(traced.jaxpr.jaxpr)),
        f"{sum(math.prod(leaf.shape) for leaf in leaves):,}",
        "x".join(map(str, model.input_shape)),
        f"{flop(traced.jaxpr) / 1e9:.3g}",
        f"{sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves):,}",
    ]


def tree(name: str) -> dict[str, list[int]]:
    """Path to shape of every leaf of a model's params.

    Args:
        name: of a row of MODELS, or an experiment file, which is code and runs.

    Raises:
        UsageError: an unknown model, or an experiment without one.
    """
    if name.endswith(".py"):
        with contextlib.redirect_stdout(sys.stderr):
            model = experiment_file.load(experiment_file.locate(name)).model
        check(model is not None, f"{name}: its experiment has a task and no model")
    else:
        model = lookup(MODELS, name, "model")()
    return {path: list(leaf.shape) for path, leaf in named_leaves(shapes(model)[0])}


def main() -> None:
    """`python -m jaxmpi.models`."""
    run(options.models(sys.argv[1:]))


def run(asked: argparse.Namespace) -> None:
    """Print the table, or trees."""
    if not asked.tree:
        return show_table()
    try:
        print(json.dumps({name: tree(name) for name in asked.tree}))
    except UsageError as error:
        sys.exit(f"error: {error}")


def show_table() -> None:
    """All models and their costs."""
    table = Table("model", caption=CAPTION)
    table.columns[0].no_wrap = True
    for heading in ("depth", "params", "input", "GFLOP/example", "gradient bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for make in MODELS.values():
        table.add_row(*row(make()))
    Console(width=max(Console().width, 100)).print(table)  # no number is cut short, in a file or pipe either


if __name__ == "__main__":
    main()
