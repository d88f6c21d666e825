"""Text: windows of bytes, the standard library as a corpus, what is held out."""

import os
from pathlib import Path

import numpy as np
import pytest

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import command, open_source, write_words
from jaxmpi.data.memory_source import MemorySource
from jaxmpi.data.sources.text import TextSource, library_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """train/: 26 + 10 bytes in two files, one of them in a folder, and a hidden one; validation/: 9 bytes."""
    for file, content in {
        "train/b.txt": b"abcdefghijklmnopqrstuvwxyz",
        "train/a/x": b"0123456789",
        "train/.hidden": b"not seen",
        "validation/c": b"123456789",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(content)
    return tmp_path


def opened(folder: Path, split: str = "train", window: int = 4) -> TextSource:
    source = open_source(Data("text", dir=str(folder), window=window), split)
    assert isinstance(source, TextSource)
    return source


def test_every_byte_but_the_first_is_predicted_once_from_those_before_it(folder):
    source = opened(folder)
    text = b"0123456789\0abcdefghijklmnopqrstuvwxyz\0"
    assert len(source) == (len(text) - 1) // 4 == 9
    inputs, labels = (np.concatenate(part).tolist() for part in zip(*(source[i] for i in range(9)), strict=True))
    assert (bytes(inputs), bytes(labels)) == (text[:36], text[1:37])
    assert {part.dtype for part in source[0]} == {np.dtype(np.int32)}
    assert (source.classes, source.bytes_each) == (256, 4)
    for index in (-1, 9):
        with pytest.raises(IndexError, match=f"text: got window {index} of 9"):
            source[index]


def test_where_a_window_begins(folder):
    source = opened(folder)
    assert [source.where(i) for i in (0, 2, 3)] == ["a/x, byte 0", "a/x, byte 8", "b.txt, byte 1"]


def test_splits_are_folders(folder):
    assert len(opened(folder, "validation")) == 2
    (folder / "validation").rename(folder / "test")
    with pytest.raises(UsageError, match=r"validation; .*--data.validation-split"):
        opened(folder, "validation")
    source = open_source(Data("text", dir=str(folder), validation_split="test", window=4), "validation")
    assert len(source) == 2


@pytest.mark.parametrize("change", ["name", "byte"])
def test_digest_sees_every_name_and_byte(folder, change):
    before = opened(folder).digest()
    assert opened(folder).digest() == before
    if change == "name":
        (folder / "train" / "b.txt").rename(folder / "train" / "c.txt")
    else:
        (folder / "train" / "b.txt").write_bytes(b"abcdefghijklmnopqrstuvwxyZ")
    assert opened(folder).digest() != before


def test_names_that_are_not_utf_8(folder):
    digests = []
    for name in (b"\xfe.txt", b"\xff.txt"):
        path = folder / "train" / os.fsdecode(name)
        try:
            path.write_bytes(b"x")
        except OSError:
            pytest.skip("this file system wants UTF-8")
        digests.append(opened(folder).digest())
        path.unlink()
    assert digests[0] != digests[1]
    assert library_files([os.fsdecode(b"\xff.py")], held_out=True) in ([], [os.fsdecode(b"\xff.py")])


def test_bad_input_is_named(folder):
    with pytest.raises(UsageError, match=r"data\.dir"):
        open_source(Data("text"), "train")
    with pytest.raises(UsageError, match=r"38 bytes .* 39"):
        opened(folder, window=38)
    assert len(opened(folder, window=37)) == 1
    with pytest.raises(UsageError, match=r"data\.window"):
        Data("text", window=0)
    with pytest.raises(UsageError, match=r"data\.memory"):  # all of it is in memory anyway
        MemorySource(opened(folder), Data())
    with (folder / "train" / "a.txt").open("wb") as file:
        file.truncate(200 << 30)
    with pytest.raises(UsageError, match="GB"):  # a file with holes, larger than memory
        opened(folder)


# ---------------------------------------------------------------- the standard library


def test_the_library_is_there_and_its_splits_are_apart():
    train, held = (open_source(Data("stdlib", window=128), split) for split in ("train", "validation"))
    assert isinstance(train, TextSource)
    assert isinstance(held, TextSource)
    assert len(train.text) > 10_000_000  # some distributions leave the tests out
    assert 0 < len(held.text) < len(train.text) / 10
    modules = [{file.split("/")[0] for file in source.files} - {"test"} for source in (train, held)]
    assert not modules[0] & modules[1]
    assert list(train.files) == sorted(train.files)  # all names are ASCII: the order of bytes
    assert "operator.py" in held.files
    assert train.where(0).startswith(train.files[0])


def test_what_is_not_the_librarys_own_is_left_out():
    files = ["a.py", "site-packages/numpy/x.py", "_sysconfigdata__linux_.py", "config-3.12-x/y.py", "sitecustomize.py"]
    assert library_files(files, held_out=False) == ["a.py"]


def test_modules_are_held_out_whole():
    files = ["test/test_asyncio/utils.py", "test/test_asyncio/x.py", "test/test_ast.py", "curses/ascii.py", "ast.py"]
    assert library_files(files, held_out=True) == ["curses/ascii.py"]
    many = len(library_files([f"{i}/x.py" for i in range(5000)], held_out=True))
    assert many == pytest.approx(100, abs=5 * (5000 * 0.02 * 0.98) ** 0.5)


def test_a_vocabulary_has_the_most_frequent_words_and_reads_the_text_whole(folder, tmp_path, capsys):
    """`b b a c d`: of three words the first are white space and b; a, c and d are equally frequent."""
    for file in ("b.txt", "a/x"):
        (folder / "train" / file).write_text("b b a c d ")
    (folder / "validation" / "c").write_text("a b ?")
    command.main(["words", str(folder), str(tmp_path / "words.json"), "--words", "4"])
    assert "words.json: 4 words; 80.0 % of the held-out ones are among them" in capsys.readouterr().out
    data = Data("text", dir=str(folder), window=1, tokenizer=str(tmp_path / "words.json"))
    source = open_source(data, "validation")
    assert isinstance(source, TextSource)
    assert (source.classes, source.text.tolist()) == (4, [3, 1, 2, 1, 0])
    with pytest.raises(UsageError, match="source digits"):
        write_words(Data("digits"), tmp_path / "words.json")
