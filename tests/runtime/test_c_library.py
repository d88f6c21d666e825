"""C sources are compiled once, and kept under what they are made of."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxmpi.runtime import compile_cache

LOAD = """
import sys
from pathlib import Path
from jaxmpi.runtime import compile_cache
path, *answers = sys.argv[1:]
print(*(compile_cache.load_c(Path(path), constants={"ANSWER": answer}).answer() for answer in answers))
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


def test_a_damaged_library_is_noticed_and_compiled_again(source, tmp_path):
    """One is cut by a byte, one has a flipped bit, and one is another; two processes find them at once."""
    whole: dict[Path, bytes] = {}
    for answer in (3, 5, 7):
        assert load(source, answer) == answer
        whole |= {path: path.read_bytes() for path in (tmp_path / "jaxmpi" / "c").glob("*.so") if path not in whole}
    first, second, third = whole
    flipped = bytearray(whole[second])
    flipped[len(flipped) // 2] ^= 1
    for path, content in {first: whole[first][:-1], second: flipped, third: whole[first]}.items():
        path.unlink()  # this process has the old one mapped
        path.write_bytes(content)
    line = [sys.executable, "-c", LOAD, str(source), "3", "5", "7"]
    loading = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [each.communicate()[0] for each in loading] == ["3 5 7\n"] * 2
    assert {path: path.read_bytes() for path in first.parent.iterdir()} == whole


def test_where_nothing_can_be_kept_it_is_compiled_each_time(source, tmp_path, monkeypatch):
    assert load(source, 6) == 6
    [cached] = (tmp_path / "jaxmpi" / "c").glob("*.so")
    cached.unlink()
    cached.mkdir()
    assert load(source, 6) == 6
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file
    assert load(source, 5) == 5
