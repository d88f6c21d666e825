"""`jaxmpi data`: pack any source, check what is packed, make a vocabulary, write a text's tokens."""

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich import progress
from rich.console import Console

from jaxmpi.config.data import Data
from jaxmpi.core.arguments import Parser
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.data.decode import CorruptExample
from jaxmpi.data.packing import PackingOptions, Progress, find_damage, pack, splits_in
from jaxmpi.data.sources.base import HOLD_OUT
from jaxmpi.data.sources.packed import PackedSource
from jaxmpi.data.sources.registry import SOURCES, open_source
from jaxmpi.data.sources.text import SUFFIX
from jaxmpi.data.tokens import list_documents, write_tokens, write_words

SHOWN = 20  # damaged records that are named
NEED_NO_FOLDER = ("digits", "animals", "synthetic")
FIELD = re.compile(r"(?<![\w./-])(?:--)?data\.(?=columns|tokenizer|name|holdout|train-split|validation-split)")


def pack_main(argv: list[str]) -> None:
    """`jaxmpi data pack SRC DST`."""
    parser = _parser(
        "pack", "Pack SRC into DST/<split>/; run again to go on.", "/data/imagenet /data/packed --resize 256"
    )
    add, default = parser.add_argument, PackingOptions()
    add("src", metavar="SRC", help=f"folder of the source; or {', '.join(NEED_NO_FOLDER)}, which need none")
    add("dst", metavar="DST", type=Path, help="folder for the packed splits")
    add("--source", help=f"what SRC holds: {', '.join(SOURCES)} (default: imagefolder)")
    add("--name", default="", help="tfds: data set, such as imagenet2012")
    add("--columns", nargs=2, default=(), metavar=("IMAGE", "LABEL"), help="of tables: names of the two")
    _add_splits(parser)
    add("--holdout", type=float, default=0.0, help="share of the training examples to pack as validation split")
    add("--resize", type=int, default=default.resize, help="px: shorter side; 0 keeps size and bytes")
    add("--quality", type=int, default=default.quality, help="JPEG 1 to 100 (default: 90); 0: PNG")
    add("--shard-mb", type=float, default=1024, help="at which a shard ends (default: 1024)")
    add("--on-error", default=default.on_error, help="stop | skip: what a corrupt image does")
    options = _parse(parser, argv)
    if not 0 < options.shard_mb < math.inf:
        raise UsageError(f"--shard-mb: got {options.shard_mb}; expected MiB > 0")
    needs_none = options.source is None and options.src in NEED_NO_FOLDER
    data = Data(
        source=options.src if needs_none else options.source or "imagefolder",
        dir="" if needs_none else options.src,
        name=options.name,
        columns=tuple(options.columns),
        train_split=options.train_split,
        validation_split=options.validation_split,
        holdout=options.holdout,
    )
    shard_bytes = max(int(options.shard_mb * 2**20), 1)
    packing = PackingOptions(options.resize, options.quality, shard_bytes, options.on_error)
    splits = ("train", "validation") if options.validation_split else ("train",)
    with _own_flags():  # a split that is missing is refused before the other is packed
        sources = {split: open_source(data, split) for split in splits}
    for split, source in sources.items():
        folder = options.dst / split
        with _own_flags():
            with _progress_bar(split, len(source)) as progress:
                packed = pack(source, folder, packing, options.threads, progress)
        print(f"{folder}: {packed.records} records, {packed.size_bytes / 1e6:,.1f} MB, skipped {packed.skipped}")


def check_main(argv: list[str]) -> None:
    """`jaxmpi data check DST`; exit code 1 if a record is damaged."""
    parser = _parser("check", "Verify every record of a packed data set.", "/data/packed --decode")
    parser.add_argument("dst", metavar="DST", type=Path, help="what jaxmpi data pack has made")
    parser.add_argument("--decode", action="store_true", help="decode the images too")
    options = _parse(parser, argv)
    damaged = 0
    for folder in splits_in(options.dst):
        packed = PackedSource(folder)
        with _progress_bar(folder.name, len(packed)) as progress:
            damage = find_damage(packed, options.threads, progress, options.decode)
        for text in damage[:SHOWN]:
            print(text)
        print(f"{folder}: {len(damage)} of {len(packed)} records are damaged" if damage else f"{folder}: all is well")
        damaged += len(damage)
    if damaged:
        sys.exit(1)


def words_main(argv: list[str]) -> None:
    """`jaxmpi data words SRC FILE`."""
    description = "Write the most frequent words of a training text to FILE, for --data.tokenizer FILE."
    parser = _text_parser("words", description, "stdlib words.json --words 8000")
    parser.add_argument("file", metavar="FILE", type=Path, help="JSON of the library tokenizers")
    parser.add_argument("--words", type=int, default=72_000, help="the most that it has (default: 72000)")
    options = parser.parse_args(argv)
    with _own_flags(is_text=True):
        vocab = write_words(_text(options), options.file, options.words, options.column)
    known = f"; {100 * vocab.known:.1f} % of the held-out ones are among them" if options.validation_split else ""
    print(f"{options.file}: {vocab.words:,} words{known}")


def tokens_main(argv: list[str]) -> None:
    """`jaxmpi data tokens SRC DST`."""
    description = "Write a text's tokens to DST/train.tokens and DST/validation.tokens, for --data.source text."
    parser = _text_parser("tokens", description, "/data/books /data/tokens --tokenizer words.json")
    parser.add_argument("dst", metavar="DST", type=Path, help="folder for the files")
    parser.add_argument("--tokenizer", default="", help="JSON of the library tokenizers (default: tokens are bytes)")
    options = _parse(parser, argv)
    data, names = _text(options), {"train": options.train_split, "validation": options.validation_split}
    splits = [split for split, name in names.items() if name]
    with _own_flags(is_text=True):
        for split in splits:  # one that is missing is refused before the other is written
            list_documents(data, split, options.column)
        for split in splits:
            path = options.dst / f"{names[split]}{SUFFIX}"
            facts = write_tokens(data, split, path, options.column, options.threads)
            print(f"{path}: {facts.ends[-1]:,} tokens of {facts.text_bytes / 1e3:,.1f} kB of text")


def _text_parser(name: str, description: str, example: str) -> Parser:
    parser = _parser(name, description, example)
    add = parser.add_argument
    add("src", metavar="SRC", help="folder with train/ and validation/, or stdlib, which needs none")
    add("--source", default="text", help="what SRC holds: text, jsonl, parquet, huggingface (default: text)")
    add("--column", default="text", help="of tables and lines of JSON: name of the text (default: text)")
    _add_splits(parser)
    return parser


def _add_splits(parser: Parser) -> None:
    parser.add_argument("--train-split", default="train", help="its name in SRC (default: train)")
    parser.add_argument("--validation-split", default="validation", help="its name in SRC; '' for none")


def _text(options: argparse.Namespace) -> Data:
    return Data(
        source="stdlib" if options.src == "stdlib" else options.source,
        dir="" if options.src == "stdlib" else options.src,
        tokenizer=getattr(options, "tokenizer", ""),
        train_split=options.train_split,
        validation_split=options.validation_split,
    )


@contextlib.contextmanager
def _own_flags(*, is_text: bool = False) -> Iterator[None]:
    """Errors name the trainer's flags; these commands' have no `data.` in front, and the folder is SRC."""
    try:
        yield
    except CorruptExample as error:
        raise UsageError(f"{error.fault}; --on-error skip, given with the same line, goes on without") from error
    except UsageError as error:
        text = str(error).replace("--data.dir DIR", "DIR as SRC").replace("data.dir", "SRC")
        if is_text:
            text = text.replace(HOLD_OUT, "--validation-split '' if there is none")
            text = text.replace("--data.columns", "--column")
        raise UsageError(FIELD.sub("--", text)) from error


def _parser(name: str, description: str, example: str) -> Parser:
    line = f"jaxmpi data {name}"
    return Parser(line, description=description, epilog=f"example: {line} {example}")


def _parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    options = parser.parse_args(argv)
    if options.threads < 1:
        raise UsageError(f"--threads: got {options.threads}; expected >= 1")
    return options


@contextlib.contextmanager
def _progress_bar(text: str, total: int) -> Iterator[Progress]:
    with progress.Progress(*progress.Progress.get_default_columns(), console=Console(stderr=True)) as shown:
        task = shown.add_task(text, total=total)
        yield lambda n: shown.advance(task, n)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "pack": pack_main,
    "check": check_main,
    "words": words_main,
    "tokens": tokens_main,
}
USAGE = """usage: jaxmpi data pack SRC DST [options]
       jaxmpi data check DST [options]
       jaxmpi data words SRC FILE [options]
       jaxmpi data tokens SRC DST [options]

Pack a source into few files that are read fast, and check them; make a vocabulary of a text; write a text's tokens to
files. `--help` after the command lists its options.

example: jaxmpi data pack /data/imagenet /data/packed"""


def main(argv: list[str]) -> None:
    """Run `jaxmpi data pack`, `check`, `words` or `tokens`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    lookup(COMMANDS, argv[0], "command")(argv[1:])
