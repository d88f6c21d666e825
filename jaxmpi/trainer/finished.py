"""A finished run: evaluation and predictions by any number of workers, and its model as a program.

    jaxmpi evaluate RUN [--best | --step K] [--field value ...]              figures of the validation data, as JSON
    jaxmpi predict RUN OUT.npz [--best | --step K] [--field value ...]       outputs, labels, files of these examples
    mpirun -n 4 jaxmpi evaluate RUN                                          the same by four workers
    jaxmpi export RUN model.jaxexport [--platforms cpu,cuda] [--batch N]     a program for JAX alone

Fields are those of the experiment, such as `--data.dir` and `--data.validation-split` for other examples. The run's own
command line, in its config.json, says which experiment file it was and with which fields. `--experiment FILE.py` names
the file for a run that `jaxmpi.Trainer` started in a script or a notebook, and for a run that somebody else has begun:
an experiment file is code, and config.json may come from anyone.

A program is what `jax.export` serializes: params, model state and `predict`, as the run evaluates them, in StableHLO.
`model.jaxexport.json` next to it says to people, and to programs without JAX, what goes in and out, where the model is
from, and the checksum that `jaxmpi.load_program` compares. Inputs are the fields of a batch that reach the outputs, as
the data source gives them: u8 images are normalised inside. Outputs have the names of `jaxmpi predict`.
"""

import argparse
import contextlib
import dataclasses
import json
import re
import zipfile
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxmpi.checkpoint.export import choose_checkpoint, load
from jaxmpi.checkpoint.export import export as export_params
from jaxmpi.checkpoint.exported_files import sealed_facts
from jaxmpi.checkpoint.manifests import read_manifest
from jaxmpi.comm.agreement import on_all_ranks
from jaxmpi.comm.job import processes
from jaxmpi.comm.topology import Workers, gather_workers
from jaxmpi.config import experiment_file, flags
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import made_whole
from jaxmpi.core.json_tree import flatten_json
from jaxmpi.core.pytrees import PyTree, by_path, named_leaves, zeros_for
from jaxmpi.core.train_state import Batch
from jaxmpi.data.example import nested
from jaxmpi.data.feed import DeviceFeed, open_validation
from jaxmpi.runtime import failures, provenance
from jaxmpi.tasks.registry import make_task
from jaxmpi.trainer import step as steps
from jaxmpi.trainer.options import PLATFORMS, PROGRAM, facts_file
from jaxmpi.trainer.plan import init_model
from jaxmpi.trainer.run import evaluate_sets
from jaxmpi.trainer.whole_set import WholeSetFunction, gather_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """A run's model with its validation data, on this process's worker."""

    workers: Workers
    feeds: dict[str, DeviceFeed]  # validation sets by the prefix of their figures
    forward: steps.Forward
    params: PyTree
    model_state: PyTree
    step: int
    whole_set: WholeSetFunction | None = None
    class_names: Sequence[str] = ()  # those of training, if they are known

    def evaluate(self) -> dict[str, float]:
        """Evaluate every example of the validation sets once, over all workers; all ranks call it.

        `eval_count` and `eval_loss` are among the figures.
        """
        if not self.is_labelled:
            raise UsageError(
                f"{self.feed.source.name}: got images without folders of classes; jaxmpi predict takes them"
            )
        for feed in self.feeds.values():
            names = getattr(feed.source, "names", ())
            for label, (got, expected) in enumerate(zip(names, self.class_names, strict=False)):
                if str(got) != expected:
                    raise UsageError(
                        f"{feed.source.name}: got {got} as class {label}; expected {expected}, as in training: a label "
                        "must mean the same in both, so give all of training's classes a folder"
                    )
        eval_step = partial(steps.eval_step, self.forward, with_outputs=bool(self.whole_set))
        evaluate_batch = partial(self.workers.comm.jit(eval_step), self.params, self.model_state)
        with contextlib.ExitStack() as pools:
            for feed in self.feeds.values():
                pools.enter_context(feed.pool)
            return evaluate_sets(self.feeds, DeviceFeed.batches, evaluate_batch, self.workers, self.whole_set)[0]

    @property
    def feed(self) -> DeviceFeed:
        """The first validation set, of which predictions are made."""
        return next(iter(self.feeds.values()))

    @cached_property
    def predict(self) -> Callable[[Batch], Any]:
        """(a dict of arrays [batch, ...] of this process's own) -> the task's outputs; compiled once."""
        return partial(steps.jit_predict(self.forward), self.params, self.model_state)

    def example(self) -> Batch:
        """A validation batch for `predict`, this worker's share; all ranks call it."""
        with self.feed.pool, contextlib.closing(self.feed.batches()) as batches:
            return {name: value for name, value in next(batches).items() if name != "weight"}

    @property
    def is_labelled(self) -> bool:
        """Return False if the source does not know its examples' classes."""
        return getattr(self.feed.source, "is_labelled", True)

    def example_names(self) -> dict[str, np.ndarray]:
        """`file` of each example, where the source knows it, and `class_names` of training, else of the source."""
        source, names = self.feed.source, dict[str, np.ndarray]()
        if where := getattr(source, "where", None):
            names["file"] = np.array([where(i) for i in range(len(source))], np.str_)
        own_classes = getattr(source, "names", ()) if self.is_labelled else ()
        if len(classes := self.class_names or own_classes):
            names["class_names"] = np.array(classes, np.str_)
        return names

    def predict_all(self) -> dict[str, np.ndarray]:
        """Outputs by name for all validation examples, and their `label`, in order, on all ranks."""
        parts, found = list[dict[str, np.ndarray]](), 0
        with self.feed.pool:
            for batch in self.feed.batches():
                labels = {"label": batch["label"]} if self.is_labelled and "label" in batch else {}
                rows = labels | by_name(self.predict(batch)), batch["weight"]
                named, weight = gather_rows(rows, self.workers)
                parts.append({name: values[weight > 0] for name, values in named.items()})
                found += int((weight > 0).sum())
        if missing := len(self.feed.source) - found:
            raise UsageError(f"{self.feed.source.name}: {missing} examples are corrupt")
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}


def by_name(outputs: Any) -> dict[str, Any]:
    """Outputs of a task by their paths; one alone is `outputs`."""
    named = dict(named_leaves(outputs))
    return {"outputs": named[""]} if [*named] == [""] else named


def open_finished(experiment: Experiment, run_dir: Path, *, step: int | None = None, best: bool = False) -> Finished:
    """The model of a run's checkpoint, which rank 0 reads for all."""
    workers = gather_workers(1)
    control = workers.processes

    def choose() -> list[Any]:
        if control.rank != 0:
            return []
        path = choose_checkpoint(run_dir, step, best)
        extra = read_manifest(path)["extra"]
        return [str(path), extra.get("experiment", {}).get("the data.train.classes", 0), extra.get("class_names", [])]

    path, classes, class_names = on_all_ranks(control, choose)[0]
    model = experiment.model
    if model is not None and classes and model.with_classes and classes != model.classes:
        experiment = dataclasses.replace(experiment, model=model.with_classes(classes))  # as training had it
    local = experiment.local_batch or -(-experiment.effective_batch // workers.size) or 32
    feeds = open_validation(experiment, local * workers.size, workers)
    feed = next(iter(feeds.values()))
    task = make_task(dataclasses.replace(experiment, model=feed.model))
    forward = steps.Forward(task, jnp.dtype(experiment.compute_dtype))
    shapes = jax.eval_shape(lambda key: init_model(forward.task, feed, key), jax.random.key(0))
    arrays = zeros_for(shapes)

    def read() -> int:
        nonlocal arrays
        if control.rank != 0:
            return 0
        model = load(path)
        arrays = model.like(*shapes)
        return model.step or 0

    at = on_all_ranks(control, read)[0]
    params, model_state = control.bcast(arrays)
    return Finished(
        workers=workers,
        feeds=feeds,
        forward=forward,
        params=params,
        model_state=model_state,
        step=at,
        whole_set=experiment.whole_set,
        class_names=class_names,
    )


# ---------------------------------------------------------------- from the command line


def evaluate(options: argparse.Namespace) -> None:
    """`jaxmpi evaluate RUN`."""
    run = open_named(options)
    figures = run.evaluate()
    if run.workers.processes.rank == 0:
        print(json.dumps({"step": run.step, **figures}))


def predict(options: argparse.Namespace) -> None:
    """`jaxmpi predict RUN OUT.npz`."""
    run = open_named(options)
    outputs = run.predict_all()
    if run.workers.processes.rank == 0:
        outputs = run.example_names() | outputs  # an output of the same name stays
        with made_whole(options.out) as aside, zipfile.ZipFile(aside, "w") as archive:
            for name, values in outputs.items():  # as `np.savez` does, under any name, even `file`
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, values, allow_pickle=False)
        shown = ", ".join(f"{name} {values.dtype}{list(values.shape)}" for name, values in outputs.items())
        print(f"{options.out}: {shown}, by the model of step {run.step}")


def export(options: argparse.Namespace) -> None:
    """`jaxmpi export RUN OUT`: program, Orbax folder or safetensors file, by suffix."""
    if options.out.suffix == PROGRAM:
        write_program(open_named(options), options.out, platforms=options.platforms, batch=options.batch)
    elif processes().rank == 0:
        step = export_params(options.run_dir, options.out, options.step, options.best)
        print(f"{options.out}: params and model state at step {step}")


def open_named(options: argparse.Namespace) -> Finished:
    """The run that a command line names, as `trainer.options` parses it."""
    failures.install_excepthooks()
    control = processes()  # before the experiment file, which may touch the device
    experiment = experiment_of(options.run_dir, options.fields, options.experiment)
    control.assert_same("what is asked for", {"options": [*map(str, vars(options).values())]})
    return open_finished(experiment, options.run_dir, step=options.step, best=options.best)


def experiment_of(run_dir: Path, argv: Sequence[str], named: str = "") -> Experiment:
    """A run's experiment, from config.json or a named file, with `argv` applied.

    Examples that `argv` names are evaluated whole, in place of the run's hold-out and validation sets by name. The file
    that config.json names is executed as `experiment_file.command_of` allows.
    """
    given_flags = {name for name, _ in flags.words_by_flag(argv)}
    has_other_data = bool(given_flags & {"data.source", "data.name", *OF_FOLDERS})
    if has_other_data and "data.holdout" not in given_flags:
        argv = [*argv, "--data.holdout", "0"]
    experiment = experiment_file.parse([*([named] if named else experiment_file.command_of(run_dir)), *argv])[0]
    if (unread := given_flags & OF_FOLDERS) and experiment.data.source in WITHOUT_FOLDER:
        raise UsageError(
            f"{min(unread).replace('-', '_')}: got it with data.source {experiment.data.source}, which has no folder; "
            "name one that does, such as --data.source imagefolder"
        )
    if named:
        saved = experiment_file.read_config(run_dir)["experiment"]
        refuse_other_inputs(named, saved, json.loads(json.dumps(flags.to_json(experiment))))
    if has_other_data:
        experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, validation=None))
    return experiment


OF_FOLDERS = {"data.dir", "data.validation-split"}  # flags
WITHOUT_FOLDER = (*experiment_file.OF_OBJECTS, "digits", "animals", "synthetic", "stdlib")

# Fields by which the outputs for one example differ, though params fit.
INPUTS = ("model", "task", "compute_dtype", "data.mean", "data.std", "data.mean_image", "data.resize", "data.crop")


def refuse_other_inputs(named: str, saved: Any, now: Any) -> None:
    """Refuse an experiment file whose model sees examples otherwise than the run's did."""
    saved, now = flatten_json(saved), flatten_json(now)
    lines = [
        f"{path}: got {now.get(path)}, expected {saved.get(path)} (the run's)"
        for path in dict.fromkeys([*saved, *now])
        if path.startswith(INPUTS) and now.get(path) != saved.get(path)
    ]
    if lines:
        way_out = "name the file that the run's script or notebook has its experiment from, or give these as flags"
        raise UsageError("\n  ".join([f"--experiment {named} is not the run's:", *lines, way_out]))


# ---------------------------------------------------------------- a program for JAX alone

ANY = "batch"  # the symbol of a dimension of any size


def write_program(run: Finished, file: Path, *, platforms: Sequence[str] = (), batch: int = 0) -> None:
    """Write a finished run's predictions and facts; all ranks call it, rank 0 alone writes and prints."""
    example, name = run.example(), run.forward.task.name  # on all ranks: they may keep the data together
    if run.workers.processes.rank != 0:
        return
    fields = dict(named_leaves(example))
    try:
        kept = lower(run, fields, [*fields], len(next(iter(fields.values())))).module_kept_var_idx
        needed = [field for i, field in enumerate(fields) if i in kept]
        exported = lower(run, fields, needed, batch or ANY, platforms or PLATFORMS)
        serialized = bytes(exported.serialize())
    except Exception as error:  # the model's own, JAX's and MLIR's, of all kinds
        asked = f"for {batch or 'any number of'} examples and {', '.join(platforms or PLATFORMS)}"
        reason = f"{type(error).__name__}: {error!s:.400}".splitlines()[0]
        raise UsageError(
            f"{name} cannot be exported {asked}: {reason}; --batch N is for a model that must know the number of "
            "examples (x.shape[0] may be any, len(x) not), --platforms for one that cannot be lowered for all"
        ) from error
    (inputs,), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)

    def facts_of(leaf: Any) -> dict[str, Any]:  # symbolic dimensions by name
        shape = [size if isinstance(size, int) else str(size) for size in leaf.shape]
        return {"dtype": leaf.dtype.name, "shape": shape}

    leaves = {"inputs": by_path(inputs), "outputs": by_path(jax.tree.unflatten(exported.out_tree, exported.out_avals))}
    facts = {
        "model": name,
        "step": run.step,
        **{way: {path: facts_of(leaf) for path, leaf in each.items()} for way, each in leaves.items()},
        "platforms": list(exported.platforms),
        "calling_convention_version": exported.calling_convention_version,
        "versions": provenance.versions(),
    }
    with made_whole(file) as aside, made_whole(facts_file(file)) as facts_aside:
        aside.write_bytes(serialized)
        facts_aside.write_text(sealed_facts(facts, serialized))
    shown = " -> ".join(
        ", ".join(f"{path} {leaf.dtype}[{', '.join(map(str, leaf.shape))}]" for path, leaf in each.items())
        for each in leaves.values()
    )
    print(f"{file}: {shown}, by the model of step {run.step}, for {', '.join(exported.platforms)}")


def lower(
    run: Finished, fields: dict[str, Any], needed: Sequence[str], size: int | str, platforms: Sequence[str] = ()
) -> jax.export.Exported:
    """The predictions as a function of some fields of a batch, lowered."""
    params, model_state = jax.tree.map(jnp.asarray, (run.params, run.model_state))

    def predictions(given: Batch) -> dict[str, Any]:
        named = dict(named_leaves(given))
        examples = jax.tree.leaves(given)[0].shape[0]
        rest = {name: jnp.zeros((examples, *x.shape[1:]), x.dtype) for name, x in fields.items() if name not in named}
        # Params are constants of the program. Without the barrier XLA would compute what depends on them alone while it
        # compiles, such as batch norm's 1 / sqrt(v + eps), and round otherwise than the trainer.
        weights, state = jax.lax.optimization_barrier((params, model_state))
        return by_name(steps.predict(run.forward, weights, state, nested(rest | named)))

    predictions.__name__ = re.sub(r"\W+", "_", f"{run.forward.task.name} step {run.step}")
    [length] = jax.export.symbolic_shape(size) if isinstance(size, str) else (size,)
    like = {name: jax.ShapeDtypeStruct((length, *fields[name].shape[1:]), fields[name].dtype) for name in needed}
    return jax.export.export(jax.jit(predictions), platforms=platforms or None)(nested(like))
