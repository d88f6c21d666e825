"""A trained model with its program in a file for JAX alone.

    jaxmpi export RUN model.jaxexport [--best | --step K] [--platforms cpu,cuda] [--batch N] [--field value ...]

The file is what `jax.export` serializes: params, model state and `predict`, as the run evaluates them, in StableHLO.
`model.jaxexport.json` next to it says to people, and to programs without JAX, what goes in and out, where the model is
from, and the checksum that `jaxmpi.load_program` compares. Inputs are the fields of a batch that reach the outputs, as
the data source gives them: u8 images are normalised inside. Outputs have the names of `jaxmpi predict`.

Params are constants of the program, behind a barrier. Without it XLA computes what depends on them alone while it
compiles, such as batch norm's 1 / sqrt(v + eps), and rounds otherwise. With the barrier outputs on a CPU are those of
the trainer bit for bit, for batches of the same size (tests/trainer/test_exported_program.py).
"""

import argparse
import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
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


class NotExportable(Exception):
    """A program that cannot be exported as requested; why, in a line."""


def main(options: argparse.Namespace) -> None:
    """`jaxmpi export RUN OUT`: program, Orbax folder or safetensors file, by suffix."""
    if options.out.suffix == PROGRAM:
        return write(open_named(options), options.out, platforms=options.platforms, batch=options.batch)
    if processes().rank == 0:
        step = export(options.run_dir, options.out, options.step, options.best)
        print(f"{options.out}: params and model state at step {step}")


def write(run: Finished, file: Path, *, platforms: Sequence[str] = (), batch: int = 0) -> None:
    """Write a finished run's predictions and facts; all ranks call it, rank 0 alone writes and prints.

    Args:
        platforms: to lower for; default: those of `PLATFORMS` for which the model can be lowered.
        batch: examples of a call; default: any number, or as many as the run predicts at once if the model must know.

    Raises:
        UsageError: the model cannot be exported, or one of the files exists or cannot be written.
    """
    example, name = run.example(), run.forward.task.name  # on all ranks: they may keep the data together
    if run.workers.processes.rank != 0:
        return
    try:
        exported, notes = export_predictions(run, example, platforms, batch)
    except NotExportable as error:
        raise UsageError(f"{name} cannot be exported: {error}") from error
    serialized = bytes(exported.serialize())
    (inputs,), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    facts = {
        "model": name,
        "step": run.step,
        "inputs": describe(inputs),
        "outputs": describe(outputs),
        "platforms": list(exported.platforms),
        "notes": notes,
        "sha256": hashlib.sha256(serialized).hexdigest(),
        "calling_convention_version": exported.calling_convention_version,
        "versions": provenance.versions(),
    }
    with made_whole(file) as aside, made_whole(facts_file(file)) as facts_aside:
        aside.write_bytes(serialized)
        facts_aside.write_text(json.dumps(facts, indent=2) + "\n")
    arrow = " -> ".join(format_leaves(facts[way]) for way in ("inputs", "outputs"))
    print(f"{file}: {arrow}, by the model of step {run.step}, for {', '.join(exported.platforms)}")
    for note in notes:
        print(f"{file}: {note}")


def export_predictions(
    run: Finished, example: Batch, platforms: Sequence[str], batch: int
) -> tuple[jax.export.Exported, list[str]]:
    """The predictions of a finished run, and notes where they do less than they might."""
    fields, notes = dict(named_leaves(example)), []
    size: int | str = batch or len(next(iter(fields.values())))
    whole = lower(run, fields, tuple(fields), size, ())
    needed = tuple(name for i, name in enumerate(fields) if i in whole.module_kept_var_idx)
    if not needed:
        raise UsageError(f"{run.forward.task.name}: its outputs depend on none of {', '.join(fields)}")
    if not batch:
        try:
            lower(run, fields, needed, ANY, ())
            size = ANY
        except NotExportable as error:
            notes.append(f"for batches of {size} alone, or of --batch N: {error}; x.shape[0] may be any, len(x) not")
    if platforms:
        return lower(run, fields, needed, size, platforms), notes
    with contextlib.suppress(NotExportable):
        return lower(run, fields, needed, size, PLATFORMS), notes
    able = []
    for platform in PLATFORMS:
        try:
            lower(run, fields, needed, size, (platform,))
            able.append(platform)
        except NotExportable as error:
            notes.append(f"not for {platform}: {error}")
    if not able:
        raise NotExportable("; ".join(notes))
    return lower(run, fields, needed, size, able), notes


def lower(
    run: Finished, fields: dict[str, Any], needed: Sequence[str], size: int | str, platforms: Sequence[str]
) -> jax.export.Exported:
    """The predictions as a function of some fields of a batch, lowered.

    Args:
        fields: arrays [examples, ...] by path.
        needed: the fields that it takes; others are zeros, on which nothing depends.
        size: examples, or a symbol for any number.
        platforms: none for this process's.
    """
    params, model_state = jax.tree.map(jnp.asarray, (run.params, run.model_state))

    def predictions(given: Batch) -> dict[str, Any]:
        named = dict(named_leaves(given))
        examples = jax.tree.leaves(given)[0].shape[0]
        rest = {name: jnp.zeros((examples, *x.shape[1:]), x.dtype) for name, x in fields.items() if name not in named}
        weights, state = jax.lax.optimization_barrier((params, model_state))
        return by_name(steps.predict(run.forward, weights, state, nested(rest | named)))

    predictions.__name__ = re.sub(r"\W+", "_", f"{run.forward.task.name} step {run.step}")
    [length] = jax.export.symbolic_shape(size) if isinstance(size, str) else (size,)
    like = {name: jax.ShapeDtypeStruct((length, *fields[name].shape[1:]), fields[name].dtype) for name in needed}
    try:
        exported = jax.export.export(jax.jit(predictions), platforms=platforms or None)(nested(like))
        exported.serialize()
        return exported
    except Exception as error:  # the model's own, JAX's and MLIR's, of all kinds
        raise NotExportable(f"{type(error).__name__}: {error!s:.400}".splitlines()[0]) from error


def describe(tree: PyTree) -> dict[str, Any]:
    """Dtype and shape of each leaf by path; symbolic dimensions by name."""
    found = {}
    for name, leaf in by_path(tree).items():
        shape = [size if isinstance(size, int) else str(size) for size in leaf.shape]
        found[name] = {"dtype": leaf.dtype.name, "shape": shape}
    return found


def format_leaves(leaves: dict[str, Any]) -> str:
    """`image uint8[batch, 8, 8, 1]`."""
    return ", ".join(f"{name} {leaf['dtype']}[{', '.join(map(str, leaf['shape']))}]" for name, leaf in leaves.items())
