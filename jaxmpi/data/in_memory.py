"""Data in memory for your own loop: load a part, take random batches of it, shuffle over a group.

These are the three calls of IBM's DIMD (Kumar et al. 2018, section 4.1). The trainer's parts do the work: `shuffle`
keeps and moves the records, `feed` decodes them and brings batches to the device. Only the moment of a shuffle, and the
order between two of them, are the loop's own (`LoopSampler`).
"""

import dataclasses
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jaxmpi.comm.agreement import refuse_together
from jaxmpi.comm.job import processes
from jaxmpi.comm.topology import gather_workers
from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.core.train_state import Batch
from jaxmpi.data.feed import DeviceFeed
from jaxmpi.data.loader_pool import make_pool
from jaxmpi.data.memory_source import NoRoom
from jaxmpi.data.sampler import Share
from jaxmpi.data.shuffle import GroupSampler, Shuffle, keep_in_memory, permute_within_parts
from jaxmpi.data.sources.base import Source
from jaxmpi.data.sources.registry import open_source
from jaxmpi.model.contract import check_whole
from jaxmpi.runtime.process import rank_cores

MOST_BATCHES = 1 << 32  # between two shuffles
STATE = ("shuffles", "batches", "examples", "effective_batch", "seed", "group_size")  # keys of `state()`


@dataclass(frozen=True)
class LoopSampler(GroupSampler):
    """The order of examples if a loop says when to shuffle.

    Step s x 2^32 + b is batch b after s shuffles. After a shuffle all workers together read each example once, in the
    order of `Sampler` for epoch s. Then they read them again, the records of each member permuted among themselves,
    until the next shuffle.
    """

    def turn_of_step(self, step: int) -> int:
        """Shuffles before a step."""
        return step // MOST_BATCHES

    def indices(self, step: int) -> Share:
        shuffles, batch = divmod(step, MOST_BATCHES)
        cycle, batch = divmod(batch, self.steps_per_epoch)
        epoch = shuffles + cycle * MOST_BATCHES  # so that crops are others, too
        places = slice(batch * self.effective_batch, min((batch + 1) * self.effective_batch, self.examples))
        order = self._order(shuffles, places.start, places.stop)
        if cycle:
            permutation = self.examples, self.effective_batch, self.seed, epoch, self.parts
            order = permute_within_parts(*permutation, first=shuffles)[places]
        return Share(epoch, self._part(order), len(order))


class InMemory:
    """A data set in workers' memory, for your own loop.

    Workers form groups. Each group holds one full copy of the compressed examples, each worker its part. Making one
    loads this worker's part.

    Communicates: settings and data are compared over all ranks; with `group_size` auto also free memory. All ranks
    make one together, call `shuffle` equally often, and `close` it together.

    Args:
        data: where the examples are, and their way to the model (crop, mirror, mean_image, augment); or the folder of a
            packed data set; or any object with `__len__` and `__getitem__(i) -> (image, label)`. `mean` and `std` are
            not applied: batches are sent as bytes, and your step may apply both on the device. With `mean_image` they
            are floats, (x - mean image) / 255 / std. `memory`, `shuffle_by`, `shuffle_period` and `max_skipped` have
            no effect: the loop says when records move, and sees `skipped`.
        local_batch: examples of a worker's batch.
        group_size: workers of a group; 0: all; auto: the fewest whose parts fit in half of each host's free memory.
            Left out: the data's if it is not 0, else the state's, else auto.
        seed: of order and augmentation.
        state: of another one's `state()`, to continue after its last batch.

    Raises:
        UsageError: settings that cannot be, or two sizes of groups; a state that is none or of another order; ranks
            that differ; or a host with too little memory.
    """

    def __init__(
        self,
        data: Data | str | Path | Source,
        local_batch: int,
        *,
        group_size: int | str | None = None,
        seed: int = 0,
        state: dict[str, int] | None = None,
    ) -> None:
        with refuse_together(processes()):
            check_whole("local_batch", local_batch)
            check_whole("seed", seed, 0)
            local_batch, seed = int(local_batch), int(seed)  # NumPy's have no JSON
            settings = _to_data(data)
            missing = [name for name in STATE if state and name not in state]
            if missing:
                raise UsageError(f"InMemory: state: got no {', '.join(missing)}; expected what state() has given")
            if group_size is not None and settings.group_size not in (0, group_size):
                raise UsageError(
                    f"InMemory: group_size: got {group_size}, and {settings.group_size} in the Data; give one of the "
                    "two"
                )
            group_size = (settings.group_size or "auto") if group_size is None else group_size
            group_size = state["group_size"] if state and group_size == "auto" else group_size
        workers, position = gather_workers(1), state or {"shuffles": 0, "batches": 0}
        arguments = {"local_batch": local_batch, "group_size": group_size, "seed": seed, "state": position}
        workers.processes.assert_same("settings of data in memory", arguments)
        fixed = {"memory": "partition", "group_size": group_size, "shuffle_by": "auto", "shuffle_period": 1}
        config = dataclasses.replace(settings, **fixed)  # period 1: records move at every turn, which is a call here
        source, batch = open_source(config, "train"), local_batch * workers.size
        self._memory, samplers = keep_in_memory(source, config, seed, batch, True, workers, sampler=LoopSampler)
        self._facts = {"examples": len(source), "effective_batch": batch, "seed": seed, "group_size": samplers[0].parts}
        self._shuffles, self._batches = position["shuffles"], position["batches"]
        self._iterator: Generator[Batch, None, None] | None = None
        self._is_closed = False
        inside = self._memory.source
        agreed: type[Exception] = UsageError  # all ranks raise it together
        try:
            pool = make_pool(config, inside, rank_cores())
            self._feed = DeviceFeed(inside, samplers, config, True, pool, memory=self._memory, labels="numbers")
            workers.processes.assert_same("the data", self._feed.facts())
            odd = [f"{k}: got {v}, expected {state.get(k)}" for k, v in self._facts.items() if state and state[k] != v]
            if odd:
                raise UsageError(f"InMemory: the state is that of another order: {'; '.join(odd)}; give these, or none")
            agreed = NoRoom  # another error of loading may be of this rank alone
            self._memory.load()
        except agreed:
            self._memory.close()
            raise

    def batch(self) -> Batch:
        """The next random batch of this worker's records, on its device; waits for records that are on their way.

        Returns: `image` and `label`, or the fields that `Data.augment` gives; and `weight`, f32[local_batch]. Rows of
            weight 0 only fill the last batch before all examples have been read. The mean over workers of
            sum(weight * loss) is the mean loss of the batch's examples.
        """
        self._check_open("batch")
        if self._iterator is None:
            first = self._shuffles * MOST_BATCHES
            self._iterator = self._feed.batches(first + self._batches, first + MOST_BATCHES)
        try:
            batch = next(self._iterator)
        except BaseException:
            self._iterator = None  # a generator that has raised is at its end; the next call comes to this batch again
            raise
        self._batches += 1
        return batch

    def shuffle(self) -> None:
        """Begin to move records at random between a group's workers; the next `batch` waits for its own.

        Communicates: over the group, in a thread of its own. All workers of the group call it, equally often. With
        groups of one worker nothing moves, and the order alone is new.
        """
        self._check_open("shuffle")
        self._drop_batches()
        self._shuffles, self._batches = self._shuffles + 1, 0
        first = self._shuffles * MOST_BATCHES
        self._memory.begin(first, first + MOST_BATCHES)

    def state(self) -> dict[str, int]:
        """Position, as JSON, from which `InMemory(..., state=...)` continues, bit for bit."""
        return {"shuffles": self._shuffles, "batches": self._batches, **self._facts}

    @property
    def steps_per_epoch(self) -> int:
        """Batches in which all workers together read each example once."""
        return self._feed.samplers[0].steps_per_epoch

    @property
    def group_size(self) -> int:
        """Workers that hold one full copy together."""
        return self._facts["group_size"]

    @property
    def held_bytes(self) -> int:
        """Bytes of this worker's part."""
        return self._memory.source.newest().bytes.size

    @property
    def shuffles(self) -> tuple[Shuffle, ...]:
        """Seconds and received bytes of each shuffle that is done here."""
        return tuple(self._memory.shuffles)

    @property
    def skipped(self) -> int:
        """Damaged examples left out by this worker so far; others than 0 only if `Data.on_error` is skip."""
        return self._feed.skipped

    def __len__(self) -> int:
        """Examples of the data set."""
        return self._facts["examples"]

    def close(self) -> None:
        """Give the memory back; all ranks call it together."""
        if not self._is_closed:
            self._is_closed = True
            self._drop_batches()
            self._feed.pool.stop()
            self._memory.close()

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise UsageError(f"InMemory: got {call}() after close(); make another one")

    def _drop_batches(self) -> None:
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:  # else this rank may be alone here
            self.close()


def _to_data(data: Any) -> Data:
    if isinstance(data, Data):
        return data
    if isinstance(data, (str, Path)):
        return Data("packed", dir=str(data))
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return Data("array", train=data)
    raise UsageError(
        f"InMemory: got {type(data).__name__}; expected a Data, the folder of a packed data set, or an object with "
        "__len__ and __getitem__"
    )
