"""Loaders that are processes: the same batches as threads, and what becomes of them when something goes wrong."""

import contextlib
import dataclasses
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from PIL import Image

from jaxmpi.comm.topology import gather_workers
from jaxmpi.config.data import Data
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.shared_memory import Segment
from jaxmpi.data import ArraySource, CorruptExample, Loader, LoaderPool, Sampler, mpi_loaders, open_source
from jaxmpi.data.feed import open_feed
from jaxmpi.data.loader_pool import make_pool, python_line
from jaxmpi.data.loader_worker import BOARD, NO_SLOT, Make, SharedPickle
from jaxmpi.launch.postmortem import children_of
from jaxmpi.model.contract import Model
from jaxmpi.runtime import failures
from launching import ROOT, mpirun, mpirun_line, run, train, wait_until
from loader_sources import PX, Numbered, TwoArguments, Unpicklable
from runs import column

AREA = {"crop": 24, "crop_area": (0.2, 1.0), "mirror": True}
IN_PROCESSES = {"loader": "processes", "loaders": 2}
PROCESSES = Data(**IN_PROCESSES)


def write_photographs(folder: Path, n: int) -> None:
    """JPEG files of noise in two classes."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / "train" / name).mkdir(parents=True)
        for i in range(n // 2):
            pixels = np.kron(rng.integers(0, 255, (8, 10, 3)), np.ones((8, 8, 1))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "train" / name / f"{i}.jpg", quality=90)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    write_photographs(folder, 22)
    return folder


@pytest.fixture
def own(tmp_path) -> Path:
    """A folder that a test may damage."""
    write_photographs(tmp_path, 6)
    return tmp_path


def folder_data(folder: Path, **kwargs) -> Data:
    return Data(source="imagefolder", dir=str(folder), **(AREA | IN_PROCESSES | kwargs))


def loader(source, batch=4, data=PROCESSES, rank=0, size=1, train=True, **kwargs) -> Loader:
    return Loader(source, Sampler(len(source), batch, rank, size, seed=0, shuffle=train), data, train, **kwargs)


def children() -> list[int]:
    """Loader processes of this one."""
    return [pid for pid in children_of(os.getpid()) if "jaxmpi.data.loader_worker" in command(pid)]


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def mapped() -> list[str]:
    """Memory of segments that this process has mapped or open."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:jaxmpi" in line]


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    gc.collect()
    assert children() == []
    assert mapped() == []


class TestSameBatches:
    @pytest.mark.parametrize(("kind", "loaders"), [("processes", 3), ("threads", 4)])
    def test_whatever_the_number_and_kind_of_loaders(self, photographs, kind, loaders):
        source = open_source(folder_data(photographs), "train")
        two = folder_data(photographs, loader="threads", loaders=2)
        others = folder_data(photographs, loader=kind, loaders=loaders, prefetch=1)
        with loader(source, 5, two, stop_step=7) as one, loader(source, 5, others, stop_step=7) as other:
            for a, b in zip(one, other, strict=True):
                for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                    assert np.array_equal(x, y)
                assert a.image.shape == (5, 24, 24, 3)

    @pytest.mark.parametrize(
        ("cores", "workers", "data", "loaders"),
        [
            (3, 1, {}, 3),
            (5, 2, {}, 4),
            (1, 2, {}, 2),
            (64, 1, {}, 8),
            (3, 1, {"loader": "threads"}, 3),
            (64, 2, {"loaders": 20}, 40),
            (64, 1, {"source": "digits"}, 2),
        ],
    )
    def test_loaders_that_decode_are_as_many_as_cores_allow(self, photographs, cores, workers, data, loaders):
        data = dataclasses.replace(folder_data(photographs), **{"loader": "auto", "loaders": 0, **data})
        assert make_pool(data, open_source(data, "train"), cores, workers).size == loaders

    def test_training_and_evaluation_share_loaders(self, photographs):
        data = folder_data(photographs)
        source = open_source(data, "train")
        with LoaderPool("processes", 2, 60) as pool, loader(source, 4, data, pool=pool) as training:
            first = next(training).image.copy()
            for _ in range(2):
                with loader(source, 4, data, train=False, pool=pool) as evaluation:
                    assert sum(int(batch.weight.sum()) for batch in evaluation) == 22
            assert len(children()) == 2
            assert next(training).step == 1
        with loader(source, 4, data) as again:
            assert np.array_equal(next(again).image, first)


class TestMemory:
    def test_batches_on_a_device_stay_as_they_are(self, photographs):
        """A device on the host takes images where they lie; their slot must not be filled again meanwhile."""
        data = folder_data(photographs, prefetch=1)
        with loader(open_source(data, "train"), 4, data, stop_step=8) as batches:
            on_device, expected = [], []
            for batch in batches:
                expected.append(batch.image.copy())
                on_device.append(jax.device_put(batch.image))
                del batch
        for kept, image in zip(on_device, expected, strict=True):
            assert np.array_equal(kept, image)

    def test_a_batch_is_handed_over_without_a_copy(self, photographs):
        data = folder_data(photographs)
        with loader(open_source(data, "train"), 4, data) as batches:
            batch = next(batches)
            address = batch.image.__array_interface__["data"][0]
            spans = [line.split()[0].split("-") for line in mapped()]
            assert any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)
            array = jax.device_put(batch.image)
            assert array.unsafe_buffer_pointer() == address

    def test_a_source_s_arrays_stay_out_of_its_pickle(self):
        content = {"images": np.arange(100_000), "empty": np.zeros(0), "labels": [np.arange(3)] * 2}
        pickled = SharedPickle(content)
        assert pickled.sizes[0] < 2000
        opened = pickled.open()
        assert np.array_equal(opened["images"], content["images"])
        assert not opened["images"].flags.writeable
        assert np.array_equal(opened["labels"][1], [0, 1, 2])
        assert opened["empty"].size == 0


class TestErrors:
    @pytest.mark.parametrize("kind", ["processes", "threads"])
    def test_corrupt_examples_stop_or_are_skipped(self, kind):
        source, data = Numbered(12, {5, 6}), Data(loader=kind, loaders=2)
        with loader(source, data=data, train=False) as batches:
            assert next(batches).label.tolist() == [0, 1, 2, 3]
            with pytest.raises(CorruptExample) as caught:
                next(batches)
            assert (caught.value.where, caught.value.index) == ("file5.jpg", 5)
            assert list(batches) == []
        with loader(source, data=dataclasses.replace(data, on_error="skip"), train=False) as batches:
            weights = [batch.weight.tolist() for batch in batches]
            assert batches.skipped == 2
        assert weights == [[1] * 4, [1, 0, 0, 1], [1] * 4]

    @pytest.mark.parametrize("error", [KeyError, TwoArguments])
    def test_any_error_comes_back_with_the_example_named(self, error):
        with loader(Numbered(4, {2}, error), data=PROCESSES, train=False) as batches:
            with pytest.raises((KeyError, RuntimeError), match="by the user") as caught:
                next(batches)
            if error is KeyError:
                assert "file2.jpg (example 2, epoch 0)" in caught.value.__notes__[0]
                assert "loader_sources.py" in caught.value.__notes__[1]

    def test_sources_that_a_process_cannot_have(self, monkeypatch):
        with pytest.raises(UsageError, match=r"socket.*data\.loader = threads"):
            loader(Unpicklable(4))
        monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).name != "tests"])
        with loader(Numbered(4)) as batches, pytest.raises(UsageError, match=r"loader_sources.*data\.loader = threads"):
            next(batches)
        source = Numbered(4)
        source.in_process = True  # it changes while it is read
        with pytest.raises(UsageError, match="threads"):
            loader(source)

    def test_files_that_cannot_be_read_end_the_run_by_name(self, own):
        """A file system that fails would otherwise be skipped whole. Read by threads: test_trouble.py."""
        data = folder_data(own, on_error="skip", loaders=1)
        source = open_source(data, "train")
        path = own / "train" / "dog" / "2.jpg"
        path.unlink()
        for reason in ("No such file", "Input/output error"):
            with (
                loader(source, 6, data) as batches,
                pytest.raises(TrainingError, match=rf"{path} \(example 5\) cannot be read: .*{reason}"),
            ):
                next(batches)
            path.unlink(missing_ok=True)
            path.symlink_to("/proc/self/mem")  # reading it gives EIO


def stick(folder: Path) -> Path:
    """A file that never ends."""
    path = folder / "train" / "dog" / "1.jpg"
    path.unlink()
    os.mkfifo(path)
    return path


class TestLoadersThatFail:
    def test_one_that_stalls_is_named_with_its_file(self, own):
        data = folder_data(own, stall_timeout_s=0.5)
        source, path = open_source(data, "train"), stick(own)
        with (
            loader(source, 6, data) as batches,
            pytest.raises(TrainingError, match=rf"loader \d of 2 has been at {path} \(example 4\) for 1 s"),
        ):
            next(batches)

    def test_one_that_dies_is_named_with_its_file(self, own):
        data = folder_data(own)
        source, path = open_source(data, "train"), stick(own)
        with loader(source, 6, data) as batches:
            pool = batches._pool

            def kill() -> None:
                at: list[int] = []
                wait_until(
                    lambda: bool(at.extend(i for i in range(2) if str(path) in pool.current_example(i)[0]) or at)
                )
                os.kill(int(pool._board["pid"][at[0]]), signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            match = rf"loader \d of 2 \(process \d+\) was killed by SIGKILL at {path} \(example 4\)"
            with pytest.raises(TrainingError, match=match):
                next(batches)
            killer.join()

    def test_one_that_is_stopped_is_noticed_and_ended(self, own, monkeypatch):
        monkeypatch.setattr("jaxmpi.data.loader_pool.LoaderProcess.JOIN_S", 0.2)
        data = folder_data(own, loaders=1, stall_timeout_s=0.5)
        with loader(open_source(data, "train"), 2, data) as batches:
            next(batches)
            (pid,) = children()
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(TrainingError, match="loader 0 of 1 has been"):
                list(batches)
        assert children() == []


def test_a_process_has_the_package_as_users_know_it_and_no_jax(tmp_path, monkeypatch):
    """Wherever it has it from: a script may have left the folder that is its first on sys.path."""
    (tmp_path / "named.py").write_text(
        "import sys, jaxmpi\n"
        "def main(*args): print(jaxmpi.UsageError.__name__, *args, {'jax', 'mpi4py'} & {*sys.modules})\n"
    )
    monkeypatch.chdir(tmp_path)
    others = [path for path in sys.path if path and not (Path(path) / "jaxmpi").is_dir()]
    monkeypatch.setattr(sys, "path", ["", *others])
    out = subprocess.run(python_line("named", 1, "two"), capture_output=True, text=True, timeout=60)
    assert out.stdout == "UsageError 1 two set()\n", out.stderr


def test_a_process_that_answers_a_worker_that_is_gone_ends_in_silence():
    """The worker no longer reads, and the loader, which still reads, is the first to notice."""
    worker_end, loader_end = socket.socketpair()
    board = Segment(BOARD.itemsize)
    line = python_line("jaxmpi.data.loader_worker", loader_end.fileno(), os.getpid(), False, 0, board.address)
    with subprocess.Popen(line, pass_fds=[loader_end.fileno()], stderr=subprocess.PIPE, text=True) as process:
        worker_end.shutdown(socket.SHUT_RD)
        pipe = Connection(worker_end.detach())
        pipe.send(Make(1, 1, NO_SLOT, 0, 0, 1, [0]))  # of no job: its answer says so
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    pipe.close()
    loader_end.close()


PARENT = """
    import os, signal, sys, time
    from jaxmpi.config import Data
    from jaxmpi.data import Loader, Sampler, open_source
    data = Data(source="imagefolder", dir={folder!r}, crop=24, loader="processes", loaders=3, prefetch=1)
    source = open_source(data, "train")
    batches = Loader(source, Sampler(6, 3, seed=0), data, True)
    next(batches)
    pids = batches._pool._board["pid"].tolist()
    print(*pids, flush=True)
    {stuck}
    {end}
"""
ENDS = {
    # Other signals that nobody handles, and `os._exit`, are alike: no code of the worker runs any more.
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    # A shell that starts a job in the background has it ignore SIGINT.
    "SIGINT": "signal.signal(2, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "out of the slots": "[next(batches) for _ in range(5)]; sys.exit(0)",
}


@pytest.mark.e2e
@pytest.mark.parametrize("end", ENDS)
def test_no_loader_outlives_its_worker(end, own):
    """However the worker ends: a loader at work, one that is stopped, and one that was sent SIGTERM and SIGINT."""
    stuck = "os.kill(pids[1], signal.SIGTERM); os.kill(pids[1], signal.SIGINT)"
    if end != "out of the slots":
        stuck += "; os.kill(pids[2], signal.SIGSTOP)"
    script = textwrap.dedent(PARENT).format(folder=str(own), end=ENDS[end], stuck=stuck)
    job = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
    pids = [int(pid) for pid in re.findall(r"\d+", job.stdout.splitlines()[0])]
    assert len(pids) == 3, job.stderr
    assert (job.returncode == 0) == (end == "out of the slots"), job.stderr
    wait_until(lambda: not any("jaxmpi.data.loader_worker" in command(pid) for pid in pids), 10)


EXPERIMENT = """
import sys
import jax.numpy as jnp
sys.path.insert(0, {tests!r})
from loader_sources import Numbered
from jaxmpi.config import Data, ExchangeConfig, Experiment, Optim
from jaxmpi.model import Model

def init(key, image):
    return {{"w": jnp.zeros(({px} * {px} * 3, {classes}))}}, {{}}

def apply(params, model_state, image, key, train):
    return image.reshape(len(image), -1) @ params["w"], model_state

experiment = Experiment(
    model=Model("softmax", init, apply, input_shape=({px}, {px}, 3), classes={classes}),
    data={data},
    optim=Optim("sgd", lr=0.01),
    exchange=ExchangeConfig("asa32"),
    effective_batch=4,
    train_for="3ep",
    log_every=1,
)
"""


@pytest.fixture
def experiment(own) -> Path:
    """Six photographs, one of them damaged, and an experiment that trains on them."""
    damaged = own / "train" / "dog" / "1.jpg"
    damaged.write_bytes(damaged.read_bytes()[:200])
    options = 'crop=24, crop_area=(0.3, 1.0), mirror=True, validation_split="train"'
    return write_experiment(own, f"Data('imagefolder', {str(own)!r}, {options})", px=24, classes=2)


def write_experiment(folder: Path, data: str, px: int, classes: int) -> Path:
    """A linear model on these data."""
    path = folder / "experiment.py"
    path.write_text(EXPERIMENT.format(tests=str(ROOT / "tests"), data=data, px=px, classes=classes))
    return path


def leftovers(folder: Path) -> list[int]:
    """Processes whose command line names the folder, as those of loaders do with Python's path."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if str(folder) in command(pid)]


@pytest.mark.e2e
def test_a_run_skips_and_counts_corrupt_examples(experiment):
    """Two workers in one process, three epochs and an evaluation, all with the same loader processes."""
    run_dir = experiment.parent / "run"
    skip = ("--data.on-error", "skip", "--data.max-skipped", "0.2", "--devices", "2", "--run-dir", str(run_dir))
    ended = train(1, str(experiment), *skip, timeout_s=100)
    assert ended.code == 0, ended.out[-3000:]
    assert column(run_dir, "train", "skipped")[-1] == 3
    assert column(run_dir, "eval", "eval_count")[-1] == 5
    assert "dog/1.jpg" in ended.out
    assert leftovers(experiment.parent) == []


SPAWNING = """
    import os, signal, time
    import jaxmpi
    comm = jaxmpi.world()
    import jaxmpi.data.mpi_loaders
    from jaxmpi.config import Data
    from jaxmpi.data import LoaderPool, Loader, Sampler, open_source
    found = []
    for kind in ("threads", "spawn"):
        data = Data(source="imagefolder", dir={folder!r}, crop=24, crop_area=(0.2, 1.0), loader=kind, loaders=2)
        source = open_source(data, "train")
        sampler = Sampler(6, 4, comm.rank, comm.size, seed=0)
        with LoaderPool(kind, 2, 60) as pool:
            for train, stop in ((True, 5), (False, 1)):
                with Loader(source, sampler, data, train, stop_step=stop, pool=pool) as batches:
                    found.append(b"".join(batch.image.tobytes() + batch.label.tobytes() for batch in batches))
    print("equal" if found[:2] == found[2:] else "different", flush=True)
    if {end!r} == "killed" and comm.rank == 1:
        batches = Loader(source, Sampler(6, 4, seed=0), data, True)
        next(batches)
        os.kill(os.getpid(), signal.SIGKILL)
    if {end!r} == "killed":
        time.sleep(100)
    jaxmpi.same_on_all_ranks("done", 1)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("end", ["well", pytest.param("killed", marks=pytest.mark.slow)])
def test_loaders_that_mpi_starts(own, end):
    """As many ranks as the launcher has slots: none is left for loaders."""
    script = own / "job.py"
    script.write_text(textwrap.dedent(SPAWNING).format(folder=str(own), end=end))
    ended = mpirun(2, str(script), timeout_s=60)
    assert not ended.timed_out, ended.out[-3000:]
    assert ended.out.count("equal") == 2, ended.out[-3000:]
    assert (ended.code == 0) == (end == "well"), ended.out[-3000:]
    wait_until(lambda: leftovers(own) == [])


@pytest.mark.parametrize(
    ("limit_s", "is_asked", "error"), [(0.1, False, TrainingError), (60, True, SystemExit)], ids=["late", "asked"]
)
def test_mpi_that_does_not_start_loaders_ends_the_run(limit_s, is_asked, error, monkeypatch):
    """Under load Open MPI may hang in the call for ever."""
    over = threading.Event()
    comm = SimpleNamespace(Spawn=lambda *_: over.wait(60))
    mpi = SimpleNamespace(COMM_SELF=comm, Info=SimpleNamespace(Create=dict), Get_processor_name=str, Exception=OSError)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    monkeypatch.setattr(mpi_loaders, "LEAVE_S", 0.1)
    monkeypatch.setattr(failures, "START_TIMEOUT_S", limit_s)
    monkeypatch.setattr(failures, "end_job", sys.exit)
    monkeypatch.setattr(failures.job, "is_asked_to_leave", lambda: is_asked)
    monkeypatch.setattr(failures.job, "has_spawned", False)
    with pytest.raises(error) as raised:
        mpi_loaders.start_spawned(2, Segment(64))
    assert not is_asked or raised.value.code == failures.PREEMPTED
    over.set()


LOSSES = {  # of a loader that MPI has started
    "stalls": ("sleep_s=100", r"loader \d of \d+ has been at file\d\.jpg \(example \d\) for \d+ s"),
    "is stopped": ("ends_at=3, by='SIGSTOP'", r"loader \d of \d+ has been at file3\.jpg \(example 3\) for \d+ s"),
    "dies": ("ends_at=3", r"loader \d of \d+ \(process \d+\) was killed by SIGKILL at file3\.jpg \(example 3\)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loader_that_mpi_started_is_named_with_its_file(loss, tmp_path):
    options, message = LOSSES[loss]
    data = f"Data('array', train=Numbered(6, {options}), validation=Numbered(6), loader='spawn', stall_timeout_s=2)"
    ended = train(2, str(write_experiment(tmp_path, data, PX, 6)), "--run-dir", str(tmp_path / "run"), timeout_s=100)
    assert not ended.timed_out, ended.out[-3000:]
    assert ended.code != 0
    assert re.search(message, ended.out), ended.out[-3000:]
    wait_until(lambda: leftovers(tmp_path) == [])


@pytest.mark.e2e
def test_a_launcher_that_has_no_room_for_loaders(experiment, tmp_path):
    """A host that takes as many processes as there are ranks, and not one more: MPI itself refuses."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2 max_slots=2\n")
    launcher, *options = mpirun_line(2)
    job = [sys.executable, "-m", "jaxmpi.train", str(experiment), "--run-dir", str(tmp_path / "run")]
    ended = run(
        [launcher, "--hostfile", str(hosts), *options, *job, "--data.loader", "spawn", "--data.loaders", "2"],
        timeout_s=60,
    )
    assert not ended.timed_out, ended.out[-3000:]
    assert ended.code != 0, ended.out[-3000:]  # the launcher's own, for what it could not start
    assert "data.loader: got spawn, but MPI cannot start 2 loaders a worker" in ended.out
    wait_until(lambda: leftovers(tmp_path) == [])


class Compressed(ArraySource):
    """Images that loaders decode."""

    def encoded(self, index: int) -> tuple[bytes, int]:
        raise AssertionError("nobody reads it here")


class Living(Compressed):
    """The same, which change while they are read."""

    in_process = True


@pytest.mark.parametrize(("kind", "loaders"), [(Compressed, "processes"), (Living, "threads")])
def test_a_validation_that_only_threads_can_read_has_loaders_of_its_own(kind, loaders):
    arrays = np.zeros((8, 8, 8, 1), np.uint8), np.arange(8) % 4
    data = Data("array", train=Compressed(*arrays, classes=4), validation=kind(*arrays, classes=4), channels=1)
    model = Model("any", lambda *_: ({}, {}), lambda *_: (None, {}), (8, 8, 1), 4)
    experiment, workers = Experiment(model=model, data=data), gather_workers(1)
    pool = open_feed(experiment, "train", 4, workers).pool
    validation = open_feed(experiment, "validation", 4, workers, pool=pool)
    assert (pool.kind, validation.pool.kind) == ("processes", loaders)
    assert (validation.pool is pool) == (kind is Compressed)
