"""The largest language model on one host by workers, forecast and seen.

python scripts/largest_model.py --memory-gb 20                       # the table, forecast
python scripts/largest_model.py --memory-gb 20 --run --ranks 8       # and train each of them for two steps
python scripts/largest_model.py --memory-gb 3 --words 4000 --run --ranks 2

The model is that of experiments/lm300m.py with one width in place of 1024: an embedding and two layers of that width,
eight times as many cells, Adam. Sharded updates are `off`, all-reduced by shm, or `on`. With `on` there is one copy of
the params, and gradients go into a sum as they come. Seen is what the lowest MemAvailable leaves of that before the
start, in all processes of the job.
"""

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import harness

from jaxmpi.comm.axis import AxisComm
from jaxmpi.comm.solo import SoloProcesses
from jaxmpi.comm.topology import Workers
from jaxmpi.config import ExchangeConfig, Experiment, Optim
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.experiments.lm300m import WINDOW
from jaxmpi.experiments.lm300m import experiment as LM300M
from jaxmpi.models.lstm import lstm
from jaxmpi.runtime import prepare
from jaxmpi.trainer.memory import WorkerMemory
from jaxmpi.trainer.memory_forecast import forecast

STEPS = 2
EXPERIMENT = """
from largest_model import asked
experiment = asked({width}, {words}, {word!r}, {batch})
"""


def asked(width: int, words: int, word: str, batch: int) -> Experiment:
    """The experiment of a width, with sharded updates `on` or `off`."""
    return dataclasses.replace(
        LM300M,
        model=lstm(classes=words, window=WINDOW, width=width, cells=8 * width),
        optim=Optim("adam", lr=0.001, lr_scaling="none", clip_norm=1.0),
        exchange=ExchangeConfig("shm", shard_update=word),
        local_batch=batch,
        train_for="1000st",
        eval_every="0st",
        checkpoint_every="0st",
        replica_check_every="0st",
        compute_only_every=0,
    )


def forecast_of(width: int, words: int, word: str, batch: int, ranks: int) -> WorkerMemory:
    """Bytes that a worker would hold, part by part."""
    workers = Workers(AxisComm("workers", ranks, (0,) * ranks), SoloProcesses(), (0,), None)
    found = forecast(asked(width, words, word, batch), workers)
    return found.on if word == "on" and found.on else found.off


def largest(words: int, word: str, batch: int, ranks: int, limit_bytes: int, step: int) -> tuple[int, int, int]:
    """The largest width that fits, its params, and all workers' bytes.

    The width is a multiple of `step`; all are 0 if none fits.
    """
    fits, beyond, held = 0, 0, None
    while beyond == 0 or beyond - fits > 1:
        tried = max(1, 2 * fits) if beyond == 0 else (fits + beyond) // 2
        of = forecast_of(tried * step, words, word, batch, ranks)
        if of.on_host(ranks) <= limit_bytes:
            fits, held = tried, of
        else:
            beyond = tried
    return (fits * step, held.params // 4, held.on_host(ranks)) if held else (0, 0, 0)


def settled_bytes() -> int:
    """Available bytes, if a job before has given back what it had."""
    last, found = -1, available_bytes()
    while found > last + 10_000_000:
        time.sleep(3)
        last, found = found, available_bytes()
    return found


def seen_bytes(width: int, words: int, word: str, batch: int, ranks: int) -> int:
    """Memory that a job takes in its first steps, in bytes.

    0 if the job ends before.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "widened.py"
        file.write_text(EXPERIMENT.format(width=width, words=words, word=word, batch=batch))
        line = [*harness.launcher(ranks, "", 0), sys.executable, "-m", "jaxmpi.train", str(file)]
        line += ["--run-dir", f"{folder}/run", "--log-every", "1"]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(harness.ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
        }
        before = lowest = settled_bytes()
        ended = threading.Event()

        def watch() -> None:
            nonlocal lowest
            while not ended.is_set():
                lowest = min(lowest, available_bytes())
                time.sleep(0.02)

        watcher = threading.Thread(target=watch)
        watcher.start()
        job = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
        )
        assert job.stdout
        is_there, said = False, []
        for text in job.stdout:
            said.append(text)
            step = re.match(r"step (\d+)/", text)
            if step and int(step[1]) >= STEPS:
                is_there = True
                break
        ended.set()
        harness.end(job)  # mpirun ends its ranks; a single one would save for minutes
        watcher.join()
    if not is_there:
        print("".join(said[-5:]), file=sys.stderr)
    return before - lowest if is_there else 0


def main() -> None:
    """Print the table."""
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--memory-gb", type=float, default=0.0, help="that may be taken (default: what is available)")
    parser.add_argument("--words", type=int, default=72_000, help="of the vocabulary")
    parser.add_argument("--local-batch", type=int, default=8)
    parser.add_argument("--width-step", type=int, default=64, help="widths are multiples of it")
    parser.add_argument("--run", action="store_true", help=f"train each for {STEPS} steps")
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    options = parser.parse_args()
    prepare.prepare()
    limit_bytes = round(options.memory_gb * 1e9) or available_bytes()
    print(harness.table(["workers", "updates", "width", "params", "forecast, MB", "seen, MB"]), flush=True)
    figures = []
    for ranks in options.ranks:
        for word in ("off", "on")[: 1 + (ranks > 1)]:
            each = options.words, word, options.local_batch, ranks
            width, params, said = largest(*each, limit_bytes, options.width_step)
            seen = seen_bytes(width, *each) if options.run and width else 0
            cells = [ranks, f"sharded {word}", width, f"{params:,}", f"{said / 1e6:,.0f}"]
            print(harness.row([*cells, f"{seen / 1e6:,.0f}" if seen else "-"]), flush=True)
            figures.append(
                {"ranks": ranks, "sharded": word, "width": width, "params": params, "forecast": said, "seen": seen}
            )
    harness.save(options.out, figures)


if __name__ == "__main__":
    main()
