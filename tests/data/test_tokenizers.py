"""Text in tokens of a tokenizer: JSON files and objects of `tokenizers`, functions."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import Loader, Sampler, open_source

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[UNK]", "a", "b", "c", "d"]


def words() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def lengths(text: str) -> list[int]:
    return [len(word) for word in text.split()]


lengths.vocab_size = 70_000  # type: ignore[attr-defined]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve words in two files, 24 bytes."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0").write_text("a b c d a b\n")
    (tmp_path / "train" / "1").write_text("d c b a e e\n")
    return tmp_path


def opened(folder: Path, tokenizer: Any, window: int = 3) -> Any:
    return open_source(Data("text", dir=str(folder), window=window, tokenizer=tokenizer), "train")


TOKENS = [1, 2, 3, 4, 1, 2, 4, 3, 2, 1, 0, 0]


@pytest.mark.parametrize("kind", ["JSON", "object"])
def test_windows_are_of_the_tokenizers_tokens(folder, tmp_path, kind):
    given: Any = words()
    if kind == "JSON":
        words().save(given := str(tmp_path / "words.json"))
    source = opened(folder, given)
    assert (len(source), source.classes) == (3, 5)
    for i in range(3):
        image, label = source[i]
        assert (image.tolist(), label.tolist()) == (TOKENS[3 * i : 3 * i + 3], TOKENS[3 * i + 1 : 3 * i + 4])
        assert image.dtype == label.dtype == np.int32
    assert source.where(2) == "1, token 0"


def test_a_tokenizer_that_truncates_is_given_whole_files(folder):
    given = words()
    given.enable_truncation(2)
    given.enable_padding(length=40)
    assert len(opened(folder, given)) == 3


def test_bits_are_of_bytes_whatever_a_token_is(folder):
    """3 tokens are 6 bytes: 24 bytes in 12 tokens."""
    source = opened(folder, words())
    assert (source.bytes_each, source.tokens_each) == (6, 3)
    as_bytes = open_source(Data("text", dir=str(folder), window=3), "train")
    assert (as_bytes.bytes_each, as_bytes.tokens_each) == (3, 3)  # type: ignore[attr-defined]


def test_functions_and_objects_that_encode_are_tokenizers(folder):
    """Those of tiktoken and SentencePiece; the latter's `vocab_size` is a method."""

    class Lengths:
        n_vocab = lengths.vocab_size  # type: ignore[attr-defined]

        def encode(self, text: str) -> list[int]:
            return lengths(text)

    class Pieces(Lengths):
        def vocab_size(self) -> int:
            return self.n_vocab

    sources = [opened(folder, tokenizer) for tokenizer in (lengths, Lengths(), Pieces())]
    assert [(source.classes, source[0][0].tolist()) for source in sources] == [(70_000, [1, 1, 1])] * 3
    assert len({source.digest() for source in sources}) == 1
    assert opened(folder, words()).digest() != sources[0].digest()


def test_loader_processes_need_no_tokenizer(folder):
    data = Data("text", dir=str(folder), window=3, tokenizer=lambda text: [1] * 7, loader="processes", loaders=1)
    data.tokenizer.vocab_size = 2
    with Loader(open_source(data, "train"), Sampler(4, 2, shuffle=False), data, train=False) as loader:
        assert [batch.image.tolist() for batch in loader] == [[[1, 1, 1]] * 2] * 2


def test_the_library_may_hold_what_is_no_utf_8():
    def first(text: str) -> list[int]:
        return [len(text) % 7]

    first.vocab_size = 7  # type: ignore[attr-defined]
    source = open_source(Data("stdlib", window=4, tokenizer=first), "validation")
    assert len(source) == (len(source.files) - 1) // 4  # type: ignore[attr-defined]


def returning(found: Any, size: int = 5) -> Any:
    def given(text: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    given.vocab_size = size  # type: ignore[attr-defined]
    return given


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (len, r"data\.tokenizer: got .* vocab_size 0"),
        (3, r"data\.tokenizer: got int"),
        ("nowhere.json", "nowhere.json"),
        (returning([0, 5]), "train/0: data.tokenizer: got .* from 0 to 5"),
        (returning([0.5]), r"train/0: data.tokenizer: got float64\[1\]"),
        (returning(KeyError("a")), "train/0: data.tokenizer: KeyError: 'a'"),
    ],
)
def test_what_is_no_tokenizer_is_refused(folder, tokenizer, said):
    with pytest.raises(UsageError, match=said):
        opened(folder, tokenizer)


def test_added_tokens_count_although_vocab_size_leaves_them_out(folder):
    class Added:
        vocab_size = 5

        def __len__(self) -> int:
            return 7

        def encode(self, text: str) -> list[int]:
            return [6] * 4

    assert opened(folder, Added()).classes == 7
    given = words()
    given.add_tokens(["e"])
    assert opened(folder, given).classes == 6


def test_files_that_cannot_be_and_too_few_tokens_are_named(folder, tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError, match=r"other\.json"):
        opened(folder, str(tmp_path / "other.json"))
    with pytest.raises(UsageError, match=r"12 tokens .* 13 tokens"):
        opened(folder, words(), window=12)
    (folder / "train" / "2").write_bytes(b"a \xff")
    with pytest.raises(UsageError, match=r"train/2: .*UTF-8"):
        opened(folder, words())


def test_a_package_that_is_missing_is_named(folder, monkeypatch):
    given = words()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"data.tokenizer: .*pip install 'jaxmpi\[tokenizers\]'"):
        opened(folder, given)


def test_the_record_has_bits_of_bytes(tmp_path):
    from jaxmpi.observe.recorder import Recorder, Unit

    record = Recorder(tmp_path, unit=Unit("tokens", 3, bytes_each=6))
    record.evaluation(step=1, epoch=1.0, examples=3, eval_count=3, tokens_per_byte=0.5, eval_loss=math.log(4))
    record.close()
    assert '"eval_bits_per_byte": 1.0' in (tmp_path / "record.jsonl").read_text()
