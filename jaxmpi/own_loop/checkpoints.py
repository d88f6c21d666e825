"""Checkpoints of a loop's own trees, in the trainer's format.

A user's own loop has a tree that is equal on all ranks, and trees that differ by rank. `Checkpoints` saves both as a
`TrainState`, so the trainer's code writes and restores them. Files are checksummed, and a damaged checkpoint is passed
over for an older one. On another number of ranks, floats of the ranks' own trees become their mean. A state of
`jaxmpi.sharded` over all ranks is resharded. A state over a part of the ranks returns to the same ranks
only.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, SupportsInt

import jax
import numpy as np

from jaxmpi.allreduce.sharded import ShardedState
from jaxmpi.checkpoint.manager import Files, Retention, check_finite, files_of, save
from jaxmpi.checkpoint.restore import Slicing, restore
from jaxmpi.comm.agreement import check_may_send, on_all_ranks
from jaxmpi.comm.base import Comm
from jaxmpi.comm.job import Processes
from jaxmpi.comm.mpi import communicator, control_of
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.json_tree import depth
from jaxmpi.core.pytrees import PyTree, as_given, check_arrays, has_ranks_own, path_name
from jaxmpi.core.random_keys import is_key_data, packed, unpacked
from jaxmpi.core.sharding import ElementSharding, TensorSharding
from jaxmpi.core.train_state import TrainState


class Restored(NamedTuple):
    """A checkpoint of one's own."""

    step: int
    shared: PyTree
    own: PyTree
    extra: dict[str, Any]


class Checkpoints:
    """Checkpoints of your own loop; all ranks call the methods together."""

    def __init__(
        self, folder: str | Path, keep: int = 2, *, check_finite: bool = True, comm: Comm | None = None
    ) -> None:
        """Name a folder; nothing is read or written.

        Args:
            folder: that all ranks see.
            keep: how many of the newest stay, >= 1.
            check_finite: refuse to save trees with NaN or infinite numbers. False for trees to which such belong, as
                `best = inf` of a loop that has seen no loss yet.
            comm: whose ranks save and restore together: `jaxmpi.world()`, or a part of it, with a folder of its own.
        """
        if not _whole_number(keep):
            raise UsageError(
                f"jaxmpi.Checkpoints: keep: got {keep!r:.80}; expected >= 1, as keep=1_000_000 to keep all"
            )
        self._folder, self._keep, self._check_finite, self._comm = Path(folder), int(keep), check_finite, comm

    def save(self, step: SupportsInt, shared: PyTree, own: PyTree = (), extra: dict[str, Any] | None = None) -> Path:
        """Write a checkpoint, in the foreground; return its folder.

        Args:
            step: its number, >= 0; `time.time_ns()` will do.
            shared: a tree of arrays, equal on all ranks; rank 0's is written.
            own: each rank's own tree, as debts of `lowrank` and `topk`, running statistics, keys, the state of
                `jaxmpi.sharded`; of the same structure and shapes on all. All are written.
            extra: JSON values kept beside, rank 0's.

        Communicates: gathers of short texts and of the files' indices.

        Raises:
            UsageError: a state of `jaxmpi.sharded` in `shared`, or several of several strategies; a step below 0, or
                another one on another rank; extra values that JSON does not have.
            TrainingError: on all ranks alike: a number is not finite, or a file cannot be written, by rank and path;
                earlier checkpoints stay.
        """
        check_may_send("jaxmpi.Checkpoints.save")
        control, number = control_of(communicator(self._comm)), _whole_number(step)
        control.assert_same("jaxmpi.Checkpoints.save", {"step": f"{step!r:.80}" if number is None else number})
        if number is None:
            raise UsageError(
                f"jaxmpi.Checkpoints.save: step: got {step!r:.80}; expected >= 0, a whole number of 63 bits at most"
            )

        prepared: list[tuple[ShardedStates, Files]] = []

        def prepare() -> list[list[Any]]:
            _check_json(extra)
            sharded = ShardedStates(shared, own, control)
            shards = [state.to_checkpoint(control.rank) for state in sharded.over_all]
            state = sharded.train_state(number, shared, own, shards)
            files = files_of({control.rank: state}, replicated=not shards)
            self._check(files, number, control)
            prepared.append((sharded, files))
            return sharded.of_parts

        of_parts = on_all_ranks(control, prepare)
        [(sharded, files)] = prepared
        sharded.check_counts(of_parts)
        facts = {OF_USER: extra or {}, **sharded.facts(of_parts)}
        return save(
            self._folder,
            files,
            control,
            step=number,
            workers=control.size,
            extra=facts,
            keep=Retention(self._keep),
            agrees=True,
        )

    def _check(self, files: Files, step: int, control: Processes) -> None:
        """Raise `TrainingError` if this rank cannot write the checkpoint."""
        if control.rank == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise TrainingError(f"the checkpoint of step {step} cannot be written: {error}") from error
        if self._check_finite:
            way_out = "; leave it out, or Checkpoints(folder, check_finite=False)"
            check_finite(files, step, self._folder, way_out)

    def restore(self, shared: PyTree, own: PyTree = ()) -> Restored | None:
        """Return the newest checkpoint that is whole on all ranks, or None.

        None stands for a folder without a checkpoint; if all are damaged, this raises.

        On another number of ranks `own` is the mean of all ranks' own for floats, and rank 0's else; keys stay those
        given here. The state of `jaxmpi.sharded` is resharded, for another strategy as well.

        Args:
            shared: a tree like that which was saved, for structure, shapes and dtypes. Leaves that are JAX arrays here
                are returned as such, others as NumPy arrays.
            own: likewise.

        Communicates: gathers of short texts: rank 0's list, and one for each checkpoint that is tried.

        Raises:
            UsageError: on all ranks alike: it is of another tree (path, got, expected); all are damaged; states of
                `jaxmpi.sharded` are of another optimizer or `gather_wire`; or they are of a part of these ranks and
                sharded otherwise than here.
        """
        check_may_send("jaxmpi.Checkpoints.restore")
        control = control_of(communicator(self._comm))
        control.assert_same("jaxmpi.Checkpoints.restore", None)
        prepared: list[tuple[ShardedStates, TrainState]] = []

        def prepare() -> list[list[Any]]:
            sharded = ShardedStates(shared, own, control)
            shards = [packed(state.shard) for state in sharded.over_all]
            prepared.append((sharded, sharded.train_state(0, shared, own, shards)))
            return sharded.of_parts

        of_parts = on_all_ranks(control, prepare)
        [(sharded, like)] = prepared
        sharded.check_counts(of_parts)
        saved = restore(
            self._folder,
            {control.rank: like},
            control,
            workers=control.size,
            replicated=not sharded.over_all,
            slicing=sharded.slicing(),
            admits=partial(sharded.check, self._folder),
        )
        if saved is None:
            return None
        state, given = saved.states[control.rank], (packed(shared), packed(own))
        common, mine = as_given((state.params, sharded.put_back(own, state)), given)
        if saved.workers != control.size:
            is_kept = lambda x: is_key_data(x) or isinstance(x, ShardedState)  # noqa: E731
            mine = jax.tree.map(lambda x, here: here if is_key_data(x) else x, mine, given[1], is_leaf=is_kept)
        extra = saved.extra[OF_USER]
        return Restored(saved.step, unpacked(common), unpacked(mine), extra)


def _whole_number(step: Any) -> int | None:
    """The step; None if it is not one that can be saved: a fraction, a bool, negative, or beyond int64."""
    try:
        number = int(step)
        is_whole = bool(number == step) and np.asarray(step).dtype != bool
        return number if 0 <= number < 1 << 63 and is_whole else None
    except (TypeError, ValueError, OverflowError):
        return None


def _check_json(extra: Any) -> None:
    try:
        text = json.dumps(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"jaxmpi.Checkpoints.save: extra: {error}; expected what JSON has: numbers of Python, as float(loss), "
            "strings, lists and dicts"
        ) from error
    # `restore` would take what it does not read for damage.
    levels = depth(extra)
    if len(text) > EXTRA_BYTES or levels > EXTRA_LEVELS:
        raise UsageError(
            f"jaxmpi.Checkpoints.save: extra: got {len(text):,} bytes in {levels} levels; expected at most "
            f"{EXTRA_BYTES:,} in {EXTRA_LEVELS}: put what is large into the tree"
        )


EXTRA_BYTES, EXTRA_LEVELS = 64 << 20, 60  # of `extra`
OF_USER, CHUNKS, CUT, SHARDED = "of user", "chunks", "cut", "sharded"  # in a manifest's extra values


def _is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedState)


class ShardedStates:
    """The states of `jaxmpi.sharded` in a rank's own tree, in order.

    Those of all ranks are resharded for other ranks. Others belong to a part of the ranks, or to ranks in another
    order, as a mesh has them: they stay with their rank, if it is there.
    """

    def __init__(self, shared: PyTree, own: PyTree, control: Processes) -> None:
        """Find them; refuse one in the shared tree, of which rank 0's is written, and shards in several orders."""
        if has_ranks_own(shared):
            raise UsageError("shared: got a state of jaxmpi.sharded, which is each rank's own; give it in own")
        named = jax.tree_util.tree_leaves_with_path(own, is_leaf=_is_sharded)
        found = [(path_name(path), state) for path, state in named if _is_sharded(state)]
        self.control, self.states = control, [state for _, state in found]
        # By state: path; then name, shape, dtype of each whole leaf.
        self.leaves = [[path, [[name, list(s), dtype] for name, s, dtype in state.whole]] for path, state in found]
        # By state: all ranks here have a shard of it, in order.
        self.is_over_all = [state.ranks == tuple(control.numbers) for state in self.states]
        self.over_all = [state for state, is_all in zip(self.states, self.is_over_all, strict=True) if is_all]
        # By state: nothing if all ranks have a shard, else how this rank has it.
        self.of_parts: list[list[Any]] = []
        for state, is_all in zip(self.states, self.is_over_all, strict=True):
            owners = state.sharding.owners if isinstance(state.sharding, TensorSharding) else ()
            self.of_parts.append([] if is_all else [[*state.ranks], [*map(int, state.indices)], [*owners]])
        # By rank: the index of its shard; whole tensors are found by their names, in any order.
        by_element = {state.indices for state in self.over_all if isinstance(state.sharding, ElementSharding)}
        if len(by_element) > 1:
            raise UsageError(
                "own: got states of jaxmpi.sharded of several strategies; give them to several Checkpoints"
            )
        self.indices = tuple(map(int, next(iter(by_element), range(control.size))))

    def check_counts(self, of_parts: list[list[Any]]) -> None:
        """Raise `UsageError` on all ranks alike if they have different numbers of states."""
        counts = [*map(len, of_parts)]
        if len({*counts}) > 1:
            raise UsageError(f"own: got {counts} states of jaxmpi.sharded by rank; expected as many on all")

    def facts(self, of_parts: list[list[Any]]) -> dict[str, Any]:
        """Entries of a manifest about them, with `of_parts` of every rank."""
        facts: dict[str, Any] = {SHARDED: {"leaves": self.leaves, "of parts": of_parts}} if self.states else {}
        if self.over_all:
            has_tensors = any(isinstance(state.sharding, TensorSharding) for state in self.over_all)
            facts |= {CHUNKS: [*self.indices], CUT: TensorSharding.name if has_tensors else ElementSharding.name}
        return facts

    def slicing(self) -> Slicing | None:
        """How states of all ranks are sharded here; None without any."""
        if not self.over_all:
            return None
        at = lambda i, name: f"{i}/{name}" if name else str(i)  # noqa: E731
        whole = {
            at(i, name): jax.ShapeDtypeStruct(shape, dtype)
            for i, state in enumerate(self.over_all)
            for name, shape, dtype in state.whole
        }

        def shards(mine: PyTree, index: int, read: Callable[[str], np.ndarray]) -> PyTree:
            rank = self.control.rank
            return [
                state.from_checkpoint(rank, lambda name, i=i: read(at(i, name)))
                for i, state in enumerate(self.over_all)
            ]

        return Slicing(whole, self.indices, shards)

    def check(self, folder: Path, extra: dict[str, Any], workers: int) -> None:
        """Refuse a checkpoint whose states do not fit this run."""
        there = extra.get(SHARDED) or {} if OF_USER in extra else {}
        rows = there.get("leaves", []), self.leaves
        saved_by = f"{folder}: got states of jaxmpi.sharded, saved by {workers} ranks"
        if rows[0] != rows[1]:
            leaves = [[f"{at}/{name} {t}{s}" for at, whole in each for name, s, t in whole] for each in rows]
            got, expected = (next((x for x in a if x not in b), "no other") for a, b in (leaves, leaves[::-1]))
            raise UsageError(
                f"{saved_by}, with {got}; expected {expected}: take the same trees, optimizer and gather_wire"
            )
        size, here = self.control.size, self.of_parts
        was = there.get("of parts", [here] * workers)[self.control.rank if workers == size else 0]
        if was != here if workers == size else any(was) or any(here):
            ranks = [[(row[0] or "those of an axis") if row else "all" for row in each] for each in (was, here)]
            raise UsageError(
                f"{saved_by}, of parts of them: ranks {ranks[0]}; expected {ranks[1]} on {size}, with the strategy and "
                "`cost` as before: such a state goes back to the same ranks. Checkpoints(folder, comm=that part), with "
                "a folder for each part, saves what can be resharded; along an axis a state is not"
            )

    def put_back(self, own: PyTree, state: TrainState) -> PyTree:
        """A rank's own tree as read, with shards from their own field."""
        shards, is_over_all = iter(state.rule_state), iter(self.is_over_all)

        def one(mine: Any, read: Any) -> Any:
            return replace(mine, shard=next(shards)) if _is_sharded(mine) and next(is_over_all) else read

        return jax.tree.map(one, own, state.model_state["arrays"], is_leaf=_is_sharded)

    def train_state(self, step: int, shared: PyTree, own: PyTree, shards: list[PyTree]) -> TrainState:
        """A `TrainState` of NumPy arrays; shards are its `rule_state`."""
        is_over_all = iter(self.is_over_all)
        taken_out = lambda x: () if _is_sharded(x) and next(is_over_all) else x  # noqa: E731
        rest = jax.tree.map(taken_out, packed(own), is_leaf=_is_sharded)
        check_arrays("jaxmpi.Checkpoints", {"shared": packed(shared), "own": rest})
        common, mine, shards = jax.tree.map(np.asarray, (packed(shared), rest, shards))
        return TrainState(
            step=np.array(step, np.int64),
            params=common,
            model_state={"arrays": mine},
            rule_state=shards,
            key=np.zeros(0, np.uint32),
        )
