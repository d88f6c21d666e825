"""Models in files for other programs: safetensors, Orbax folders, and programs for JAX alone.

Each has its arrays' bytes as they are, and a digest that is compared when it is read. No run is resumed from them,
since they lack the rule's state. A safetensors file has leaves by dotted names such as `params.conv1.kernel`, and the
step in its header. Lists are dicts with the keys "0", "1" and so on. `--params` also takes bare params, as other
programs write them. Orbax restores NumPy leaves of any shape, so every imported leaf is compared with the model's.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np

from jaxmpi.checkpoint.manager import write_text
from jaxmpi.checkpoint.manifests import Damaged, check_undamaged
from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.files import made_whole
from jaxmpi.core.json_tree import nest, parse_json
from jaxmpi.core.pytrees import PyTree, mismatches, named_leaves

SUFFIX = ".safetensors"
CHECKSUM = "jaxmpi.sha256"  # file in an exported Orbax folder
SEPARATOR = "/"  # between a leaf's names, as in params/conv1/kernel
WAY_OUT = "name a folder that `jaxmpi export` has written"
ANOTHER_MODEL = (
    "give the model the names, sizes and dtypes that it was trained with (config.json of the run has its experiment), "
    "or take the params of another run"
)
Leaves = dict[str, np.ndarray]  # by path


# ---------------------------------------------------------------- programs


def sealed_facts(facts: Mapping[str, Any], program: bytes) -> str:
    """The file of facts beside a program, with the checksums of both.

    The facts need one of their own: people and programs without JAX act on them, whatever the program's says.
    """
    facts = {**facts, "sha256": hashlib.sha256(program).hexdigest()}
    return json.dumps({**facts, "facts_sha256": _digest_of_facts(facts)}, indent=2) + "\n"


def load_program(where: str | Path) -> jax.export.Exported:
    """The model and its program in a file .jaxexport, once checksums have been compared.

    They stand in the file of facts that `jaxmpi export` has written beside it: the program's, and that of the facts.

    Raises:
        UsageError: there is no such file, one of the two is damaged, or the facts are missing.
    """
    file, facts_file = Path(where), Path(f"{where}.json")
    try:
        program, text = file.read_bytes(), facts_file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error}; expected it with {facts_file.name} beside it") from error
    try:
        facts = parse_json(text, facts_file)
    except UsageError as error:
        raise Damaged(str(error)) from error
    facts = facts if isinstance(facts, dict) else {}
    _check_whole(facts_file, facts.pop("facts_sha256", "") == _digest_of_facts(facts))
    _check_whole(file, facts.get("sha256") == hashlib.sha256(program).hexdigest())
    return jax.export.deserialize(bytearray(program))


def _digest_of_facts(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


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
        aside.touch()
        mode = aside.stat().st_mode  # as the umask has it; the library's file is for this user alone
        try:
            save_file(leaves, aside, metadata=metadata)
            aside.chmod(mode)
        except Exception as error:  # SafetensorError, which also stands for a full disk, derives from Exception alone
            raise OSError(f"{error!s:.400}") from error


def read_safetensors(file: Path) -> tuple[PyTree, int | None]:
    """Params and model state of a file of `params.*` and `model_state.*`, or of bare params; the step if it says."""
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
    return tree, int(step) if re.fullmatch("[0-9]{1,19}", step) else None


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
            return Loaded(in_structure(folder, tree, params), model_state, False)
        got = in_structure(folder, tree, {"params": params, "model_state": model_state})
        return Loaded(got["params"], got["model_state"], True)

    return structured(read_orbax(folder, structured))  # of the sizes first


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
        with _muted_logs(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            writer.save(aside.absolute() / "model", args=ocp.args.StandardSave(tree))  # pyright: ignore[reportCallIssue]
        write_text(aside / "model" / CHECKSUM, _digest_of(dict(named_leaves(tree))))
        (aside / "model").rename(folder)
    except Exception as error:  # Orbax and TensorStore raise of all kinds
        number = re.search(r"os_error_code='(\d+)'", str(error))  # at the end of TensorStore's long sentence
        text = os.strerror(int(number[1])) if number else str(error)
        text = text if isinstance(error, OSError) else f"{text:.400}".partition("\n")[0]
        raise UsageError(
            f"{folder}: cannot be written: {text}; nothing of it is left: name another folder, or make room"
        ) from error
    finally:
        if aside:
            shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _muted_logs() -> Iterator[None]:
    """Keep Orbax from logging tracebacks of its threads, whose error it raises as well."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def read_orbax(folder: Path, admit: Callable[[PyTree], Any] = lambda sizes: None) -> PyTree:
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


# ---------------------------------------------------------------- what they share


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
    check_undamaged(is_whole, f"{source}: damaged, its checksum does not match; export the run again")


def in_structure(source: Path, tree: PyTree, like: PyTree) -> PyTree:
    """A tree's leaves, read or unread, in the structure of `like`; raise `UsageError` if they differ."""
    leaves = dict(named_leaves(tree))
    lines = mismatches(leaves, dict(named_leaves(like)))
    check(not lines, "\n  ".join([f"{source} is not of this model:", *lines, ANOTHER_MODEL]))
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name, _ in named_leaves(like)])
