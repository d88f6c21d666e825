"""Text as tokens: joined files, cut into windows of one length; tokenizers; tokens in a file.

A window is an example: i32[window] in, i32[window] to predict. A token is a byte, or what a tokenizer makes of a whole
file: a JSON file of `tokenizers`, an object that encodes, or a function. Ranks of a host share the pages of a file of
tokens, which is read where they lie, so none holds all tokens:

    array      NumPy's format, u8, u16 or u32[tokens]: `numpy.load(file, mmap_mode="r")` reads the tokens, too
    facts      JSON: what text and tokenizer they are of, and the CRC-32 of each block of tokens
    CRC-32     of the facts, 4 bytes

The facts come last, since a text is read once. Blocks are compared with their CRC-32 when they are first read.
"""

import contextlib
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.core.json_tree import parse_json
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.data.sources.base import (
    check_plain_files,
    import_package,
    name_split,
    place_in_parts,
    refusing,
    sha256,
    split_name,
)
from jaxmpi.data.sources.numpy_files import Expected, Header, read_header
from jaxmpi.data.sources.reading import OpenFiles

FORMAT, SUFFIX = "jaxmpi tokens 1", ".tokens"
MOST_FACTS_BYTES = 1 << 28
WAY_OUT = "copy it again, or make it again: jaxmpi data tokens"
TOKENS = Expected(
    "unsigned numbers[tokens]",
    lambda header: header.dtype.str in ("|u1", "<u2", "<u4") and len(header.shape) == 1,
)


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
        self.header = read_header(self.path, TOKENS)
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


# ---------------------------------------------------------------- windows


BYTES = 256  # classes
SEPARATOR = b"\0"  # between files; no text has it
HELD_OUT = 50  # one module of the standard library in so many
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
OF_THE_MACHINE = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")  # how names begin
FORM = (
    "the name of a JSON file, a tokenizers.Tokenizer, or an object whose encode(text) returns the tokens' numbers, or "
    "a function that does, with vocab_size or n_vocab"
)
# Tells tokenizers apart: letters, signs, numbers, code, other scripts.
SAMPLE = (
    "The quick brown fox, aged 0123456789, jumps over 3.14 lazy dogs -- don't!\n\tdef f(x): return x ** 2\n"
    "na\u00efve caf\u00e9 Stra\u00dfe \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u4e2d\u6587 \u65e5\u672c\u8a9e "
    "\U0001f389 a b c d e f g h i j k l m n o p q r s t u v w x y z"
)


class TextSource:
    """Tokens in one row, in memory or in a file, cut into windows.

    Examples are (i32[window], i32[window]). Window i has tokens [i T, i T + T), T the window; its labels are tokens
    [i T + 1, i T + T + 1). So each token but the first is predicted once, from those before it in its window. The last
    n - 1 mod T tokens are left out.

    Args:
        name: of the source, for errors.
        window: T, tokens, >= 1.
        tokens: of all files; a NUL is put between two files if they are bytes.
        facts: what they are of, the same on all machines.

    Attributes:
        bytes_each, tokens_each: mean bytes that are predicted in an example, and tokens.
    """

    def __init__(self, name: str, window: int, tokens: np.ndarray | TokenFile, facts: TextFacts) -> None:
        self.name, self.window, self.tokens, self.facts, self.classes = name, window, tokens, facts, facts.classes
        self.unit, self.ends = "token" if facts.tokenizer else "byte", np.array(facts.ends, np.int64)
        if not len(self):
            raise UsageError(
                f"{name}: got {len(tokens)} {self.unit}s in {len(facts.files)} files; expected at least "
                f"data.window + 1 = {window + 1} {self.unit}s"
            )
        self.tokens_each, self.bytes_each = window, window * facts.text_bytes / len(tokens)

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.window

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: got window {index} of {len(self)}")
        begin = index * self.window
        tokens = self.tokens[begin : begin + self.window + 1].astype(np.int32)
        return tokens[:-1], tokens[1:]

    def where(self, index: int) -> str:
        file, place = place_in_parts(self.ends, index * self.window)
        return f"{self.facts.files[file]}, {self.unit} {place}"

    def digest(self) -> str:
        return self.facts.digest


def text(config: Data, split: str) -> TextSource:
    """The tokens in DIR/<split>.tokens, or all files below DIR/<split>/ in alphabetical order; DIR is `data.dir`."""
    tokenizer = open_tokenizer(config.tokenizer)
    path, train_path = (Path(config.dir, split_name(config, each) + SUFFIX) for each in (split, "train"))
    if not config.dir or not (path.is_file() or train_path.is_file()):
        return TextSource("text", config.window, *read_tokens(config, split, tokenizer))
    if not path.is_file():
        raise UsageError(
            f"{path}: No such file; expected tokens beside {train_path}: write them with jaxmpi data tokens, or "
            "validate on a share of the training windows: --data.holdout 0.02"
        )
    tokens = TokenFile(path)
    expected = {"data.tokenizer": tokenizer.digest} if tokenizer else {}
    if train_path.is_file():
        expected[str(train_path)] = TokenFile(train_path).facts.tokenizer_digest
    for name, digest in expected.items():
        if digest != tokens.facts.tokenizer_digest:
            raise UsageError(
                f"{path}: got tokens by {tokens.facts.tokenizer or 'no tokenizer'}, {tokens.facts.classes} different "
                f"ones; expected those of {name}, another tokenizer: {WAY_OUT}"
            )
    return TextSource("text", config.window, tokens, tokens.facts)


def stdlib(config: Data, split: str) -> TextSource:
    """Source code of Python's standard library, tests included: 31 MB that are the same everywhere for one version.

    One module in 50 is held out whole: a top-level file or package, or one below `test`.
    """
    return TextSource("stdlib", config.window, *read_tokens(config, split, open_tokenizer(config.tokenizer)))


# ---------------------------------------------------------------- files


class Part(NamedTuple):
    """A file of a text, or of its documents."""

    name: str  # the same on all machines
    documents: Callable[[], Iterable[tuple[str, bytes]]]  # a name in errors, and the text, of each


def list_parts(config: Data, split: str) -> tuple[Path, list[Part]]:
    """The folder of `stdlib` or `text`, and its files, each one document."""
    if config.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = library_files(list_files(root, ".py"), held_out=split != "train")
    else:
        base = Path(config.dir)
        root = base / split_name(config, split)
        if not config.dir or not root.is_dir():
            got = f"the file {base}" if base.is_file() else f"no folder {root if base.is_dir() else base}"
            raise UsageError(
                f"text: got {got if config.dir else 'no folder'}; expected files in DIR/train/ and DIR/validation/, or "
                f"DIR/train{SUFFIX}, with --data.dir DIR; {name_split(split)}"
            )
        files = list_files(root)

    def read(path: Path) -> list[tuple[str, bytes]]:
        with refusing_text(config.source, path):
            return [(str(path), path.read_bytes())]

    return root, [Part(file, partial(read, root / file)) for file in files]


def read_tokens(config: Data, split: str, tokenizer: "Tokenizer | None") -> tuple[np.ndarray, TextFacts]:
    """All tokens of `stdlib` or `text` in memory."""
    root, parts = list_parts(config, split)
    with refusing_text(config.source, root):
        # Files are in memory twice: as they are read, and joined. Sparse ones may be larger than their disk.
        need_bytes, left_bytes = 2 * sum((root / part.name).stat().st_size for part in parts), available_bytes()
    if need_bytes > left_bytes:
        raise UsageError(
            f"{config.source}: {root}: {need_bytes / 1e9:,.1f} GB of memory are needed to read {len(parts)} files, and "
            f"{left_bytes / 1e9:,.1f} GB are left; write their tokens to a file: jaxmpi data tokens"
        )
    encoded = [encode(document, config.source, tokenizer) for part in parts for document in part.documents()]
    arrays, sizes = zip(*encoded, strict=True) if encoded else ((np.empty(0, np.uint8),), (0,))
    tokens, files = np.concatenate(arrays), tuple(part.name for part in parts)
    facts = TextFacts(
        files=files,
        ends=tuple(np.cumsum([*map(len, arrays)]).tolist()),
        text_bytes=sum(sizes),
        classes=tokenizer.classes if tokenizer else BYTES,
        digest=sha256(files, (tokens,)),
        tokenizer=tokenizer.name if tokenizer else "",
    )
    return tokens, facts


def encode(document: tuple[str, bytes], source: str, tokenizer: "Tokenizer | None") -> tuple[np.ndarray, int]:
    """A document's tokens, and the number of its bytes; without a tokenizer a NUL ends it, which counts."""
    where, blob = document
    if tokenizer is None:
        return np.frombuffer(blob + SEPARATOR, np.uint8), len(blob) + 1
    with refusing_text(source, where):
        return tokenizer.tokens(decode(blob, source), where), len(blob)


def decode(blob: bytes, source: str) -> str:
    """Files of the standard library may have bytes that are not UTF-8, which become U+FFFD."""
    return blob.decode(errors="replace" if source == "stdlib" else "strict")


@contextlib.contextmanager
def refusing_text(source: str, where: str | Path) -> Iterator[None]:
    """Turn errors of a file into a `UsageError`."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        way_out = "mend it or take it away, on all machines; a tokenizer takes UTF-8"
        raise UsageError(f"{source}: {where} cannot be read: {error}; {way_out}") from error


def list_files(root: Path, suffix: str = "") -> list[str]:
    """Names of the files below a folder that end in `suffix`, hidden ones left out.

    They are relative to the folder, with slashes, and in the order of their bytes, which is the same on all machines.
    """
    paths = (path.relative_to(root) for path in root.rglob(f"*{suffix}") if path.is_file())
    shown = (path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts))
    return sorted(shown, key=os.fsencode)


def library_files(files: Iterable[str], *, held_out: bool) -> list[str]:
    """Files of the standard library that every machine has, of one split.

    Whether a module is held out follows from its name alone, `asyncio` for asyncio/base_events.py and
    `test/test_asyncio` for test/test_asyncio/utils.py, so a file more or less moves no other.
    """
    split = []
    for file in files:
        parts = file.split("/")
        is_common = not NOT_THE_LIBRARY & {*parts} and not any(part.startswith(OF_THE_MACHINE) for part in parts)
        module = "/".join(parts[: 2 if parts[0] == "test" else 1]).encode(errors="surrogateescape")
        is_held_out = int.from_bytes(hashlib.sha256(module).digest()[:8], "big") % HELD_OUT == 0
        if is_common and is_held_out == held_out:
            split.append(file)
    return split


# ---------------------------------------------------------------- tokenizers


class Tokenizer(NamedTuple):
    """Text to numbers in [0, classes)."""

    encode: Callable[[str], Any]
    classes: int
    name: str
    vocabulary: Callable[[], Mapping[str, int]] = dict  # numbers of tokens, if they are known

    @property
    def dtype(self) -> np.dtype:
        """Of tokens: u16 or u32."""
        return np.dtype("<u2" if self.classes <= 1 << 16 else "<u4")

    @property
    def digest(self) -> str:
        """The same for tokenizers with the same vocabulary that make the same tokens of SAMPLE."""
        words = json.dumps(sorted(self.vocabulary().items()))
        return sha256([words, str(self.classes)], [self.tokens(SAMPLE, "a sample").astype("<u4")])

    def tokens(self, text: str, where: str) -> np.ndarray:
        """u16 or u32[n] of a whole file."""
        try:
            tokens = np.asarray(self.encode(text))
        except Exception as error:  # whatever a function of the user's raises, or a library
            raise UsageError(f"{where}: data.tokenizer: {type(error).__name__}: {error}; expected tokens") from error
        is_row = tokens.ndim == 1 and (tokens.dtype.kind in "iu" or tokens.size == 0)
        lowest, highest = (int(tokens.min()), int(tokens.max())) if is_row and tokens.size else (0, 0)
        if not is_row or lowest < 0 or highest >= self.classes:
            raise UsageError(
                f"{where}: data.tokenizer: got {tokens.dtype}{list(tokens.shape)} from {lowest} to {highest}; expected "
                f"whole numbers [tokens], 0 <= token < {self.classes}, its vocab_size"
            )
        return tokens.astype(self.dtype)


def open_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """The tokenizer that `data.tokenizer` names or is; None if it is empty."""
    if not tokenizer:
        return None
    if isinstance(tokenizer, str) or hasattr(tokenizer, "to_str"):
        return _open_json(tokenizer)
    size: Any = getattr(tokenizer, "vocab_size", getattr(tokenizer, "n_vocab", 0))
    classes: Any = size() if callable(size) else size  # SentencePiece's is a method
    is_number = isinstance(classes, (int, np.integer))
    encode = getattr(tokenizer, "encode", tokenizer)
    if is_number and hasattr(tokenizer, "__len__"):  # `vocab_size` of Transformers leaves out added tokens
        classes = max(classes, len(tokenizer))
    if not callable(encode) or not is_number or classes <= 0:
        raise UsageError(f"data.tokenizer: got {type(tokenizer).__name__} of vocab_size {classes!r}; expected {FORM}")
    name = getattr(tokenizer, "name", None) or getattr(tokenizer, "__name__", type(tokenizer).__name__)
    return Tokenizer(encode, int(classes), str(name), getattr(tokenizer, "get_vocab", dict))


def _open_json(tokenizer: Any) -> Tokenizer:
    """The tokenizer of a JSON file, or of an object of `tokenizers`, which is copied by its JSON."""
    tokenizers, is_file = import_tokenizers("data.tokenizer"), isinstance(tokenizer, str)
    if is_file:
        check_plain_files([tokenizer], f"data.tokenizer: {FORM}")
    try:
        parsed = tokenizers.Tokenizer.from_str(
            Path(tokenizer).read_text(encoding="utf-8") if is_file else tokenizer.to_str()
        )
    except Exception as error:  # all that the library raises
        name = tokenizer if is_file else type(tokenizer).__name__
        raise UsageError(f"data.tokenizer: {name} cannot be read: {error}; expected {FORM}") from error
    parsed.no_truncation()  # many are saved with it: it would cut each file off
    parsed.no_padding()
    classes = max([parsed.get_vocab_size(), *(number + 1 for number in parsed.get_vocab().values())])
    name = os.path.basename(tokenizer) if is_file else type(tokenizer).__name__
    return Tokenizer(lambda text: parsed.encode(text).ids, classes, name, parsed.get_vocab)


def import_tokenizers(purpose: str) -> Any:
    """The library `tokenizers`, with the parts in use."""
    parts = "models", "pre_tokenizers", "trainers"
    return import_package(purpose, "tokenizers", "tokenizers", *(f"tokenizers.{part}" for part in parts))
