"""Draw what ranks do when one of them is killed, as three jobs did it, and who notices what after how long.

python scripts/death_drawing.py       runs the three jobs again, and writes docs/pictures/death.json
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from svg import WIDTH, Picture

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "docs" / "pictures" / "death.json"
SAVED, KILLED_RANK, KILLED_STEP, RANKS = 20, 2, 23, 4
CASES = {
    "--restarts 1": "all start again, from the checkpoint",
    "--on-rank-loss shrink": f"the others do step {KILLED_STEP} again",
    "--rule.name easgd": "nobody waits for rank 2",
}
STEP_S, PAUSE_S = 0.4, 1.0  # least time of a step of the jobs; what is drawn as a pause
Begins = list[tuple[int, float]]  # steps of a rank, and when it began them


def experiment() -> Any:
    """The digits in steps that are long enough to be told apart, whose begins each rank writes down."""
    import jaxmpi
    from jaxmpi.experiments.digits import experiment as digits
    from jaxmpi.runtime.process import my_rank

    notes = Path(os.environ["DEATH_NOTES"], str(my_rank()))

    class Note(jaxmpi.Callback):
        def before_step(self, step: int, state: Any, batch: Any) -> tuple[Any, Any]:
            with notes.open("a") as file:
                file.write(f"{step} {time.time():.2f}\n")
            time.sleep(STEP_S)
            return state, batch

    return dataclasses.replace(digits, callbacks=(Note(),), train_for="30st", checkpoint_every=f"{SAVED}st")


def record() -> None:
    """Run a job for each case, and keep the steps from the checkpoint on."""
    recorded = dict[str, list[Begins]]()
    for flags in CASES:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "noted.py")
            scripts = str(Path(__file__).parent)
            file.write_text(
                f"import sys; sys.path.insert(0, {scripts!r}); import death_drawing as d; experiment = d.experiment()"
            )
            fault = f"kill:rank={KILLED_RANK},step={KILLED_STEP}"
            line = [sys.executable, "-m", "jaxmpi.tools.cli", "train", "-n", str(RANKS), *flags.split(), str(file)]
            line += ["--run-dir", f"{folder}/run", "--inject", fault]
            Path(folder, "notes").mkdir()
            subprocess.run(line, env=os.environ | {"DEATH_NOTES": f"{folder}/notes"}, check=True)
            ranks = [Path(folder, "notes", str(rank)).read_text().split() for rank in range(RANKS)]
        begins = [[(int(step), float(s)) for step, s in zip(rank[::2], rank[1::2], strict=True)] for rank in ranks]
        recorded[flags] = [[begin for begin in rank if begin[0] > SAVED] for rank in begins]
    RECORDED.write_text(json.dumps(recorded, indent=0) + "\n")


def time_limits() -> dict[str, float]:
    """Seconds until something notices a rank that hangs or a host that vanishes, by what the others then do."""
    from jaxmpi.comm import control, diagnosis, shared_sync
    from jaxmpi.config import Experiment
    from jaxmpi.launch import supervisor

    first, gap, probes = (int(supervisor.KEEPALIVE[name]) for name in ("time", "intvl", "probes"))
    limits = {
        "the launcher has not ended the job: it is killed": supervisor.ENDS_S,
        "a rank is waited for: a line names it": diagnosis.SAID_AFTER_S,
        "a host does not answer TCP: the job ends": first + gap * probes,
        "a vote or comparison lacks a rank: the job ends": control.AGREE_TIMEOUT_S + control.LATE_S,
        "no rank gets on: the watchdog names the late one": Experiment.stall_timeout_s,
        "a message of an exchange is missing: the job ends": shared_sync.TIMEOUT_S,
    }
    return dict(sorted(limits.items(), key=lambda limit: limit[1]))


def draw_death() -> Picture:
    """The recorded jobs, and after how long somebody notices what is not so plain as a death."""
    picture = Picture("A rank is killed: restart from the checkpoint, go on without it, or not notice; time limits")
    for y, (flags, ranks) in zip(range(0, 400, 132), json.loads(RECORDED.read_text()).items(), strict=False):
        picture.text((0, y + 14), f"{flags}: {CASES[flags]}", "small head")
        for rank, begins in enumerate(ranks):
            top, x = y + 22 + 24 * rank, 52
            picture.text((0, top + 15), f"rank {rank}")
            dead = [("killed", None)] if rank == KILLED_RANK else []
            steps = with_pauses(begins)
            before = next((i for i, (_, pause_s) in enumerate(steps) if pause_s), len(steps))
            for step, pause_s in [*steps[:before], *dead, *steps[before:]]:
                if pause_s:
                    picture.text((x + 19, top + 15), f"{pause_s:.0f} s", anchor="middle")
                    x += 42
                if x + 40 <= WIDTH:
                    picture.box((x, top), (40, 20), "fill c4" if step == "killed" else "box", step)
                x += 44
        picture.add(f'<line x1="50" y1="{y + 20}" x2="50" y2="{y + 116}" class="line"/>', y + 116)
    words = f"a box is a step, the line checkpoint {SAVED}, a pause a start or compiling on busy cores"
    picture.text((0, 400), words)
    limits = time_limits()
    picture.text((0, 432), "a rank that dies is noticed at once; seconds until (by default):", "small head")
    for y, (words, seconds) in zip(range(440, 1000, 26), limits.items(), strict=False):
        length = 190 * np.log10(seconds) / np.log10(max(limits.values()))
        picture.box((0, y), (length, 20), "fill c4", opacity=0.45)
        picture.text((6, y + 15), f"{seconds:g} s", "small head")
        picture.text((200, y + 15), words)
    return picture


def with_pauses(begins: Begins) -> list[tuple[int, float | None]]:
    """Each step, with the seconds since the one before if these are a pause."""
    steps: list[tuple[int, float | None]] = [(begins[0][0], None)]
    for (_, before_s), (step, begin_s) in pairwise(begins):
        steps.append((step, begin_s - before_s if begin_s - before_s > PAUSE_S else None))
    return steps


if __name__ == "__main__":
    record()
