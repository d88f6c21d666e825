"""A trained model out of a run, for other programs and for the next run.

    model = jaxmpi.load("runs/first")           newest checkpoint of a run
    net = model.into(Net(rngs=nnx.Rngs(0)))     Flax NNX; Equinox likewise; Linen: model.into(Net())
    jaxmpi export runs/first model.safetensors  for programs that know neither JAX nor Orbax
    jaxmpi export runs/first FOLDER             an Orbax folder, of `{"params": ..., "model_state": ...}`

Both forms hold nested dicts of arrays with their bytes as they are, and a digest of all leaves that is compared when
they are read. No run is resumed from them, since they lack the rule's state. A safetensors file has leaves by dotted
names such as `params.conv1.kernel`, and the step in its header. Lists are dicts with the keys "0", "1" and so on.
`--params` also takes bare params, as other programs write them. Orbax restores NumPy leaves of any shape, so every
imported leaf is compared with the model's.
"""

import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np
from optax.contrib import schedule_free_eval_params

from jaxmpi.checkpoint import manifests
from jaxmpi.checkpoint.manager import write_text
from jaxmpi.checkpoint.manifests import open_regular, read_manifest, undamaged
from jaxmpi.checkpoint.restore import WholeLeaves, is_at, is_float, leaf_spec, read_leaf
from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.files import made_whole
from jaxmpi.core.json_tree import MALFORMED, nest
from jaxmpi.core.pytrees import PyTree, mismatches, named_leaves
from jaxmpi.model.adapters.loading import fill_leaves

SUFFIX = ".safetensors"
CHECKSUM = "jaxmpi.sha256"  # file in an exported Orbax folder
SEPARATOR = "/"  # between a leaf's names, as in params/conv1/kernel
WAY_OUT = "name a folder that `jaxmpi export` has written"
ANOTHER_MODEL = (
    "give the model the names, sizes and dtypes that it was trained with (config.json of the run has its experiment), "
    "or take the params of another run"
)


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
            return _structured(self.source, {"params": self.params}, {"params": params})["params"], model_state
        tree = {"params": self.params, "model_state": self.model_state}
        got = _structured(self.source, tree, {"params": params, "model_state": model_state})
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
        return _from_safetensors(path)
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
        tree, at = _read_orbax(path), None
        if not isinstance(tree, dict) or not tree.keys() <= {"params", "model_state"}:
            tree = {"params": tree}
        check("params" in tree, f"{path}: got no params; expected those of a model, as `jaxmpi export` writes them")
    return TrainedModel(params=tree["params"], model_state=tree.get("model_state", {}), step=at, source=path)


def load_program(where: str | Path) -> jax.export.Exported:
    """The model and its program in a file .jaxexport, once its checksum has been compared.

    The checksum stands in the file of facts that `jaxmpi export` has written beside it.

    Raises:
        UsageError: there is no such file, it is damaged, or its facts are missing.
    """
    file, facts = Path(where), Path(f"{where}.json")
    try:
        program = file.read_bytes()
        expected = json.loads(facts.read_bytes())["sha256"]
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error}; expected it with {facts.name} beside it") from error
    except (*MALFORMED, KeyError, TypeError) as error:
        raise manifests.Damaged(f"{facts}: damaged, it has no checksum; export the run again") from error
    _check_whole(file, hashlib.sha256(program).hexdigest() == expected)
    return jax.export.deserialize(bytearray(program))


def choose_checkpoint(run_dir: Path, step: int | None = None, best: bool = False) -> Path:
    """A run's checkpoint: of a step, the best, or the newest.

    Raises:
        UsageError: there is none, it is damaged, or both are asked for.
    """
    kept = {manifests.step_of(path): path for path in manifests.candidates(run_dir / "checkpoints")}
    check(bool(kept), f"{run_dir}: no checkpoint; name a run directory")
    check(step is None or not best, f"{run_dir}: got step {step} and best; give one of them")
    if best:
        for path in kept.values():  # of a damaged one nobody knows whether it is the best
            manifests.read_manifest(path)
        best_path = next(iter(manifests.best_first(kept.values())), None)
        if best_path is None:
            raise UsageError(f"{run_dir}: none of its checkpoints was evaluated; leave best out")
        return best_path
    step = max(kept) if step is None else step
    check(step in kept, f"{run_dir}: step: got {step}; there are {', '.join(map(str, sorted(kept)))}: name one of them")
    manifests.read_manifest(kept[step])  # else a damaged one would be taken for an Orbax folder, or an older one for it
    return kept[step]


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
Leaves = dict[str, np.ndarray]  # by path
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
        undamaged(fits, f"{path / name}: damaged, {where}/z is not of these params")
        state: Any = SimpleNamespace(b1=b1, z=z)  # all fields of Optax's class that it looks at
        x = schedule_free_eval_params(state, {leaf: params[leaf] for leaf in z})
        params |= {leaf: value.astype(params[leaf].dtype) for leaf, value in x.items()}
    return params


def _mean_over_files(path: Path, files: dict[str, Rows], where: str) -> Leaves:
    """Mean of floating-point leaves below `where` over files; others are the first's."""
    each = [_read_leaves_under(path, name, rows, where) for name, rows in files.items() if _rows_below(rows, where)]
    if len(each) < 2:
        return each[0] if each else {}
    mean = dict(each[0])
    for name, leaf in mean.items():
        if is_float(leaf):
            total = sum((other[name] for other in each), np.zeros(leaf.shape))  # float64
            mean[name] = (total / len(each)).astype(leaf.dtype)
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
        undamaged(is_whole, f"{source}: damaged, leaves lie over each other")
        return {
            row["path"].removeprefix(where): read_leaf(source, file, row["path"], row, likes[row["path"]])
            for row in rows
        }


# ---------------------------------------------------------------- safetensors


def to_safetensors(tree: PyTree, file: Path, step: int) -> None:
    """Write nested dicts of arrays; the file gets its name when whole.

    Raises:
        UsageError: it exists or cannot be written, a name has a dot in it, or safetensors is missing.
    """
    save_file = _safetensors_library().numpy.save_file
    leaves = dict(dotted(tree))
    metadata = {"step": str(step), "writer": "jaxmpi", "sha256": _digest_of(leaves, str(step))}
    with made_whole(file) as aside:
        try:
            save_file(leaves, aside, metadata=metadata)
        except Exception as error:  # SafetensorError, which also stands for a full disk, derives from Exception alone
            raise OSError(f"{error!s:.400}") from error


def _from_safetensors(file: Path) -> TrainedModel:
    """The model in a file of `params.*` and `model_state.*`, or bare params."""
    library = _safetensors_library()
    check(file.is_file(), f"{file}: no such file; name one that `jaxmpi export` or another program has written")
    try:
        leaves = library.numpy.load_file(str(file))
        with library.safe_open(str(file), framework="np") as opened:
            facts = opened.metadata() or {}
    except Exception as error:  # SafetensorError derives from Exception alone
        raise UsageError(f"{file}: cannot be read: {error!s:.400}; export the run again") from error
    step = facts.get("step", "")
    if facts.get("writer") == "jaxmpi" or "sha256" in facts:  # either, since a flipped bit may have changed one
        _check_whole(file, facts.get("sha256") == _digest_of(leaves, step) and facts.get("writer") == "jaxmpi")
    tree = nest(leaves, lambda name: name.split("."), file)
    if not tree.keys() <= {"params", "model_state"}:
        tree = {"params": tree}
    at = int(step) if re.fullmatch("[0-9]{1,19}", step) else None
    return TrainedModel(params=tree.get("params", {}), model_state=tree.get("model_state", {}), step=at, source=file)


def dotted(tree: PyTree, above: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Leaves of nested dicts by names such as `params.conv1.kernel`.

    Raises:
        UsageError: a name with a dot in it.
    """
    for key, value in tree.items():
        check("." not in key, f"{above}{key}: got a dot in a name; safetensors names have it between names")
        if isinstance(value, dict):
            yield from dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", np.asarray(value, order="C")


def _safetensors_library() -> Any:
    """The package `safetensors`, with its `numpy`."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise UsageError(f"safetensors is not installed: {installing('jaxmpi[safetensors]')}") from error
    return safetensors


# ---------------------------------------------------------------- Orbax


class Loaded(NamedTuple):
    """Params and model state that a run begins with."""

    params: PyTree
    model_state: PyTree
    has_state: bool  # the folder held the model state; else it is the model's own


def params_from_orbax(folder: Path, params: PyTree, model_state: PyTree) -> Loaded:
    """Params and model state from an Orbax folder, structured as those given.

    Args:
        params: their leaves have the shapes and dtypes that the folder's must have.
        model_state: likewise; what the run begins with if the folder holds bare params.

    Raises:
        UsageError: it cannot be read, or a leaf is absent, of another shape or type, or unknown: path, got, expected.
    """

    def structured(tree: PyTree) -> Loaded:
        names, bare = ({name for name, _ in named_leaves(part)} for part in (tree, params))
        if names == bare or not {name.split(SEPARATOR)[0] for name in names} <= {"params", "model_state"}:
            return Loaded(_structured(folder, tree, params), model_state, False)
        got = _structured(folder, tree, {"params": params, "model_state": model_state})
        return Loaded(got["params"], got["model_state"], True)

    return structured(_read_orbax(folder, structured))  # of the sizes first


def to_orbax(tree: PyTree, folder: Path) -> None:
    """Write nested dicts of arrays as an Orbax folder.

    The folder gets its name only when it is whole. If it cannot be written, nothing remains.

    Raises:
        UsageError: the folder exists or cannot be written.
    """
    import orbax.checkpoint as ocp  # seconds to import

    check(not os.path.lexists(folder), f"{folder} exists; name a new folder")
    # Orbax names an array by its path with dots, and keeps one of two of a name.
    names = [path.replace(SEPARATOR, ".") for path, _ in named_leaves(tree)]
    check(len({*names}) == len(names), f"{folder}: two leaves have one name in an Orbax folder; rename one of them")
    aside = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
        # Not StandardCheckpointer: it writes in a thread, and blocks forever if that cannot make the folder.
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            writer.save(aside.absolute() / "model", args=ocp.args.StandardSave(tree))  # pyright: ignore[reportCallIssue]
        write_text(aside / "model" / CHECKSUM, _digest_of(dict(named_leaves(tree))))
        (aside / "model").rename(folder)
    except Exception as error:  # Orbax and TensorStore raise of all kinds
        text = str(error) if isinstance(error, OSError) else f"{error!s:.400}".splitlines()[0]
        raise UsageError(
            f"{folder}: cannot be written: {text}; nothing of it is left: name another folder, or make room"
        ) from error
    finally:
        if aside:
            shutil.rmtree(aside, ignore_errors=True)


def _read_orbax(folder: Path, admit: Callable[[PyTree], Any] = lambda sizes: None) -> PyTree:
    """Nested dicts of an Orbax folder's arrays, compared with its checksum if `export` wrote it.

    A stranger's folder is looked at first: it holds regular files only, and no chunk, which is read whole, is larger
    than its leaf.
    """
    import orbax.checkpoint as ocp

    check(folder.is_dir(), f"no folder {str(folder)!r}; {WAY_OUT}")
    for path, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            mode = os.lstat(os.path.join(path, name)).st_mode
            is_regular = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
            check(is_regular, f"{path}/{name}: got something other than a regular file or a folder; {WAY_OUT}")
    try:
        with ocp.StandardCheckpointer() as reader:
            metadata = reader.metadata(folder.absolute())
            sizes = getattr(metadata, "item_metadata", metadata)
            admit(sizes)
            for name, leaf in named_leaves(sizes):
                storage = getattr(leaf, "storage", None)
                for shape in (getattr(storage, "chunk_shape", None), getattr(storage, "write_shape", None)):
                    is_small = shape is None or math.prod(shape) <= max(1, math.prod(leaf.shape))
                    text = f"got chunks of {[*(shape or ())]}, expected {[*leaf.shape]} at most"
                    check(is_small, f"{folder}: {name}: {text}; {WAY_OUT}")
            tree = jax.tree.map(np.asarray, reader.restore(folder.absolute()))
        checksum = folder / CHECKSUM
        expected = checksum.read_bytes()[:100] if checksum.exists() else None
    except UsageError:
        raise
    except Exception as error:  # Orbax and TensorStore raise of all kinds
        raise UsageError(f"{folder}: cannot be read: {error!s:.400}; {WAY_OUT}") from error
    _check_whole(folder, expected is None or expected == _digest_of(dict(named_leaves(tree))).encode())
    return tree


# ---------------------------------------------------------------- trees


def nested(leaves: Leaves) -> PyTree:
    """Turn paths into nested dicts; an escaped slash stays in its name."""

    def split(path: str) -> list[str]:
        return [part.replace("\0", SEPARATOR) for part in path.replace("\\/", "\0").split(SEPARATOR)]

    return nest(leaves, split)


def _digest_of(leaves: Mapping[str, np.ndarray], *facts: str) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of leaves, in the order of their names, and over `facts`."""
    digest = hashlib.sha256("\n".join(facts).encode())
    for name in sorted(leaves):
        array = np.asarray(leaves[name], order="C")
        digest.update(f"\n{name}\0{array.dtype}{list(array.shape)}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _check_whole(source: Path, is_whole: bool) -> None:
    """Raise `Damaged` if an exported file's checksum does not match."""
    undamaged(is_whole, f"{source}: damaged, its checksum does not match; export the run again")


def _structured(source: Path, tree: PyTree, like: PyTree) -> PyTree:
    """A tree's leaves, read or unread, in the structure of `like`; raise `UsageError` if they differ."""
    leaves = dict(named_leaves(tree))
    lines = mismatches(leaves, dict(named_leaves(like)))
    check(not lines, "\n  ".join([f"{source} is not of this model:", *lines, ANOTHER_MODEL]))
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name, _ in named_leaves(like)])
