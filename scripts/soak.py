"""Kill ranks of a training job at random moments, for as long as asked, and see that it goes on every time.

    python scripts/soak.py --minutes 60 --ranks 8            one host
    python scripts/soak.py --kills 200 --ranks 4 --saving    until 200 kills, most of them while a checkpoint is written
    python scripts/soak.py --minutes 60 --ranks 8 --hosts 4  emulated hosts (needs root or user namespaces)

The job is `jaxmpi train`, started anew after every death, with a checkpoint every few steps. Asserted: every kill is
followed by a good resume, the record has every step once and in order, no rank and no shared memory is left behind.
Printed: how soon a job ends after a kill, and how a rank's memory, threads and file descriptors grow in an hour.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Sample(NamedTuple):
    """What a rank holds at a moment of its life."""

    age_s: float
    memory_mb: float
    threads: int
    handles: int


class Seen:
    """Samples of every rank that has lived."""

    def __init__(self) -> None:
        self.born: dict[int, float] = {}
        self.samples: dict[int, list[Sample]] = {}

    def look(self, folder: Path) -> list[int]:
        """Take a sample of every rank that lives now; their process numbers."""
        ranks = ranks_of(folder)
        for pid in ranks:
            born = self.born.setdefault(pid, time.monotonic())
            try:
                sample = sample_of(pid, time.monotonic() - born)
            except (OSError, ValueError, IndexError):  # has just ended
                continue
            self.samples.setdefault(pid, []).append(sample)
        return ranks

    def growth(self) -> dict[str, float]:
        """By how much a rank's holdings grow between the second and the last quarter of its life, per hour, median."""
        rates: dict[str, list[float]] = {"memory_mb": [], "threads": [], "handles": []}
        for samples in self.samples.values():
            if len(samples) < 40:
                continue
            quarter = len(samples) // 4
            early, late = samples[quarter : 2 * quarter], samples[-quarter:]
            hours = (median(s.age_s for s in late) - median(s.age_s for s in early)) / 3600
            for name, values in rates.items():
                grown = median(getattr(s, name) for s in late) - median(getattr(s, name) for s in early)
                values.append(grown / hours)
        return {name: median(values) if values else 0.0 for name, values in rates.items()}


def ranks_of(folder: Path) -> list[int]:
    """Process numbers of the job's ranks."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            parent = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        is_python = words and b"python" in os.path.basename(words[0])
        if is_python and b"jaxmpi.train" in words and os.fsencode(folder) in words and parent != "Z":
            found.append(int(entry))
    return sorted(found)


def sample_of(pid: int, age_s: float) -> Sample:
    """From /proc."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    handles = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(age_s, int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), handles)


def parse() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--kills", type=int, default=0, help="end after as many kills (default: by the time alone)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the job (default: 8)")
    parser.add_argument("--hosts", type=int, default=1, help="emulated hosts (default: 1, this machine)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between kills, on average (default: 30)")
    parser.add_argument("--saving", action="store_true", help="wait for a checkpoint in the making before each kill")
    parser.add_argument("--seed", type=int, default=0, help="of the kills (default: 0)")
    parser.add_argument("--experiment", default="experiments/digits.py", help="what to train")
    return parser.parse_args()


def command(asked: argparse.Namespace, folder: Path) -> list[str]:
    """The job, without an end of its own."""
    cluster = [sys.executable, str(ROOT / "scripts" / "cluster.py"), "--hosts", str(asked.hosts)]
    cluster += ["--slots", str(-(-asked.ranks // asked.hosts)), "--rate", "1gbit", "--"]
    resume = ["--resume"] if (folder / "record.jsonl").exists() else []
    batch = ["--effective-batch", str(8 * asked.ranks)]
    return [
        *(cluster if asked.hosts > 1 else []),
        *(sys.executable, "-m", "jaxmpi.cli", "train", "-n", str(asked.ranks), asked.experiment, *batch, *resume),
        *(
            "--run-dir",
            str(folder),
            "--train-for",
            "100000000st",
            "--checkpoint-every",
            "20st",
            "--eval-every",
            "200st",
        ),
    ]


def saved_step(folder: Path) -> int:
    """The newest whole checkpoint's step, 0 where there is none."""
    names = [p.name for p in (folder / "checkpoints").glob("step_*") if (p / "manifest.json").is_file()]
    return max((int(name.split("_")[1]) for name in names if name.count(".") == 0), default=0)


def is_saving(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((folder / "checkpoints").glob("step_*.tmp"))


def steps_in(folder: Path) -> list[int]:
    """Steps in the record."""
    rows = []
    for line in (folder / "record.jsonl").read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # cut off by a kill; dropped by the next start
            continue
    return [row["step"] for row in rows if row["kind"] == "train"]


def wait_for_moment(asked: argparse.Namespace, folder: Path, seen: Seen, before: int, draw: random.Random) -> None:
    """Come to a moment for a kill: after progress, at random; with --saving when a checkpoint is in the making.

    Raises:
        RuntimeError: no progress.
    """
    deadline = time.monotonic() + 300
    while saved_step(folder) <= before:
        seen.look(folder)
        if time.monotonic() > deadline:
            raise RuntimeError(f"no checkpoint after step {before} within 300 s")
        time.sleep(0.5)
    until = time.monotonic() + draw.expovariate(1 / asked.every)
    while time.monotonic() < until:
        seen.look(folder)
        time.sleep(0.5)
    while asked.saving and draw.random() < 0.9 and not is_saving(folder) and time.monotonic() < deadline:
        time.sleep(0.0005)
    time.sleep(draw.random() * 0.02 * asked.saving)


def soak(asked: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Kill and start again until it is enough; what was counted."""
    draw, seen, shm = random.Random(asked.seed), Seen(), set(os.listdir("/dev/shm"))
    end, kills, resumes, before, detections = time.monotonic() + 60 * asked.minutes, 0, 0, 0, []
    while time.monotonic() < end and (not asked.kills or kills < asked.kills):
        with (folder / "log.txt").open("ab") as log:
            job = subprocess.Popen(command(asked, folder), stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
        wait_for_moment(asked, folder, seen, before, draw)
        resumes += before > 0
        before = saved_step(folder)
        victim = draw.choice(seen.look(folder))
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        kills += 1
        job.wait(60)
        while ranks_of(folder):
            if time.monotonic() - killed > 60:
                raise RuntimeError(f"ranks outlive their job: {ranks_of(folder)}")
            time.sleep(0.05)
        detections.append(time.monotonic() - killed)
        print(f"kill {kills}: step {before}, gone after {detections[-1]:.1f} s", flush=True)
    steps = steps_in(folder)
    if steps != sorted(set(steps)):
        raise RuntimeError("steps are lost or repeated in the record")
    leaked = [name for name in set(os.listdir("/dev/shm")) - shm if not is_mapped(name)]
    counted = {"kills": kills, "resumes": resumes, "steps": before, "slowest_end_s": max(detections)}
    return counted | {"leaked": len(leaked)} | {f"{name}_per_hour": rate for name, rate in seen.growth().items()}


def is_mapped(name: str) -> bool:
    """Whether a process maps a file of /dev/shm."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"/dev/shm/{name}" in Path(f"/proc/{entry}/maps").read_text():
                return True
        except OSError:
            continue
    return False


def main() -> None:
    """Soak, and say what was counted."""
    asked = parse()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"run directory {folder}", flush=True)
    counted = soak(asked, folder)
    print(json.dumps(counted))
    if counted["resumes"] != counted["kills"] - 1 or counted["leaked"]:
        sys.exit("not every kill was followed by a good resume, or shared memory is left behind")


if __name__ == "__main__":
    main()
