"""Check what the doctor says of ranks' facts, and of this machine."""

import numpy as np
import pytest

from jaxmpi.comm import mpi_info
from jaxmpi.core.env import getting_mpi
from jaxmpi.core.errors import UsageError
from jaxmpi.tools import cli
from jaxmpi.tools.doctor import format_pairs, pair_speeds, slow_pairs, suggest_changes
from launching import run

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
        "c trouble": "",
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
    "compiler": (
        [rank(), rank() | {"c trouble": "no cc"}, rank("b") | {"c trouble": "no cc"}],
        MULTIPLE,
        "b: no cc: a small call",
    ),
}


@pytest.mark.parametrize("name", ILLS)
def test_every_ill_has_its_advice(name, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    ranks, mpi, words = ILLS[name]
    assert any(words in line for line in suggest_changes(ranks, mpi))
    assert list(suggest_changes(GOOD, MULTIPLE)) == []


def test_a_pair_with_a_slow_link_is_named():
    """A trip is 1 MiB there and 1 MiB back; 0.5 GB/s between hosts but for one pair, 5 GB/s inside one."""
    hosts = ["a", "a", "b", "c"]
    trips_s = np.full((4, 4), 2 * 2**20 / 0.5e9)
    trips_s[0, 1] = trips_s[1, 0] = 2 * 2**20 / 5e9
    trips_s[1, 3], trips_s[3, 1] = 2 * 2**20 / 0.01e9, 1.0  # the quicker of both ranks' clocks counts
    np.fill_diagonal(trips_s, np.nan)
    pairs = pair_speeds(trips_s, hosts)
    assert [(p.a, p.b) for p in (pairs[0], pairs[-1])] == [(1, 3), (0, 1)]
    assert format_pairs(pairs, hosts) == [
        "pairs     on one host: 5 to 5 GB/s; slowest rank 0 on a and rank 1 on a",
        "pairs     on two hosts: 0.01 to 0.5 GB/s; slowest rank 1 on a and rank 3 on c",
    ]
    hint = "rank 1 on a and rank 3 on c exchange 0.01 GB/s, pairs on two hosts 0.5 in the median: look at the network"
    [line] = slow_pairs(pairs, hosts)
    assert line.startswith(hint)
    assert slow_pairs(pair_speeds(np.full((1, 1), np.nan), ["a"]), ["a"]) == []


def test_wrong_options(monkeypatch):
    with pytest.raises(UsageError, match=r"got experiment\.py"):
        cli.run(["doctor", "experiment.py"])
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(UsageError, match="under a launcher; the number of ranks is its own"):
        cli.run(["doctor", "-n", "2"])


@pytest.mark.e2e
def test_without_mpi4py_it_says_how_this_environment_comes_by_an_mpi(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError('none here', name='mpi4py')")
    ended = run(["python", "-m", "jaxmpi.tools.cli", "doctor"], timeout_s=100, env={"PYTHONPATH": str(tmp_path)})
    assert ended.code == 0, ended.out
    assert "MPI       not used" in ended.out
    finding = f"- one worker runs, but not several: mpi4py cannot be imported (none here); {getting_mpi()}"
    assert finding in ended.out.splitlines()


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        ("Open MPI v5.0.10, package: Open MPI builder@host, ident: 5.0.10\0", "Open MPI v5.0.10"),
        (
            "MPICH Version:\t4.0.2\nMPICH Release date:\tThu Apr  7\nMPICH configure:\t--build=x,y\n",
            "MPICH Version: 4.0.2",
        ),
    ],
)
def test_of_an_mpi_its_name_and_release_are_shown(version, shown):
    assert mpi_info.library_of(version) == shown
