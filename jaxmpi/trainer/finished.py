"""A finished run: evaluation and predictions by any number of workers.

    jaxmpi evaluate RUN [--best | --step K] [--field value ...]              figures of the validation data, as JSON
    jaxmpi predict RUN OUT.npz [--best | --step K] [--field value ...]       outputs for every validation example
    jaxmpi predict RUN OUT.npz --data IN.npz                                 for arrays of a file, without labels
    mpirun -n 4 jaxmpi evaluate RUN                                          the same by four workers

Fields are those of the experiment, such as `--data.dir` and `--data.validation-split` for other examples. The run's own
command line, in its config.json, says which experiment file it was and with which fields. `--experiment FILE.py` names
the file for a run that `jaxmpi.Trainer` started in a script or a notebook, and for a run that somebody else has begun:
an experiment file is code, and config.json may come from anyone.
"""

import argparse
import contextlib
import dataclasses
import hmac
import json
import os
import shlex
import zipfile
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmpi.checkpoint.export import choose_checkpoint, load
from jaxmpi.checkpoint.manifests import read_manifest
from jaxmpi.checkpoint.run_directory import MOST_CONFIG_BYTES
from jaxmpi.comm.agreement import on_all_ranks
from jaxmpi.comm.job import processes
from jaxmpi.comm.topology import Workers, gather_workers
from jaxmpi.config import experiment_file, flags
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import made_whole, open_plain
from jaxmpi.core.json_tree import flatten_json, read_json
from jaxmpi.core.pytrees import PyTree, named_leaves, zeros_for
from jaxmpi.core.train_state import Batch
from jaxmpi.data.example import nested
from jaxmpi.data.feed import DeviceFeed, open_feed
from jaxmpi.runtime import failures, provenance
from jaxmpi.tasks.registry import make_task
from jaxmpi.trainer import step as steps
from jaxmpi.trainer.evaluate import gather_figures
from jaxmpi.trainer.options import config_file
from jaxmpi.trainer.plan import init_model

FROM_PYTHON = "from_python.py"  # experiment file of a run that jaxmpi.Trainer started in processes of its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """A run's model with its validation data, on this process's worker."""

    workers: Workers
    feed: DeviceFeed
    forward: steps.Forward
    params: PyTree
    model_state: PyTree
    step: int

    def evaluate(self) -> dict[str, float]:
        """Evaluate every validation example once, over all workers; all ranks call it.

        `eval_count` and `eval_loss` are among the figures.
        """
        evaluate_batch = self.workers.comm.jit(partial(steps.eval_step, self.forward))
        with self.feed.pool:
            metrics = map(partial(evaluate_batch, self.params, self.model_state), self.feed.batches())
            return gather_figures(metrics, self.workers)

    def predict(self, batch: Batch) -> Any:
        """Return the task's outputs for one batch of this process's own, a dict of arrays [batch, ...].

        Raises:
            UsageError: no dict, arrays of different lengths, or a field that the task takes is missing.
        """
        if not (isinstance(batch, dict) and batch):
            raise UsageError(f"predict: got {batch!r:.80}; expected a dict of arrays [batch, ...]")
        shapes = {name: np.shape(leaf) for name, leaf in named_leaves(batch)}
        if () in shapes.values() or len({shape[0] for shape in shapes.values()}) != 1:
            shown = ", ".join(f"{name} {[*shape]}" for name, shape in shapes.items())
            raise UsageError(f"predict: got {shown}; expected one length, that of the batch, as the first axis of all")
        try:
            return self._predict(self.params, self.model_state, batch)
        except KeyError as error:
            if (field := error.args[0]) in batch:
                raise
            text = f"predict: got the fields {', '.join(batch)}; task {self.forward.task.name} takes {field}"
            raise UsageError(text) from error

    @cached_property
    def _predict(self) -> Callable[[PyTree, PyTree, Batch], Any]:
        return jax.jit(partial(steps.predict, self.forward))

    def example(self) -> Batch:
        """A validation batch for `predict`, this worker's share; all ranks call it."""
        with self.feed.pool, contextlib.closing(self.feed.batches()) as batches:
            batch = next(batches, None)
        if batch is None:
            raise UsageError(f"{self.feed.source.name}: got 0 examples; expected >= 1")
        return {name: value for name, value in batch.items() if name != "weight"}

    def predict_all(self) -> dict[str, np.ndarray]:
        """Outputs by name for all validation examples, in order, on all ranks."""
        names: list[str] = []
        parts: list[list[np.ndarray]] = []
        with self.feed.pool:
            for batch in self.feed.batches():
                named = by_name(self.predict(batch))
                names = [*named]
                parts.append(self._gather_rows([*map(np.asarray, named.values()), np.asarray(batch["weight"])]))
        *whole, weights = map(np.concatenate, zip(*parts, strict=True)) if parts else [np.zeros(0)]
        real = weights > 0
        if missing := len(self.feed.source) - int(real.sum()):
            raise UsageError(f"{self.feed.source.name}: {missing} examples are corrupt")
        return {name: values[real] for name, values in zip(names, whole, strict=True)}

    def _gather_rows(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Every rank's rows in the sampler's order; float64 keeps 32 bits exactly."""
        every = self.workers.processes.allgather_array(np.concatenate([x.ravel().astype(np.float64) for x in arrays]))
        ends = np.cumsum([x.size for x in arrays])[:-1]
        gathered = []
        for x, part in zip(arrays, np.split(every, ends, axis=1), strict=True):
            rows = part.reshape(len(every), *x.shape).swapaxes(0, 1)
            gathered.append(rows.reshape(-1, *x.shape[1:]).astype(x.dtype))
        return gathered


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
        return [str(path), read_manifest(path)["extra"].get("experiment", {}).get("the data.train.classes", 0)]

    path, classes = on_all_ranks(control, choose)[0]
    model = experiment.model
    if model is not None and classes and model.with_classes and classes != model.classes:
        experiment = dataclasses.replace(experiment, model=model.with_classes(classes))  # as training had it
    local = experiment.local_batch or -(-experiment.effective_batch // workers.size) or 32
    feed = open_feed(experiment, "validation", local * workers.size, workers)
    dtype = jnp.bfloat16 if experiment.compute_dtype == "bfloat16" else jnp.float32
    forward = steps.Forward(make_task(dataclasses.replace(experiment, model=feed.model)), dtype)
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
    return Finished(workers=workers, feed=feed, forward=forward, params=params, model_state=model_state, step=at)


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
        with made_whole(options.out) as aside, zipfile.ZipFile(aside, "w") as archive:
            for name, values in outputs.items():  # as `np.savez` does, under any name, even `file`
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, values, allow_pickle=False)
        shown = ", ".join(f"{name} {values.dtype}{list(values.shape)}" for name, values in outputs.items())
        print(f"{options.out}: {shown}, by the model of step {run.step}")


def open_named(options: argparse.Namespace) -> Finished:
    """The run that a command line names, as `trainer.options` parses it."""
    failures.install_excepthooks()
    control = processes()  # before the experiment file, which may touch the device
    experiment = experiment_of(options.run_dir, options.fields, options.experiment)
    control.assert_same("what is asked for", {"options": [*map(str, vars(options).values())]})
    if getattr(options, "data", None):
        experiment = with_inputs(experiment, options.data)
    return open_finished(experiment, options.run_dir, step=options.step, best=options.best)


def experiment_of(run_dir: Path, argv: Sequence[str], named: str = "") -> Experiment:
    """A run's experiment, from config.json or a named file, with `argv` applied.

    An experiment file is code. One that config.json names is executed only if it comes with jaxmpi, or if the
    signature shows that this user has begun the run with it.
    """
    file = config_file(run_dir)
    config = read_json(file, MOST_CONFIG_BYTES, "a run's configuration")
    words = config.get("command") if isinstance(config, dict) and "experiment" in config else None
    if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        raise UsageError(f"{file}: damaged: expected a run's command and experiment")
    if named:
        experiment = experiment_file.parse([named, *argv])[0]
        now = flatten_json(json.loads(json.dumps(flags.to_json(experiment))))
        refuse_other_inputs(named, flatten_json(config["experiment"]), now)
        return experiment
    command = experiment_file.file_first(words[1:])
    is_file = bool(command) and experiment_file.is_experiment(command[0], "")
    if not is_file or Path(command[0]).name == FROM_PYTHON:
        raise UsageError(
            f"{run_dir} was started from Python: name a file that has its `experiment = Experiment(...)`, --experiment "
            "FILE.py, or use jaxmpi.Trainer(experiment).evaluate() there"
        )
    path = experiment_file.locate(command[0])
    if path.resolve() not in map(Path.resolve, experiment_file.find_shipped().values()):
        mine = provenance.sign([words, config.get("experiment_path")])
        if not (mine and hmac.compare_digest(mine.encode(), str(config.get("signature")).encode())):
            raise UsageError(
                f"{file}: names {str(path)!r}, which is code, and nothing shows that you have begun this run here; if "
                "you trust the file, name it: --experiment FILE.py"
            )
        path = Path(config["experiment_path"])
    if not path.is_file():
        raise UsageError(f"{run_dir} was started with {shlex.join(command)}; {path} is gone: --experiment FILE.py")
    return experiment_file.parse([str(path), *command[1:], *argv])[0]


# Fields by which the outputs for one example differ, though params fit.
INPUTS = ("model", "task", "compute_dtype", "data.mean", "data.std", "data.mean_image", "data.resize", "data.crop")


def refuse_other_inputs(named: str, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse an experiment file whose model sees examples otherwise than the run's did.

    Args:
        saved: fields of the run's configuration, by path.
        now: of this experiment.
    """
    paths = [path for path in dict.fromkeys([*saved, *now]) if path.startswith(INPUTS)]
    lines = [
        f"{path}: got {now.get(path)}, expected {saved.get(path)} (the run's)"
        for path in paths
        if now.get(path) != saved.get(path)
    ]
    if lines:
        way_out = "name the file that the run's script or notebook has its experiment from, or give these as flags"
        raise UsageError("\n  ".join([f"--experiment {named} is not the run's:", *lines, way_out]))


ZIP_END_BYTES = 22  # of the last record of a zip file without comment, which has the number of its entries


def with_inputs(experiment: Experiment, file: Path) -> Experiment:
    """Set a NumPy file's arrays as validation data; images need no labels."""
    arrays = "arrays [n, ...] that np.savez has written"
    expected = f"expected {arrays}"
    try:
        with open(open_plain(file, arrays, follow=True), "rb") as raw:
            opened = np.load(raw, allow_pickle=False)
            if not isinstance(opened, np.lib.npyio.NpzFile):
                raise UsageError(f"{file}: got one array; {expected}")
            assert opened.zip is not None
            if damaged := opened.zip.testzip():  # NumPy compares no checksum of an array that ends before its entry
                raise UsageError(f"{file}: {damaged}: damaged, its checksum does not match; {expected}")
            raw.seek(-ZIP_END_BYTES, os.SEEK_END)
            end, count = raw.read(), len(opened.zip.namelist())
            entries = int.from_bytes(end[10:12], "little") if end.startswith(b"PK\5\6") else count
            if entries not in (count, 0xFFFF):
                raise UsageError(f"{file}: damaged, got {count} arrays of {entries}; {expected}")
            named = {name: opened[name] for name in opened.files}
    except UsageError:
        raise
    except Exception as error:  # zipfile and NumPy's reader raise of all kinds for a damaged file
        raise UsageError(f"{file}: cannot be read: {error}; {expected}") from error
    for name, values in named.items():
        if values.ndim == 0:
            raise UsageError(f"{file}: {name}: got one number, {values!r:.40}; {expected}")
    fields = nested(named)
    if experiment.model is not None and fields.keys() == {"image"}:
        fields["label"] = np.zeros(len(fields["image"]), np.int32)
    data = dataclasses.replace(experiment.data, source="array", validation=fields, memory="none", shuffle_by="auto")
    return dataclasses.replace(experiment, data=data)
