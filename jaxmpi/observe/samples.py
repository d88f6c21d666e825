"""Samples of a model: texts in `sample` lines, PNG files in RUN/samples."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.errors import UsageError
from jaxmpi.core.files import read_plain, write_whole

FOLDER = "samples"
FILE = re.compile(rf"{FOLDER}/[\w-]+\.png")  # file name in a line, which may come from a stranger
MOST_PICTURE_BYTES = 1 << 22
MOST_TEXT = 10_000  # characters of a text in the report
MOST_NAMES = 50  # names of samples in the report of a run


class Sample(NamedTuple):
    """The newest sample of a name."""

    name: str
    step: Any
    text: str = ""
    picture: bytes = b""  # PNG


def check_picture(value: Any) -> np.ndarray:
    """A picture as u8[height, width] or u8[height, width, 3].

    Raises:
        UsageError: it is none.
    """
    picture = np.asarray(value)
    has_shape = picture.ndim == 2 or (picture.ndim == 3 and picture.shape[-1] == 3)
    if not has_shape or picture.dtype not in (np.uint8, np.bool_) or not picture.size:
        raise UsageError(
            f"show: got {picture.dtype}{list(picture.shape)}; expected a text, or a picture, uint8[height, width] or "
            "uint8[height, width, 3]: numbers in [0, 1] times 255, in rows beside each other"
        )
    return picture.astype(np.uint8) * (255 if picture.dtype == np.bool_ else 1)


def save(picture: np.ndarray, file: Path) -> None:
    """Write a picture as PNG.

    Raises:
        OSError: it cannot be written.
    """
    import cv2

    file.parent.mkdir(exist_ok=True)
    in_order = picture if picture.ndim == 2 else picture[..., ::-1]  # OpenCV has blue first
    write_whole(file, cv2.imencode(".png", in_order)[1].tobytes())


def newest(folder: Path, rows: Iterable[dict[str, Any]]) -> list[Sample]:
    """The newest sample of each name, without pictures that cannot be read."""
    last = {str(row.get("name", "")): row for row in rows if row.get("kind") == "sample"}
    found = []
    for name, row in [*last.items()][:MOST_NAMES]:
        if isinstance(row.get("text"), str):
            found.append(Sample(name, row.get("step"), text=row["text"][:MOST_TEXT]))
        elif FILE.fullmatch(str(row.get("file"))):
            try:
                raw = read_plain(folder / row["file"], MOST_PICTURE_BYTES, "a picture")
            except UsageError:
                continue
            found.append(Sample(name, row.get("step"), picture=raw))
    return found
