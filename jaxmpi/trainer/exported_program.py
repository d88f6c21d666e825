"""A trained model with its program in a file for JAX alone.

    jaxmpi export RUN model.jaxexport [--best | --step K] [--platforms cpu,cuda] [--batch N] [--field value ...]

The file is what `jax.export` serializes: params, model state and `predict`, as the run evaluates them, in StableHLO. It
says itself what goes in and out and for which platforms it is. `model.jaxexport.json` beside it says that to people
and to programs without JAX, and where the model is from. It also has the checksum that `jaxmpi.load_program` compares.

Inputs are the fields of a batch that reach the outputs, as the data source gives them: u8 images are normalised inside.
Outputs have the names of `jaxmpi predict`, in a dict, so that a task may give any tree.

Params are constants of the program, behind a barrier. Without the barrier XLA computes what depends on them alone while
it compiles, and rounds otherwise. An example of such a value is batch norm's 1 / sqrt(v + eps). With the barrier
outputs on a CPU are those of the trainer bit for bit. This holds for batches of the same size
(tests/trainer/test_exported_program.py).
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from jaxmpi.checkpoint.export import export
from jaxmpi.comm.job import processes
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import made_whole
from jaxmpi.core.pytrees import PyTree, by_path, named_leaves
from jaxmpi.core.train_state import Batch
from jaxmpi.data.example import nested
from jaxmpi.runtime import provenance
from jaxmpi.trainer import step as steps
from jaxmpi.trainer.finished import Finished, by_name, open_named
from jaxmpi.trainer.options import PLATFORMS, PROGRAM, facts_file

ANY = "batch"  # the symbol of a dimension of any size


class Unable(Exception):
    """A program that cannot be exported as requested; why, in a line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportedPredictions:
    """A model's predictions as `jax.export` has them."""

    exported: jax.export.Exported
    serialized: bytes
    notes: tuple[str, ...]  # where it does less than it might, and why


def program_of(run: Finished, example: Batch, *, platforms: Sequence[str] = (), batch: int = 0) -> ExportedPredictions:
    """The predictions of a finished run, with its params in them.

    Args:
        example: a batch as the run's `example` gives it.
        platforms: to lower for; default: those of `PLATFORMS` for which the model can be lowered.
        batch: examples of a call; default: any number, or as many as the run predicts at once if the model must know.

    Raises:
        UsageError: the model cannot be exported so: why.
    """
    fields = dict(named_leaves(example))
    size = len(next(iter(fields.values())))
    try:
        whole = lowered(run, fields, tuple(fields), batch or size, ())
        needed = tuple(name for i, name in enumerate(fields) if i in whole.exported.module_kept_var_idx)
        if not needed:
            raise UsageError(f"{run.forward.task.name}: its outputs depend on none of {', '.join(fields)}")
        chosen, notes = (batch, []) if batch else any_or(size, partial(lowered, run, fields, needed, platforms=()))
        made, left_out = on_platforms(platforms, partial(lowered, run, fields, needed, chosen))
    except Unable as error:
        raise UsageError(f"{run.forward.task.name} cannot be exported: {error}") from error
    return dataclasses.replace(made, notes=(*notes, *left_out))


def any_or(size: int, lower: Callable[[int | str], ExportedPredictions]) -> tuple[int | str, list[str]]:
    """The symbol of any batch size; else `size`, with the reason."""
    try:
        lower(ANY)
    except Unable as error:
        return size, [f"for batches of {size} alone, or of --batch N: {error}; x.shape[0] may be any, len(x) not"]
    return ANY, []


def on_platforms(
    asked: Sequence[str], lower: Callable[[Sequence[str]], ExportedPredictions]
) -> tuple[ExportedPredictions, list[str]]:
    """The program for `asked`, else for all `PLATFORMS` that are possible.

    The list says why others are left out.

    Raises:
        Unable: for one that was asked for, or for all.
    """
    if asked:
        return lower(asked), []
    with contextlib.suppress(Unable):
        return lower(PLATFORMS), []
    left_out: dict[str, str] = {}
    for platform in PLATFORMS:
        try:
            lower((platform,))
        except Unable as error:
            left_out[platform] = f"not for {platform}: {error}"
    able = tuple(platform for platform in PLATFORMS if platform not in left_out)
    if not able:
        raise Unable("; ".join(left_out.values()))
    return lower(able), list(left_out.values())


def lowered(
    run: Finished, fields: dict[str, Any], needed: Sequence[str], batch: int | str, platforms: Sequence[str]
) -> ExportedPredictions:
    """The predictions as a function of some fields of a batch, lowered.

    Args:
        fields: arrays [examples, ...] by path.
        needed: the fields that it takes; others are zeros, on which nothing depends.
        batch: examples, or a symbol for any number.
        platforms: none for this process's.

    Raises:
        Unable: in tracing, lowering or serializing.
    """
    params, model_state = jax.tree.map(jnp.asarray, (run.params, run.model_state))

    def predictions(given: Batch) -> dict[str, Any]:
        named = dict(named_leaves(given))
        examples = jax.tree.leaves(given)[0].shape[0]
        rest = {name: jnp.zeros((examples, *x.shape[1:]), x.dtype) for name, x in fields.items() if name not in named}
        weights, state = jax.lax.optimization_barrier((params, model_state))
        return by_name(steps.predict(run.forward, weights, state, nested(rest | named)))

    name = re.sub(r"\W+", "_", f"{run.forward.task.name} step {run.step}")
    predictions.__name__ = name
    [size] = jax.export.symbolic_shape(batch) if isinstance(batch, str) else (batch,)
    like = {name: jax.ShapeDtypeStruct((size, *fields[name].shape[1:]), fields[name].dtype) for name in needed}
    try:
        exported = jax.export.export(jax.jit(predictions), platforms=platforms or None)(nested(like))
        return ExportedPredictions(exported=exported, serialized=bytes(exported.serialize()), notes=())
    except Exception as error:  # the model's own, JAX's and MLIR's, of all kinds
        raise Unable(f"{type(error).__name__}: {error!s:.400}".splitlines()[0]) from error


# ---------------------------------------------------------------- files


def write(run: Finished, file: Path, *, platforms: Sequence[str] = (), batch: int = 0) -> None:
    """Write a finished run's predictions and facts; all ranks call it.

    Rank 0 alone writes and prints. Both files get their names when they are whole.

    Args: platforms, batch: as those of `program_of`.

    Raises:
        UsageError: the model cannot be exported, or one of the files exists or cannot be written.
    """
    example = run.example()  # on all ranks: they may keep the data together
    if run.workers.processes.rank != 0:
        return
    program = program_of(run, example, platforms=platforms, batch=batch)
    facts = facts_of(run, program)
    with made_whole(file) as aside, made_whole(facts_file(file)) as facts_aside:
        aside.write_bytes(program.serialized)
        facts_aside.write_text(json.dumps(facts, indent=2) + "\n")
    way = f"{told(facts['inputs'])} -> {told(facts['outputs'])}"
    print(f"{file}: {way}, by the model of step {run.step}, for {', '.join(facts['platforms'])}")
    for note in program.notes:
        print(f"{file}: {note}")


def facts_of(run: Finished, program: ExportedPredictions) -> dict[str, Any]:
    """Inputs, outputs and platforms of a program, and where it is from."""
    exported = program.exported
    (inputs,), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    return {
        "model": run.forward.task.name,
        "step": run.step,
        "inputs": shown(inputs),
        "outputs": shown(jax.tree.unflatten(exported.out_tree, exported.out_avals)),
        "platforms": list(exported.platforms),
        "notes": list(program.notes),
        "sha256": hashlib.sha256(program.serialized).hexdigest(),
        "calling_convention_version": exported.calling_convention_version,
        "versions": provenance.versions(),
    }


def shown(tree: PyTree) -> dict[str, Any]:
    """Dtype and shape of each leaf by path; symbolic dimensions by name."""
    sizes = lambda leaf: [size if isinstance(size, int) else str(size) for size in leaf.shape]  # noqa: E731
    return {name: {"dtype": leaf.dtype.name, "shape": sizes(leaf)} for name, leaf in by_path(tree).items()}


def told(leaves: dict[str, Any]) -> str:
    """`image uint8[batch, 8, 8, 1]`."""
    return ", ".join(f"{name} {leaf['dtype']}[{', '.join(map(str, leaf['shape']))}]" for name, leaf in leaves.items())


# ---------------------------------------------------------------- jaxmpi export


def main(options: argparse.Namespace) -> None:
    """`jaxmpi export RUN OUT`: program, Orbax folder or safetensors file, by suffix."""
    if options.out.suffix == PROGRAM:
        return write(open_named(options), options.out, platforms=options.platforms, batch=options.batch)
    if processes().rank == 0:
        step = export(options.run_dir, options.out, options.step, options.best)
        print(f"{options.out}: params and model state at step {step}")
