"""Accuracy and seconds of experiments/digits.py for every rule and strategy, as a table.

    python scripts/digits_table.py [-n 4] [--strategies ar asa32 asa16 ring32]

SUBGD sums its workers' updates, so it runs 1/n of the learning rate of the others; all then make the same steps.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RULES = ("subgd", "awagd", "gradients")
STRATEGIES = ("ar", "asa32", "asa16", "ring32")
LR = 0.02  # that of the experiment


def run(workers: int, rule: str, strategy: str) -> tuple[float, float]:
    """Run one command: (top-1 of the last evaluation, seconds from start to end)."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "jaxmpi.tools.cli", "train", "-n", str(workers), "experiments/digits.py"]
        lr = LR / workers if rule == "subgd" else LR
        options = ["--rule.name", rule, "--exchange.strategy", strategy, "--optim.lr", str(lr)]
        begin = time.monotonic()
        subprocess.run([*line, *options, "--run-dir", folder], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - begin
        rows = [json.loads(row) for row in (Path(folder) / "record.jsonl").read_text().splitlines()]
        return [row for row in rows if row["kind"] == "eval"][-1]["eval_top1"], seconds


def main() -> None:
    """Run them all, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=4, help="workers")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    options = parser.parse_args()
    print("| rule | " + " | ".join(options.strategies) + " |\n|" + "---|" * (len(options.strategies) + 1))
    for rule in RULES:
        cells = [run(options.n, rule, strategy) for strategy in options.strategies]
        shown = " | ".join(f"{100 * top1:.2f} %, {seconds:.0f} s" for top1, seconds in cells)
        print(f"| `{rule}` | {shown} |", flush=True)


if __name__ == "__main__":
    main()
