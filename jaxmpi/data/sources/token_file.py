"""A text's tokens in one file, read where they lie: ranks of a host share its pages, and none holds all tokens.

    array      NumPy's format, u8, u16 or u32[tokens]: `numpy.load(file, mmap_mode="r")` reads the tokens, too
    facts      JSON: what text and tokenizer they are of, and the CRC-32 of each block of tokens
    CRC-32     of the facts, 4 bytes

The facts come last, since a text is read once. Blocks are compared with their CRC-32 when they are first read.
"""

import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.core.json_tree import parse_json
from jaxmpi.data.sources.base import refusing
from jaxmpi.data.sources.numpy_files import Expected, Header, read_header
from jaxmpi.data.sources.open_files import OpenFiles

FORMAT, SUFFIX = "jaxmpi tokens 1", ".tokens"
MOST_FACTS_BYTES = 1 << 28
WAY_OUT = "copy it again, or make it again: jaxmpi data tokens"
TYPES = ("|u1", "<u2", "<u4")


class TextFacts(NamedTuple):
    """What a row of tokens is of."""

    files: tuple[str, ...]  # names, in the order of their tokens
    ends: tuple[int, ...]  # of each, the number of the token behind its last
    text_bytes: int
    classes: int
    digest: str  # SHA-256 of names and tokens
    tokenizer: str = ""  # its name; empty: tokens are bytes
    tokenizer_digest: str = ""  # see `Tokenizer.digest`


class TokenFile:
    """The tokens of a file; slices of it are read, and compared with their checksums.

    Raises:
        UsageError: it is missing, cut, damaged, or of another kind: which.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.header = read_header(self.path, Expected("unsigned numbers[tokens]", _holds_tokens))
        facts = _read_facts(self.path, self.header)
        with refusing(self.path, "facts of its tokens", ArithmeticError, LookupError, TypeError, ValueError):
            self.sums = np.array(facts.pop("crc32"), np.uint32)
            self.per_block = facts.pop("block_bytes") // self.header.dtype.itemsize
            self.facts = TextFacts(**facts)
            if (len(self.sums), self.facts.ends[-1]) != (-(-len(self) // self.per_block), len(self)):
                raise ValueError(f"facts of {self.facts.ends[-1]} tokens in {len(self.sums)} blocks")
        self.sound: set[int] = set()  # blocks that were compared
        self._file = OpenFiles([self.path])

    def __len__(self) -> int:
        return self.header.shape[0]

    def __getitem__(self, part: slice) -> np.ndarray:
        begin, end, _ = part.indices(len(self))
        for block in range(begin // self.per_block, -(-end // self.per_block)):
            if block not in self.sound:
                first = block * self.per_block
                tokens = self._read(first, min(first + self.per_block, len(self)))
                if zlib.crc32(tokens.data) != self.sums[block]:
                    raise UsageError(f"{self.path}: damaged at token {first} or behind it; {WAY_OUT}")
                self.sound.add(block)
        return self._read(begin, end)

    def _read(self, begin: int, end: int) -> np.ndarray:
        dtype = self.header.dtype
        return self._file.read(0, np.empty(end - begin, dtype), self.header.offset + begin * dtype.itemsize)


def _holds_tokens(header: Header) -> bool:
    return header.dtype.str in TYPES and len(header.shape) == 1


def _read_facts(path: str, header: Header) -> dict[str, Any]:
    """The facts behind the tokens."""
    size = os.stat(path).st_size - header.end
    if size > MOST_FACTS_BYTES:
        raise UsageError(f"{path}: got {size} bytes behind its tokens; expected at most {MOST_FACTS_BYTES}: {WAY_OUT}")
    with open(path, "rb") as file:
        file.seek(header.end)
        raw = file.read(size)
    if len(raw) < 4 or zlib.crc32(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
        raise UsageError(f"{path}: cut or damaged: got no sound facts behind its tokens; {WAY_OUT}")
    facts = parse_json(raw[:-4], path)
    if not isinstance(facts, dict) or facts.pop("format", None) != FORMAT:
        raise UsageError(f"{path}: of another version; expected {FORMAT!r}: {WAY_OUT}")
    return facts
