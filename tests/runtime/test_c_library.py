"""C sources are compiled once, and kept under what they are made of."""

import os
import subprocess
import sys

import pytest

from jaxmpi.runtime import c_library

LOAD = """
import sys
from pathlib import Path
from jaxmpi.runtime import c_library
print(c_library.load(Path(sys.argv[1]), constants={"ANSWER": 3}).answer())
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    written = tmp_path / "answer.c"
    written.write_text("int answer(void) { return ANSWER; }\n")
    return written


def test_a_source_is_compiled_once_for_each_definition(source, tmp_path, monkeypatch):
    assert [c_library.load(source, constants={"ANSWER": n}).answer() for n in (2, 3)] == [2, 3]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert c_library.load(source, constants={"ANSWER": 2}).answer() == 2
    with pytest.raises(OSError, match="no C compiler is on the path"):
        c_library.load(source, constants={"ANSWER": 4})


def test_another_source_of_that_name_is_another_library(source):
    assert c_library.load(source, constants={"ANSWER": 1}).answer() == 1
    source.write_text("int answer(void) { return 7 * ANSWER; }\n")
    assert c_library.load(source, constants={"ANSWER": 1}).answer() == 7


def test_what_the_compiler_says_is_in_the_error(source):
    with pytest.raises(OSError, match=r"(?s)cannot compile answer.c: .*ANSWER"):
        c_library.load(source)
    assert not list(source.parent.rglob("*.so"))


def test_cc_names_the_compiler(source, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", f"{c_library.compiler()[0]} -DANSWER=9")
    assert c_library.load(source).answer() == 9


@pytest.mark.parametrize("damage", ["cut by a byte", "a flipped bit", "foreign"])
def test_a_damaged_library_is_noticed_and_compiled_again(source, tmp_path, monkeypatch, damage):
    cache = tmp_path / "jaxmpi" / "c"
    assert c_library.load(source, constants={"ANSWER": 3}).answer() == 3
    [name] = [path.name for path in cache.glob("*.so")]
    assert c_library.load(source, constants={"ANSWER": 4}).answer() == 4
    whole = (cache / name).read_bytes()
    [other] = [path.read_bytes() for path in cache.glob("*.so") if path.name != name]
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    damaged = tmp_path / "other" / "jaxmpi" / "c" / name
    damaged.parent.mkdir(parents=True, mode=0o700)
    damaged.write_bytes(
        {
            "cut by a byte": whole[:-1],
            "a flipped bit": bytes(flipped),
            "foreign": other,
        }[damage]
    )
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, str(source)],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "other")},
        capture_output=True,
        text=True,
    )
    assert (loaded.returncode, loaded.stdout) == (0, "3\n"), loaded
    assert damaged.read_bytes() == whole
    assert [path.name for path in damaged.parent.iterdir()] == [name]


def test_processes_that_find_a_damaged_library_at_once_all_load_a_whole_one(source, tmp_path):
    assert c_library.load(source, constants={"ANSWER": 3}).answer() == 3
    [cached] = (tmp_path / "jaxmpi" / "c").glob("*.so")
    cached.unlink()  # this process has the old one mapped
    cached.write_bytes(b"damaged")
    processes = [
        subprocess.Popen([sys.executable, "-c", LOAD, str(source)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [process.communicate()[0] for process in processes] == ["3\n"] * 3
    assert not any(process.returncode for process in processes)


def test_a_folder_in_the_place_of_a_library_is_no_obstacle(source, tmp_path):
    assert c_library.load(source, constants={"ANSWER": 6}).answer() == 6
    [cached] = (tmp_path / "jaxmpi" / "c").glob("*.so")
    cached.unlink()
    cached.mkdir()
    assert c_library.load(source, constants={"ANSWER": 6}).answer() == 6


def test_where_nothing_can_be_kept_it_is_compiled_each_time(source, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file
    assert c_library.load(source, constants={"ANSWER": 5}).answer() == 5
