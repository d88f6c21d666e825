"""A trained model out of a run: tree, module or safetensors file.

    model = jaxmpi.load("runs/first")           newest checkpoint of a run
    net = model.into(Net(rngs=nnx.Rngs(0)))     Flax NNX; Equinox likewise; Linen: model.into(Net())
    jaxmpi export runs/first model.safetensors  for programs that know neither JAX nor Orbax

A safetensors file has the leaves by dotted names, `params.conv1.kernel` and `model_state.bn.mean`, with their bytes as
they are, and the step as text in its header. It knows no lists: they are dicts with the keys "0", "1" and so on, as in
Orbax folders.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmpi.checkpoint import manifests, orbax_export
from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.files import made_whole
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.model.adapters.loading import fill_leaves

SUFFIX = ".safetensors"


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
        tree, want = {"params": self.params}, {"params": params}
        if self.model_state:
            tree["model_state"], want["model_state"] = self.model_state, model_state
        orbax_export.check_leaves(self.source, tree, want)
        leaves = dict(named_leaves(tree))
        got = jax.tree.unflatten(jax.tree.structure(want), [leaves[name] for name, _ in named_leaves(want)])
        return got["params"], got.get("model_state", model_state)


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
    path = Path(where)
    if path.suffix == SUFFIX:
        check(step is None and not best, f"{path}: got step or best; a file holds one model: leave them out")
        return from_safetensors(path)
    check(
        path.is_dir(), f"{path}: got no folder; expected a run directory, a checkpoint, or what `jaxmpi export` wrote"
    )
    if (path / "checkpoints").is_dir():
        path = chosen(path, step, best)
    else:
        check(step is None and not best, f"{path}: got step or best for one checkpoint; name the run directory")
    if (path / "manifest.json").is_file():
        tree, at = orbax_export.nested(orbax_export.model_of(path)), manifests.step_of(path)
    else:
        tree, at = orbax_export.read(path), None
        check("params" in tree, f"{path}: got no params; expected those of a model, as `jaxmpi export` writes them")
    return TrainedModel(params=tree["params"], model_state=tree.get("model_state", {}), step=at, source=path)


def chosen(run_dir: Path, step: int | None = None, best: bool = False) -> Path:
    """A run's checkpoint: of a step, the best, or the newest.

    Raises:
        UsageError: there is none, or both are asked for.
    """
    kept = {manifests.step_of(path): path for path in manifests.found(run_dir / "checkpoints")}
    check(bool(kept), f"{run_dir}: no checkpoint; name a run directory")
    check(step is None or not best, f"{run_dir}: got step {step} and best; give one of them")
    if best:
        best_path = next(iter(manifests.best_first(kept.values())), None)
        if best_path is None:
            raise UsageError(f"{run_dir}: none of its checkpoints was evaluated; leave best out")
        return best_path
    step = max(kept) if step is None else step
    check(step in kept, f"{run_dir}: step: got {step}; there are {', '.join(map(str, sorted(kept)))}: name one of them")
    return kept[step]


def export(run_dir: Path, out: Path, step: int | None = None, best: bool = False) -> int:
    """Export the model of a run's checkpoint; return the checkpoint's step.

    An `out` that ends in .safetensors becomes such a file, any other an Orbax folder.

    Raises:
        UsageError: there is no such checkpoint, it is damaged, or `out` exists or cannot be written.
    """
    path = chosen(run_dir, step, best)
    tree, at = orbax_export.nested(orbax_export.model_of(path)), manifests.step_of(path)
    if out.suffix == SUFFIX:
        to_safetensors(tree, out, at)
    else:
        orbax_export.export(tree, out)
    return at


# ---------------------------------------------------------------- safetensors


def to_safetensors(tree: PyTree, file: Path, step: int) -> None:
    """Write nested dicts of arrays; the file gets its name when whole.

    Raises:
        UsageError: it exists or cannot be written, a name has a dot in it, or safetensors is missing.
    """
    save_file = library().numpy.save_file
    leaves = dict(dotted(tree))
    with made_whole(file) as aside:
        save_file(leaves, aside, metadata={"step": str(step)})


def from_safetensors(file: Path) -> TrainedModel:
    """The model in a file of `params.*` and `model_state.*`, or bare params.

    Raises:
        UsageError: no such file, it is damaged, or safetensors is missing.
    """
    made = library()
    check(file.is_file(), f"{file}: no such file; name one that `jaxmpi export` or another program has written")
    try:
        leaves = made.numpy.load_file(str(file))
        with made.safe_open(str(file), framework="np") as opened:
            step = (opened.metadata() or {}).get("step", "")
    except Exception as error:  # SafetensorError derives from Exception alone
        raise UsageError(f"{file}: cannot be read: {error!s:.400}; export the run again") from error
    heads = {name.split(".")[0] for name in leaves}
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
            check(isinstance(place, dict), f"{file}: {name}: both a leaf and a node of the tree")
        place[last] = leaf
    if not heads <= {"params", "model_state"}:
        tree = {"params": tree}
    at = int(step) if step.isdigit() else None
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


def library() -> Any:
    """The package `safetensors`, with its `numpy`.

    Raises:
        UsageError: it is missing.
    """
    try:
        import safetensors.numpy
    except ImportError as error:
        raise UsageError(f"safetensors is not installed: {installing('jaxmpi[safetensors]')}") from error
    return safetensors
