"""C sources are compiled once, and kept under what they are made of."""

import os
import subprocess
import sys

import pytest

from jaxmpi.runtime import compile_cache

LOAD = """
import sys
from pathlib import Path
from jaxmpi.runtime import compile_cache
print(compile_cache.load_c(Path(sys.argv[1]), constants={"ANSWER": 3}).answer())
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    written = tmp_path / "answer.c"
    written.write_text("int answer(void) { return ANSWER; }\n")
    return written


def load(source, answer: int) -> int:
    return compile_cache.load_c(source, constants={"ANSWER": answer}).answer()


def test_a_source_is_compiled_once_for_each_definition_and_text(source, tmp_path, monkeypatch):
    assert [load(source, n) for n in (2, 3)] == [2, 3]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load(source, 2) == 2
    source.write_text("int answer(void) { return 7 * ANSWER; }\n")
    with pytest.raises(OSError, match="no C compiler is on the path"):
        load(source, 2)


def test_cc_names_the_compiler_whose_words_are_in_the_error(source, monkeypatch):
    with pytest.raises(OSError, match=r"(?s)cannot compile answer.c: .*ANSWER"):
        compile_cache.load_c(source)
    assert not list(source.parent.rglob("*.so"))
    monkeypatch.setenv("CC", f"{compile_cache.compiler()[0]} -DANSWER=9")
    assert compile_cache.load_c(source).answer() == 9


@pytest.mark.parametrize("damage", ["cut by a byte", "a flipped bit", "foreign"])
def test_a_damaged_library_is_noticed_and_compiled_again(source, tmp_path, monkeypatch, damage):
    cache = tmp_path / "jaxmpi" / "c"
    assert load(source, 3) == 3
    [name] = [path.name for path in cache.glob("*.so")]
    assert load(source, 4) == 4
    whole = (cache / name).read_bytes()
    [other] = [path.read_bytes() for path in cache.glob("*.so") if path.name != name]
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    damaged = tmp_path / "other" / "jaxmpi" / "c" / name
    damaged.parent.mkdir(parents=True, mode=0o700)
    content = {"cut by a byte": whole[:-1], "a flipped bit": bytes(flipped), "foreign": other}
    damaged.write_bytes(content[damage])
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
    assert load(source, 3) == 3
    [cached] = (tmp_path / "jaxmpi" / "c").glob("*.so")
    cached.unlink()  # this process has the old one mapped
    cached.write_bytes(b"damaged")
    processes = [
        subprocess.Popen([sys.executable, "-c", LOAD, str(source)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [process.communicate()[0] for process in processes] == ["3\n"] * 3
    assert not any(process.returncode for process in processes)


def test_where_nothing_can_be_kept_it_is_compiled_each_time(source, tmp_path, monkeypatch):
    assert load(source, 6) == 6
    [cached] = (tmp_path / "jaxmpi" / "c").glob("*.so")
    cached.unlink()
    cached.mkdir()
    assert load(source, 6) == 6
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file
    assert load(source, 5) == 5
