"""Room for parts of the data: what processes need, what a machine has left, and the sizes of groups that fit."""

import sys

import numpy as np
import pytest

from jaxmpi.config.data import Data
from jaxmpi.core import shared_memory
from jaxmpi.core.errors import UsageError
from jaxmpi.data import memory_source


class TestRoom:
    def test_more_than_the_machine_has_is_refused(self):
        assert 2**20 < shared_memory.available_bytes() < 2**50
        with pytest.raises(UsageError, match=r"1,125,900\.0 GB more are needed on this machine, .* left; .*group_size"):
            memory_source.check_alone(2**50)

    def test_ranks_of_a_host_need_it_together(self):
        hosts = (0, 1, 0, 1)
        rows = np.array([[2e9, 5e9], [2e9, 4e9], [3e9, 5e9], [2e9, 4e9]])
        memory_source.check_room(rows, hosts)
        rows[3, 0] = 3e9
        said = r"5\.0 GB more are needed by 2 ranks on rank 1's machine, which has 4\.0 GB left"
        with pytest.raises(UsageError, match=said):
            memory_source.check_room(rows, hosts)

    def test_the_second_part_of_a_shuffle_is_counted(self, monkeypatch):
        monkeypatch.setattr(memory_source, "available_bytes", lambda: 7)
        assert memory_source.room(1000, 100).tolist() == [1900, 7]
        assert memory_source.room(1000, 100, copies=2).tolist() == [3900, 7]
        assert memory_source.room(10 * memory_source.CHUNK_BYTES, 0, copies=2).tolist() == [
            22 * memory_source.CHUNK_BYTES,
            7,
        ]


class TestAvailable:
    OWN = "/sys/fs/cgroup/job_7/task_0"

    @pytest.fixture
    def files(self, monkeypatch):
        """Files of the kernel: 8 GB of the machine are available, and the task's own group has no limit."""
        files = {"/proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable:   8000000 kB\n"}
        files |= {"/proc/self/cgroup": "4:memory:/x\n0::/job_7/task_0\n", f"{self.OWN}/memory.max": "max\n"}
        monkeypatch.setattr(shared_memory, "read", lambda path: files.get(str(path), ""), raising=False)
        return files

    @pytest.mark.parametrize("group", ["/job_7", "/job_7/task_0", ""])
    def test_the_limit_of_any_group_above(self, files, group):
        """Files in the page cache go when memory is needed."""
        place = f"/sys/fs/cgroup{group}"
        files |= {f"{place}/memory.max": "2000000000\n", f"{place}/memory.current": "1900000000\n"}
        assert shared_memory.available_bytes() == 100_000_000
        files[f"{place}/memory.stat"] = "anon 500\nfile 700\ninactive_file 400000000\nactive_file 300000000\n"
        assert shared_memory.available_bytes() == 800_000_000

    @pytest.mark.parametrize("group", ["/x", ""])
    def test_the_limit_of_a_group_of_version_1(self, files, group):
        """A container sees the root of the mount, whatever path the machine gives its group."""
        place = f"/sys/fs/cgroup/memory{group}"
        files |= {f"{place}/memory.limit_in_bytes": "2000000000\n", f"{place}/memory.usage_in_bytes": "1900000000\n"}
        files[f"{place}/memory.stat"] = "active_file 1\ntotal_inactive_file 400000000\ntotal_active_file 300000000\n"
        assert shared_memory.available_bytes() == 800_000_000

    def test_a_system_that_does_not_say(self, monkeypatch):
        monkeypatch.setattr(shared_memory, "read", lambda path: "", raising=False)
        assert shared_memory.available_bytes() == sys.maxsize


def test_group_sizes_divide_the_workers_and_cut_no_process_of_several():
    assert [memory_source.check_group(group, 8) for group in (0, 1, 4)] == [8, 1, 4]
    assert [memory_source.check_group(group, 8, each=4) for group in (0, 1, 2, 4, 8)] == [8, 1, 2, 4, 8]
    for group, workers, each, said in ((6, 12, 4, "1, 2, 4, 12"), (3, 8, 1, "1, 2, 4, 8"), (16, 8, 1, "1, 2, 4, 8")):
        with pytest.raises(UsageError, match=rf"data\.group_size: got {group} .* one of {said}"):
            memory_source.check_group(group, workers, each)


def test_the_smallest_group_that_fits_is_chosen():
    """Eight ranks on two hosts, 8 GB of records and two chunks of 64 MiB a rank; half of what is left is taken."""
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)

    def chosen(left_bytes: float, copies: float = 2.0) -> int:
        return memory_source.smallest_group(8e9, copies, np.array([9e12] * 4 + [left_bytes] * 4), hosts)

    assert [chosen(left) for left in (2 * 33e9, 2 * 32e9, 2 * 17e9, 2 * 16e9, 2 * 9e9, 1e9)] == [1, 4, 4, 8, 8, 8]
    assert chosen(2 * 18e9, copies=1.1) == 2


@pytest.mark.parametrize("size", [-1, "some"])
def test_a_group_size_that_is_none(size):
    with pytest.raises(UsageError, match=r"data\.group_size"):
        Data(group_size=size)
