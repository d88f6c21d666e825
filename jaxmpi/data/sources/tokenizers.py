"""Tokenizers for text: a JSON file, an encoding object, or a function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError, check
from jaxmpi.data.sources.base import check_plain_files

FORM = (
    "the name of a JSON file, a tokenizers.Tokenizer, or an object whose encode(text) returns the tokens' numbers, or "
    "a function that does, with vocab_size or n_vocab"
)


class Tokenizer(NamedTuple):
    """Text to numbers in [0, classes)."""

    encode: Callable[[str], Any]
    classes: int

    def tokens(self, text: str, where: str) -> np.ndarray:
        """u16 or u32[n] of a whole file.

        Raises:
            UsageError: what the tokenizer returns are no such numbers.
        """
        try:
            found = np.asarray(self.encode(text))
        except Exception as error:  # whatever a function of the user's raises, or a library
            raise UsageError(f"{where}: data.tokenizer: {type(error).__name__}: {error}; expected tokens") from error
        is_row = found.ndim == 1 and (found.dtype.kind in "iu" or found.size == 0)
        check(is_row, f"{where}: data.tokenizer: got {found.dtype}{list(found.shape)}; expected whole numbers [tokens]")
        least, most = (int(found.min()), int(found.max())) if found.size else (0, 0)
        check(
            0 <= least and most < self.classes,
            f"{where}: data.tokenizer: got tokens from {least} to {most}; expected 0 <= token < {self.classes}, its "
            "vocab_size",
        )
        return found.astype(np.uint16 if self.classes <= 1 << 16 else np.uint32)


def tokenizer_of(given: Any) -> Tokenizer | None:
    """The tokenizer that `data.tokenizer` names or is; None if it is empty.

    Raises:
        UsageError: no such file, a package that is missing, or no tokenizer.
    """
    if not given:
        return None
    if isinstance(given, str):
        return _of_json(_read(given), given)
    if hasattr(given, "get_vocab_size") and hasattr(given, "to_str"):
        return _of_json(given.to_str(), "data.tokenizer")
    size: Any = getattr(given, "vocab_size", getattr(given, "n_vocab", 0))
    classes: Any = size() if callable(size) else size  # SentencePiece's is a method
    is_number: bool = isinstance(classes, (int, np.integer))
    encode = getattr(given, "encode", given)
    if is_number and hasattr(given, "__len__"):  # `vocab_size` of Transformers leaves out added tokens
        classes = max(classes, len(given))
    is_able = callable(encode) and is_number and bool(classes > 0)
    check(is_able, f"data.tokenizer: got {type(given).__name__} of vocab_size {classes!r}; expected {FORM}")
    return Tokenizer(encode, int(classes))


def _read(path: str) -> str:
    try:
        check_plain_files([path], f"data.tokenizer: {FORM}")
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"data.tokenizer: {path} cannot be read: {error}; expected {FORM}") from error


def _of_json(content: str, name: str) -> Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise UsageError(f"data.tokenizer: {error}; install it with {installing('jaxmpi[tokenizers]')}") from error
    try:
        made = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # all that the library raises
        raise UsageError(f"{name}: {error}; expected JSON as Tokenizer.save of tokenizers writes it") from error
    made.no_truncation()  # many are saved with it: it would cut each file off
    made.no_padding()
    classes = max([made.get_vocab_size(), *(number + 1 for number in made.get_vocab().values())])
    return Tokenizer(lambda text: made.encode(text).ids, classes)
