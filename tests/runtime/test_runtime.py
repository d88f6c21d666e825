"""Check what the launcher says, and what is set in this process before the device starts."""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import jax
import pytest

from jaxmpi.core.env import seconds_from
from jaxmpi.core.errors import UsageError
from jaxmpi.runtime import compile_cache, failures, process
from jaxmpi.runtime.process import Launch
from launching import ROOT, mpirun, mpirun_line, run

OMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
MV2 = tuple(name.replace("OMPI", "MV2") for name in OMPI)
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
JSM = tuple(name.replace("OMPI_COMM_WORLD", "JSM_NAMESPACE") for name in OMPI)
PALS = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
FLUX = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
LAUNCHED = [
    ({}, None),
    (dict(zip(OMPI, ("3", "8", "1", "4"), strict=True)), Launch("Open MPI's mpirun", 3, 8, 1, 4)),
    (dict(zip(MV2, ("3", "8", "1", "4"), strict=True)), Launch("MVAPICH's mpirun", 3, 8, 1, 4)),
    (dict(zip(HYDRA, ("3", "8", "1", "4"), strict=True)), Launch("Hydra's mpiexec (MPICH, Intel MPI)", 3, 8, 1, 4)),
    (dict(zip(SLURM, ("3", "8", "1", "4(x2)"), strict=True)), Launch("srun", 3, 8, 1, 4)),
    (dict(zip(SLURM, ("5", "7", "1", "4,3"), strict=True)), Launch("srun", 5, 7, 1, 4)),
    (dict(zip(JSM, ("3", "8", "1", "4"), strict=True)), Launch("jsrun", 3, 8, 1, 4)),
    (dict(zip(PALS, ("3", "8", "1", "4"), strict=True)), Launch("HPE's PALS", 3, 8, 1, 4)),
    (dict(zip(FLUX, ("3", "8", "1", "3"), strict=True)), Launch("flux run", 3, 8, 1, 3)),
    # Flux speaks PMI, too, and alone knows the local ranks.
    (
        {"PMI_RANK": "5", "PMI_SIZE": "8", **dict(zip(FLUX, ("5", "8", "1", "2"), strict=True))},
        Launch("flux run", 5, 8, 1, 4),
    ),
    # Of PMI alone, local ranks are unknown: one host is the guess.
    ({"PMI_RANK": "2", "PMI_SIZE": "4"}, Launch("Hydra's mpiexec (MPICH, Intel MPI)", 2, 4, 2, 4)),
    # srun --mpi=pmi2 speaks PMI, and Slurm knows the local ranks.
    (
        {"PMI_RANK": "5", "PMI_SIZE": "8", **dict(zip(SLURM, ("5", "8", "1", "4(x2)"), strict=True))},
        Launch("srun", 5, 8, 1, 4),
    ),
    # mpirun inside a Slurm job is Open MPI's.
    ({**dict(zip(OMPI, "0210", strict=True)), "SLURM_PROCID": "0"}, Launch("Open MPI's mpirun", 0, 2, 1, 0)),
    # A batch script that starts a plain Python: a task number, but no step.
    ({"SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS": "8"}, None),
]


@pytest.mark.parametrize(("environ", "expected"), LAUNCHED)
def test_what_each_launcher_says(environ, expected, no_launcher, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert process.launched() == expected
    rank, size = (expected.rank, expected.size) if expected else (0, 1)
    assert process.my_rank() == rank
    assert failures.describe_rank().startswith(f"rank {rank}/{size} on ")


def python(code: str, **environ: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name not in process.VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**clean, **environ}
    )


SHARES = [
    # call of this rank, its cores, cores of the host -> cores to keep
    (lambda: process.pin_cores(0, 2), 8, 8, [0, 1, 2, 3]),
    (lambda: process.pin_cores(1, 2), 8, 8, [4, 5, 6, 7]),
    (lambda: process.pin_cores(5, 8), 2, 2, [1]),
    (lambda: process.pin_cores(1, 3), 8, 8, None),  # does not divide
    (lambda: process.pin_cores(1, 2), 4, 8, None),  # whether others have this part is seen when MPI has started
    (lambda: process.pin_cores(0, 1), 8, 8, list(range(8))),
    (lambda: process.divide_mask([[0, 1], [2, 3]], 1), 2, 8, None),
    (lambda: process.divide_mask([[4, 5, 6, 7]] * 2, 1), 4, 8, [6, 7]),
    (lambda: process.divide_mask([[4, 5, 6, 7], [0, 1], [4, 5, 6, 7], [0, 1]], 2), 4, 8, [6, 7]),
    (lambda: process.divide_mask([[0, 1, 2]] * 2, 1), 3, 8, None),
    (lambda: process.divide_mask([[]] * 2, 1), 0, 8, None),
]


@pytest.mark.parametrize(("bind", "cores", "cpus", "expected"), SHARES)
def test_share_of_cores(bind, cores, cpus, expected, monkeypatch):
    kept = []
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, chosen: kept.append(sorted(chosen)), raising=False)
    bind()
    assert kept == ([] if expected is None else [expected])


EXCHANGED = """
import os, resource
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    from mpi4py import MPI
import jaxmpi
comm = jaxmpi.world()
import jax, jax.numpy as jnp
tree = [jnp.full(18 << 20, 1.0), jnp.ones(1000)]  # 72 MiB
for strategy in ("asa32", "shm"):
    f = jax.jit(lambda tree: jaxmpi.exchange(tree, strategy))
    for call in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        jax.block_until_ready(f(tree))
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / (72 << 20)
        if call > 2: assert faults <= 0.05, (strategy, call, faults)
    print("no faults", flush=True)
"""


@pytest.mark.e2e
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc only")
def test_exchanges_above_64_mib_cost_no_page_faults_whether_or_not_mpi_starts_first():
    """On rank 1 it does."""
    ended = mpirun(2, "-c", EXCHANGED, timeout_s=100)
    assert ended.out.count("no faults") == 4, ended.out[-3000:]


@pytest.mark.e2e
def test_prepare_sets_what_mpi_reads_and_makes_devices_and_a_private_cache(tmp_path):
    code = (
        "import os, jax; from jaxmpi.runtime import process; process.prepare(); process.make_cpu_devices(3); "
        "names = ('mpi_yield_when_idle', 'osc', 'opal_abort_delay'); "
        "print(*(os.environ.get('OMPI_MCA_' + name) for name in names), len(jax.devices('cpu')))"
    )
    options = {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    job = python(code, **options, **dict(zip(OMPI, ("0", "4096", "0", "4096"), strict=True)))
    assert (job.stdout.split(), job.returncode) == (["1", "^ucx", "None", "3"], 0), job.stderr
    assert (tmp_path / "jaxmpi" / "xla").stat().st_mode & 0o077 == 0
    options |= {"OMPI_MCA_mpi_yield_when_idle": "0", "OMPI_MCA_osc": "rdma"}  # the user's
    job = python(code, **options, **dict(zip(OMPI, ("0", "8192", "0", "4096"), strict=True)))  # two hosts
    assert job.stdout.split() == ["0", "rdma", "1", "3"]


@pytest.mark.e2e
def test_a_rank_says_nothing_of_programs_that_another_has_half_written(tmp_path):
    """A program that is cut off in the cache is compiled."""
    script = "from jaxmpi.runtime import process\nprocess.prepare()\nimport jax\njax.jit(lambda x: x + 1)(1.0)\n"
    env = {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", **dict(zip(OMPI, "0202", strict=True))}
    for _ in range(2):
        ended = python(script, **env)
        assert (ended.returncode, "Error reading persistent" in ended.stderr) == (0, False), ended.stderr
        programs = list((tmp_path / "jaxmpi" / "xla").glob("*-cache"))
        assert programs
        for program in programs:
            program.write_bytes(program.read_bytes()[:20])


@pytest.fixture
def cache_setting(no_launcher) -> Iterator[Callable[[], str]]:
    """JAX's folder of compiled programs, which comes back at the end."""
    names = [f"jax_persistent_cache_min_{name}" for name in ("compile_time_secs", "entry_size_bytes")]
    before = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", *names)}
    yield lambda: getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009 # unknown to type checkers
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("trouble", ["writable by others", "of another user", "no home"])
def test_a_cache_that_others_could_have_filled_is_not_used(trouble, cache_setting, tmp_path, monkeypatch):
    folder = tmp_path / "jaxmpi" / "xla"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder.chmod(0o755)
    jax.config.update("jax_compilation_cache_dir", None)
    assert compile_cache.use_compilation_cache() == ""
    assert cache_setting() == str(folder)
    if trouble == "writable by others":
        folder.chmod(0o775)
        said = f"others may write {str(folder)!r}"
    elif trouble == "no home":
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
        said = "XDG_CACHE_HOME"
    elif os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        said = f"{str(folder)!r} belongs to user 12345"
    else:
        pytest.skip("only root can give a folder away")
    assert said in compile_cache.use_compilation_cache()
    assert cache_setting() is None


FAIL = """
from jaxmpi.runtime import failures
from jaxmpi.core.errors import TrainingError
from jaxmpi.core.errors import UsageError
failures.install_excepthooks()
raise {error}
"""
ERRORS = {
    "UsageError('got 1; expected 2')": (2, "error: got 1; expected 2"),
    "KeyError('x')": (1, "KeyError: 'x'"),
    "KeyboardInterrupt": (130, "interrupted"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_uncaught_error_names_the_rank_and_ends_with_its_code(error):
    job = python(FAIL.format(error=error))
    code, message = ERRORS[error]
    assert job.returncode == code
    assert "jaxmpi: rank 0/1 on " in job.stderr
    assert message in job.stderr
    assert ("Traceback" in job.stderr) == (code == 1)


def test_an_error_in_a_thread_ends_a_process_but_a_thread_may_end_itself():
    code = "import sys, threading, time\nfrom jaxmpi.runtime import failures\nfailures.install_excepthooks()\n"
    code += "thread = threading.Thread(target=lambda: sys.exit(0))\nthread.start()\nthread.join()\nprint('on')\n"
    job = python(code + "threading.Thread(target=lambda: 1 / 0).start()\ntime.sleep(60)")
    assert (job.returncode, job.stdout) == (1, "on\n")
    assert "jaxmpi: rank 0/1 on " in job.stderr
    assert "ZeroDivisionError" in job.stderr


LAST_WORDS = """
import os, signal
from jaxmpi.runtime import failures
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's job in the background has not
failures.READ_S = {patience_s}
os.write(2, b"why\\n")
failures.drain_stdio()
os._exit(3)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("ends", ["read", "interrupted", "time is up"])
def test_last_words_are_waited_for_until_they_are_read(ends):
    """By the launcher, which forgets what it has not read when a job is ended; Ctrl-C ends the wait."""
    code = LAST_WORDS.format(patience_s=0.5 if ends == "time is up" else 100)
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as rank:
        assert rank.stderr is not None
        assert select.select([rank.stderr], [], [], 60)[0]
        if ends != "time is up":
            with pytest.raises(subprocess.TimeoutExpired):
                rank.wait(1)
            assert rank.stderr.read(4) == b"why\n" if ends == "read" else rank.send_signal(signal.SIGINT) is None
        assert rank.wait(60) == 3


SLOW_END = """
import os, threading, time
from jaxmpi.runtime import failures
from jaxmpi.runtime.failures import JobControl
ending = threading.Event()
def abort(code):
    ending.set()
    time.sleep(0.5)
    os._exit(code)
failures.install_hooks(JobControl(0, 2, abort, lambda patience_s: True))
threading.Thread(target=lambda: 1 / 0, daemon=True).start()
ending.wait()
"""


@pytest.mark.e2e
def test_a_process_whose_thread_ends_the_job_does_not_end_well_meanwhile():
    assert python(SLOW_END).returncode == 1


@pytest.mark.parametrize(
    ("text", "cores", "of_two_ranks"),
    [("max 100000", 7, 3), ("250000 100000", 2, 1), ("50000 100000", 1, 1), ("", 7, 3)],
)
def test_cores_of_a_quota(text, cores, of_two_ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "core_mask", lambda: [*range(7)])
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.setattr(process, "QUOTA", tmp_path / "cpu.max")
    if text:
        process.QUOTA.write_text(text)
    assert process.cores() == process.rank_cores() == cores
    monkeypatch.setattr(process, "launched", lambda: process.Launch("mpirun", 0, 4, 0, 2))
    assert process.rank_cores() == of_two_ranks


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_time_limits_that_are_none(text, monkeypatch, capsys):
    monkeypatch.setenv("A_LIMIT_S", text)
    with pytest.raises(SystemExit, match=r"^2$"):
        seconds_from("A_LIMIT_S", 1)
    assert capsys.readouterr().err == f"jaxmpi: error: A_LIMIT_S: got '{text}'; expected seconds > 0\n"


GPUS = [
    # CUDA_VISIBLE_DEVICES, local rank, ranks of the host, GPUs of each -> device chosen, share of its memory
    ("0,1", 1, 2, 1, "1", None),
    ("0,1", 3, 4, 1, "1", "0.450"),
    ("4,5,6,7", 1, 2, 2, "2,3", None),
    ("3", 1, 2, 1, "all", "0.450"),  # the one that is visible; to be corrected if the launcher gave each rank its own
    ("0,-1,1", 1, 3, 1, "all", "0.300"),
    ("", 1, 2, 1, "all", None),
]


@pytest.mark.parametrize(("visible", "local_rank", "local_size", "devices", "device", "share"), GPUS)
def test_each_local_rank_takes_its_gpus_and_share(visible, local_rank, local_size, devices, device, share, monkeypatch):
    """Only JAX's settings and backend are replaced: the GPUs need not be there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv(process.MEMORY_SHARE, "")  # so that it goes with the test
    monkeypatch.delenv(process.MEMORY_SHARE)
    monkeypatch.setattr(process, "_share", "")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    chosen = {}
    monkeypatch.setattr(jax.config, "update", chosen.__setitem__)
    process.pin_gpu(local_rank, local_size, devices)
    assert (chosen.get("jax_cuda_visible_devices", "all"), os.environ.get(process.MEMORY_SHARE)) == (device, share)


SHOW_SHARE = """
import jaxmpi, os
comm = jaxmpi.world()
print(f"share of {comm.rank}:", os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"))
"""


@pytest.mark.e2e
@pytest.mark.parametrize(("second", "share"), [("0", "0.450"), ("1", None)])
def test_ranks_on_one_gpu_share_its_memory_and_those_with_their_own_do_not(second, share):
    """On any machine: which GPU a rank has is read from its environment before the device starts."""
    ranks = [["env", f"CUDA_VISIBLE_DEVICES={gpu}", sys.executable, "-c", SHOW_SHARE] for gpu in ("0", second)]
    ended = run([*mpirun_line(1), *ranks[0], ":", "-n", "1", *ranks[1]], timeout_s=60, env={"JAX_PLATFORMS": "cpu"})
    assert ended.code == 0, ended.out
    assert sorted(ended.out.splitlines()) == [f"share of {rank}: {share}" for rank in (0, 1)]


OF_A_STEP = [
    # what two ranks of srun see, GPUs of the step on this host -> whether both take the same GPU
    ("0", "1", True),
    ("0", "2", False),
    ("0,1", "2", False),
]


@pytest.mark.parametrize(("visible", "gpus", "is_same"), OF_A_STEP)
def test_srun_may_call_every_ranks_own_gpu_0(visible, gpus, is_same, no_launcher, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", gpus)
    found = set()
    for rank in "01":
        for name, value in zip(SLURM, (rank, "2", rank, "2"), strict=True):
            monkeypatch.setenv(name, value)
        found.add(process.my_gpu())
    assert len(found) == (1 if is_same else 2)


@pytest.mark.parametrize(("backend", "is_late"), [("gpu", True), ("cpu", False)])
def test_a_gpu_that_has_started_cannot_be_chosen_any_more(backend, is_late, monkeypatch):
    """If there is no GPU, only JAX's word about its backend is another."""
    jax.devices()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    chosen = []
    monkeypatch.setattr(jax.config, "update", lambda *option: chosen.append(option))
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    with pytest.raises(UsageError, match=r"call jaxmpi\.world\(\) before") if is_late else contextlib.nullcontext():
        process.pin_gpu(1, 2)
    assert chosen == ([] if is_late else [("jax_cuda_visible_devices", "1")])


@pytest.mark.e2e
@pytest.mark.parametrize("platform", ["quantum", "cuda"])
def test_a_platform_that_is_not_there_is_one_sentence(platform):
    """`cuda` is a name that JAX knows: without a GPU it ends in a bare assertion."""
    code = "from jaxmpi.runtime import failures; failures.install_excepthooks(); import jax; jax.random.key(0)"
    job = python(code, JAX_PLATFORMS=platform, CUDA_VISIBLE_DEVICES="-1")
    assert job.returncode == 2
    assert f"JAX_PLATFORMS is '{platform}': unset it" in job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.e2e
@pytest.mark.slow  # two runs
def test_a_run_goes_on_where_stdout_is_closed_or_nobody_reads_it(tmp_path):
    command = f"{sys.executable} -m jaxmpi.tools.cli train -n 2 experiments/digits.py"
    line = f"{command} --train-for 2st --run-dir {tmp_path}"
    for name, redirected, said in (("/a >&-", "", ""), ("/b", " | head -1", "output cannot be written")):
        text = f"({line}{name}; echo code $? >&2){redirected}"
        job = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=100, cwd=ROOT)
        assert "code 0" in job.stderr, job.stderr
        assert said in job.stderr
        assert "Traceback" not in job.stderr
