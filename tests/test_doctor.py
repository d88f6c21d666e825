"""What the doctor says of ranks' facts, and of this machine."""

import re
import time

import pytest

from jaxmpi import doctor
from jaxmpi.config import UsageError
from jaxmpi.doctor import ADVICE, Timed, interfaces, of_test, shown, spelled
from launching import mpirun, run

MULTIPLE = {"threads": "MPI_THREAD_MULTIPLE"}


def rank(host: str = "a", cores: int = 8, mask: tuple[int, ...] = (0, 1), **more) -> dict:
    facts = {
        "host": host,
        "launcher": "srun",
        "cores": cores,
        "may use": list(mask),
        "whole cores": len(mask),
        "shm free": 1 << 30,
        "interfaces": {"eth0": "up, 1000 Mbit/s"},
        "backend": "cpu",
        "devices": ["cpu"],
        "gpus": [],
        "versions": {"jax": "0.10.2"},
    }
    return facts | more


GOOD = [rank(mask=(0, 1, 2, 3)), rank(mask=(4, 5, 6, 7))]
ILLS = {
    "versions": ([rank(), rank("b", versions={"jax": "0.9"})], MULTIPLE, "jax is 0.9 on b (rank 1), 0.10.2 on a (rank"),
    "crowded": ([rank(mask=(0,)), rank(mask=(0,))], MULTIPLE, "a has 2 ranks on 1 cores"),
    "bound": ([rank(mask=(0,)), rank(mask=(1,))], MULTIPLE, "a: 2 ranks are bound to 2 of 8 cores"),
    "threads": (GOOD, {"threads": "MPI_THREAD_SERIALIZED"}, "no overlap and no watchdog"),
    "shared memory": ([rank() | {"shm free": 1 << 20}] * 2, MULTIPLE, "/dev/shm has 1 MiB free, expected 64"),
    "gpus": ([rank(gpus=["0", "1"])], MULTIPLE, "a has 2 GPUs, but JAX runs on its CPU"),
    "mpi": ([rank()], {"missing": "libmpi.so not found"}, "no MPI: libmpi.so not found; one worker runs without"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_every_ill_has_its_advice_and_the_healthy_get_none(name, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    ranks, mpi, words = ILLS[name]
    [line, *_] = ADVICE[name](ranks, mpi)
    assert words in line
    assert ADVICE[name](GOOD, MULTIPLE) == []


def test_what_the_self_test_shows():
    right, wrong = Timed("asa32", 1024, 1e-3, 1.0, True), Timed("ring32", 1024, 1e-3, 1.0, False)
    assert of_test([right], [0.0, 1e-5, 1e-5, 1e-5]) == []
    told = of_test([right, wrong], [0.0, 1e-5, 1e-5, 5e-3])
    assert told[0] == "ring32 gave a wrong mean of 1024 floats: do not train here"
    assert told[1].startswith("rank 3 is 5.0 ms away from rank 0")
    assert of_test([], [0.0]) == []


def test_the_page():
    lines = shown(GOOD, MULTIPLE, [Timed("asa32", 1024, 1e-3, 1.5, True)], [0.0, 2e-5])
    assert lines[-1] == "nothing to change"
    assert "exchange  asa32        4,096 bytes      1.000 ms    1.500 GB/s  right" in lines
    assert "host      a: 8 cores, /dev/shm 1024 MiB free; eth0 up, 1000 Mbit/s" in lines
    assert "rank 1    a: cores 4-7; cpu, cpu" in lines
    assert spelled([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert spelled([]) == "unknown"


def test_interfaces(tmp_path):
    for name, files in {"eth0": {"operstate": "up", "speed": "25000"}, "lo": {}, "veth": {"operstate": "down"}}.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text + "\n")
    assert interfaces(tmp_path) == {"eth0": "up, 25000 Mbit/s", "veth": "down"}
    assert interfaces(tmp_path / "none") == {}


def test_wrong_options(monkeypatch):
    with pytest.raises(UsageError, match=r"got experiment\.py"):
        doctor.main(["experiment.py"])
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(UsageError, match="under a launcher; the number of ranks is its own"):
        doctor.main(["-n", "2"])


def test_one_process_needs_no_mpi_to_run():
    ended = run(["python", "-m", "jaxmpi.cli", "doctor"], timeout_s=60)
    assert ended.code == 0, ended.out
    assert "ranks     1 on 1 hosts, launcher none" in ended.out
    assert "to change" in ended.out or "nothing to change" in ended.out


@pytest.mark.slow  # two ranks: README's block
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_examined_together(ranks):
    begin = time.monotonic()
    ended = mpirun(ranks, "-m", "jaxmpi.doctor", timeout_s=60)
    assert ended.code == 0, ended.out
    assert f"ranks     {ranks} on 1 hosts, launcher Open MPI's mpirun" in ended.out
    assert "threads MPI_THREAD_MULTIPLE" in ended.out
    assert len(re.findall(r"^rank \d", ended.out, re.M)) == ranks  # said once
    assert len(re.findall(r"^exchange .* right$", ended.out, re.M)) == 4
    assert "change" in ended.out.splitlines()[-1] or ended.out.splitlines()[-1].startswith("- ")
    if ranks == 4:
        assert time.monotonic() - begin < 15
