"""The shuffle of data in memory beside MPI_Alltoallv.

python scripts/bench_shuffle.py --ranks 2 4                  ranks of this machine
python scripts/bench_shuffle.py --hosts 2 4 8 --rate 1gbit   an emulated cluster, see scripts/cluster.py

Both move the same records in turn, for each size of group that divides the ranks; a time is that of the slowest rank.
The bare call moves the same bytes, contiguous already, and reuses its buffers.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np

from jaxmpi.allreduce.measuring import slowest
from jaxmpi.comm.topology import gather_workers
from jaxmpi.config.data import Data
from jaxmpi.data.shuffle import MemoryShuffle, alltoallv_buffer, keep_in_memory, place_owners, plan_moves, record_owners

RECORD_BYTES = 110_000  # the mean of ImageNet's


class Blobs:
    """Records of half to three halves of RECORD_BYTES, cut from one block."""

    name, classes = "blobs", 0

    def __init__(self, size_bytes: int) -> None:
        rng = np.random.default_rng(0)
        self.block = rng.integers(0, 256, 2 * RECORD_BYTES, np.uint8).tobytes()
        self.lengths = rng.integers(RECORD_BYTES // 2, RECORD_BYTES * 3 // 2, max(size_bytes // RECORD_BYTES, 1))

    def __len__(self) -> int:
        return len(self.lengths)

    def encoded(self, index: int) -> tuple[bytes, int]:
        """A part of the block."""
        begin = index % (RECORD_BYTES // 2)
        return self.block[begin : begin + int(self.lengths[index])], 0

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.frombuffer(self.encoded(index)[0], np.uint8), 0


def time_shuffles(mb: float, rounds: int) -> list[dict[str, Any]]:
    """Be a rank: seconds of both ways in turn, for each group."""
    workers = gather_workers(1)
    control, rows = harness.control(), []
    for group in (d for d in range(1, control.size + 1) if control.size % d == 0):
        source = Blobs(int(mb * 1e6))
        memory, _ = keep_in_memory(source, Data(memory="partition", group_size=group), 0, control.size, True, workers)
        memory.begin(0, None)
        while memory.group is not None and not memory.shuffles:  # the shuffle to the first epoch
            time.sleep(0.0002)
        ours, bare = [], []
        for epoch in range(rounds if group > 1 else 0):
            ours.append(slowest(control, lambda memory=memory, epoch=epoch: wait_for_shuffle(memory, epoch)))
            bare.append(slowest(control, bare_alltoallv(memory, epoch)))
        memory.stop()
        kept_bytes = sum(int(memory.source.lengths[r]) for r in memory.source.newest().records)
        rows.append({"group": group, "ours_s": ours, "bare_s": bare, "kept_bytes": kept_bytes})
    return rows


def wait_for_shuffle(memory: MemoryShuffle, epoch: int) -> None:
    """Wait for the shuffle to the next epoch."""
    memory.reached(epoch * memory.sampler.steps_per_epoch)
    while len(memory.shuffles) < epoch + 2:
        time.sleep(0.0002)


def bare_alltoallv(memory: MemoryShuffle, epoch: int) -> Callable[[], None]:
    """Bare exchange of the same segments; it needs an idle communicator."""
    group, source, sampler = memory.group, memory.source, memory.sampler
    owners = place_owners(len(source), sampler.effective_batch, group.size)
    before, order = record_owners(sampler.epoch_order(epoch), owners), sampler.epoch_order(epoch + 1)
    planned = list(plan_moves(order, before, owners, source.lengths, group.rank, group.size))
    outgoing = np.ones(max(int(m.sent_bytes.sum()) for m in planned), np.uint8)
    received = np.ones(max(int(m.received_bytes.sum()) for m in planned), np.uint8)

    def work() -> None:
        for move in planned:
            group.Alltoallv(
                alltoallv_buffer(outgoing, move.sent_bytes), alltoallv_buffer(received, move.received_bytes)
            )

    return work


def main() -> None:
    """Print a row for each number of ranks and size of group."""
    parser = harness.parser(__doc__, ranks=[2], rate="1gbit", rounds=5, json=None)
    parser.add_argument("--hosts", type=int, nargs="+", help="emulated ones, a rank each, instead of ranks")
    parser.add_argument("--mb", type=float, default=200, help="of all records")
    options = parser.parse_args()
    size = f"{options.mb:g} MB in records of {RECORD_BYTES / 1000:g} KB"
    print(f"{size}; medians of {options.rounds}, {os.cpu_count()} cores")
    print("\n" + harness.table(("ranks", "group", "MB a worker", "shuffle s", "bare Alltoallv s", "bare / shuffle")))
    env, rate = {"OMPI_MCA_mpi_yield_when_idle": "1"}, options.rate if options.hosts else ""
    rows = []
    for ranks in options.hosts or options.ranks:
        for row in harness.on_ranks(time_shuffles, options.mb, options.rounds, ranks=ranks, rate=rate, env=env):
            ours, bare = (statistics.median(row[k]) if row[k] else 0.0 for k in ("ours_s", "bare_s"))
            ratio = statistics.median(b / a for a, b in zip(row["ours_s"], row["bare_s"], strict=True)) if ours else 0.0
            shown = [f"{ours:.3f}", f"{bare:.3f}", f"{ratio:.2f}"] if ours else ["indices only", "-", "-"]
            print(harness.row([ranks, row["group"], f"{row['kept_bytes'] / 1e6:.1f}", *shown]), flush=True)
            row |= {"ranks": ranks, "MB": row["kept_bytes"] / 1e6, "shuffle_s": ours, "ratio": ratio}
            rows.append(row)
    harness.save(options.json, rows)


if __name__ == "__main__":
    main()
