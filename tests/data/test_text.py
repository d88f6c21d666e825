"""Text: windows of bytes or of a tokenizer's tokens, the standard library as a corpus, vocabularies of words."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import command, open_source, tokens, write_tokens, write_words
from jaxmpi.data.memory_source import MemorySource
from jaxmpi.data.sources.text import TextSource, library_files
from launching import train_here
from runs import column

tokenizers = pytest.importorskip("tokenizers")
pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")


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


def opened(folder: Path, split: str = "train", window: int = 4, **more: Any) -> Any:
    return open_source(Data("text", dir=str(folder), window=window, **more), split)


class TestBytes:
    def test_every_byte_but_the_first_is_predicted_once_from_those_before_it(self, folder):
        source = opened(folder)
        text = b"0123456789\0abcdefghijklmnopqrstuvwxyz\0"
        assert len(source) == (len(text) - 1) // 4 == 9
        inputs, labels = (np.concatenate(part).tolist() for part in zip(*(source[i] for i in range(9)), strict=True))
        assert (bytes(inputs), bytes(labels)) == (text[:36], text[1:37])
        assert {part.dtype for part in source[0]} == {np.dtype(np.int32)}
        assert (source.classes, source.bytes_each) == (256, 4)
        assert [source.where(i) for i in (0, 2, 3)] == ["a/x, byte 0", "a/x, byte 8", "b.txt, byte 1"]
        for index in (-1, 9):
            with pytest.raises(IndexError, match="of 9"):
                source[index]

    def test_names_that_are_not_utf_8(self, folder):
        digests, path = {opened(folder).digest()}, folder / "train" / "b.txt"
        for name in (b"\xfe.txt", b"\xff.txt"):
            try:
                path = path.rename(folder / "train" / os.fsdecode(name))
            except OSError:
                pytest.skip("this file system wants UTF-8")
            digests.add(opened(folder).digest())
        assert len(digests) == 3
        library_files([path.name], held_out=True)

    def test_bad_input_is_named(self, folder):
        with pytest.raises(UsageError, match=r"data\.dir"):
            open_source(Data("text"), "train")
        with pytest.raises(UsageError, match=r"38 bytes .* 39"):
            opened(folder, window=38)
        assert len(opened(folder, window=37)) == 1
        with pytest.raises(UsageError, match=r"data\.window"):
            Data("text", window=0)
        with pytest.raises(UsageError, match=r"data\.memory"):  # all of it is in memory anyway
            MemorySource(opened(folder), Data())
        os.truncate(folder / "train" / "b.txt", 200 << 30)
        with pytest.raises(UsageError, match="GB"):  # a file with holes, larger than memory
            opened(folder)


class TestLibrary:
    def test_it_is_there_and_its_splits_are_apart(self):
        train, held_out = (open_source(Data("stdlib", window=128), split) for split in ("train", "validation"))
        assert isinstance(train, TextSource)
        assert isinstance(held_out, TextSource)
        assert len(train.tokens) > 10_000_000  # some distributions leave the tests out
        assert 0 < len(held_out.tokens) < len(train.tokens) / 10
        files, held_out_files = train.facts.files, held_out.facts.files
        modules = [{file.split("/")[0] for file in each} - {"test"} for each in (files, held_out_files)]
        assert not modules[0] & modules[1]
        assert list(files) == sorted(files)  # all names are ASCII: the order of bytes
        assert "operator.py" in held_out_files

    def test_modules_are_held_out_whole(self):
        files = ["test/test_asyncio/utils.py", "test/test_asyncio/x.py", "test/test_ast.py", "curses/ascii.py"]
        assert library_files(files, held_out=True) == ["curses/ascii.py"]
        many = len(library_files([f"{i}/x.py" for i in range(5000)], held_out=True))
        assert many == pytest.approx(100, abs=5 * (5000 * 0.02 * 0.98) ** 0.5)


# ---------------------------------------------------------------- tokenizers

TOKENS = [1, 2, 3, 4, 1, 2, 4, 3, 2, 1, 0, 0]


def words() -> Any:
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "a", "b", "c", "d"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def function(encode: Any, vocab_size: Any = 5) -> Any:
    def given(text: str) -> Any:
        if isinstance(encode, Exception):
            raise encode
        return encode(text) if callable(encode) else encode

    given.vocab_size = vocab_size  # type: ignore[attr-defined]
    return given


def lengths(text: str) -> list[int]:
    return [len(word) for word in text.split()]


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    """Twelve words in two files, 24 bytes."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0").write_text("a b c d a b\n")
    (tmp_path / "train" / "1").write_text("d c b a e e\n")
    return tmp_path


class TestTokenizers:
    @pytest.mark.parametrize("kind", ["JSON", "object"])
    def test_windows_are_of_the_tokenizers_tokens(self, sentences, tmp_path, kind):
        given: Any = words()
        given.enable_truncation(2)  # a tokenizer that truncates and pads is given whole files all the same
        given.enable_padding(length=40)
        if kind == "JSON":
            given.save(path := str(tmp_path / "words.json"))
            given = path
        source = opened(sentences, window=3, tokenizer=given)
        assert (len(source), source.classes) == (3, 5)
        for i in range(3):
            image, label = source[i]
            assert (image.tolist(), label.tolist()) == (TOKENS[3 * i : 3 * i + 3], TOKENS[3 * i + 1 : 3 * i + 4])
            assert image.dtype == label.dtype == np.int32
        assert source.where(2) == "1, token 0"
        assert (source.bytes_each, source.tokens_each) == (6, 3)  # 24 bytes in 12 tokens

    def test_functions_and_objects_that_encode_are_tokenizers(self, sentences):
        """Those of tiktoken and SentencePiece; the latter's `vocab_size` is a method."""

        class Lengths:
            n_vocab = 70_000
            encode = staticmethod(lengths)

        class Pieces(Lengths):
            def vocab_size(self) -> int:
                return self.n_vocab

        given = (function(lengths, 70_000), Lengths(), Pieces())
        sources = [opened(sentences, tokenizer=tokenizer) for tokenizer in given]
        assert [(source.classes, source[0][0].tolist()) for source in sources] == [(70_000, [1, 1, 1, 1])] * 3
        assert len({source.digest() for source in sources}) == 1
        assert opened(sentences, tokenizer=words()).digest() != sources[0].digest()

    def test_added_tokens_count_although_vocab_size_leaves_them_out(self, sentences):
        class Added:
            vocab_size = 5

            def __len__(self) -> int:
                return 7

            def encode(self, text: str) -> list[int]:
                return [6] * 4

        assert opened(sentences, tokenizer=Added()).classes == 7
        given = words()
        given.add_tokens(["e"])
        assert opened(sentences, tokenizer=given).classes == 6

    @pytest.mark.parametrize(
        ("tokenizer", "named"),
        [
            (len, "vocab_size 0"),
            (3, "got int"),
            ("nowhere.json", "nowhere.json"),
            (function([0, 5]), "train/0: .*from 0 to 5"),
            (function([0.5]), r"train/0: .*float64\[1\]"),
            (function(KeyError("a")), "train/0: .*KeyError: 'a'"),
        ],
    )
    def test_what_is_no_tokenizer_is_refused(self, sentences, tokenizer, named):
        with pytest.raises(UsageError, match=named) as caught:
            opened(sentences, tokenizer=tokenizer)
        assert "data.tokenizer" in str(caught.value)


# ---------------------------------------------------------------- tokens in a file

DOCUMENTS = ["one small step", "", "naïve\ncafé", *(f"document {i} of many, " * 9 for i in range(60))]


def write_documents(folder: Path, source: str) -> None:
    """The same documents in two files, as a source has them."""
    for split, documents in {"train": DOCUMENTS, "validation": DOCUMENTS[:20]}.items():
        place = folder / split
        if source == "huggingface":
            datasets = pytest.importorskip("datasets")
            datasets.Dataset.from_dict({"body": documents}).save_to_disk(str(place))
            continue
        place.mkdir(parents=True)
        for part, some in enumerate((documents[:9], documents[9:])):
            if source == "text":
                for number, document in enumerate(some):
                    (place / f"{part}-{number:03d}").write_text(document)
            elif source == "jsonl":
                lines = (json.dumps({"body": document, "id": 1}) + "\n" for document in some)
                (place / f"{part}.jsonl").write_text("".join(lines))
            else:
                pq.write_table(pa.table({"body": some}), place / f"{part}.parquet", row_group_size=16)


@pytest.fixture
def tokens_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: a text's tokens in files, in blocks of 48 bytes, and the same text as files in memory."""
    monkeypatch.setattr(tokens, "BLOCK_BYTES", 48)
    write_documents(tmp_path / "text", "text")

    def write(source: str = "text", tokenizer: str = "") -> tuple[Path, Any]:
        if source != "text":
            write_documents(tmp_path / source, source)
        more = ["--source", source, "--column", "body", *(["--tokenizer", tokenizer] if tokenizer else [])]
        command.main(["tokens", str(tmp_path / source), str(tmp_path / "out"), *more])
        return tmp_path / "out", opened(tmp_path / "text", tokenizer=tokenizer, window=10)

    return write


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "huggingface"])
@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_windows_of_a_file_of_tokens_are_those_in_memory(tokens_of, source, kind, tmp_path, capsys):
    tokenizer = ""
    if kind == "words":
        given = words()
        given.add_tokens(["document", "many", "é", "1"])
        given.save(tokenizer := str(tmp_path / "words.json"))
    folder, expected = tokens_of(source, tokenizer)
    assert f"train.tokens: {len(expected.tokens):,} tokens of" in capsys.readouterr().out
    got = pickle.loads(pickle.dumps(opened(folder, window=10)))
    assert (len(got), got.classes, got.bytes_each) == (len(expected), expected.classes, expected.bytes_each)
    for i in (*range(len(got)), 3):
        np.testing.assert_array_equal(got[i], expected[i])
        assert got[i][0].dtype == np.int32
    np.testing.assert_array_equal(np.load(folder / "train.tokens", mmap_mode="r"), expected.tokens)
    if source == "text":
        assert got.digest() == expected.digest()
        assert [got.where(i) for i in (0, 99)] == [expected.where(i) for i in (0, 99)]


BIGRAMS = """
import jax.numpy as jnp
from jaxmpi.config import Data, Experiment
from jaxmpi.model import plain_model

init = lambda key: {"logits": jnp.zeros((256, 256))}
apply = lambda params, tokens: jnp.take(params["logits"], tokens, axis=0)
model = plain_model(init, apply, name="bigrams", input_shape=(16,), classes=256)
model = model._replace(input_dtype=jnp.int32, label_shape=(16,))
experiment = Experiment(model=model, data=Data("text", window=16), effective_batch=8, train_for="6st", log_every=1)
"""


@pytest.mark.e2e
def test_two_workers_learn_alike_from_a_file_of_tokens_and_from_memory(tokens_of, tmp_path):
    folders, rows = {"memory": tmp_path / "text", "file": tokens_of()[0]}, {}
    (tmp_path / "bigrams.py").write_text(BIGRAMS)
    for name, folder in folders.items():
        run_dir = str(tmp_path / name)
        options = ("--devices", "2", "--data.dir", str(folder), "--run-dir", run_dir)
        done = train_here(str(tmp_path / "bigrams.py"), *options)
        assert done.code == 0, done.out
        rows[name] = [column(run_dir, "train", "loss"), column(run_dir, "eval", "eval_bits_per_byte")]
    assert len(rows["file"][0]) == 6
    assert rows["file"] == rows["memory"]


def test_files_of_tokens_that_are_damaged_or_by_another_tokenizer_are_refused(tokens_of, tmp_path):
    folder, _ = tokens_of()
    words().save(path := str(tmp_path / "words.json"))
    write_tokens(Data("text", dir=str(tmp_path / "text"), tokenizer=path), "validation", folder / "words")
    changes: list[tuple[str, Any, str]] = [
        ("train", lambda file: file.write_bytes(file.read_bytes()[:500]), "bytes are missing"),
        ("train", lambda file: file.write_bytes(file.read_bytes()[:-1]), "cut or damaged"),
        ("train", lambda file: flip(file, 333), "damaged at token 192 "),
        ("train", lambda file: flip(file, -99), "cut or damaged"),
        ("train", lambda file: flip(file, 3), "npy file"),
        ("validation", lambda file: file.unlink(), "validation.tokens: No such file"),
        ("validation", lambda file: shutil.copy(file.with_name("words"), file), "got tokens by words.json, 5 differ"),
    ]
    for number, (split, change, match) in enumerate(changes):
        copy = shutil.copytree(folder, tmp_path / str(number))
        change(copy / f"{split}.tokens")
        with pytest.raises(UsageError, match=match):
            print([[*opened(copy, split)] for split in ("train", "validation")])


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_another_tokenizer_than_that_of_the_file_is_refused(tokens_of, tmp_path):
    words().save(path := str(tmp_path / "words.json"))
    folder, _ = tokens_of(tokenizer=path)
    assert opened(folder, tokenizer=words()).classes == 5
    with pytest.raises(UsageError, match=r"got tokens by words\.json, 5 .*expected those of data\.tokenizer"):
        opened(folder, tokenizer=function(lambda text: [1] * len(text), 5))
    with pytest.raises(UsageError, match="exists"):
        write_tokens(Data("text", dir=str(tmp_path / "text")), "train", folder / "train.tokens")


def test_a_vocabulary_has_the_most_frequent_words_and_reads_the_text_whole(folder, tmp_path, capsys):
    """`b b a c d`: of three words the first are white space and b; a, c and d are equally frequent."""
    for file in ("b.txt", "a/x"):
        (folder / "train" / file).write_text("b b a c d ")
    (folder / "validation" / "c").write_text("a b ?")
    command.main(["words", str(folder), str(tmp_path / "words.json"), "--words", "4"])
    assert "words.json: 4 words; 80.0 % of the held-out ones are among them" in capsys.readouterr().out
    source = opened(folder, "validation", window=1, tokenizer=str(tmp_path / "words.json"))
    assert (source.classes, source.tokens.tolist()) == (4, [3, 1, 2, 1, 0])
    with pytest.raises(UsageError, match="got digits"):
        write_words(Data("digits"), tmp_path / "words.json")


def test_words_of_lines_of_json_are_those_of_their_texts(tmp_path, capsys):
    made = {}
    for source in ("text", "jsonl"):
        write_documents(tmp_path / source, source)
        made[source] = tmp_path / f"{source}.json"
        given = ["--source", source, "--column", "body", "--validation-split", ""]
        command.main(["words", str(tmp_path / source), str(made[source]), *given])
    assert made["jsonl"].read_text() == made["text"].read_text()
    assert "held-out" not in capsys.readouterr().out


def test_a_damaged_parquet_file_is_named_and_not_the_file_of_tokens(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.table({"text": ["one two"] * 3}), path, write_page_checksum=True, compression="none")
    blob = path.read_bytes()
    path.write_bytes(blob.replace(b"one two", b"one tvo", 1))
    with pytest.raises(UsageError, match=rf"{path.name}.* cannot be read: .*{path}"):
        write_tokens(Data("parquet", dir=str(tmp_path)), "train", tmp_path / "train.tokens")


def test_tokens_without_a_validation_split_are_refused_before_any_are_written_and_held_out_in_training(tmp_path):
    write_documents(tmp_path / "text", "text")
    shutil.rmtree(tmp_path / "text" / "validation")
    line = ["tokens", str(tmp_path / "text"), str(tmp_path / "out")]
    for given, named in ((line, " --validation-split ''"), (["tokens", __file__, "out"], "the file .* as SRC")):
        with pytest.raises(UsageError, match=named):
            command.main(given)
    command.main([*line, "--validation-split", ""])
    with pytest.raises(UsageError, match=r"validation\.tokens: No such file.*--data\.holdout"):
        opened(tmp_path / "out", "validation")
    assert len(opened(tmp_path / "out", "validation", window=10, holdout=0.1)) > 0
