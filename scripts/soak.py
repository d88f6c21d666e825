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
SAMPLE_S = 1.0  # between samples of the processes
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
    optim=Optim("momentum", lr=0.002), exchange=ExchangeConfig("ring32"), log_every=1,
)
"""


class Sample(NamedTuple):
    """Resources of a process at a moment."""

    at_s: float
    memory_mb: float
    threads: int
    handles: int


class Soak:
    """A job whose ranks are killed, and what was seen of it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.draw = options, folder, random.Random(options.seed)
        self.kills, self.cut_off, self.step = 0, 0, saved_step(folder)
        self.ends_s: list[float] = []  # from each kill to the job's end
        self.wrong: list[str] = []  # kills of which another rank is blamed
        self.samples: dict[int, list[Sample]] = {}  # by process
        self.shared_folders: set[bytes] = set()  # of the job, in the shared memory of each of its hosts
        self.log = (folder / "log.txt").open("ab")
        line = command(options, folder, FOREVER)
        self.job = subprocess.Popen(line, stdout=self.log, stderr=self.log, cwd=ROOT, start_new_session=True)

    def run(self) -> dict:
        """Kill ranks as requested, then let the job run; return the counts."""
        begin, quiet_s = time.monotonic(), 60 * self.options.quiet
        until = begin + 60 * self.options.minutes - quiet_s
        self.wait_for_checkpoint()
        while time.monotonic() < until and not 0 < self.options.kills <= self.kills:
            self.spend(self.draw.expovariate(1 / self.options.every))
            self.kill()
        warm_s = min(60.0, quiet_s / 2)  # the first steps after a start fill caches
        self.spend(warm_s)
        since, ranks, supervisors = time.monotonic(), running(self.folder, RANK), running(self.folder, SUPERVISOR)
        self.spend(quiet_s - warm_s)
        grown = {"rank": self.growth(ranks, since), "supervisor": self.growth(supervisors, begin + 60)}
        on_hosts = sorted(leaked(self.folder, self.shared_folders) - {WORDS})
        os.kill(running(self.folder, SUPERVISOR)[0], signal.SIGTERM)  # the job saves and leaves
        if (code := self.job.wait(PROGRESS_S)) != 75:
            raise RuntimeError(f"asked to leave, the job ended with {code}; see log.txt")
        return {
            **{"kills": self.kills, "while_saving": self.cut_off, "steps": saved_step(self.folder)},
            "minutes": round((time.monotonic() - begin) / 60, 1),
            **{"end_s_median": round(median(self.ends_s), 2), "end_s_most": round(max(self.ends_s), 2)},
            **grown,
            **{"leaked_on_hosts": on_hosts, "wrongly_blamed": self.wrong},
            "leaked": sorted(leaked(self.folder, self.shared_folders)),
            "orphans": running(self.folder, RANK),
        }

    def wait_for_checkpoint(self) -> None:
        """Wait for a new checkpoint of all ranks, after start or resume.

        Raises:
            RuntimeError: there is none in time, or the job has ended.
        """
        deadline = time.monotonic() + PROGRESS_S
        while saved_step(self.folder) <= self.step or len(running(self.folder, RANK)) < self.options.ranks:
            self.spend(0.2)
            if time.monotonic() > deadline or self.job.poll() is not None:
                raise RuntimeError(f"no checkpoint after step {self.step}; the job: {self.job.poll()}; see log.txt")

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
        while survivors := set(ranks) & set(running(self.folder, RANK)):
            if time.monotonic() - killed > GONE_S:
                raise RuntimeError(f"ranks outlive their job: {survivors}")
            time.sleep(0.05)
        self.ends_s.append(time.monotonic() - killed)
        self.kills, self.cut_off, self.step = self.kills + 1, self.cut_off + cut_off, saved_step(self.folder)
        note = ", a checkpoint in the making" * cut_off
        print(
            f"kill {self.kills}: rank {rank} after step {self.step}{note}, gone in {self.ends_s[-1]:.1f} s", flush=True
        )
        self.wait_for_checkpoint()
        blamed = re.findall(r"jaxmpi: rank ([\d,]+)\b.* ended the job", (self.folder / "log.txt").read_text())
        if self.options.ranks > 1 and blamed[-1:] != [str(rank)]:
            self.wrong.append(f"kill {self.kills} of rank {rank}: blamed {blamed[-1:]}")

    def spend(self, seconds: float) -> None:
        """Let time pass, and take a sample of every live process once a second."""
        until = time.monotonic() + seconds
        while True:
            for pid in [*running(self.folder, RANK), *running(self.folder, SUPERVISOR)]:
                before = self.samples.setdefault(pid, [])
                if before and time.monotonic() - before[-1].at_s < SAMPLE_S:
                    continue
                try:
                    before.append(sample_of(pid))
                    self.shared_folders |= set(variable(pid, SEGMENTS))
                except (OSError, KeyError, ValueError, IndexError):  # has just ended
                    continue
            if (remaining_s := until - time.monotonic()) <= 0:
                return
            time.sleep(min(remaining_s, SAMPLE_S))

    def growth(self, pids: list[int], since_s: float) -> dict[str, list[float]]:
        """By resource: medians of the first and the last quarter of samples, of the process that grows most."""
        pairs: dict[str, list[list[float]]] = {"memory_mb": [], "threads": [], "handles": []}
        for pid in pids:
            samples = [sample for sample in self.samples.get(pid, []) if sample.at_s >= since_s]
            if quarter := len(samples) // 4:
                for name, medians in pairs.items():
                    values = [getattr(sample, name) for sample in samples]
                    medians.append([median(values[:quarter]), median(values[-quarter:])])
        return {name: max(medians, key=lambda pair: pair[1] - pair[0]) for name, medians in pairs.items() if medians}


# ---------------------------------------------------------------- the job and its processes


def command(options: argparse.Namespace, folder: Path, train_for: str) -> list[str]:
    """Command line of the job that restarts itself."""
    slots = -(-options.ranks // options.hosts)
    cluster = harness.cluster(options.hosts, "1gbit", slots=slots) if options.hosts > 1 else []
    head = [sys.executable, "-m", "jaxmpi.tools.cli", "train", "-n", str(options.ranks), "--restarts", "1000000"]
    tail = ["--checkpoint-every", options.checkpoint_every, "--eval-every", "1000st", "--train-for", train_for]
    tail += ["--resume"] if (folder / "record.jsonl").exists() else []
    return [*cluster, *head, options.experiment, "--run-dir", str(folder), *tail]


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
    start, place = [b"-m", module.encode()], os.fsencode(folder)
    return sorted(pid for pid, words in processes() if words[1:3] == start and place in words)


def variable(pid: int, name: str) -> list[bytes]:
    """A process's environment variable; an empty list if it has none."""
    return re.findall(rb"(?:^|\0)" + name.encode() + rb"=([^\0]+)", Path(f"/proc/{pid}/environ").read_bytes())


def sample_of(pid: int) -> Sample:
    """Take a sample from /proc."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    handles = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(time.monotonic(), int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), handles)


def leaked(folder: Path, shared_folders: set[bytes]) -> set[str]:
    """Files of the job in shared memory that no process maps.

    Folders are searched on this host and as its ranks see them.
    """
    hosts = {os.readlink(f"/proc/{pid}/ns/mnt"): pid for pid in [*running(folder, RANK), os.getpid()]}
    roots = [Path(f"/proc/{pid}/root") for pid in hosts.values()]
    places = [root / os.fsdecode(name).lstrip("/") for root in roots for name in shared_folders]
    names = {path.name for place in places if place.is_dir() for path in place.iterdir()}
    for pid, _ in processes():
        try:
            names -= {Path(mapping).name for mapping in re.findall(r"/\S+", Path(f"/proc/{pid}/maps").read_text())}
        except OSError:
            continue
    return names


def saved_step(folder: Path) -> int:
    """The newest whole checkpoint's step, 0 if there is none."""
    whole = [path for path in (folder / "checkpoints").glob("step_*[0-9]") if (path / "manifest.json").is_file()]
    return max((int(path.name.split("_")[1]) for path in whole), default=0)


def is_saving(folder: Path) -> bool:
    """Return True if a checkpoint is being written, or was cut off."""
    return any((folder / "checkpoints").glob("step_*.tmp"))


# ---------------------------------------------------------------- the promises


def complaints(options: argparse.Namespace, folder: Path, counted: dict) -> list[str]:
    """Violations of the promises."""
    promised = ("wrongly_blamed", "leaked_on_hosts", "leaked", "orphans")
    problems = [f"{name}: {counted[name]}" for name in promised if counted[name]]
    if [step for step, *_ in losses(folder)] != list(range(1, counted["steps"] + 1)):
        problems.append("steps are lost or repeated in the record")
    for process in ("rank", "supervisor") if options.quiet else ():
        for name, (first, last) in counted[process].items():
            if last > first * (1 + FLAT * (name == "memory_mb")):
                problems.append(f"{process}: {name} grew from {first} to {last}")
    if options.verify:
        other, step = folder / "undisturbed", counted["steps"]
        with (folder / "log.txt").open("ab") as log:
            subprocess.run(command(options, other, f"{step}st"), stdout=log, stderr=log, cwd=ROOT, check=True)
        if losses(folder) != losses(other):
            problems.append("losses are other than undisturbed")
        if state_files(folder, step) != state_files(other, step):
            problems.append("the last checkpoint is other than undisturbed")
    return problems


def losses(folder: Path) -> list[tuple[int, int, float]]:
    """(step, examples, loss) of the record's steps."""
    return [(row["step"], row["examples"], row["loss"]) for row in harness.record(folder) if row["kind"] == "train"]


def state_files(folder: Path, step: int) -> dict[str, bytes]:
    """Files of every worker's state at a checkpoint."""
    return {file.name: file.read_bytes() for file in (folder / "checkpoints" / f"step_{step:08d}").glob("*.bin")}


def main() -> None:
    """Soak, and print the counts."""
    parser = harness.parser(__doc__, ranks=8, hosts=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long at most (default: 60)")
    parser.add_argument("--quiet", type=float, default=0.0, help="minutes of these, at the end, without kills")
    parser.add_argument("--kills", type=int, default=0, help="end after as many kills (default: by the time alone)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds of progress before a kill, on average")
    parser.add_argument("--checkpoint-every", default="20st", help="as of the trainer (default: 20st)")
    parser.add_argument("--saving", action="store_true", help="wait for a checkpoint in the making before most kills")
    parser.add_argument("--verify", action="store_true", help="compare with a run that nobody disturbs")
    parser.add_argument("--seed", type=int, default=0, help="of the kills (default: 0)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    options.experiment = str(folder / "softmax.py")
    Path(options.experiment).write_text(TINY)
    print(f"run directory {folder}", flush=True)
    counted = Soak(options, folder).run()
    print(json.dumps(counted), flush=True)
    sys.exit("\n".join(complaints(options, folder, counted)) or None)


if __name__ == "__main__":
    main()
