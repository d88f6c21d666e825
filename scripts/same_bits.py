"""Compare short runs of this code and a commit's, bit by bit.

    python scripts/same_bits.py --against HEAD~1
    python scripts/same_bits.py --against HEAD~1 --only "gradients, asa32" resume

Each run is made by the code of this folder, then by that of the commit, with the same interpreter. A row has SHA-256
hashes of params and of the rule's state in the last checkpoint. It also has those of the losses in the record. Params,
state and losses are read as files, without the code under test. The exit code is 1 if a row differs, if a run fails, or
if none could be compared.

The runs are short, but of every kind that repeats its bits. GoogLeNet runs on 8 ranks, and all synchronous rules run on
four strategies. There are runs with a resume, with several devices of a process, and with overlap between emulated
hosts. There are also runs with a rank that dies, and with sharded updates. Asynchronous rules are left out: their
result depends on which worker comes first. If both versions refuse a run in the same words, that counts as the same. If
only the commit's refuses it, the row says so.
"""

import collections
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import harness

from jaxmpi.rules.registry import RULES
from jaxmpi.runtime import job_folder

NAMES = ("params", "rule's state", "losses")
STRATEGIES = ("asa32", "asa16", "ring32", "shm")
OFTEN = {"local_steps": "--rule.local-steps", "tau": "--rule.tau"}  # settings that are 2, so that workers exchange
EACH = ("--log-every", "1")  # the loss of every step is in the record
REFUSED = 2  # exit code
Values = dict[str, str]  # hash by leaf, or figure by line


class Run(NamedTuple):
    """Arguments of `jaxmpi train` for consecutive jobs; `hosts` are emulated ones."""

    name: str
    jobs: tuple[tuple[str, ...], ...]
    hosts: int = 0


class Outcome(NamedTuple):
    """A run's values by name after exit code 0, else its error."""

    code: int
    error: str = ""
    values: dict[str, Values] | None = None


def digits(*args: str, ranks: int = 2, upto: int = 6) -> tuple[str, ...]:
    """A job of the small CNN, up to a step."""
    periods = ("--train-for", f"{upto}st", "--eval-every", "6st", "--checkpoint-every", "6st")
    return ("-n", str(ranks), "experiments/digits.py", *periods, *EACH, *args)


def runs() -> list[Run]:
    """All runs, by name."""
    cases = [Run("googlenet, 8 ranks", (("-n", "8", "experiments/googlenet.py", "--train-for", "2st", *EACH),))]
    for rule, spec in RULES.items():
        often = [word for name in spec.settings or () if name in OFTEN for word in (OFTEN[name], "2")]
        for strategy in STRATEGIES if not spec.is_asynchronous else ():
            job = digits("--rule.name", rule, *often, "--exchange.strategy", strategy)
            cases.append(Run(f"{rule}, {strategy}", (job,)))
    batch = ("--effective-batch", "36")  # which 2 and 3 workers can share
    for before, after in ((2, 2), (3, 3), (2, 3)):
        first, resumed = digits(*batch, ranks=before, upto=3), digits(*batch, "--resume", ranks=after)
        cases.append(Run(f"resume with {after} ranks a run of {before}", (first, resumed)))
    dies = ("--on-rank-loss", "shrink", "--inject", "kill:rank=1,step=3")
    return [
        *cases,
        Run("1 process of 4 devices", (digits("--devices", "4", ranks=1),)),
        Run("2 processes of 2 devices", (digits("--devices", "2"),)),
        Run("overlap, 4 hosts", (digits("--exchange.overlap", "on", ranks=4),), hosts=4),
        Run("shrink, 3 ranks", (digits(*batch, *dies, ranks=3),)),
        Run("sharded updates, asa32", (digits("--exchange.shard-update", "on"),)),
    ]


def outcome(code: Path, run: Run, folder: Path) -> Outcome:
    """Make a run with the code of a folder."""
    environ = {**os.environ, "PYTHONPATH": str(code), "JAX_PLATFORMS": "cpu"}
    for job in run.jobs:
        line = [
            *(harness.cluster(run.hosts, "1gbit") if run.hosts else ()),
            sys.executable,
            "-m",
            "jaxmpi.tools.cli",
            "train",
        ]
        line = job_folder.remove_leftovers_first([*line, *job, "--run-dir", str(folder)])
        ended = subprocess.run(line, cwd=code, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if ended.returncode:
            output = ended.stdout.decode(errors="replace").replace(str(folder), "RUN").replace(str(code), ".")
            errors = re.findall(r"^(?:jaxmpi: error|error|cluster\.py): (.*)", output, re.MULTILINE)
            return Outcome(ended.returncode, errors[0] if errors else f"code {ended.returncode}: {output[-300:]}")
    return Outcome(0, values=values_of(folder, code))


def values_of(folder: Path, code: Path) -> dict[str, Values]:
    """Hashes of a run's last checkpoint, by leaf, and its recorded losses."""
    record = harness.record(folder)
    program = next(line["command"][0] for line in record if line["kind"] == "run")
    if not Path(program).is_relative_to(code):
        raise SystemExit(f"the run was made by {program}; expected code of {code}")
    record_losses = [
        (f"step {row['step']}", name, row[name]) for row in record for name in ("loss", "eval_loss") if name in row
    ]
    losses = {f"{name} {number} of {step}": repr(value) for number, (step, name, value) in enumerate(record_losses)}
    table: dict[str, Values] = {"params": {}, "rule's state": {}, "losses": losses}
    last = max((folder / "checkpoints").glob("step_????????"))
    for file, rows in json.loads((last / "manifest.json").read_text())["files"].items():
        raw = (last / file).read_bytes()
        for row, end in zip(rows, [*(row["offset"] for row in rows[1:]), len(raw)], strict=True):
            name = {"params": "params", "rule_state": "rule's state"}.get(row["path"].partition("/")[0])
            if name:
                facts = f"{row['dtype']}{row['shape']}".encode()
                table[name][f"{file} {row['path']}"] = hashlib.sha256(facts + raw[row["offset"] : end]).hexdigest()
    if not (table["params"] and losses):
        raise SystemExit(f"{folder}: got {len(table['params'])} params and {len(losses)} losses; expected some of both")
    return table


def verdict(ours: Outcome, theirs: Outcome) -> tuple[str, str]:
    """(kind, and details) of a run of both versions."""
    if ours.values and theirs.values:
        parts = [difference(name, ours.values[name], theirs.values[name]) for name in NAMES]
        return ("differs" if any(parts) else "same", "; ".join(filter(None, parts)))
    if ours == theirs and ours.code in (REFUSED, harness.NOT_PERMITTED):
        return ("refused by both" if ours.code == REFUSED else "not compared", ours.error)
    if ours.values and theirs.code == REFUSED:
        return "not compared", f"only the commit refuses it: {theirs.error}"
    kind = "failed" if ours.code == theirs.code != REFUSED else "differs"
    return kind, " / ".join(
        f"{side}: {outcome.error or 'ends well'}" for side, outcome in (("here", ours), ("there", theirs))
    )


def difference(name: str, ours: Values, theirs: Values) -> str:
    """The number of differing values and the first; empty if all agree."""
    every = {**ours, **theirs}
    other = [key for key in every if ours.get(key) != theirs.get(key)]
    return f"{len(other)} of {len(every)} {name}, first {other[0]}" if other else ""


def digest(outcome: Outcome, name: str) -> str:
    """First digits of the values' hash; a dash if there are none."""
    values = json.dumps(outcome.values and outcome.values[name], sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()[:12] if outcome.values else "-"


def main() -> None:
    """Print a row per run, and the number of rows by result."""
    parser = harness.parser(__doc__)
    parser.add_argument("--against", required=True, metavar="REV", help="commit to compare this folder's code with")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="runs with one of these in their name")
    options = parser.parse_args()
    chosen = [run for run in runs() if any(word in run.name for word in options.only)]
    if not chosen:
        parser.error(f"--only: got {options.only}; there are {'; '.join(run.name for run in runs())}")
    kinds: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory).resolve()
        if subprocess.run(["git", "archive", "-o", folder / "code.tar", options.against], cwd=harness.ROOT).returncode:
            parser.error(f"--against: got {options.against}; expected a commit of this repository")
        with tarfile.open(folder / "code.tar") as archive:
            archive.extractall(folder / "code", filter="data")
        sides = {"here": harness.ROOT, "there": folder / "code"}
        print(harness.table(["run", *(f"{name}, {side}" for name in NAMES for side in sides), "result"]))
        for number, run in enumerate(chosen):
            both = [outcome(code, run, folder / f"{side}-{number}") for side, code in sides.items()]
            kind, details = verdict(*both)
            kinds[kind] += 1
            result = " ".join(f"{kind}{': ' * bool(details)}{details}".replace("|", "\\|").split())
            print(
                harness.row([run.name, *(digest(one_outcome, name) for name in NAMES for one_outcome in both), result]),
                flush=True,
            )
    print("\n" + ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    sys.exit(bool(kinds["differs"] + kinds["failed"]) or not kinds["same"] + kinds["refused by both"])


if __name__ == "__main__":
    main()
