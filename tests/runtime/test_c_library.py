"""C sources are compiled once, and kept under what they are made of."""

import ctypes

import pytest

from jaxmpi.runtime import c_library


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    written = tmp_path / "answer.c"
    written.write_text("int answer(void) { return ANSWER; }\n")
    return written


def test_a_source_is_compiled_once_for_each_definition(source, tmp_path, monkeypatch):
    assert [c_library.load(source, [f"ANSWER={n}"]).answer() for n in (2, 3)] == [2, 3]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert c_library.load(source, ["ANSWER=2"]).answer() == 2
    with pytest.raises(OSError, match="no C compiler is on the path"):
        c_library.load(source, ["ANSWER=4"])


def test_another_source_of_that_name_is_another_library(source):
    assert c_library.load(source, ["ANSWER=1"]).answer() == 1
    source.write_text("int answer(void) { return 7 * ANSWER; }\n")
    assert c_library.load(source, ["ANSWER=1"]).answer() == 7


def test_what_the_compiler_says_is_in_the_error(source):
    with pytest.raises(OSError, match=r"(?s)cannot compile answer.c: .*ANSWER"):
        c_library.load(source)
    assert not list(source.parent.rglob("*.so"))


def test_cc_names_the_compiler(source, tmp_path, monkeypatch):
    found = c_library.compiler()
    other = tmp_path / "my-cc"
    other.write_text(f'#!/bin/sh\nexec {found} -DANSWER=9 "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("CC", str(other))
    assert isinstance(loaded := c_library.load(source), ctypes.CDLL)
    assert loaded.answer() == 9
