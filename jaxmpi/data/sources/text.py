"""Text as tokens: joined files, cut into windows of one length; tokenizers, and vocabularies of words.

A window is an example: i32[window] in, i32[window] to predict. A token is a byte, or what a tokenizer makes of a whole
file: a JSON file of `tokenizers`, an object that encodes, or a function.
"""

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.core.shared_memory import available_bytes
from jaxmpi.data.sources.base import check_plain_files, import_package, place_in_parts, sha256, split_name

BYTES = 256  # classes
SEPARATOR = b"\0"  # between files; no text has it
HELD_OUT = 50  # one module of the standard library in so many
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
OF_THE_MACHINE = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")  # how names begin
FORM = (
    "the name of a JSON file, a tokenizers.Tokenizer, or an object whose encode(text) returns the tokens' numbers, or "
    "a function that does, with vocab_size or n_vocab"
)
UNKNOWN = "[UNK]"
WORD = r"\w+|[^\w\s]|\s+"  # letters and digits, one other sign, or white space: together they are the whole text
MOST_WORDS = 1 << 24


class TextSource:
    """Files as one row of tokens, cut into windows.

    Examples are (i32[window], i32[window]). Window i has tokens [i T, i T + T), T the window; its labels are tokens
    [i T + 1, i T + T + 1). So each token but the first is predicted once, from those before it in its window. The last
    n - 1 mod T tokens are left out.

    Args:
        root, files: a folder, and names in it, in this order, the same on all machines; a NUL is put between two files.
        window: T, tokens, >= 1.
        name: of the source, for errors.
        tokenizer: makes the tokens of a file, without a NUL; None: they are its bytes.
        errors: what becomes of bytes that are not UTF-8, for a tokenizer: strict refuses them, replace takes U+FFFD.

    Attributes:
        bytes_each, tokens_each: mean bytes that are predicted in an example, and tokens.
    """

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        window: int,
        name: str,
        tokenizer: "Tokenizer | None" = None,
        errors: str = "strict",
    ) -> None:
        self.name, self.files, self.window = name, tuple(files), window
        self.classes, self.token = (tokenizer.classes, "token") if tokenizer else (BYTES, "byte")
        parts, size_bytes, path = [np.empty(0, np.uint8)], 0, root
        try:
            # Files are in memory twice: as they are read, and joined. Sparse ones may be larger than their disk.
            need_bytes, left_bytes = 2 * sum((path := root / file).stat().st_size for file in files), available_bytes()
            if need_bytes > left_bytes:
                raise UsageError(
                    f"{name}: {root}: {need_bytes / 1e9:,.1f} GB of memory are needed to read {len(files)} files, and "
                    f"{left_bytes / 1e9:,.1f} GB are left; take fewer or smaller files"
                )
            for path in (root / file for file in files):
                blob = path.read_bytes() + (b"" if tokenizer else SEPARATOR)
                size_bytes += len(blob)
                if tokenizer is None:
                    parts.append(np.frombuffer(blob, np.uint8))
                else:
                    parts.append(tokenizer.tokens(blob.decode(errors=errors), str(path)))
        except (OSError, UnicodeDecodeError) as error:
            way_out = "mend it or take it away, on all machines; a tokenizer takes UTF-8"
            raise UsageError(f"{name}: {path} cannot be read: {error}; {way_out}") from error
        self.ends = np.cumsum([len(part) for part in parts[1:]], dtype=np.int64)
        self.text = np.concatenate(parts)
        if not len(self):
            raise UsageError(
                f"{name}: got {len(files)} files of {len(self.text)} {self.token}s in {root}; expected at least "
                f"data.window + 1 = {window + 1} {self.token}s"
            )
        self.tokens_each, self.bytes_each = window, window * size_bytes / len(self.text)

    def __len__(self) -> int:
        return max(len(self.text) - 1, 0) // self.window

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: got window {index} of {len(self)}")
        begin = index * self.window
        tokens = self.text[begin : begin + self.window + 1].astype(np.int32)
        return tokens[:-1], tokens[1:]

    def where(self, index: int) -> str:
        file, place = place_in_parts(self.ends, index * self.window)
        return f"{self.files[file]}, {self.token} {place}"

    def digest(self) -> str:
        return sha256(self.files, (self.text,))


def text(config: Data, split: str) -> TextSource:
    """All files below DIR/<split>/ in alphabetical order; DIR is `data.dir`."""
    folder = Path(config.dir) / split_name(config, split)
    if not config.dir or not folder.is_dir():
        raise UsageError(
            f"text: set data.dir to a folder DIR with files in DIR/train/ and DIR/validation/; got no folder {folder}; "
            f"name the right one with --data.{split}-split"
        )
    return TextSource(folder, list_files(folder), config.window, "text", open_tokenizer(config.tokenizer))


def stdlib(config: Data, split: str) -> TextSource:
    """Source code of Python's standard library, tests included: 31 MB that are the same everywhere for one version.

    One module in 50 is held out whole: a top-level file or package, or one below `test`.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = library_files(list_files(root, ".py"), held_out=split != "train")
    return TextSource(root, files, config.window, "stdlib", open_tokenizer(config.tokenizer), errors="replace")


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
        return tokens.astype(np.uint16 if self.classes <= 1 << 16 else np.uint32)


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
    return Tokenizer(encode, int(classes))


def _open_json(tokenizer: Any) -> Tokenizer:
    """The tokenizer of a JSON file, or of an object of `tokenizers`, which is copied by its JSON."""
    tokenizers, is_file = _import_tokenizers("data.tokenizer"), isinstance(tokenizer, str)
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
    return Tokenizer(lambda text: parsed.encode(text).ids, classes)


def _import_tokenizers(purpose: str) -> Any:
    parts = "models", "pre_tokenizers", "trainers"
    return import_package(purpose, "tokenizers", "tokenizers", *(f"tokenizers.{part}" for part in parts))


class Vocabulary(NamedTuple):
    """A written vocabulary."""

    words: int  # in it, with the one for all others
    known: float  # share of the held-out text's words that are in it


def write_words(config: Data, path: str | Path, words: int = 72_000) -> Vocabulary:
    """Write the training text's most frequent words for `data.tokenizer`; needs `jaxmpi[tokenizers]`.

    A word is a row of letters, digits and underscores, one other sign, or a row of white space, so tokens cover the
    text. Number 0 stands for all that are not among the `words` most frequent. Words that are equally frequent are in
    the order of the alphabet, so one text gives one file. Gibiansky's 300 million params have 72,000 words.
    """
    if config.source not in ("stdlib", "text") or not 2 <= words <= MOST_WORDS:
        raise UsageError(
            f"words: got {words} words of source {config.source}; expected 2 to {MOST_WORDS:,} of stdlib or text"
        )
    tokenizers = _import_tokenizers("words")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORD), "isolated")
    trainer = tokenizers.trainers.WordLevelTrainer(vocab_size=words, special_tokens=[UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator(_decode_files(config, "train"), trainer)
    try:
        tokenizer.save(str(path))
    except Exception as error:  # all that the library raises
        raise UsageError(f"words: {path} cannot be written: {error}") from error
    tokens = [token for file in tokenizer.encode_batch(_decode_files(config, "validation")) for token in file.ids]
    return Vocabulary(tokenizer.get_vocab_size(), 1 - tokens.count(0) / max(len(tokens), 1))


def _decode_files(config: Data, split: str) -> list[str]:
    open_text, errors = (stdlib, "replace") if config.source == "stdlib" else (text, "strict")
    joined = open_text(dataclasses.replace(config, tokenizer="", window=1), split).text.tobytes()
    try:
        return [file.decode(errors=errors) for file in joined.split(SEPARATOR) if file]
    except UnicodeDecodeError as error:
        way_out = "words are of UTF-8: convert the file, or take it away"
        raise UsageError(f"words: {config.dir}: {error}; {way_out}") from error
