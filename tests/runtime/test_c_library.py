"""C sources are compiled once, and kept under what they are made of."""

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
def test_a_damaged_library_is_noticed_and_compiled_again(source, tmp_path, damage):
    assert load(source, 4) == 4
    [other] = (tmp_path / "jaxmpi" / "c").glob("*.so")
    foreign = other.read_bytes()
    other.unlink()
    assert load(source, 3) == 3
    [cached] = (tmp_path / "jaxmpi" / "c").glob("*.so")
    whole = cached.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    cached.unlink()  # this process has the old one mapped
    cached.write_bytes({"cut by a byte": whole[:-1], "a flipped bit": flipped, "foreign": foreign}[damage])
    loading = [
        subprocess.Popen([sys.executable, "-c", LOAD, str(source)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [each.communicate()[0] for each in loading] == ["3\n"] * 2  # processes that find it at once
    assert [path.read_bytes() for path in cached.parent.iterdir()] == [whole]


def test_where_nothing_can_be_kept_it_is_compiled_each_time(source, tmp_path, monkeypatch):
    assert load(source, 6) == 6
    [cached] = (tmp_path / "jaxmpi" / "c").glob("*.so")
    cached.unlink()
    cached.mkdir()
    assert load(source, 6) == 6
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file
    assert load(source, 5) == 5
