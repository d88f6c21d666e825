"""Tokens of a text, and vocabularies of its words, written to files; the text is read a document at a time."""

import contextlib
import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import made_whole
from jaxmpi.data.sources import text
from jaxmpi.data.sources.base import split_files
from jaxmpi.data.sources.reading import in_order
from jaxmpi.data.sources.registry import open_source
from jaxmpi.data.sources.text import (
    FORMAT,
    Part,
    TextFacts,
    decode,
    encode,
    import_tokenizers,
    open_tokenizer,
    refusing_text,
)

UNKNOWN = "[UNK]"
WORD = r"\w+|[^\w\s]|\s+"  # letters and digits, one other sign, or white space: together they are the whole text
MOST_WORDS = 1 << 24
BLOCK_BYTES = 1 << 18  # that have a checksum; a multiple of a token's bytes


def write_tokens(
    config: Data,
    split: str,
    path: str | Path,
    column: str = "text",
    threads: int = 2,
    progress: Callable[[int], None] = lambda n: None,
) -> TextFacts:
    """Write a text's tokens to a file DIR/<split>.tokens, which `Data("text", dir=DIR)` reads where they lie.

    Args:
        config: `source` of a row of DOCUMENTS, its `dir`, and the `tokenizer`.
        column: of Parquet and saved data sets, and field of lines of JSON.
        threads: encode documents; few are in memory at once.
        progress: called with 1 after each file or batch of documents.

    Raises:
        UsageError: the file exists or cannot be written, or the text cannot be read.
    """
    tokenizer, parts = open_tokenizer(config.tokenizer), list_documents(config, split, column)
    files, ends, sums, text_bytes, count = tuple(part.name for part in parts), [], [], 0, 0
    digest, waiting = hashlib.sha256("\0".join(files).encode(errors="surrogateescape")), bytearray()
    dtype = tokenizer.dtype if tokenizer else np.dtype(np.uint8)
    with made_whole(Path(path)) as aside, aside.open("wb") as file:

        def write_block(size: int) -> None:
            block = bytes(waiting[:size])
            del waiting[:size]
            file.write(block)
            digest.update(block)
            sums.append(zlib.crc32(block))

        def write_header(tokens: int) -> None:  # equally long for any number
            fields = {"descr": dtype.str, "fortran_order": False, "shape": (tokens,)}
            np.lib.format.write_array_header_1_0(file, fields)

        write_header(0)
        for part in parts:
            work = partial(encode, source=config.source, tokenizer=tokenizer)
            with contextlib.closing(in_order(work, part.documents(), threads)) as encoded:
                for tokens, size in encoded:
                    waiting += tokens.tobytes()
                    text_bytes, count = text_bytes + size, count + len(tokens)
                    while len(waiting) >= BLOCK_BYTES:
                        write_block(BLOCK_BYTES)
            ends.append(count)
            progress(1)
        if waiting:
            write_block(len(waiting))
        if not count:
            raise UsageError(f"{config.source}: got no text in {len(parts)} files for {split}; expected some")
        facts = TextFacts(files, tuple(ends), text_bytes, text.BYTES, digest.hexdigest())
        if tokenizer:
            words = {"tokenizer": tokenizer.name, "tokenizer_digest": tokenizer.digest}
            facts = facts._replace(classes=tokenizer.classes, **words)
        sealed = {"format": FORMAT, **facts._asdict(), "block_bytes": BLOCK_BYTES, "crc32": sums}
        raw = json.dumps(sealed).encode()
        file.write(raw + zlib.crc32(raw).to_bytes(4, "little"))
        file.seek(0)
        write_header(count)
    return facts


class Vocabulary(NamedTuple):
    """A written vocabulary."""

    words: int  # in it, with the one for all others
    known: float  # share of the held-out text's words that are in it


def write_words(config: Data, path: str | Path, words: int = 72_000, column: str = "text") -> Vocabulary:
    """Write the training text's most frequent words for `data.tokenizer`; needs `jaxmpi[tokenizers]`.

    A word is a row of letters, digits and underscores, one other sign, or a row of white space, so tokens cover the
    text. Number 0 stands for all that are not among the `words` most frequent. Words that are equally frequent are in
    the order of the alphabet, so one text gives one file. Gibiansky's 300 million params have 72,000 words. `column`
    and the sources are those of `write_tokens`.
    """
    if not 2 <= words <= MOST_WORDS:
        raise UsageError(f"words: got {words} words; expected 2 to {MOST_WORDS:,}")
    tokenizers, splits = import_tokenizers("words"), ("train", "validation")[: 2 if config.validation_split else 1]
    train, *held_out = (list_documents(config, split, column) for split in splits)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORD), "isolated")
    trainer = tokenizers.trainers.WordLevelTrainer(vocab_size=words, special_tokens=[UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator(_decoded(train, config.source), trainer)
    try:
        tokenizer.save(str(path))
    except Exception as error:  # all that the library raises
        raise UsageError(f"words: {path} cannot be written: {error}") from error
    files = tokenizer.encode_batch([each for parts in held_out for each in _decoded(parts, config.source)])
    tokens = [token for file in files for token in file.ids]
    return Vocabulary(tokenizer.get_vocab_size(), 1 - tokens.count(0) / max(len(tokens), 1))


def _decoded(parts: list[Part], source: str) -> Iterator[str]:
    for part in parts:
        for where, blob in part.documents():
            with refusing_text(f"words: {source}", where):
                yield decode(blob, source)


# ---------------------------------------------------------------- documents


def list_documents(config: Data, split: str, column: str) -> list[Part]:
    """A text's files, or batches of a table, with their documents."""
    if config.source in ("text", "stdlib"):
        return text.list_parts(config, split)[1]
    if config.source == "jsonl":
        paths = split_files(config, split, ".jsonl")
        return [Part(os.path.basename(path), partial(read_lines, path, column)) for path in paths]
    if config.source not in ("parquet", "huggingface"):
        raise UsageError(f"--source: got {config.source}; expected text, stdlib, jsonl, parquet or huggingface")
    table: Any = open_source(dataclasses.replace(config, columns=(column,)), split)
    return [
        Part(os.path.basename(name), partial(read_column, table, number, column))
        for number, name in enumerate(table.parts)
    ]


def read_lines(path: str, field: str) -> Iterator[tuple[str, bytes]]:
    """A field of each line of JSON."""
    with refusing_text("jsonl", path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)[field].encode()
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise UsageError(
                    f"{where}: {type(error).__name__}: {error}; expected a JSON object whose {field!r} is a text: name "
                    "the field with --column"
                ) from error


def read_column(table: Any, number: int, column: str) -> Iterator[tuple[str, bytes]]:
    """A column's texts in a batch of a table."""
    with refusing_text(table.name, table.parts[number]):
        cells = table.tables[number].column(column)
    for row, cell in enumerate(cells):
        where, document = f"{table.parts[number]}[{row}]", cell.as_py()
        if not isinstance(document, str):
            raise UsageError(f"{where}: got {type(document).__name__}; expected a text: name the column with --column")
        yield where, document.encode()
