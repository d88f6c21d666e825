"""`jaxmpi bench`: how long an exchange takes, beside other libraries and the bound, in alternating rounds.

Outside MPI this starts a job of ranks for every number of ranks that is needed, and shows what they measured; under a
launcher it is a rank itself. In a round every contender runs once on the same data, each starting one place on from
the round before; the slowest rank counts.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rich.console import Console

from jaxmpi import contenders, experiment, figures, launch, runtime
from jaxmpi.config import TrainingError, UsageError, check
from jaxmpi.contenders import COPY, LINK, PEERS, Contender, Inputs, Run, Shape
from jaxmpi.figures import AS_IT_COMES, TUNED, Json
from jaxmpi.processes import MpiProcesses, Processes, processes

STRATEGIES = ("asa32", "asa16", "ring32", "ring16")
# The lengths of Baidu's test of its ring allreduce, up to 64 Mi floats (Gibiansky 2017, section 3).
BAIDU = (0, 32, 256, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 23, 1 << 26)
MULTIPLES = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20}
SAMPLE_S = 0.02  # a shorter exchange is repeated up to this
MOST_REPEATS = 1000
TURN_S = 1800.0  # for the other job's turn to end


class Case(NamedTuple):
    """What is exchanged: a vector, or a tree."""

    name: str
    is_tree: bool
    shapes: list[Shape]

    @property
    def floats(self) -> int:
        """Of all leaves."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Plan:
    """What a job measures; equal on all ranks."""

    strategies: tuple[str, ...]
    peers: tuple[str, ...]
    cases: tuple[Case, ...]
    rounds: int
    warm_up: int
    rate_mbit: float | None

    @classmethod
    def of_json(cls, value: Any) -> "Plan":
        """The inverse of `dataclasses.asdict`, and of JSON."""
        return cls(**(value | {"cases": tuple(Case(*case) for case in value["cases"])}))


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m jaxmpi.bench [-n N] [options]`, alone or under a launcher."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--job" in argv or runtime.launched_workers() > 1:
        return be_a_rank(argv)
    try:
        start(argv)
    except (UsageError, TrainingError) as error:
        sys.exit(f"jaxmpi: error: {error}")


# ---------------------------------------------------------------- the command line


class Parser(argparse.ArgumentParser):
    """Errors as this project shows them."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`."""
        raise UsageError(f"{message}\n{self.format_usage()}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options.

    Raises:
        UsageError: an unknown one, or a value out of range.
    """
    parser = Parser("jaxmpi bench", description="Time exchanges beside other libraries and the bound.")
    parser.allow_abbrev = False
    add = parser.add_argument
    add("-n", type=int, help="ranks (default: 2; under a launcher: its ranks); fewer where memory ends")
    add("--launcher", default="mpirun", help="mpirun or srun (default: mpirun)")
    add("--launcher-args", default="", help='more arguments for it, such as "--hostfile hosts"')
    add("--strategies", nargs="*", default=STRATEGIES, metavar="NAME", help="also compressors (default: %(default)s)")
    add("--sizes", nargs="*", metavar="N", help="floats, such as 0 4096 64Mi; without a number Baidu's list")
    add("--tree", nargs="+", default=[], metavar="MODEL", help="gradients of `jaxmpi models`, or lm300m")
    add(
        "--peers",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help=f"{', '.join(PEERS)}, or all that there are, or none",
    )
    add("--rounds", type=int, default=10, help="that count (default: 10)")
    add("--warm-up", type=int, default=8, help="rounds before, until the heap has settled (default: 8)")
    add("--rate-mbit", type=float, help="of each host's link, for the bound (default: as measured)")
    add("--as-it-comes", action="store_true", help="the peers once more with glibc's allocator as it comes, in turn")
    add("--out", help="JSON file for all figures")
    add("--plot", help="PNG file for the chart")
    add("--job", nargs=3, help=argparse.SUPPRESS)  # plan, result, allocator: how `start` starts ranks
    options = parser.parse_args(joined(argv))
    for name, least in (("n", 1), ("rounds", 1), ("warm_up", 1)):
        value = getattr(options, name)
        flag = f"-{'-' * (len(name) > 1)}{name.replace('_', '-')}"
        check(value is None or value >= least, f"{flag}: got {value}; expected >= {least}")
    check(options.rate_mbit is None or options.rate_mbit > 0, f"--rate-mbit: got {options.rate_mbit}; expected > 0")
    return options


def joined(argv: Sequence[str]) -> list[str]:
    """`--launcher-args=--hostfile` for `--launcher-args --hostfile`, which would look like another option."""
    text = "\0".join(argv)
    return re.sub("(^|\0)--launcher-args\0", r"\1--launcher-args=", text).split("\0") if argv else []


def floats(text: str) -> int:
    """`64Mi` as a number of floats.

    Raises:
        UsageError: it is none, or has 2^31 and more, which MPI cannot count.
    """
    match = re.fullmatch(r"(\d+)(Ki|Mi|)", text)
    number = int(match[1]) * MULTIPLES[match[2]] if match else -1
    check(0 <= number < 2**31, f"--sizes: got {text!r}; expected floats below 2^31, such as 4096, 64Ki or 64Mi")
    return number


def make_plan(options: argparse.Namespace) -> Plan:
    """What the options ask for; runs `python -m models` where there are trees.

    Raises:
        UsageError: unknown strategies, peers or models; a file that cannot be written.
    """
    for name in options.strategies:
        contenders.ours(name)
    peers = contenders.importable(options.peers)
    check(bool(peers or options.strategies), "nothing to time: neither strategies nor peers")
    check(bool(peers) or not options.as_it_comes, "--as-it-comes times peers, and there are none")
    for path in (options.out, options.plot):
        check_writable(path)
    named = options.sizes or (BAIDU if options.sizes is not None or not options.tree else ())
    cases = [Case(f"{n:,} floats", False, [(n,)]) for n in (floats(str(size)) for size in named)]
    cases += [Case(name, True, list(tree.values())) for name, tree in trees(options.tree).items()]
    check(options.plot is None or any(case.floats for case in cases), "--plot: no case has any floats to draw")
    strategies = tuple(dict.fromkeys(options.strategies))
    return Plan(strategies, peers, tuple(cases), options.rounds, options.warm_up, options.rate_mbit)


def check_writable(path: str | None) -> None:
    """Refuse a file that could not be written after the last round."""
    if path is None:
        return
    file = Path(path)
    try:
        is_new = not file.exists()
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path!r}: {error.strerror}; name a file in a folder that exists") from error


def trees(names: Sequence[str]) -> dict[str, dict[str, Shape]]:
    """Gradient shapes by model; jaxmpi itself knows no model, so `python -m models` says them."""
    models = [name for name in dict.fromkeys(names) if name != "lm300m"]
    found = {"lm300m": lm300m()} if "lm300m" in names else {}
    if not models:
        return found
    line = [sys.executable, "-m", "models", "--tree", *models]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))} | {"JAX_PLATFORMS": "cpu"}
    job = subprocess.run(line, capture_output=True, text=True, env=environ)
    last = job.stderr.strip().splitlines()[-1:] or [f"exit code {job.returncode}"]
    check(job.returncode == 0, f"--tree: python -m models, in {os.getcwd()}: {last[0]}; lm300m needs no models")
    try:
        printed = json.loads(job.stdout)
    except json.JSONDecodeError as error:
        raise UsageError(f"{shlex.join(line)}, in {os.getcwd()}: expected JSON of shapes by model and path") from error
    return found | {model: {path: tuple(shape) for path, shape in tree.items()} for model, tree in printed.items()}


def lm300m() -> dict[str, Shape]:
    """Shapes of a language model of 298,588,480 params: f32.

    Two LSTM layers, 8192 cells each projected to 1024 (Jozefowicz et al. 2016, section 5.5), between an embedding and
    an output layer over 72,000 words: the size that Gibiansky 2017 reports.
    """
    words, width, cells = 72_000, 1024, 8192
    layer = {"input": (width, 4 * cells), "state": (width, 4 * cells), "bias": (4 * cells,), "project": (cells, width)}
    layers = {f"lstm{i}/{name}": shape for i in (1, 2) for name, shape in layer.items()}
    return {"embedding": (words, width), **layers, "words/kernel": (width, words), "words/bias": (words,)}


# ---------------------------------------------------------------- outside: jobs of ranks


def start(argv: Sequence[str]) -> None:
    """Run a job for every number of ranks that memory allows, then show all.

    Raises:
        UsageError: as `make_plan`; or no case fits.
        TrainingError: a job failed.
    """
    options = parse(argv)
    plan, wanted = make_plan(options), options.n or 2
    picks = options.launcher == "mpirun" and not options.launcher_args  # else ranks may lie on other hosts
    cases_by_ranks: dict[int, list[Case]] = {}
    for case in plan.cases:
        jobs, least = 1 + options.as_it_comes, min(2, wanted)
        ranks = fitting(case, plan.peers, wanted, jobs) if picks else wanted
        if ranks < least:
            print(left_out(case, plan.peers, least * jobs))
            continue
        cases_by_ranks.setdefault(ranks, []).append(case)
    check(bool(cases_by_ranks), "no case fits into memory")
    runs = [
        run
        for ranks, cases in cases_by_ranks.items()
        for run in run_jobs(dataclasses.replace(plan, cases=tuple(cases)), ranks, options)
    ]
    report(runs, options, ["jaxmpi", "bench", *argv])


def fitting(case: Case, peers: Sequence[str], wanted: int, jobs: int) -> int:
    """The ranks of each job, up to those wanted, for which this machine has memory."""
    return min(wanted, free_bytes() // (jobs * contenders.rank_bytes(case.floats, peers)))


def left_out(case: Case, peers: Sequence[str], ranks: int) -> str:
    """A line on a case that memory does not hold."""
    need_gb = ranks * contenders.rank_bytes(case.floats, peers) / 1e9
    return f"{case.name}: left out: {ranks} ranks need {need_gb:.1f} GB, and {free_bytes() / 1e9:.1f} GB are free"


def free_bytes() -> int:
    """Memory that new processes may take: of this machine, or of its container where that is less."""
    machine = re.search(r"MemAvailable:\s+(\d+) kB", read(Path("/proc/meminfo")))
    limit, used = (read(Path(f"/sys/fs/cgroup/memory.{name}")).strip() for name in ("max", "current"))
    free = [1024 * int(machine[1])] if machine else []
    free += [int(limit) - int(used)] if limit.isdigit() and used.isdigit() else []
    return min(free, default=sys.maxsize)


def read(file: Path) -> str:
    """A file of the kernel's; nothing where there is none."""
    try:
        return file.read_text()
    except OSError:
        return ""


def run_jobs(plan: Plan, ranks: int, options: argparse.Namespace) -> list[Json]:
    """What a job of so many ranks measures; a second one, of peers alone, takes turns with it where asked for."""
    allocators = [TUNED, *([AS_IT_COMES] if options.as_it_comes else [])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "turn").write_text(f"{TUNED} 0")
        jobs = []
        for allocator in allocators:
            part = plan if allocator == TUNED else dataclasses.replace(plan, strategies=())
            (folder / f"{allocator}.plan").write_text(json.dumps(dataclasses.asdict(part)))
            files = [str(folder / f"{allocator}.{end}") for end in ("plan", "result")]
            line = job_line(ranks, options, ["--job", *files, allocator])
            environ = {"JAXMPI_ALLOCATOR": "system"} if allocator == AS_IT_COMES else {}
            jobs.append((line, os.environ | environ))
        wait_for(jobs)
        return [run for allocator in allocators for run in json.loads((folder / f"{allocator}.result").read_text())]


def job_line(ranks: int, options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """The launcher's line for ranks of this file."""
    try:
        more = tuple(shlex.split(options.launcher_args))
    except ValueError as error:
        raise UsageError(f"--launcher-args: got {options.launcher_args!r}: {error}") from error
    asked = launch.Options(ranks, options.launcher, more, tuple(arguments))
    return launch.command(asked, cores=runtime.cores(), is_root=os.geteuid() == 0, module="jaxmpi.bench")


def wait_for(jobs: Sequence[tuple[list[str], dict[str, str]]]) -> None:
    """Print and run lines at the same time, until all have ended or one has failed.

    Raises:
        TrainingError: one failed.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that `finally` runs
    running = []
    try:
        for line, environ in jobs:
            print("+ " + shlex.join(line), flush=True)
            running.append(subprocess.Popen(line, env=environ))
        while any(job.poll() is None for job in running):
            failed = [job.returncode for job in running if job.returncode]
            check_job(failed)
            time.sleep(0.05)
        check_job([job.returncode for job in running if job.returncode])
    finally:
        for job in running:
            if job.poll() is None:
                job.terminate()  # launchers end their ranks
                job.wait()


def check_job(failed: Sequence[int]) -> None:
    """Stop where a job has failed; its ranks have said why."""
    if failed:
        raise TrainingError(f"a job ended with exit code {failed[0]}; see above")


# ---------------------------------------------------------------- inside: one rank


def be_a_rank(argv: Sequence[str]) -> None:
    """Take part in a job; rank 0 hands over what was measured, or shows it."""
    runtime.install_excepthooks()
    runtime.prepare()
    options = parse(argv)
    control = processes()
    check(options.n in (None, control.size), f"-n: got {options.n} in a job of {control.size} ranks; leave it out")
    with runtime.at_work():
        plan = agreed_plan(options, control)
        allocator = options.job[2] if options.job else TUNED
        turns = Turns(Path(options.job[0]).parent, allocator, control) if options.job else contextlib.nullcontext()
        runs = [run | {"allocator": allocator} for run in measure(plan, control, turns)]
        if control.rank == 0 and isinstance(turns, Turns):
            Path(options.job[1]).write_text(json.dumps(runs))
            turns.end()
        elif control.rank == 0:
            report(runs, options, sys.argv)
        control.barrier()


def agreed_plan(options: argparse.Namespace, control: Processes) -> Plan:
    """Rank 0's plan, on all ranks.

    Raises:
        UsageError: on all ranks, where rank 0 could make none.
    """
    word = ""
    if control.rank == 0:
        try:
            made = json.loads(Path(options.job[0]).read_text()) if options.job else dataclasses.asdict(my_plan(options))
            word = json.dumps({"plan": made})
        except UsageError as error:
            word = json.dumps({"error": str(error)})
    answer = json.loads(control.gather(word)[0])
    check("plan" in answer, answer.get("error", ""))
    return Plan.of_json(answer["plan"])


def my_plan(options: argparse.Namespace) -> Plan:
    """The options' plan, without cases that this host's ranks have no memory for."""
    here = runtime.launched()
    local = here.local_size if here else 1
    check(not options.as_it_comes, "--as-it-comes needs two jobs: call jaxmpi bench without a launcher before it")
    plan = make_plan(options)
    fits = [case for case in plan.cases if fitting(case, plan.peers, local, 1) >= local]
    for case in plan.cases:
        if case not in fits:
            print(left_out(case, plan.peers, local), flush=True)
    check(bool(fits), "no case fits into memory")
    return dataclasses.replace(plan, cases=tuple(fits))


def measure(plan: Plan, control: Processes, turns: contextlib.AbstractContextManager) -> list[Json]:
    """Seconds of every contender in every round, case by case; all ranks get the same."""
    several_hosts = isinstance(control, MpiProcesses) and len(set(control.hosts)) > 1
    check(several_hosts or plan.rate_mbit is None, "--rate-mbit: all ranks are on one host, and no link is in use")
    peers = plan.peers if isinstance(control, MpiProcesses) else ()
    if isinstance(control, MpiProcesses):
        for name in peers:
            PEERS[name].connect(control)
    elif plan.peers and control.rank == 0:
        print("one rank: nothing travels, and no peer runs", flush=True)
    yardsticks = [] if control.size == 1 else [LINK] if several_hosts else [COPY]
    field = [*map(contenders.ours, plan.strategies), *map(contenders.peer, peers), *yardsticks]
    check(bool(field), "one rank and no strategies: nothing to time")
    return [measure_case(case, field, plan, control, turns) for case in plan.cases]


def measure_case(
    case: Case, field: Sequence[Contender], plan: Plan, control: Processes, turns: contextlib.AbstractContextManager
) -> Json:
    """One case: a first call of each contender with its result checked, warm-up, rounds that count."""
    if control.rank == 0:
        print(f"{case.name}, {control.size} ranks: {len(field)} contenders, {plan.rounds} rounds", flush=True)
    inputs, runs = Inputs(case.shapes, control), {}
    with turns:
        for contender in field:
            runtime.doing(f"{case.name}, {contender.name}, first call")
            runs[contender.name] = run = contender.start(inputs)
            contenders.check_result(contender, run(), control)
    repeats = dict.fromkeys(runs, 1)
    samples: list[dict[str, Sample]] = []
    for i in range(plan.warm_up + plan.rounds):
        with turns:
            samples.append(one_round(rotated(list(runs), i), runs, repeats, case, control))
        if i == plan.warm_up - 1:
            repeats = {name: repeats_for(samples[-1][name].seconds, control) for name in runs}
    counted = samples[plan.warm_up :]
    return {
        "case": case.name,
        "is_tree": case.is_tree,
        "floats": case.floats,
        "leaves": len(case.shapes),
        "ranks": control.size,
        "hosts": len(set(control.hosts)) if isinstance(control, MpiProcesses) else 1,
        "seconds": {name: slowest([s[name].seconds for s in counted], control) for name in runs},
        "sent": {name: {"sent_bytes": median_sent([s[name].sent for s in counted], control)} for name in runs},
    }


class Sample(NamedTuple):
    """One contender in one round, on this rank."""

    seconds: float
    sent: float  # bytes that this host's cards sent, an exchange


def one_round(
    order: Sequence[str], runs: dict[str, Run], repeats: dict[str, int], case: Case, control: Processes
) -> dict[str, Sample]:
    """A sample of each contender in this order."""
    samples = {}
    for name in order:
        runtime.doing(f"{case.name}, {name}")
        samples[name] = sample(runs[name], repeats[name], control)
    return samples


def sample(run: Run, repeats: int, control: Processes) -> Sample:
    """Time so many exchanges in a row; the first is not counted where there are several."""
    control.barrier()  # polled: whoever waits leaves the cores to others
    before = card_bytes()
    if repeats > 1:
        run()  # ranks leave the barrier up to a millisecond apart
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    seconds = (time.perf_counter() - begin) / repeats
    return Sample(seconds, (card_bytes() - before) / (repeats + (repeats > 1)))


def rotated(names: list[str], places: int) -> list[str]:
    """The names, beginning so many places on."""
    at = places % len(names)
    return names[at:] + names[:at]


def repeats_for(seconds: float, control: Processes) -> int:
    """Exchanges to be timed in a row, the same on all ranks."""
    most = max(float(text) for text in control.gather(str(seconds)))
    return min(MOST_REPEATS, max(1, math.ceil(SAMPLE_S / most)))


def slowest(seconds: Sequence[float], control: Processes) -> list[float]:
    """Of each round the time of the slowest rank."""
    return [max(column) for column in zip(*map(json.loads, control.gather(json.dumps(seconds))), strict=True)]


def median_sent(sent: Sequence[float], control: Processes) -> float | None:
    """Median over rounds of the host that sends most; None on one host, where nothing goes through a card."""
    if not isinstance(control, MpiProcesses) or len(set(control.hosts)) == 1:
        return None
    most = sorted(slowest(sent, control))
    return most[len(most) // 2]


def card_bytes() -> int:
    """Bytes that this host's network cards have sent since it started."""
    cards = [line.split(":") for line in read(Path("/proc/self/net/dev")).splitlines()[2:]]
    return sum(int(counts.split()[8]) for card, counts in cards if card.strip() != "lo")


class Turns:
    """Two jobs on one machine, of which one works at a time: a file says which, and which turn of it."""

    def __init__(self, folder: Path, mine: str, control: Processes) -> None:
        """Take the folder that both see, and this job's name."""
        self.folder, self.mine, self.control = folder, mine, control
        self.other = AS_IT_COMES if mine == TUNED else TUNED
        self.alone = not (folder / f"{self.other}.plan").exists()
        self.turn = 0

    def __enter__(self) -> None:
        """Wait for this job's next turn, or until the other has ended."""
        deadline = time.monotonic() + TURN_S
        while not self.alone and read(self.folder / "turn") != f"{self.mine} {self.turn}":
            self.alone = (self.folder / f"{self.other} has ended").exists()
            if time.monotonic() > deadline:
                raise TrainingError(f"the job {self.other!r} has kept its turn for {TURN_S:.0f} s")
            time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        """Give the other job its turn, once all ranks of this one have had theirs."""
        self.control.barrier()
        if self.control.rank == 0:
            (self.folder / "next").write_text(f"{self.other} {self.turn + (self.mine == AS_IT_COMES)}")
            (self.folder / "next").replace(self.folder / "turn")
        self.turn += 1

    def end(self) -> None:
        """No more turns are needed."""
        (self.folder / f"{self.mine} has ended").touch()


# ---------------------------------------------------------------- what comes of it


def report(runs: Sequence[Json], options: argparse.Namespace, command: Sequence[str]) -> None:
    """Table, JSON file and chart."""
    cases = figures.of_cases(runs, options.rate_mbit)
    table = figures.table(cases)
    console = Console()
    console.width = max(console.width, Console(width=1000).measure(table).maximum)  # no number is cut short
    console.print(table)
    for line in figures.bound_lines(cases):
        console.print(line, highlight=False)
    if options.out:
        Path(options.out).write_text(json.dumps({**facts(command), "cases": cases}, indent=1) + "\n")
    if options.plot:
        figures.draw(cases, options.plot)


def facts(command: Sequence[str]) -> Json:
    """What a figure depends on."""
    found = experiment.versions()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return {
        "command": shlex.join(command),
        "versions": found,
        "commit": experiment.commit(None),
        "cores": runtime.cores(),
        "processor": platform.machine(),
        "system": platform.platform(),
    }


if __name__ == "__main__":
    main()
