"""Copies of slices for `--on-rank-loss shrink` with sharded updates: `--exchange.buddy`.

A worker that updates a slice of the params has the optimizer's state of this slice alone. It takes this state along
when it dies. So after each step a worker sends its slice to the next worker, or to the next few. It sends the slice
before the vote by which the step counts. A slice is gone only if its worker has died together with all that had a copy
of it. Otherwise the workers that are left hold all slices. They put the state together, leaf by leaf, and cut it anew
for as many as they are.

A copy costs as many bytes as a slice has, a w-th of the optimizer's state, once a step; two sets of copies are held,
since a set counts only after the vote. Tried and dropped: to gather all slices on all ranks after a death, which takes
the memory that slices save.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmpi.checkpoint.restore import RULE_STATE, Slicing, with_rule_state
from jaxmpi.comm.control import MpiProcesses
from jaxmpi.comm.job import Processes
from jaxmpi.comm.mpi_fault_tolerant import FaultTolerantComm
from jaxmpi.core.deals import Leaves
from jaxmpi.core.errors import AgreedError
from jaxmpi.core.pytrees import PyTree, named_leaves
from jaxmpi.core.slices import Entries, whole_of_slices
from jaxmpi.core.train_state import TrainState
from jaxmpi.recover.replica_check import checksum, difference

SLICES = 7  # tag of messages about them


class SliceLayout(NamedTuple):
    """How a rule's state is cut over workers."""

    cut: Entries | Leaves  # for the state of the rule's optimizer
    numbers: tuple[int, ...]  # by worker: the number of its slice


class Slices(NamedTuple):
    """A worker's slice of the rule's state, and copies of others' slices."""

    layout: SliceLayout
    by_number: dict[int, PyTree]

    def named(self) -> dict[int, dict[str, np.ndarray]]:
        """Leaves by slice number, then by their paths in a checkpoint."""
        found = {}
        for number, state in self.by_number.items():
            saved = self.layout.cut.saved(state, number)
            found[number] = {f"{RULE_STATE}/{name}": np.asarray(leaf) for name, leaf in named_leaves(saved)}
        return found


class Copies:
    """Slices of the workers before this one, after the last step."""

    def __init__(self, comm: FaultTolerantComm, layout: SliceLayout, count: int) -> None:
        """Take part in copying each slice to the next `count` workers."""
        self._comm, self._layout = comm, layout
        self._distances = range(1, min(count, comm.size - 1) + 1)
        self._sets: list[list[list[np.ndarray]]] = []  # memory of the set that counts, and of the one to come

    def renewed(self, rule_state: PyTree) -> Slices:
        """This worker's slice, and the copies of those before it.

        The copies of the call before stay as they are, until the next one. After a loss these are worth nothing.
        Communicates: a slice for each copy.
        """
        leaves, structure = jax.tree.flatten(rule_state)
        own = [np.asarray(leaf) for leaf in leaves]
        if len(self._sets) < 2:
            self._sets.append([[np.empty_like(leaf) for leaf in own] for _ in self._distances])
        else:
            self._sets.reverse()
        numbers, rank, size = self._layout.numbers, int(self._comm.rank), self._comm.size
        by_number = {numbers[rank]: rule_state}
        for distance, came in zip(self._distances, self._sets[-1], strict=True):
            self._comm.pass_on(own, came, distance)
            by_number[numbers[(rank - distance) % size]] = jax.tree.unflatten(structure, came)
        return Slices(self._layout, by_number)


def difference_of_copies(slices: Slices, processes: Processes, step: int) -> str:
    """Workers whose copies of a slice differ, as text on all ranks.

    The text is empty if all copies are equal. With several copies it also names the leaf. A difference shows what
    happened to a slice or its copy since the copy was sent. It may also show what the message changed.

    Communicates: a gather of CRC-32 of the leaves held here, as text.
    """
    held = {number: dict(named_leaves(state)) for number, state in slices.by_number.items()}
    mine = [[n, [checksum(np.asarray(leaf)) for leaf in leaves.values()]] for n, leaves in held.items()]
    rows: dict[int, dict[int, np.ndarray]] = {}  # by number of the slice, by worker
    for worker, pairs in enumerate(processes.allgather_object(mine)):
        for number, sums in pairs:
            rows.setdefault(number, {})[worker] = np.array(sums, np.uint32)
    names = [f"{RULE_STATE}/{name}" for name in next(iter(held.values()))]  # all slices have the same leaves
    texts = (
        difference(row, names, step, f"copies of slice {number} of the optimizer's state")
        for number, row in sorted(rows.items())
    )
    return "; ".join(filter(None, texts))


def recut(
    control: MpiProcesses, slices: Slices, state: TrainState, like: PyTree, slicing: Slicing, told: str
) -> TrainState:
    """This worker's state, with the rule's part recut from remaining slices.

    All remaining workers call it together. Each in turn requests the slices of one leaf after another. So no worker
    holds more than a whole leaf beside its own part.

    Args:
        state: of the same worker before the loss.
        like: shapes of its part of the rule's state now.
        slicing: how it is held now.
        told: who is gone, for the error.

    Communicates: 8 n w bytes for Adam, n params and w that are left.

    Raises:
        AgreedError: a slice is gone, on all ranks.
    """
    mine = slices.named()
    told_by = control.allgather_object([[number, list(leaves)] for number, leaves in mine.items()])
    holders, names = dict[int, int](), dict[int, set[str]]()
    for rank, pairs in enumerate(told_by):
        for number, leaves in pairs:
            holders.setdefault(number, rank)
            names[number] = set(leaves)
    before, world = len(slices.layout.numbers), control.world
    if missing := sorted(set(range(before)) - set(holders)):
        raise AgreedError(
            f"{told}, and with it every copy of {len(missing)} of {before} slices of the optimizer's state; go on from "
            "the last checkpoint with --resume, and keep more copies with a larger --exchange.buddy"
        )

    def get(number: int, name: str) -> np.ndarray:
        if number in mine:
            return mine[number][name]
        world.send((number, name), holders[number], SLICES)
        return world.recv(source=holders[number], tag=SLICES)

    def read(name: str, leaf: Any) -> np.ndarray:
        if isinstance(slices.layout.cut, Leaves):
            return get(next(number for number in range(before) if name in names[number]), name)
        return whole_of_slices(leaf, before, lambda number, _: get(number, name))

    every = [name for leaves in names.values() for name in leaves]
    for turn in range(control.size):
        if turn == control.rank:
            state = with_rule_state(state, like, slicing, control.rank, every, read)
            for other in set(range(control.size)) - {turn}:
                world.send(None, other, SLICES)
        else:
            while asked := world.recv(source=turn, tag=SLICES):
                number, name = asked
                world.send(mine[number][name], turn, SLICES)
    return state
