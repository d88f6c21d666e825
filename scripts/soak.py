"""Kill ranks of a training job at random; check that it recovers.

    python scripts/soak.py --minutes 60 --quiet 20 --hosts 4        8 ranks on emulated hosts (scripts/cluster.py)
    python scripts/soak.py --kills 200 --ranks 2 --saving --verify  most of them while a checkpoint is written

The job is one `jaxmpi train --restarts`, which restarts itself after every death. The script asserts that a good resume
follows every kill, and that the killed rank is blamed. It asserts that the record has every step once and in order. It
also asserts that no rank and no shared memory is left behind. With --verify, every loss and the last checkpoint equal
those of an undisturbed run, bit for bit. In the quiet time at the end no rank is killed. Then the ranks' memory,
threads and handles must not grow; the supervisor's must not at any time.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import harness
from harness import ROOT

from jaxmpi.runtime.job_folder import SEGMENTS, WORDS

FOREVER = "100000000st"
PROGRESS_S = 600.0  # from a kill to the next checkpoint, on a machine that may be busy
GONE_S = 60.0  # from a kill to the end of the job's last process
LOOK_S = 1.0  # between samples of the processes
FLAT = 0.02  # share by which memory may grow in the quiet time
RANK, SUPERVISOR = "jaxmpi.train", "jaxmpi.tools.cli"  # modules of processes
TINY = """
import jax
import jax.numpy as jnp
from jaxmpi.config.data import Data
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.schema import Experiment
from jaxmpi.config.optim import Optim
from jaxmpi.model.contract import Model

def init(key, image):
    return {"w": 0.01 * jax.random.normal(key, (64, 10)), "b": jnp.zeros(10)}, {"mean": jnp.zeros(64)}

def apply(params, model_state, image, key, train):
    x = image.reshape(len(image), -1)
    return x @ params["w"] + params["b"], {"mean": 0.9 * model_state["mean"] + 0.1 * x.mean(0)}

experiment = Experiment(
    model=Model("softmax", init, apply, input_shape=(8, 8, 1), classes=10),
    data=Data("digits", channels=1, mean=(0.305,), std=(0.376,)), effective_batch=32,
    optim=Optim("momentum", lr=0.002, lr_scaling="none"), exchange=ExchangeConfig("ring32"), log_every=1,
)
"""


def parse() -> argparse.Namespace:
    """Parse the options."""
    parser = harness.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long at most (default: 60)")
    parser.add_argument(
        "--quiet", type=float, default=0.0, help="minutes of these, at the end, without kills (default: 0)"
    )
    parser.add_argument("--kills", type=int, default=0, help="end after as many kills (default: by the time alone)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the job (default: 8)")
    parser.add_argument("--hosts", type=int, default=1, help="emulated hosts (default: 1, this machine)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds of progress before a kill, on average")
    parser.add_argument("--checkpoint-every", default="20st", help="as of the trainer (default: 20st)")
    parser.add_argument("--saving", action="store_true", help="wait for a checkpoint in the making before most kills")
    parser.add_argument("--verify", action="store_true", help="compare with a run that nobody disturbs")
    parser.add_argument("--seed", type=int, default=0, help="of the kills (default: 0)")
    parser.add_argument("--folder", default="", help="go on with the run in this folder (default: a new one)")
    parser.add_argument("--experiment", default="", help="what to train (default: a softmax on the digits)")
    return parser.parse_args()


def command(options: argparse.Namespace, folder: Path, train_for: str) -> list[str]:
    """Command line of the job that restarts itself."""
    cluster = (
        harness.cluster(options.hosts, "1gbit", slots=-(-options.ranks // options.hosts)) if options.hosts > 1 else []
    )
    head = [sys.executable, "-m", "jaxmpi.tools.cli", "train", "-n", str(options.ranks), "--restarts", "1000000"]
    tail = ["--checkpoint-every", options.checkpoint_every, "--eval-every", "1000st", "--train-for", train_for]
    tail += ["--resume"] if (folder / "record.jsonl").exists() else []
    return [*cluster, *head, options.experiment, "--run-dir", str(folder), *tail]


# ---------------------------------------------------------------- resources of processes


class Sample(NamedTuple):
    """Resources of a process at a moment."""

    at_s: float
    memory_mb: float
    threads: int
    handles: int


class Seen:
    """Samples of every process of the job that has lived."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._next_s = folder, 0.0
        self.samples: dict[int, list[Sample]] = {}
        self.folders: set[bytes] = set()  # folders of the job, in the shared memory of each of its hosts

    def look(self) -> None:
        """Take a sample of every live process, once a second at most."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LOOK_S
        for pid in [*running(self._folder, RANK), *running(self._folder, SUPERVISOR)]:
            try:
                self.samples.setdefault(pid, []).append(sample_of(pid))
                self.folders |= set(variable(pid, SEGMENTS))
            except (OSError, KeyError, ValueError, IndexError):  # has just ended
                continue

    def growth(self, pids: list[int], since_s: float) -> dict[str, list[float]]:
        """By resource: medians of first and last quarters of samples since `since_s`.

        They are of the process that grows most.
        """
        pairs: dict[str, list[list[float]]] = {"memory_mb": [], "threads": [], "handles": []}
        for pid in pids:
            samples = [sample for sample in self.samples.get(pid, []) if sample.at_s >= since_s]
            quarter = len(samples) // 4
            if quarter:
                for name, found in pairs.items():
                    found.append([median(getattr(s, name) for s in q) for q in (samples[:quarter], samples[-quarter:])])
        return {name: max(found, key=lambda pair: pair[1] - pair[0]) for name, found in pairs.items() if found}


def processes() -> Iterator[tuple[int, list[bytes]]]:
    """Every process that is not a zombie: its number and command line."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            state = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z":
            yield int(entry), words


def running(folder: Path, module: str) -> list[int]:
    """Processes `python -m module` that work for a run directory."""
    return sorted(
        p for p, words in processes() if words[1:3] == [b"-m", module.encode()] and os.fsencode(folder) in words
    )


def variable(pid: int, name: str) -> list[bytes]:
    """A process's environment variable; an empty list if it has none."""
    return re.findall(rb"(?:^|\0)" + name.encode() + rb"=([^\0]+)", Path(f"/proc/{pid}/environ").read_bytes())


def sample_of(pid: int) -> Sample:
    """Take a sample from /proc."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    handles = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(time.monotonic(), int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), handles)


def leaked(folder: Path, folders: set[bytes]) -> set[str]:
    """Files of the job in shared memory that no process maps.

    Folders are searched on this host and as its ranks see them.
    """
    hosts = {os.readlink(f"/proc/{pid}/ns/mnt"): pid for pid in [*running(folder, RANK), os.getpid()]}
    places = [Path(f"/proc/{pid}/root", os.fsdecode(name).lstrip("/")) for pid in hosts.values() for name in folders]
    names = {path.name for place in places if place.is_dir() for path in place.iterdir()}
    for pid, _ in processes():
        try:
            names -= {Path(found).name for found in re.findall(r"/\S+", Path(f"/proc/{pid}/maps").read_text())}
        except OSError:
            continue
    return names


# ---------------------------------------------------------------- progress of the job


def saved_step(folder: Path) -> int:
    """The newest whole checkpoint's step, 0 if there is none."""
    whole = [path for path in (folder / "checkpoints").glob("step_*[0-9]") if (path / "manifest.json").is_file()]
    return max((int(path.name.split("_")[1]) for path in whole), default=0)


def is_saving(folder: Path) -> bool:
    """Return True if a checkpoint is being written, or was cut off."""
    return any((folder / "checkpoints").glob("step_*.tmp"))


def losses(folder: Path) -> list[tuple[int, int, float]]:
    """(step, examples, loss) of the record's steps."""
    return [(row["step"], row["examples"], row["loss"]) for row in harness.record(folder) if row["kind"] == "train"]


def state_files(folder: Path, step: int) -> dict[str, bytes]:
    """Files of every worker's state at a checkpoint."""
    return {file.name: file.read_bytes() for file in (folder / "checkpoints" / f"step_{step:08d}").glob("*.bin")}


# ---------------------------------------------------------------- kills


class Soak:
    """A job and its history."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.draw = options, folder, random.Random(options.seed)
        self.seen = Seen(folder)
        self.kills, self.cut_off, self.step = 0, 0, saved_step(folder)
        self.ends_s: list[float] = []
        self.wrong: list[str] = []  # kills of which another rank is blamed
        self.log = (folder / "log.txt").open("ab")
        line = command(options, folder, FOREVER)
        self.job = subprocess.Popen(line, stdout=self.log, stderr=self.log, cwd=ROOT, start_new_session=True)

    def come_further(self) -> None:
        """Wait for a new checkpoint of all ranks, after start or resume.

        Raises:
            RuntimeError: there is none in time, or the job has ended.
        """
        deadline = time.monotonic() + PROGRESS_S
        while saved_step(self.folder) <= self.step or len(running(self.folder, RANK)) < self.options.ranks:
            self.seen.look()
            if time.monotonic() > deadline or self.job.poll() is not None:
                raise RuntimeError(f"no checkpoint after step {self.step}; the job: {self.job.poll()}; see log.txt")
            time.sleep(0.2)

    def spend(self, seconds: float) -> None:
        """Let time pass, and take samples."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.seen.look()
            time.sleep(min(left, 0.2))

    def kill(self) -> None:
        """Kill a rank, perhaps during a checkpoint, and wait for a resume."""
        deadline, ranks = time.monotonic() + PROGRESS_S, running(self.folder, RANK)
        if self.options.saving and self.draw.random() < 0.9:
            while not is_saving(self.folder) and time.monotonic() < deadline:
                time.sleep(0.0005)
            time.sleep(self.draw.random() * 0.005)
        cut_off = is_saving(self.folder)
        victim = self.draw.choice(ranks)
        rank = int((variable(victim, "OMPI_COMM_WORLD_RANK") or [b"0"])[0])  # a single process is no rank of mpirun
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        while left := set(ranks) & set(running(self.folder, RANK)):
            if time.monotonic() - killed > GONE_S:
                raise RuntimeError(f"ranks outlive their job: {left}")
            time.sleep(0.05)
        self.ends_s.append(time.monotonic() - killed)
        self.kills, self.cut_off, self.step = self.kills + 1, self.cut_off + cut_off, saved_step(self.folder)
        note = ", a checkpoint in the making" * cut_off
        print(
            f"kill {self.kills}: rank {rank} after step {self.step}{note}, gone in {self.ends_s[-1]:.1f} s",
            flush=True,
        )
        self.come_further()
        blamed = re.findall(r"jaxmpi: rank ([\d,]+)\b.* ended the job", (self.folder / "log.txt").read_text())
        if self.options.ranks > 1 and blamed[-1:] != [str(rank)]:
            self.wrong.append(f"kill {self.kills} of rank {rank}: blamed {blamed[-1:]}")

    def end(self) -> None:
        """Ask the job to save and leave.

        Raises:
            RuntimeError: it does not.
        """
        os.kill(running(self.folder, SUPERVISOR)[0], signal.SIGTERM)
        if (code := self.job.wait(PROGRESS_S)) != 75:
            raise RuntimeError(f"asked to leave, the job ended with {code}; see log.txt")
        self.step = saved_step(self.folder)


def soak(options: argparse.Namespace, folder: Path) -> dict:
    """Kill ranks as requested, then let the job run; return the counts."""
    begin, self = time.monotonic(), Soak(options, folder)
    self.come_further()
    while time.monotonic() - begin < 60 * (options.minutes - options.quiet) and not 0 < options.kills <= self.kills:
        self.spend(self.draw.expovariate(1 / options.every))
        self.kill()
    self.spend(min(60.0, 30 * options.quiet))  # the first steps after a start fill caches
    quiet, ranks, supervisors = time.monotonic(), running(folder, RANK), running(folder, SUPERVISOR)
    self.spend(60 * options.quiet - min(60.0, 30 * options.quiet))
    counted = {"rank": self.seen.growth(ranks, quiet), "supervisor": self.seen.growth(supervisors, begin + 60)}
    counted |= {"leaked_on_hosts": sorted(leaked(folder, self.seen.folders) - {WORDS})}
    self.end()
    minutes = round((time.monotonic() - begin) / 60, 1)
    return {
        **{"kills": self.kills, "while_saving": self.cut_off, "steps": self.step, "minutes": minutes},
        **{"end_s_median": round(median(self.ends_s), 2), "end_s_most": round(max(self.ends_s), 2)},
        **counted,
        "wrongly_blamed": self.wrong,
        "leaked": sorted(leaked(folder, self.seen.folders)),
        "orphans": running(folder, RANK),
    }


def complaints(options: argparse.Namespace, folder: Path, counted: dict) -> list[str]:
    """Violations of the promises."""
    promised = ("wrongly_blamed", "leaked_on_hosts", "leaked", "orphans")
    found = [f"{name}: {counted[name]}" for name in promised if counted[name]]
    steps = [step for step, *_ in losses(folder)]
    if steps != list(range(1, counted["steps"] + 1)):
        found.append("steps are lost or repeated in the record")
    for who in ("rank", "supervisor"):
        for name, (first, last) in counted[who].items() if options.quiet else ():
            if last > first * (1 + FLAT * (name == "memory_mb")):
                found.append(f"{who}: {name} grew from {first} to {last}")
    return found


def differences(options: argparse.Namespace, folder: Path, steps: int) -> list[str]:
    """Differences from an undisturbed run."""
    other = folder / "undisturbed"
    with (folder / "log.txt").open("ab") as log:
        subprocess.run(command(options, other, f"{steps}st"), stdout=log, stderr=log, cwd=ROOT, check=True)
    return [
        *(["losses"] if losses(folder) != losses(other) else []),
        *(["the last checkpoint"] if state_files(folder, steps) != state_files(other, steps) else []),
    ]


def main() -> None:
    """Soak, and print the counts."""
    options = parse()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not options.experiment:
        options.experiment = str(folder / "softmax.py")
        Path(options.experiment).write_text(TINY)
    print(f"run directory {folder}", flush=True)
    counted = soak(options, folder)
    print(json.dumps(counted), flush=True)
    found = complaints(options, folder, counted)
    if options.verify:
        found += [f"other than undisturbed: {what}" for what in differences(options, folder, counted["steps"])]
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main()
