"""Checkpoints of a loop's own trees, in the trainer's format.

A user's own loop has a tree that is equal on all ranks, and trees that differ by rank. `Checkpoints` saves both as a
`TrainState`, so the trainer's code writes and restores them. Files are checksummed, and a damaged checkpoint is passed
over for an older one. On another number of ranks, floats of the ranks' own trees become their mean. A state of
`jaxmpi.sharded` over all ranks is cut anew for the new number. A state over a part of the ranks returns to the same
ranks only.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, SupportsInt

import jax
import numpy as np

from jaxmpi.allreduce.sharded import ShardedState
from jaxmpi.checkpoint.manager import check_finite
from jaxmpi.checkpoint.manifests import found, read_manifest
from jaxmpi.checkpoint.restore import Slicing, restore
from jaxmpi.checkpoint.write import Files, Retention, files_of, save
from jaxmpi.comm.agreement import check_may_send, on_all_ranks
from jaxmpi.comm.base import Comm
from jaxmpi.comm.job import Processes
from jaxmpi.comm.mpi import MpiComm, communicator
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.core.deals import Leaves
from jaxmpi.core.errors import TrainingError, UsageError, check
from jaxmpi.core.pytrees import PyTree, as_given, check_arrays, has_ranks_own, path_name
from jaxmpi.core.random_keys import is_key_data, packed, unpacked
from jaxmpi.core.slices import Entries
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
        is_count = bool(_whole_number(keep))
        check(is_count, f"jaxmpi.Checkpoints: keep: got {keep!r:.80}; expected >= 1, as keep=1_000_000 to keep all")
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
        control, number, files, cuts = self._processes(), _whole_number(step), {}, None
        control.assert_same("jaxmpi.Checkpoints.save", {"step": f"{step!r:.80}" if number is None else number})
        if number is None:
            raise UsageError(
                f"jaxmpi.Checkpoints.save: step: got {step!r:.80}; expected >= 0, a whole number of 63 bits at most"
            )

        def prepare() -> list[list[Any]]:
            nonlocal cuts, files
            _check_json(extra)
            cuts = Cuts.of(shared, own, control)
            state = cuts.state(number, shared, own, [share.saved(control.rank) for share in cuts.shares])
            files = files_of({control.rank: state}, replicated=not cuts.shares)
            self._check(files, number, control)
            return cuts.of_parts

        of_parts = on_all_ranks(control, prepare)
        assert cuts is not None
        cuts.check_counts(of_parts)
        facts = {OF_USER: extra or {}, RANKS: [*control.numbers], **cuts.facts(of_parts)}
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

    def _processes(self) -> Processes:
        comm = communicator(self._comm)
        return comm.processes if isinstance(comm, MpiComm) else SoloProcesses()

    def _check(self, files: Files, step: int, control: Processes) -> None:
        """Raise `TrainingError` if this rank cannot write the checkpoint."""
        if control.rank == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                others = self._others(control)
            except OSError as error:
                raise TrainingError(f"the checkpoint of step {step} cannot be written: {error}") from error
            if others:
                raise TrainingError(
                    f"{self._folder}: has a checkpoint that ranks {others} of this job saved; expected those of ranks "
                    f"{[*control.numbers]} alone: give each part of the ranks its folder"
                )
        if self._check_finite:
            way_out = "; leave it out, or Checkpoints(folder, check_finite=False)"
            check_finite(files, step, self._folder, way_out)

    def _others(self, control: Processes) -> list[int]:
        """Other ranks of this job, if they saved the newest checkpoint."""
        for path in found(self._folder)[-1:]:
            try:
                ranks = read_manifest(path)["extra"].get(RANKS, [])
            except UsageError:  # damaged: it is passed over
                return []
            if (path / "manifest.json").stat().st_mtime > BEGAN_S and not set(ranks) & set(control.numbers):
                return ranks
        return []

    def restore(self, shared: PyTree, own: PyTree = ()) -> Restored | None:
        """Return the newest checkpoint that is whole on all ranks, or None.

        None stands for a folder without a checkpoint; if all are damaged, this raises.

        On another number of ranks `own` is the mean of all ranks' own for floats, and rank 0's else; keys stay those
        given here. The state of `jaxmpi.sharded` is put together and cut anew, for another strategy as well.

        Args:
            shared: a tree like that which was saved, for structure, shapes and dtypes. Leaves that are JAX arrays here
                are returned as such, others as NumPy arrays.
            own: likewise.

        Communicates: gathers of short texts: rank 0's list, and one for each checkpoint that is tried.

        Raises:
            UsageError: on all ranks alike: it is of another tree (path, got, expected); all are damaged; states of
                `jaxmpi.sharded` are of another optimizer or `gather_wire`; or they are of a part of these ranks and cut
                otherwise than here.
        """
        check_may_send("jaxmpi.Checkpoints.restore")
        control = self._processes()
        control.assert_same("jaxmpi.Checkpoints.restore", None)
        cuts, like = None, {}

        def prepare() -> list[list[Any]]:
            nonlocal cuts, like
            cuts = Cuts.of(shared, own, control)
            like = {control.rank: cuts.state(0, shared, own, [packed(share.own) for share in cuts.shares])}
            return cuts.of_parts

        of_parts = on_all_ranks(control, prepare)
        assert cuts is not None
        cuts.check_counts(of_parts)
        saved = restore(
            self._folder,
            like,
            control,
            workers=control.size,
            replicated=not cuts.shares,
            slicing=cuts.slicing() if cuts.shares else None,
            admits=partial(cuts.check, self._folder),
        )
        if saved is None:
            return None
        state, given = saved.states[control.rank], (packed(shared), packed(own))
        common, mine = as_given((state.params, cuts.with_shares(own, state)), given)
        if saved.workers != control.size:
            is_kept = lambda x: is_key_data(x) or isinstance(x, ShardedState)  # noqa: E731
            mine = jax.tree.map(lambda x, here: here if is_key_data(x) else x, mine, given[1], is_leaf=is_kept)
        extra = saved.extra[OF_USER]
        return Restored(saved.step, unpacked(common), unpacked(mine), extra)


def _whole_number(step: Any) -> int | None:
    """The step; None if it is not one that can be saved: a fraction, negative, or beyond int64."""
    try:
        number = int(step)
        return number if 0 <= number < 1 << 63 and bool(number == step) else None
    except (TypeError, ValueError, OverflowError):
        return None


def _check_json(extra: Any) -> None:
    try:
        json.dumps(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"jaxmpi.Checkpoints.save: extra: {error}; expected what JSON has: numbers of Python, as float(loss), "
            "strings, lists and dicts"
        ) from error


OF_USER, RANKS, CHUNKS, CUT, SHARDED = "of user", "ranks", "chunks", "cut", "sharded"  # in a manifest's extra values
BEGAN_S = time.time()  # no checkpoint of this process is older


def _is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedState)


@dataclass(frozen=True)
class Cuts:
    """The states of `jaxmpi.sharded` in a rank's own tree, in order.

    All ranks have a share of some. These are cut anew for other ranks. Others belong to a part of the ranks, or to
    ranks in another order, as a mesh has them. These stay with their rank, if it is there.
    """

    control: Processes
    states: tuple[ShardedState, ...]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, shared: PyTree, own: PyTree, control: Processes) -> "Cuts":
        """Find them.

        Raises:
            UsageError: one is in the shared tree, of which rank 0's is written; or shares are in several orders.
        """
        check(
            not has_ranks_own(shared), "shared: got a state of jaxmpi.sharded, which is each rank's own; give it in own"
        )
        named = jax.tree_util.tree_leaves_with_path(own, is_leaf=_is_sharded)
        found = [(path_name(path), state) for path, state in named if _is_sharded(state)]
        states, paths = tuple(state for _, state in found), tuple(path for path, _ in found)
        made = cls(control, states, paths)
        orders = {share.chunks for share in made.shares if isinstance(share.cut, Entries)}
        several = "own: got states of jaxmpi.sharded of several strategies; give them to several Checkpoints"
        check(len(orders) < 2, several)
        return made

    def check_counts(self, of_parts: list[list[Any]]) -> None:
        """Raise `UsageError` on all ranks alike if they have different numbers of states."""
        counts = [*map(len, of_parts)]
        several = f"own: got {counts} states of jaxmpi.sharded by rank; expected as many on all"
        check(len({*counts}) == 1, several)

    @property
    def is_share(self) -> list[bool]:
        """By state: all ranks here have a share of it, in order."""
        return [state.ranks == tuple(self.control.numbers) for state in self.states]

    @property
    def shares(self) -> list[ShardedState]:
        """States of which all ranks have a share."""
        return [state for state, is_share in zip(self.states, self.is_share, strict=True) if is_share]

    @property
    def leaves(self) -> list[list[Any]]:
        """By state: path; then name, shape, dtype of each whole leaf."""
        whole = [[[name, list(shape), dtype] for name, shape, dtype in state.whole] for state in self.states]
        return [[path, leaves] for path, leaves in zip(self.paths, whole, strict=True)]

    @property
    def of_parts(self) -> list[list[Any]]:
        """By state: nothing for a share, else how this rank has it."""
        rows = []
        for state, is_share in zip(self.states, self.is_share, strict=True):
            owners = state.cut.deal.owners if isinstance(state.cut, Leaves) else ()
            rows.append([] if is_share else [[*state.ranks], [*map(int, state.chunks)], [*owners]])
        return rows

    @property
    def order(self) -> tuple[int, ...]:
        """By rank: the number of its slice.

        Whole tensors are found by their names, in any order.
        """
        slices = (share.chunks for share in self.shares if isinstance(share.cut, Entries))
        return tuple(map(int, next(slices, range(self.control.size))))

    def facts(self, of_parts: list[list[Any]]) -> dict[str, Any]:
        """Entries of a manifest about them, with `of_parts` of every rank."""
        said = {SHARDED: {"leaves": self.leaves, "of parts": of_parts}} if self.states else {}
        if not self.shares:
            return said
        has_tensors = any(isinstance(share.cut, Leaves) for share in self.shares)
        return said | {CHUNKS: [*self.order], CUT: "leaves" if has_tensors else "entries"}

    def slicing(self) -> Slicing:
        """How shares are held here."""
        shares, whole = self.shares, {}
        at = lambda i, name: f"{i}/{name}" if name else str(i)  # noqa: E731
        for i, share in enumerate(shares):
            whole |= {at(i, name): jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in share.whole}

        def held(mine: PyTree, chunk: int, read: Callable[[str], np.ndarray]) -> PyTree:
            return [
                share.restored(self.control.rank, lambda name, i=i: read(at(i, name))) for i, share in enumerate(shares)
            ]

        return Slicing(whole, self.order, held)

    def check(self, folder: Path, extra: dict[str, Any], workers: int) -> None:
        """Refuse a checkpoint whose states do not fit this run.

        Raises:
            UsageError: they are of other trees or optimizers; or of parts of the ranks, and other ones than here.
        """
        there = extra.get(SHARDED) or {} if OF_USER in extra else {}
        is_known = isinstance(there, dict)
        check(
            is_known, f"{folder}: got states of jaxmpi.sharded as a version under development saved them; begin again"
        )
        rows = there.get("leaves", []), self.leaves
        saved_by = f"{folder}: got states of jaxmpi.sharded, saved by {workers} ranks"
        leaves = [[f"{at}/{name} {t}{s}" for at, whole in each for name, s, t in whole] for each in rows]
        got, expected = (next((x for x in a if x not in b), "no other") for a, b in (leaves, leaves[::-1]))
        way_out = "take the same trees, optimizer and gather_wire"
        check(leaves[0] == leaves[1], f"{saved_by}, with {got}; expected {expected}: {way_out}")
        places = [[row[0] for row in each] for each in rows]
        check(places[0] == places[1], f"{saved_by} at {places[0]}; expected them at {places[1]}: take the same trees")
        size, here = self.control.size, self.of_parts
        was = there.get("of parts", [here] * workers)[self.control.rank if workers == size else 0]
        is_same = was == here if workers == size else not any(was) and not any(here)
        of_axis = "those of an axis"
        ranks = [[(row[0] or of_axis) if row else "all" for row in each] for each in (was, here)]
        check(
            is_same,
            f"{saved_by}, of parts of them: ranks {ranks[0]}; expected {ranks[1]} on {size}, with the strategy and "
            "`cost` as before: such a state goes back to the same ranks. Checkpoints(folder, comm=that part), with a "
            "folder for each part, saves what can be cut anew; along an axis a state is not",
        )

    def with_shares(self, own: PyTree, state: TrainState) -> PyTree:
        """A rank's own tree as read, with shares from their own field."""
        shares, is_share = iter(state.rule_state), iter(self.is_share)

        def put(mine: Any, read: Any) -> Any:
            return replace(mine, own=next(shares)) if _is_sharded(mine) and next(is_share) else read

        return jax.tree.map(put, own, state.model_state["arrays"], is_leaf=_is_sharded)

    def state(self, step: int, shared: PyTree, own: PyTree, shares: list[PyTree]) -> TrainState:
        """A `TrainState` of NumPy arrays; shares are its `rule_state`."""
        is_share = iter(self.is_share)
        rest = jax.tree.map(lambda x: () if _is_sharded(x) and next(is_share) else x, packed(own), is_leaf=_is_sharded)
        check_arrays("jaxmpi.Checkpoints", {"shared": packed(shared), "own": rest})
        common, mine, shares = jax.tree.map(np.asarray, (packed(shared), rest, shares))
        return TrainState(
            step=np.array(step, np.int64),
            params=common,
            model_state={"arrays": mine},
            rule_state=shares,
            key=np.zeros(0, np.uint32),
        )
