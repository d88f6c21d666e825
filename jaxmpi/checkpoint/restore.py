"""A run's state from the newest checkpoint whole on all ranks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from jaxmpi.checkpoint.leaves import halves, worker_of
from jaxmpi.checkpoint.manifests import Damaged, candidates, read_manifest
from jaxmpi.checkpoint.recut import Slicing, cut_anew, has_masters, is_cut_otherwise, without
from jaxmpi.comm.job import Processes
from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.train_state import TrainState

T = TypeVar("T")


class Saved(NamedTuple):
    """A restored checkpoint."""

    states: dict[int, TrainState]  # by worker
    step: int
    extra: dict[str, Any]
    workers: int  # that wrote it
    step_there: int | None = None  # its step in the run that wrote it, if another run continues that


def restore(
    folder: Path,
    like: Mapping[int, TrainState],
    processes: Processes,
    *,
    workers: int,
    replicated: bool,
    same_params: bool = True,
    slicing: Slicing | None = None,
    reads_params: bool = True,
    admits: Callable[[dict[str, Any], int], None] = lambda extra, workers: None,
    say: Callable[[str], None] = print,
) -> Saved | None:
    """Read this process's workers from the newest checkpoint whole on all ranks.

    None if there is no checkpoint.

    Args:
        like: states of the same structure, shapes and dtypes, as the run starts with.
        slicing: how the rule's state is held now. One that was held otherwise is put together and cut anew.
        reads_params: False for a process that needs no params: it gets their shapes. It reads them all the same if
            one of checkpoint and run keeps masters.
        admits: raises UsageError for a checkpoint that is not to be read, by its extra values and number of workers.
        say: receives a line for each damaged checkpoint that is skipped.

    Communicates, raises: see `first_whole`.
    """

    def read(path: Path) -> Saved:
        manifest = read_manifest(path)
        admits(manifest["extra"], manifest["workers"])
        if reads_params or has_masters(manifest, slicing):
            return read_all(path, manifest, like)
        bare = {worker: state._replace(params=()) for worker, state in like.items()}
        saved = read_all(path, without(manifest, "params"), bare)
        shapes = {worker: jax.eval_shape(lambda params: params, state.params) for worker, state in like.items()}
        return saved._replace(
            states={worker: state._replace(params=shapes[worker]) for worker, state in saved.states.items()}
        )

    def read_all(path: Path, manifest: dict, like: Mapping[int, TrainState]) -> Saved:
        if slicing and is_cut_otherwise(manifest, next(iter(like.values())), slicing):
            states = {
                worker: cut_anew(path, manifest, worker, state, slicing, workers) for worker, state in like.items()
            }
            return Saved(states, manifest["step"], manifest["extra"], manifest["workers"])
        halved = {worker: halves(state, replicated, same_params) for worker, state in like.items()}
        states = {worker: worker_of(path, manifest, worker, workers, *parts) for worker, parts in halved.items()}
        return Saved(states, manifest["step"], manifest["extra"], manifest["workers"])

    return first_whole(folder, processes, read, say)


def first_whole(folder: Path, processes: Processes, read: Callable[[Path], T], say: Callable[[str], None]) -> T | None:
    """Return `read` of the newest checkpoint whole on all ranks, or None.

    Args:
        say: receives a line for each damaged checkpoint that is skipped.

    Communicates: a gather of rank 0's list, then one of short texts for each checkpoint that is tried.

    Raises:
        UsageError: it is of another model or optimizer (path, got, expected), or all are damaged (leaf); on all ranks.
    """
    names = processes.bcast_object([path.name for path in candidates(folder)])
    damage: list[str] = []
    for name in reversed(names):
        saved, problem = attempt(folder / name, read)
        told = enumerate(processes.allgather_object(problem))
        problems = [(processes.in_job([rank])[0], *row) for rank, row in told if row]
        if not problems:
            return saved
        others = [text for _, is_damage, text in problems if not is_damage]
        check(not others, others[0] if others else "")
        rank, _, text = problems[0]
        damage.append(f"{text} (read by rank {rank})")
        say(f"passed over: {damage[-1]}")
    check(not damage, f"no checkpoint in {folder} is whole:\n  " + "\n  ".join([*damage, AGAIN]))
    return None


AGAIN = "bring them back, or begin again at step 0 with --from-start in place of --resume, which keeps what is there"


def attempt(path: Path, read: Callable[[Path], T]) -> tuple[T | None, tuple[bool, str] | None]:
    """Read a checkpoint; return (it, None) or (None, (is damaged, error text))."""
    try:
        return read(path), None
    except OSError as error:
        return None, (True, f"{path}: cannot be read: {error}")
    except UsageError as error:
        return None, (isinstance(error, Damaged), str(error))
