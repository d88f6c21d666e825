"""A vocabulary of words from training text, as JSON for `data.tokenizer`."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from jaxmpi.config.data import Data
from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError, check
from jaxmpi.data.sources.text import BETWEEN, stdlib, text

SOURCES = {"stdlib": stdlib, "text": text}
UNKNOWN = "[UNK]"
WORD = r"\w+|[^\w\s]|\s+"  # letters and digits, one other sign, or white space: together they are the whole text
MOST_WORDS = 1 << 24


class Vocabulary(NamedTuple):
    """A written vocabulary."""

    words: int  # in it, with the one for all others
    known: float  # share of the held-out text's words that are in it


def write_words(config: Data, path: str | Path, words: int = 72_000) -> Vocabulary:
    """Write the training text's most frequent words for `data.tokenizer`; needs `jaxmpi[tokenizers]`.

    A word is a row of letters, digits and underscores, one other sign, or a row of white space. So tokens cover the
    text. Number 0 stands for all that are not among them. Words that are equally frequent are in the order of the
    alphabet, so one text gives one file. Gibiansky's 300 million params have 72,000 words.

    Args:
        config: source `stdlib` or `text`, and its folder.
        path: of the JSON file.
        words: the most that it has, with number 0.

    Raises:
        UsageError: another source, `tokenizers` is missing, or the file cannot be written.
    """
    check(config.source in SOURCES, f"words: got source {config.source}; expected {' or '.join(SOURCES)}")
    check(2 <= words <= MOST_WORDS, f"words: got {words}; expected 2 to {MOST_WORDS:,}")
    try:
        import tokenizers
        from tokenizers import models, pre_tokenizers, trainers
    except ImportError as error:
        raise UsageError(f"words: {error}; install it with {installing('jaxmpi[tokenizers]')}") from error
    made = tokenizers.Tokenizer(models.WordLevel(unk_token=UNKNOWN))  # pyright: ignore[reportCallIssue]
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(WORD), "isolated")  # pyright: ignore
    trainer: Any = trainers.WordLevelTrainer(vocab_size=words, special_tokens=[UNKNOWN], show_progress=False)
    made.train_from_iterator(_files(config, "train"), trainer)
    aside = path.with_name(f"{path.name}.tmp")
    try:
        made.save(str(aside))
        aside.replace(path)
    except Exception as error:  # all that the library raises
        aside.unlink(missing_ok=True)
        raise UsageError(f"words: {path} cannot be written: {error}") from error
    tokens = [token for file in made.encode_batch(_files(config, "validation")) for token in file.ids]
    return Vocabulary(made.get_vocab_size(), 1 - tokens.count(0) / max(len(tokens), 1))


def _files(config: Data, split: str) -> list[str]:
    """The text of each file of a split."""
    source = SOURCES[config.source](dataclasses.replace(config, tokenizer="", window=1), split)
    errors = "replace" if config.source == "stdlib" else "strict"
    try:
        return [file.decode(errors=errors) for file in source.text.tobytes().split(BETWEEN) if file]
    except UnicodeDecodeError as error:
        raise UsageError(
            f"words: {config.dir}: {error}; words are of UTF-8: convert the file, or take it away"
        ) from error


def words_parser() -> argparse.ArgumentParser:
    """Parser of `jaxmpi data words`."""
    parser = argparse.ArgumentParser(
        "jaxmpi data words",
        description="Write the most frequent words of a training text to FILE, for --data.tokenizer FILE.",
        epilog="example: jaxmpi data words stdlib words.json --words 8000",
    )
    parser.add_argument("src", metavar="SRC", help="folder with train/ and validation/, or stdlib, which needs none")
    parser.add_argument("file", metavar="FILE", type=Path, help="JSON of the library tokenizers")
    parser.add_argument("--words", type=int, default=72_000, help="the most that it has (default: 72000)")
    return parser


def words_main(argv: list[str]) -> None:
    """`jaxmpi data words SRC FILE`."""
    options = words_parser().parse_args(argv)
    data = Data("stdlib") if options.src == "stdlib" else Data("text", dir=options.src)
    done = write_words(data, options.file, options.words)
    print(f"{options.file}: {done.words:,} words; {100 * done.known:.1f} % of the held-out ones are among them")
