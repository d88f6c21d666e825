"""Data in memory: the shuffle beside MPI_Alltoallv, and the sources.

python scripts/bench_shuffle.py shuffle --ranks 2 4                  ranks of this machine
python scripts/bench_shuffle.py shuffle --hosts 2 4 8 --rate 1gbit   an emulated cluster, see scripts/cluster.py
python scripts/bench_shuffle.py sources --images 400                 images/s from folder, arrays, packed, memory

`shuffle` alternates both on the same records, for each size of group that divides the ranks; a time is that of the
slowest rank. The bare call moves the same bytes, contiguous already, and reuses its buffers.
"""

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
from bench_data import jpegs

from jaxmpi.allreduce.measuring import slowest
from jaxmpi.comm.topology import gather_workers
from jaxmpi.config.data import Data
from jaxmpi.data import ArraySource, Loader, Sampler, Source, open_source, packing
from jaxmpi.data.group_order import place_owners, plan_moves, record_owners
from jaxmpi.data.memory_source import MemorySource
from jaxmpi.data.shuffle import MemoryShuffle, alltoallv_buffer, keep_in_memory

RECORD_BYTES = 110_000  # the mean of ImageNet's


# ---------------------------------------------------------------- shuffle


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
        """A piece of the block."""
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
        held_bytes = sum(int(memory.source.lengths[r]) for r in memory.source.newest().records)
        rows.append({"group": group, "ours_s": ours, "bare_s": bare, "held_bytes": held_bytes})
    return rows


def wait_for_shuffle(memory: MemoryShuffle, epoch: int) -> None:
    """Wait for the shuffle to the next epoch."""
    memory.reached(epoch * memory.sampler.steps_per_epoch)
    while len(memory.shuffles) < epoch + 2:
        time.sleep(0.0002)


def bare_alltoallv(memory: MemoryShuffle, epoch: int) -> Callable[[], None]:
    """Bare exchange of the same segments; it needs an idle communicator."""
    group, source, sampler = memory.group, memory.source, memory.sampler
    whose = place_owners(len(source), sampler.effective_batch, group.size)
    before, order = record_owners(sampler.epoch_order(epoch), whose), sampler.epoch_order(epoch + 1)
    planned = list(plan_moves(order, before, whose, source.lengths, group.rank, group.size))
    sent = np.ones(max(int(m.sent_bytes.sum()) for m in planned), np.uint8)
    received = np.ones(max(int(m.received_bytes.sum()) for m in planned), np.uint8)

    def work() -> None:
        for move in planned:
            group.Alltoallv(alltoallv_buffer(sent, move.sent_bytes), alltoallv_buffer(received, move.received_bytes))

    return work


def shuffle(options: argparse.Namespace) -> None:
    """A row for each number of ranks and size of group."""
    size = f"{options.mb:g} MB in records of {RECORD_BYTES / 1000:g} KB"
    print(f"{size}; medians of {options.rounds}, {os.cpu_count()} cores")
    print("\n" + harness.table(("ranks", "group", "MB a worker", "shuffle s", "bare Alltoallv s", "bare / shuffle")))
    env, rate = {"OMPI_MCA_mpi_yield_when_idle": "1"}, options.rate if options.hosts else ""
    for ranks in options.hosts or options.ranks:
        for row in harness.on_ranks(time_shuffles, options.mb, options.rounds, ranks=ranks, rate=rate, env=env):
            ours, bare = (statistics.median(row[k]) if row[k] else 0.0 for k in ("ours_s", "bare_s"))
            ratio = statistics.median(b / a for a, b in zip(row["ours_s"], row["bare_s"], strict=True)) if ours else 0.0
            shown = [f"{ours:.3f}", f"{bare:.3f}", f"{ratio:.2f}"] if ours else ["indices only", "-", "-"]
            print(harness.row([ranks, row["group"], f"{row['held_bytes'] / 1e6:.1f}", *shown]), flush=True)


# ---------------------------------------------------------------- sources


def sources(options: argparse.Namespace) -> None:
    """Print images/s of each source; files are in the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_sources(Path(folder), [blob for _, blob in jpegs(options.images)], options.latency_ms / 1000)
        runs = {}
        for name, (source, data) in made.items():
            runs[name, "whole"] = partial(read_batches, source, data)
            runs[name, "bare"] = partial(read_bytes, source)
        seconds = harness.take_turns(runs, options.rounds)
    print("\n" + harness.table(("source", "images/s, batches of 224 px", "images/s, compressed only")))
    for name in made:
        rates = [options.images / statistics.median(seconds[name, what]) for what in ("whole", "bare")]
        print(harness.row([name, *map("{:.0f}".format, rates)]))


class Far:
    """Source whose reads wait first, as on a busy file system."""

    def __init__(self, inner: Any, latency_s: float) -> None:
        self.inner, self.latency_s, self.name, self.classes = inner, latency_s, inner.name, inner.classes

    def __len__(self) -> int:
        return len(self.inner)

    def encoded(self, index: int) -> tuple[bytes, int]:
        """The inner source's bytes, after a pause."""
        time.sleep(self.latency_s)
        return self.inner.encoded(index)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        time.sleep(self.latency_s)
        return self.inner[index]


def make_sources(folder: Path, blobs: list[bytes], latency_s: float) -> dict[str, tuple[Source, Data]]:
    """The same photographs as folder, arrays, packed, in memory, with slow reads."""
    place = folder / "files" / "train" / "one"
    place.mkdir(parents=True)
    for i, blob in enumerate(blobs):
        (place / f"{i:06d}.jpg").write_bytes(blob)
    crop = Data(crop=224, mirror=True, loader="threads")  # for all: a source that waits cannot be sent to a process
    resize = dataclasses.replace(crop, resize=256)
    files = open_source(Data(source="imagefolder", dir=str(folder / "files"), resize=256), "train")
    full = open_source(Data(source="imagefolder", dir=str(folder / "files")), "train")
    packing.pack(full, folder / "packed" / "train")
    packing.pack(full, folder / "small" / "train", packing.PackingOptions(resize=256))
    packed, small = (
        open_source(Data(source="packed", dir=str(folder / name), resize=px), "train")
        for name, px in (("packed", 256), ("small", 0))
    )
    memory = MemorySource(small, crop)
    memory.load(np.arange(len(small)))
    arrays = ArraySource(np.stack([files[i][0][:, :341] for i in range(len(files))]), np.zeros(len(files), int))
    return {
        "folder": (files, resize),
        "packed, as it is": (packed, resize),
        "packed at 256 px": (small, crop),
        "memory, packed at 256 px": (memory, crop),
        "folder, reads take longer": (Far(files, latency_s), resize),
        "packed at 256 px, reads take longer": (Far(small, latency_s), crop),
        "arrays of 256 px (batch files)": (arrays, crop),
    }


def read_batches(source: Source, data: Data) -> None:
    """Read an epoch of batches."""
    with Loader(source, Sampler(len(source), 32), data, train=True, stop_step=len(source) // 32) as loader:
        for _ in loader:
            pass


def read_bytes(source: Source) -> None:
    """Read every record once, in the order of an epoch."""
    read = getattr(source, "encoded", None) or source.__getitem__
    for i in Sampler(len(source), len(source)).indices(0).indices:
        read(int(i))


def main() -> None:
    """Run one of both."""
    parser = harness.parser(__doc__, ranks=[2], rate="1gbit", rounds=5)
    parser.add_argument("what", choices=["shuffle", "sources"])
    parser.add_argument("--hosts", type=int, nargs="+", help="emulated ones, a rank each, instead of ranks")
    parser.add_argument("--mb", type=float, default=200, help="of all records")
    parser.add_argument("--latency-ms", type=float, default=10, help="of a read that takes longer")
    parser.add_argument("--images", type=int, default=400, help="of the sources")
    options = parser.parse_args()
    {"shuffle": shuffle, "sources": sources}[options.what](options)


if __name__ == "__main__":
    main()
