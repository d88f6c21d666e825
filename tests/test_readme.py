"""The blocks of README and of the pages for users run, and what README and docs name exists.

A block is a fence under `<!-- block: NAME -->`. One whose name ends in .py is a file; the others are shell lines. Every
block is in SCENARIOS, FILES or PLANS, which run here, or in NOT_RUN, with the reason. The quickstart repeats some
without a name.
"""

import ast
import contextlib
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxmpi.config import experiment_file
from jaxmpi.tools import cli
from launching import NOT_PERMITTED, ROOT, run

DOCS = ROOT / "docs"
BLOCKS = [
    (page.stem, *block)
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
    for block in re.findall(r"(?:<!-- block: (\S+) -->\n)?^```(\w+)\n(.*?)^```$", page.read_text(), re.S | re.M)
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
NAMED = {name: (language, text) for _, name, language, text in BLOCKS if name}
FENCES = [
    pytest.param(language, text, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, (language, text) in enumerate(re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.S | re.M))
]
EXPORTS = [line for line in NAMED["mpirun"][1].splitlines() if line.startswith("export ")]


class Scenario(NamedTuple):
    """Blocks that run one after another in one folder, how they are shortened, and what they must print."""

    blocks: tuple[str, ...]
    expected: tuple[str, ...]
    edits: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 120


TWO_RANKS = (("-n 8", "-n 2"), ("-n 4", "-n 2"))
# `uv run` has installed what these tests run in.
INSTALLED = (("pip install uv && uv run ", ""),)
THREE_STEPS = (("digits.py", "digits.py --train-for 3st"),)
TWO_STEPS = (("googlenet.py", "googlenet.py --train-for 2st"),)
THREE_EPOCHS = (".py\n", ".py --train-for 3ep\n")
SCENARIOS = [
    Scenario(("collectives.py", "collectives"), ("allreduce", "Transpose: `reduce` of a sum, to root")),
    Scenario(
        ("start",), ("+ ", "no data folder", "2 workers", "step 2/2", "top-1"), (*INSTALLED, *TWO_RANKS, *TWO_STEPS)
    ),
    Scenario(("mpirun",), ("no data folder", "2 workers", "step 2/2", "top-1"), (*TWO_RANKS, *TWO_STEPS)),
    Scenario(("solo",), ("1 workers", "step 3/3", "top-1"), THREE_STEPS),
    Scenario(("devices",), ("4 workers", "step 3/3", "top-1"), THREE_STEPS),
    Scenario(("own_loop.py", "own_loop"), ("2 workers: 2.000 -3.000 1.000",)),
    Scenario(
        ("zero_loop.py", "zero_loop"),
        ("3,001 floats of state on this rank of 1", "1,501 floats of state on this rank of 2"),
        TWO_RANKS,
    ),
    Scenario(("around.py", "around"), ("step 100 loss 0.0", "step 200 loss 0.000000")),
    Scenario(("doctor",), ("ranks     2 on 1 hosts", "right"), TWO_RANKS),
    Scenario(
        ("stripes.py", "experiments/stripes.py", "stripes"),
        ("step 192/192", "top-1 9", '"eval_count": 500', "outputs float32[500, 2]"),
        TWO_RANKS,
    ),
    Scenario(
        ("kill", "resize"),
        ("exited on signal 9", "restart 1 of 1 from step 20", "resumed at step 40", "train_for: was 40st, is 80st"),
    ),
    Scenario(("hang",), ("late: rank 1", "restart 1 of 1", "step 40  evaluation")),
    Scenario(("full_disk",), ("No space left on device", "restart 1 of 1 from step 10", "step 40  evaluation")),
    Scenario(("bitflip",), ("worker 1 differs from the other 3", "step 40  evaluation")),
    Scenario(("two_hosts",), ("ranks are on 2 hosts", "step 60  evaluation")),
    Scenario(("hier_hosts",), ("strategy hier-ring:32", "step 60  evaluation")),
    Scenario(("doctor_hosts",), ("ranks     4 on 2 hosts", "right")),
    Scenario(("slow32",), ("strategy ring:32", "step 60  evaluation")),
    Scenario(("slow8",), ("strategy ring:8", "step 60  evaluation")),
    Scenario(("slowrank",), ("strategy lowrank4/ring32", "step 60  evaluation")),
    Scenario(("slowdiloco",), ("rule diloco, strategy ring:8", "step 60  evaluation")),
    Scenario(("help",), ("--optim.lr ", "--data.dir ", "--exchange.strategy ")),
    Scenario(
        ("overrides", "resume", "report"),
        (
            *("rule awagd, strategy ring:16", "step 90/90", '"eval_top5"', "resumed at step 90", "step 180/180"),
            "report: runs/first/report/index.html",
        ),
        TWO_RANKS,
    ),
    Scenario(("experiments/softmax.py", "softmax"), ("softmax: 1 workers", "top-1 9")),
    Scenario(
        ("experiments/softmax.py", "experiments/majority.py", "majority"), ("2 workers", "rule majority", "top-1 9")
    ),
    Scenario(("experiments/softmax.py", "experiments/damped.py", "damped"), ("2 workers", "rule damped", "top-1 9")),
    Scenario(("experiments/softmax.py", "experiments/chain.py", "chain"), ("2 workers", "rule chain", "top-1 9")),
    Scenario(("experiments/line.py", "line"), ("line: 1 workers", "step 100/100", "distance 0.0")),
    Scenario(("experiments/softmax.py", "from_python.py"), ("1 workers", "(4, 10) 115 (64, 10)")),
    Scenario(("experiments/watched.py", "watched"), ("step 45/45", "\n45 0.", "top-1")),
    Scenario(("experiments/softmax.py", "experiments/weights.py", "weights"), ("2 workers", "largest weight", "top-1")),
    *(
        Scenario(
            (f"experiments/my_{name}.py", name), (f"{name}: ", "step 135/135", "top-1 9"), (*TWO_RANKS, THREE_EPOCHS)
        )
        for name in ("nnx", "linen", "equinox", "functions")
    ),
    Scenario(
        ("pack",),
        ("train: 1437 records", "validation: all is well", "2 workers", "(auto)", "step 3/3", "top-1"),
        (*TWO_RANKS, ("partition\n", "partition --train-for 3st\n")),
    ),
    Scenario(("in_memory.py", "in_memory"), ("2 workers hold 1437 examples; loss ",)),
    Scenario(
        ("batch_files.py", "batch_files"), ("2 workers", "step 3/3", "top-1"), (("files\n", "files --train-for 3st\n"),)
    ),
    Scenario(("words",), ("words.json: 8,000 words", "8000 classes", "step 2/2", "bits per byte"), (("20st", "2st"),)),
    Scenario(("functions.py",), ("finite: True",)),
    Scenario(
        ("model_state.py",),
        ("straggler", "errors (1000,) mean (1, 5)", "only ['total']", "rows 1000", "on each worker {1000}"),
    ),
    Scenario(("colors.py", "colors"), ("color4 1.5", "pipering 1.5"), TWO_RANKS),
]
FILES = {  # and what each prints; one process runs them all
    "with_optax.py": (),
    "overlap.py": ("[0.0666",),
    "bigrams.py": (),
    "bits.py": ("0.0 1.0", "16 2.1e-04", "bf16 1.7e-03", "8 6.9e-03"),
    **dict.fromkeys(("numpy_files.py", "parquet.py", "huggingface.py", "webdataset.py"), ("10 classes",)),
    "grain_maps.py": ("100 examples",),
    "grain_streams.py": ("data.train",),
    "raw_images.py": ("2 classes",),
    "augment.py": ("(32, 8, 8, 1)",),
    "words.py": ("100 classes",),
    "mixture.py": ("2874 examples",),
    "gather.py": ("[[3. 4.]\n [3. 4.]\n [3. 4.]\n [3. 4.]]",),
    "wire24.py": ("[[1.       1.3333",),
}
PLANS = {  # blocks of lines of `jaxmpi plan`, and what they print
    "plan": ("given prices", "4096  512 x 8"),
    "problems": ("0.1406     0.1406     0.4406      68.1 %", "100.0 %", "80.7 %", "6.8 %", "color4:32         0.00040"),
}
# Jobs of longer runs or of what has tests of its own, in slow tests.
BY_HAND = (
    "words report around batch_files equinox linen collectives in_memory majority chain pack weights mpirun devices "
    "nnx solo help hang full_disk bitflip resize two_hosts hier_hosts doctor_hosts slow32 slow8 slowrank"
).split()
NOT_RUN = {
    "tests": "it is this very suite",
    "imagenet": "needs ImageNet",
    "bench": "takes minutes; tests/bench has shorter ones",
    "srun": "needs Slurm",
    "first_job": "needs Slurm",
    "docker": "starts a container",
    "apptainer": "needs Slurm and Apptainer",
    "hosts": "needs several hosts",
    "wheel": "installs; tests/test_wheel.py does it",
    "wheel_mpi": "installs an MPI, and compiles",
    "own_mpi": "installs, and needs an MPI other than the one that comes along",
    "own_mpi_uv": "the same",
    "devices_mpi": "its flags run in test_local_devices.py",
    "comm_xla": "its flag runs in test_local_devices.py",
    "over_xla.py": "runs in test_comm_xla.py",
    "cuda": "installs, and needs GPUs",
    **{f"use_{name}.py": "runs in test_export.py" for name in ("nnx", "linen", "equinox", "functions")},
    "use_jaxexport.py": "runs in test_exported_program.py",
}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder like a fresh clone with its environment; in place of GoogLeNet a model that compiles in seconds."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "digits.py").symlink_to(ROOT / "experiments" / "digits.py")
    (tmp_path / "experiments" / "googlenet.py").write_text(
        "import dataclasses, runpy\n"
        "from jaxmpi.models.cnn import digits_cnn\n"
        f"recipe = runpy.run_path({str(ROOT / 'experiments' / 'googlenet.py')!r})['experiment']\n"
        "data = dataclasses.replace(recipe.fallback.data, channels=1, resize=0)\n"
        "small = dataclasses.replace(recipe.fallback, model=digits_cnn(), data=data)\n"
        "experiment = dataclasses.replace(recipe, fallback=small)\n"
    )
    return tmp_path


def bash(script: str, folder: Path, timeout_s: float) -> str:
    """Return the output of a script that ended well."""
    head = ['export PATH="$PWD/.venv/bin:$PATH"', "unset JAXMPI_DATA", *EXPORTS]
    on_cpu = {"JAX_PLATFORMS": "cpu"} if "--devices" in script else {}  # a machine may have fewer GPUs
    ended = run(["bash", "-euc", "\n".join([*head, script])], timeout_s=timeout_s, env=on_cpu, cwd=folder)
    if "cluster.py" in script and ended.code == NOT_PERMITTED:
        pytest.skip(ended.out.strip())
    assert ended.code == 0, ended.out[-4000:]
    return ended.out


@pytest.mark.e2e
@pytest.mark.parametrize(
    "scenario",
    [pytest.param(each, marks=[pytest.mark.slow] * (each.blocks[-1] in BY_HAND)) for each in SCENARIOS],
    ids=lambda scenario: scenario.blocks[-1],
)
def test_blocks_run(scenario, clone):
    printed = ""
    for name in scenario.blocks:
        text = NAMED[name][1]
        if name.endswith(".py"):
            (clone / name).write_text(text)
            continue
        for old, new in scenario.edits:
            text = text.replace(old, new)
        printed += bash(text, clone, scenario.timeout_s)
    if scenario.blocks[-1].endswith(".py"):
        printed = bash(f"python {scenario.blocks[-1]}", clone, scenario.timeout_s)
    for text in scenario.expected:
        assert text in printed, printed[-4000:]


RUN_FILES = """
import runpy, sys
for name in sys.argv[1:]:
    print("====", name, flush=True)
    runpy.run_path(name, run_name="__main__")
"""


@pytest.mark.e2e
def test_files_run(clone):
    for name in FILES:
        (clone / name).write_text(NAMED[name][1])
    ended = run([sys.executable, "-c", RUN_FILES, *FILES], timeout_s=120, cwd=clone)
    assert ended.code == 0, ended.out[-4000:]
    printed = dict(part.split("\n", 1) for part in ended.out.split("==== ")[1:])
    for name, expected in FILES.items():
        assert all(text in printed[name] for text in expected), (name, printed[name])


@pytest.mark.e2e
@pytest.mark.parametrize("name", PLANS)
def test_plans_are_printed(name, clone, monkeypatch, capsys, no_launcher):
    monkeypatch.chdir(clone)
    monkeypatch.delenv("JAXMPI_DATA", raising=False)
    for line in NAMED[name][1].splitlines():
        program, *words = line.split()
        assert program == "jaxmpi"
        cli.run(words)
    printed = capsys.readouterr().out
    assert all(text in printed for text in PLANS[name]), printed


def test_every_block_runs_or_says_why_not():
    names = [name for page, name, _, _ in BLOCKS if name or page != "quickstart"]
    assert all(names), "a fence without a name"
    assert len(names) == len(set(names)), "two fences of one name"
    ran = {name for scenario in SCENARIOS for name in scenario.blocks} | {*FILES, *PLANS}
    assert ran | set(NOT_RUN) == set(NAMED)
    assert not ran & set(NOT_RUN)


@pytest.mark.parametrize(("language", "text"), FENCES)
def test_blocks_have_no_syntax_errors(language, text):
    assert language in ("bash", "python", "text", "json")
    if language == "bash":
        checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=20)
        assert (checked.returncode, checked.stderr) == (0, "")
    if language == "python":
        ast.parse(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


OTHERS_FLAGS = {
    "mpirun": {"--bind-to", "--host", "--hostfile", "--map-by", "--mca", "--oversubscribe", "--with-ft"},
    "Slurm": {"--mpi", "--nodes", "--ntasks-per-node", "--time", "--job-name", "--requeue", "--signal", "--wait"},
    "uv": {"--extra", "--group", "--no-config", "--no-group", "--no-sync", "--refresh-package", "--with", "--wheel"}
    | {"--no-binary", "--no-cache-dir", "--reinstall-package", "--force-reinstall", "--no-deps"}
    | {"--build-constraint", "--build-constraints"},
    "ruff": {"--check"},
    "containers": {"--rm", "--shm-size", "--cpus", "--cpuset-cpus", "--ipc", "--gpus", "--nv"},
    "XLA": {"--xla"},
    "a rule of one's own": {"--rule.quorum", "--rule.share"},
}


def test_every_flag_exists(capsys):
    with pytest.raises(SystemExit):
        experiment_file.parse([str(ROOT / "experiments" / "digits.py"), "--help"])
    for line in (*cli.COMMANDS, "data pack", "data check", "data words", "data tokens"):
        with contextlib.suppress(SystemExit):
            cli.run([*line.split(), "--help"])
    known = flags(capsys.readouterr().out) | {"--version"} | set().union(*OTHERS_FLAGS.values())
    scripts = [*(ROOT / "scripts").glob("*.py"), *(ROOT / "experiments" / "functions").glob("*.py")]
    known |= {flag for script in scripts for flag in flags(script.read_text())}
    for page in PAGES:
        if page.name != "CHANGELOG.md":  # names those that went, too
            now = re.sub(r".* of commit .*", "", page.read_text())  # figures of scripts that have gone
            assert not flags(now) - known, page.name


def flags(text: str) -> set[str]:
    """Words such as --optim.lr."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z]", text))
