"""C sources are compiled once, and kept under what they are made of."""

import pytest

from jaxmpi.runtime import c_library


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


def test_a_damaged_library_is_compiled_anew(source, tmp_path, monkeypatch):
    assert c_library.load(source, constants={"ANSWER": 3}).answer() == 3
    [kept] = (tmp_path / "jaxmpi" / "c").glob("*.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))  # a library of one path is loaded once
    damaged = tmp_path / "other" / "jaxmpi" / "c" / kept.name
    damaged.parent.mkdir(parents=True, mode=0o700)
    damaged.write_bytes(b"damaged")
    assert c_library.load(source, constants={"ANSWER": 3}).answer() == 3
    assert damaged.read_bytes() == kept.read_bytes()


def test_where_nothing_can_be_kept_it_is_compiled_each_time(source, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file
    assert c_library.load(source, constants={"ANSWER": 5}).answer() == 5
