"""A trained model out of a run, for other programs and for the next run.

    model = jaxmpi.load("runs/first")           newest checkpoint of a run
    net = model.into(Net(rngs=nnx.Rngs(0)))     Flax NNX; Equinox likewise; Linen: model.into(Net())
    jaxmpi export runs/first model.safetensors  for programs that know neither JAX nor Orbax
    jaxmpi export runs/first FOLDER             an Orbax folder, of `{"params": ..., "model_state": ...}`

The formats: `exported_files`.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from optax.contrib import schedule_free_eval_params

from jaxmpi.checkpoint import manifests
from jaxmpi.checkpoint.exported_files import (
    SEPARATOR,
    SUFFIX,
    Leaves,
    in_structure,
    read_orbax,
    read_safetensors,
    to_orbax,
    to_safetensors,
)
from jaxmpi.checkpoint.manifests import check_undamaged, open_regular, read_manifest
from jaxmpi.checkpoint.restore import WholeLeaves, is_at, is_float, leaf_spec, read_leaf
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.json_tree import nest
from jaxmpi.core.pytrees import PyTree
from jaxmpi.model.adapters.loading import fill_leaves


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A trained model: nested dicts of NumPy arrays.

    Args:
        params: as the run evaluates them.
        model_state: batch statistics and the like; empty if the model has none.
        step: of the checkpoint; None if the file does not say.
        source: folder or file that it was read from.
    """

    params: dict[str, Any] = field(repr=False)
    model_state: dict[str, Any] = field(repr=False)
    step: int | None = None
    source: Path = Path()

    @property
    def variables(self) -> dict[str, Any]:
        """Variables for Flax Linen's `module.apply`."""
        return {"params": self.params, **self.model_state}

    def into(self, module: Any) -> Any:
        """The module with this model's arrays: Flax NNX, Flax Linen or Equinox.

        An NNX module is changed in place. For an Equinox module, or (module, state), a copy with the arrays is
        returned. A Linen module, which holds no arrays, is returned bound to them: `net(x, train=False)`.

        Raises:
            UsageError: a module of another library, or whose arrays are not this model's: path, got, expected.
        """
        return fill_leaves(module, self.params, self.model_state, str(self.source))

    def like(self, params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
        """Params and model state, structured as the given arrays or shapes.

        A file of bare params leaves the given model state as it is.

        Raises:
            UsageError: a leaf is absent, of another shape or type, or unknown: path, got, expected.
        """
        if not self.model_state:
            return in_structure(self.source, {"params": self.params}, {"params": params})["params"], model_state
        tree = {"params": self.params, "model_state": self.model_state}
        got = in_structure(self.source, tree, {"params": params, "model_state": model_state})
        return got["params"], got["model_state"]


def load(where: str | Path, *, step: int | None = None, best: bool = False) -> TrainedModel:
    """Load a run's model in one process, without MPI or the experiment.

    Params are the workers' mean, the rule's center or an average: what the run evaluates. Checksums are compared.

    Args:
        where: a run directory; a checkpoint in it; a folder that `jaxmpi export` wrote; a safetensors file.
        step: of the run's checkpoint; default: the newest.
        best: of the run's checkpoints the best by `monitor`.

    Raises:
        UsageError: there is no such model, or it is damaged.
    """
    path, is_chosen = Path(where), step is not None or best
    check(path.suffix != ".jaxexport", f"{path}: got a program; jaxmpi.load_program({str(path)!r}) reads it")
    if path.suffix == SUFFIX:
        check(not is_chosen, f"{path}: got step or best; a file holds one model: leave them out")
        tree, at = read_safetensors(path)
        return TrainedModel(
            params=tree.get("params", {}), model_state=tree.get("model_state", {}), step=at, source=path
        )
    check(
        path.is_dir(), f"{path}: got no folder; expected a run directory, a checkpoint, or what `jaxmpi export` wrote"
    )
    if (path / "checkpoints").is_dir():
        path = choose_checkpoint(path, step, best)
    else:
        check(not is_chosen, f"{path}: got step or best for one checkpoint; name the run directory")
    if (path / "manifest.json").is_file():
        tree, at = nested(model_of(path)), manifests.step_of(path)
    else:
        tree, at = read_orbax(path), None
        if not isinstance(tree, dict) or not tree.keys() <= {"params", "model_state"}:
            tree = {"params": tree}
        check("params" in tree, f"{path}: got no params; expected those of a model, as `jaxmpi export` writes them")
    return TrainedModel(params=tree["params"], model_state=tree.get("model_state", {}), step=at, source=path)


def choose_checkpoint(run_dir: Path, step: int | None = None, best: bool = False) -> Path:
    """A run's checkpoint: of a step, the best, or the newest.

    Raises:
        UsageError: there is none, it is damaged, or both are asked for.
    """
    dirs = {manifests.step_of(path): path for path in manifests.checkpoint_folders(run_dir / "checkpoints")}
    check(bool(dirs), f"{run_dir}: no checkpoint; name a run directory")
    check(step is None or not best, f"{run_dir}: got step {step} and best; give one of them")
    if best:
        for path in dirs.values():  # of a damaged one nobody knows whether it is the best
            manifests.read_manifest(path)
        best_path = next(iter(manifests.best_first(dirs.values())), None)
        if best_path is None:
            raise UsageError(f"{run_dir}: none of its checkpoints was evaluated; leave best out")
        return best_path
    step = max(dirs) if step is None else step
    check(step in dirs, f"{run_dir}: step: got {step}; there are {', '.join(map(str, sorted(dirs)))}: name one of them")
    manifests.read_manifest(dirs[step])  # else a damaged one would be taken for an Orbax folder, or an older one for it
    return dirs[step]


def export(run_dir: Path, out: Path, step: int | None = None, best: bool = False) -> int:
    """Export the model of a run's checkpoint; return the checkpoint's step.

    An `out` that ends in .safetensors becomes such a file, any other an Orbax folder.

    Raises:
        UsageError: there is no such checkpoint, it is damaged, or `out` exists or cannot be written.
    """
    path = choose_checkpoint(run_dir, step, best)
    tree, at = nested(model_of(path)), manifests.step_of(path)
    if out.suffix == SUFFIX:
        to_safetensors(tree, out, at)
    else:
        to_orbax(tree, out)
    return at


# ---------------------------------------------------------------- the model in a checkpoint

CENTERS = ("center", "rule_state/center", "rule_state/average")  # asynchronous rules', easgd_sync's, optim.ema
SCHEDULE_FREE = ("b1", "weight_sum", "step_count", "max_lr")  # leaves of Optax's ScheduleFreeState beside z
Rows = list[dict[str, Any]]  # index of a file


def model_of(path: Path) -> Leaves:
    """Params and model state of a checkpoint, by path, as evaluated.

    Params are the center or the average, if the rule or its optimizer has one, else the workers' mean. In the model
    state, floating-point leaves are the workers' mean and others worker 0's. Under asynchronous rules worker 0
    evaluates, so all of it is worker 0's. Sizes are bounded by those of the files.

    Raises:
        UsageError: it is damaged, or a leaf's dtype is not known.
    """
    manifest = read_manifest(path)
    files = manifest["files"]
    centers = ((where, name) for where in CENTERS for name in files if _rows_below(files[name], where))
    where, name = next(centers, ("params", ""))
    if name and name != "common.bin" and manifest["extra"].get("chunks"):  # shards of an average
        with open_regular(path / "common.bin") as file:
            rows = _rows_below(files["common.bin"], "params")
            likes = {row["path"].removeprefix("params"): leaf_spec(path, file, row) for row in rows}
        shards = WholeLeaves(path, manifest)
        params = {rest: shards.read(where + rest, like) for rest, like in likes.items()}
    else:
        params = _read_leaves_under(path, name, files[name], where) if name else _mean_params(path, files)
    sources = {name: files[name] for name in sorted(files) if _rows_below(files[name], "model_state")}
    if where == "center":
        sources = dict([*sources.items()][:1])
    state = _mean_over_files(path, sources, "model_state")
    return {f"params{rest}": leaf for rest, leaf in params.items()} | {
        f"model_state{rest}": leaf for rest, leaf in state.items()
    }


def _mean_params(path: Path, files: dict[str, Rows]) -> Leaves:
    """Mean of the workers' params, with schedule-free y replaced by x."""
    params = _mean_over_files(path, files, "params")
    places: dict[str, str] = {}  # where in the state, by the first file that has it
    for name, rows in files.items():
        names = {row["path"] for row in rows}
        for where in (full.removesuffix("/b1") for full in names if full.endswith("/b1")):
            if {f"{where}/{field}" for field in SCHEDULE_FREE} <= names:
                places.setdefault(where, name)
    for where, name in places.items():
        [b1] = _read_leaves_under(path, name, files[name], f"{where}/b1").values()
        z = _read_leaves_under(path, name, files[name], f"{where}/z")
        fits = all(leaf in params and params[leaf].shape == z[leaf].shape for leaf in z) and not b1.shape
        check_undamaged(fits, f"{path / name}: damaged, {where}/z is not of these params")
        state: Any = SimpleNamespace(b1=b1, z=z)  # all fields of Optax's class that it looks at
        x = schedule_free_eval_params(state, {leaf: params[leaf] for leaf in z})
        params |= {leaf: value.astype(params[leaf].dtype) for leaf, value in x.items()}
    return params


def _mean_over_files(path: Path, files: dict[str, Rows], where: str) -> Leaves:
    """Mean of floating-point leaves below `where` over files; others are the first's."""
    subtrees = [_read_leaves_under(path, name, rows, where) for name, rows in files.items() if _rows_below(rows, where)]
    if len(subtrees) < 2:
        return subtrees[0] if subtrees else {}
    mean = dict(subtrees[0])
    for name, leaf in mean.items():
        if is_float(leaf):
            total = sum((other[name] for other in subtrees), np.zeros(leaf.shape))  # float64
            mean[name] = (total / len(subtrees)).astype(leaf.dtype)
    return mean


def _rows_below(rows: Rows, where: str) -> Rows:
    """Entries of an index with leaves in this field of the state."""
    return [row for row in rows if is_at(row["path"], where)]


def _read_leaves_under(path: Path, name: str, rows: Rows, where: str) -> Leaves:
    """A file's leaves below `where`, by the rest of their paths."""
    rows, source = _rows_below(rows, where), path / name
    with open_regular(source) as file:
        likes = {row["path"]: leaf_spec(source, file, row) for row in rows}
        size = sum(math.prod(like.shape) * like.dtype.itemsize for like in likes.values())
        is_whole = len(likes) == len(rows) and size <= os.fstat(file.fileno()).st_size
        check_undamaged(is_whole, f"{source}: damaged, leaves lie over each other")
        return {
            row["path"].removeprefix(where): read_leaf(source, file, row["path"], row, likes[row["path"]])
            for row in rows
        }


def nested(leaves: Leaves) -> PyTree:
    """Turn paths into nested dicts; an escaped slash stays in its name."""

    def split(path: str) -> list[str]:
        return [part.replace("\0", SEPARATOR) for part in path.replace("\\/", "\0").split(SEPARATOR)]

    return nest(leaves, split)
