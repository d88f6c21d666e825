"""Compressed images to pixels, by libjpeg-turbo, Pillow and OpenCV.

No other file of this folder calls these libraries, and each is imported when it is first used. JPEG files are decoded
by libjpeg-turbo, at 1/2 or less of their size if that is enough. Files that it refuses (PNG, CMYK, damaged ones)
go to Pillow. Pillow decides what is an image and what is not.
"""

import contextlib
import functools
import io
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxmpi.core.errors import TrainingError, UsageError

MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's name for so many channels
SPACES = {1: "GRAY", 3: "RGB", 4: "RGBA"}  # libjpeg-turbo's
# Pillow's modes of 8 bits a channel at most, which it converts to those by itself.
EIGHT_BIT_MODES = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"}
# Pixels at most of a JPEG that libjpeg-turbo decodes, and of an image that has been scaled; Pillow warns of larger
# files, and refuses the largest.
MAX_PIXELS = 1 << 26
OBJECT = re.compile(r" <\S+ object at \w+>")  # the bytes, which Pillow names so
MAX_SCANS = 500  # scans of a progressive JPEG at most; ten are usual. Each goes over all blocks, and may be a few bytes


class CorruptExample(TrainingError):
    """An example that cannot be decoded: its place, index and reason; `fault` is that without a way out."""

    def __init__(self, where: str, index: int, reason: str) -> None:
        self.fault = f"{where} (example {index}) is corrupt: {reason}"
        super().__init__(f"{self.fault}; --data.on-error skip goes on without, --data.max-skipped sets how many")
        self.where, self.index, self.reason = where, index, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return CorruptExample, (self.where, self.index, self.reason)


@contextlib.contextmanager
def corrupt_if_it_fails(blob: Any, where: str, index: int) -> Iterator[None]:
    """Turn errors of decoding `blob`, whatever their type, into `CorruptExample`."""
    try:
        yield
    except (MemoryError, ImportError):  # the machine's fault, and the installation's: no example is corrupt for them
        raise
    except Exception as error:
        reason = OBJECT.sub("", f"{type(error).__name__}: {error}") if len(blob) else "the file is empty"
        raise CorruptExample(where, index, reason) from error


class Picture(NamedTuple):
    """A compressed image whose header has been read."""

    height: int  # px
    width: int
    pixels: Callable[[int, int], np.ndarray]  # (height, width) -> all of it, at least so large if it is, u8[h, w, c]
    jpeg: tuple[Any, int] | None = None  # blob and channels, if libjpeg-turbo decodes it


def opened(blob: Any, channels: int) -> Picture:
    """A JPEG, PNG or what else Pillow knows, as 1, 3 or 4 channels; raises whatever Pillow does on a damaged file.

    Grey, palette and CMYK images are converted; of 16 bits a pixel the 8 highest are taken, and 32 bits are refused,
    since their range is not known. Transparency is dropped, and an animation gives its first frame. An EXIF orientation
    is ignored, as in the usual ImageNet pipelines. A file's name does not count.
    """
    import simplejpeg

    _check_scans(memoryview(blob))
    with contextlib.suppress(ValueError):  # no JPEG, or one that is not sound: Pillow says which
        header: tuple[Any, ...] = simplejpeg.decode_jpeg_header(blob)
        height, width, space = header[:3]
        if space in ("YCbCr", "Gray", "RGB") and height * width <= MAX_PIXELS:
            return Picture(height, width, functools.partial(_jpeg, blob, channels), (blob, channels))
    pixels = _by_pillow(blob, channels)
    return Picture(pixels.shape[0], pixels.shape[1], lambda height, width: pixels)


def _check_scans(blob: memoryview) -> None:
    """Refuse a progressive JPEG of so many scans that decoding takes hours; other scans have bits for each block."""
    at = 2
    while at + 4 <= len(blob) and blob[at] == 0xFF and blob[at + 1] in _SKIPPED:
        at += 2 + int.from_bytes(blob[at + 2 : at + 4], "big")
    is_sequential = at + 4 <= len(blob) and blob[at] == 0xFF and blob[at + 1] in (0xC0, 0xC1)
    if blob[:2] == b"\xff\xd8" and not is_sequential:
        scans = bytes(blob).count(b"\xff\xda")
        if scans > MAX_SCANS:
            raise UsageError(f"got a JPEG of {scans} scans; expected at most {MAX_SCANS}")


def _jpeg(blob: Any, channels: int, height: int, width: int, strict: bool = True) -> np.ndarray:
    import simplejpeg

    try:
        return simplejpeg.decode_jpeg(
            blob,
            SPACES[channels],
            strict=strict,
            # Colours lie at half the resolution in most files; to repeat them is quicker, and nobody sees a difference.
            fastupsample=True,
            min_height=height,
            min_width=width,
            min_factor=2,  # 7/8 to 5/8 are slower than the whole
        )
    except ValueError:  # it is strict: Pillow reads files with bytes too many
        return _by_pillow(blob, channels)


def _by_pillow(blob: Any, channels: int) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(blob)) as file:
        image: Any = file
        _check_kind(image)
        if _is_16_bit(image):  # Pillow's own conversion clips at 255
            bits = image.tag_v2.get(258, (16,))[0] if image.format == "TIFF" else 16  # BitsPerSample, which may be 12
            image = Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
        if image.mode == "P":  # a palette may hold colours with alpha
            image = image.convert("RGBA")
        pixels = np.array(image.convert(MODES[channels]))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _check_kind(image: Any) -> None:
    if image.format == "EPS":
        raise UsageError("an EPS file is a program, which Pillow has Ghostscript run; expected an image")
    if image.mode not in EIGHT_BIT_MODES and not _is_16_bit(image):
        raise UsageError(
            f"got an image of Pillow's mode {image.mode} ({image.format}), whose range is not known; expected 8 or 16 "
            "bits a pixel: scale its pixels to 0 to 255, and save them as uint8"
        )


def _is_16_bit(image: Any) -> bool:
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def decoded(blob: Any, channels: int, resize: int) -> np.ndarray:
    """u8[height, width, channels] of a compressed image, its shorter side `resize` px if set; raises as `opened`."""
    picture = opened(blob, channels)
    if not resize:
        return picture.pixels(picture.height, picture.width)
    size = _shorter_side(picture.height, picture.width, resize)
    return _scaled(picture.pixels(*size), size)


def window(picture: Picture, top: int, left: int, height: int, width: int, px: int) -> np.ndarray:
    """A window scaled to u8[px, px, channels], decoded no further than needed."""
    picture = _without_rows_below(picture, top + height)
    enough = -(-picture.height * px // height), -(-picture.width * px // width)
    image = picture.pixels(*enough)
    down, across = image.shape[0] / picture.height, image.shape[1] / picture.width
    top, left = round(top * down), round(left * across)
    height, width = max(round(height * down), 1), max(round(width * across), 1)
    return stretched(image[top : top + height, left : left + width], px)


def _without_rows_below(picture: Picture, bottom: int) -> Picture:
    """The picture without the rows of blocks below `bottom`, if possible.

    JPEG files are coded from top to bottom, so decoding may stop early: the header is made to say that there are fewer
    rows. Bytes left over after them are no fault then, so the file must be seen to have an end.
    """
    if picture.jpeg is None:
        return picture
    blob, channels = picture.jpeg
    blob = bytes(blob)
    frame = _frame(blob) if blob.endswith(b"\xff\xd9") else None
    if frame is None:
        return picture
    at, block = frame
    rows = -(-bottom // block) * block
    if rows >= picture.height:
        return picture
    shortened = b"".join((memoryview(blob)[:at], rows.to_bytes(2, "big"), memoryview(blob)[at + 2 :]))
    return Picture(rows, picture.width, functools.partial(_jpeg, shortened, channels, strict=False))


_SKIPPED = frozenset([0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)])  # tables, application's own, comments


def _frame(blob: bytes) -> tuple[int, int] | None:
    """Offset of the height's two bytes, and rows that are coded together, of a JPEG of one scan (ITU-T T.81, B.2)."""
    at, frame, components = 2, None, 0
    while at + 10 < len(blob) and blob[at] == 0xFF:
        marker, size = blob[at + 1], int.from_bytes(blob[at + 2 : at + 4], "big")
        if marker in (0xC0, 0xC1):  # baseline and extended sequential
            components = blob[at + 9]
            sampling = blob[at + 11 : at + 11 + 3 * components : 3]
            frame = at + 5, 8 * max((factor & 15 for factor in sampling), default=1)
        elif marker == 0xDA:  # the scan follows
            return frame if frame and blob[at + 4] == components else None
        elif marker not in _SKIPPED:
            return None
        at += 2 + size
    return None


def resized(image: np.ndarray, px: int, where: str = "image") -> np.ndarray:
    """u8 or f32[height, width, channels], its shorter side `px` long, aspect kept; refused if it would be too large."""
    height, width, _ = image.shape
    return image if min(height, width) == px else _scaled(image, _shorter_side(height, width, px, where))


def stretched(image: np.ndarray, px: int) -> np.ndarray:
    """u8 or f32[height, width, channels] as [px, px, channels], aspect not kept."""
    return _scaled(image, (px, px))


def _scaled(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Scale to (height, width) px: bilinear, or means over areas if either side shrinks to half or less."""
    if image.shape[:2] == size:
        return image
    cv2 = _opencv()
    shrinks = max(have / want for have, want in zip(image.shape, size, strict=False))
    scaled = cv2.resize(image, size[::-1], interpolation=cv2.INTER_AREA if shrinks >= 2 else cv2.INTER_LINEAR)
    return scaled if scaled.ndim == 3 else scaled[..., None]


def mirrored(image: np.ndarray) -> np.ndarray:
    """Left to right; a view if it is not u8[height, width, 3]."""
    if image.dtype == np.uint8 and image.ndim == 3 and image.shape[-1] == 3:
        return _opencv().flip(image, 1)  # copying a mirrored view goes pixel by pixel
    return image[:, ::-1]


@functools.cache
def _opencv() -> Any:
    import cv2

    cv2.setNumThreads(1)  # loaders share out the cores
    return cv2


def _shorter_side(height: int, width: int, px: int, where: str = "image") -> tuple[int, int]:
    scale = px / min(height, width)
    high, wide = max(px, round(height * scale)), max(px, round(width * scale))
    if high * wide > MAX_PIXELS:  # a line of pixels, which a small file has, would become gigabytes
        raise UsageError(
            f"{where}: got {height} x {width} px, {high} x {wide} with a shorter side of {px}; expected at most "
            f"{MAX_PIXELS} px in all: crop or drop it, or set a smaller resize"
        )
    return high, wide


def with_channels(image: np.ndarray, channels: int, where: str) -> np.ndarray:
    """An image as [height, width, channels]; grey is repeated, and other numbers of channels are refused."""
    image = image[..., None] if image.ndim == 2 else image
    if image.ndim != 3 or image.shape[-1] not in (1, channels):
        raise UsageError(
            f"{where}: got an image of shape {image.shape}; expected [height, width, {channels}] or grey [height, "
            "width]; see data.channels"
        )
    return np.broadcast_to(image, (*image.shape[:2], channels))


def encoded_again(blob: bytes, px: int, quality: int) -> bytes:
    """Resize an image file's shorter side to `px`, as JPEG or PNG; with 0, or of that size, it keeps its bytes."""
    from PIL import Image

    with Image.open(io.BytesIO(blob)) as image:
        _check_kind(image)
        if px in (0, min(image.size)):
            return blob
        channels = 1 if image.mode in ("1", "L", "LA") or image.mode.startswith("I") else 3
    return encoded(decoded(blob, channels, px), quality)


def encoded(image: np.ndarray, quality: int) -> bytes:
    """Encode u8[height, width, 1, 3 or 4] as JPEG of `quality` 1 to 100, or with 0 as PNG, which loses nothing."""
    from PIL import Image

    image = image[..., None] if image.ndim == 2 else image
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] not in MODES:
        raise UsageError(f"got an image {image.dtype}{list(image.shape)}; expected u8[height, width, 1, 3 or 4]")
    if quality and image.shape[-1] == 4:
        raise UsageError("JPEG has no transparency; give quality 0, which makes PNG")
    file = io.BytesIO()
    plain = Image.fromarray(image if image.shape[-1] > 1 else image[..., 0])
    plain.save(file, "JPEG", quality=quality) if quality else plain.save(file, "PNG")
    return file.getvalue()
