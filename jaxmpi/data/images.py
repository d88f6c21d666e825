"""Compressed images to pixels: the one file that calls Pillow, which is imported when first used."""

import io
from typing import Any

import numpy as np

from jaxmpi.config import UsageError, check

MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's name for so many channels


class CorruptExample(UsageError):
    """An example that cannot be decoded: where it is, its index in the source, why."""

    def __init__(self, where: str, index: int, reason: str) -> None:
        super().__init__(
            f"{where} (example {index}) is corrupt: {reason}; data.on_error=skip goes on without such examples"
        )
        self.where, self.index, self.reason = where, index, reason


def decoded(blob: bytes, channels: int, resize: int) -> np.ndarray:
    """A JPEG, PNG or what else Pillow knows, as u8[height, width, channels].

    Grey, palette, CMYK and 16-bit images are converted, transparency is dropped, an animation
    gives its first frame, and an EXIF orientation is ignored, as in the usual ImageNet pipelines.

    Args:
        blob: the file's bytes.
        channels: 1, 3 or 4.
        resize: px, shorter side of the result; 0 keeps the size.

    Raises:
        Exception: whatever Pillow raises on a damaged file; the caller knows the file's name.
    """
    from PIL import Image

    with Image.open(io.BytesIO(blob)) as image:
        if resize:  # JPEG only: decode at 1/2, 1/4 or 1/8, never below the size asked for
            image.draft(None, (resize, resize))
        plain = _convert(image, MODES[channels])
        if resize:
            plain = plain.resize(_shorter_side(plain.size, resize), Image.Resampling.BILINEAR)
        pixels = np.array(plain)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _convert(image: Any, mode: str) -> Any:
    from PIL import Image

    if image.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion clips at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P":  # a palette may hold colours with alpha
        image = image.convert("RGBA")
    return image.convert(mode)


def resized(image: np.ndarray, px: int) -> np.ndarray:
    """u8 or f32[height, width, channels] with its shorter side `px` long, bilinear, aspect kept."""
    height, width, _ = image.shape
    return image if min(height, width) == px else _scaled(image, _shorter_side((width, height), px))


def stretched(image: np.ndarray, px: int) -> np.ndarray:
    """u8 or f32[height, width, channels] as [px, px, channels], bilinear, aspect not kept."""
    return image if image.shape[:2] == (px, px) else _scaled(image, (px, px))


def _scaled(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """To `size` = (width, height) px."""
    from PIL import Image

    channels = image.shape[-1]
    if image.dtype == np.uint8 and channels == 3:
        return np.array(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
    planes = [Image.fromarray(np.ascontiguousarray(image[..., c])) for c in range(channels)]
    return np.stack([np.array(p.resize(size, Image.Resampling.BILINEAR)) for p in planes], axis=-1)


def _shorter_side(size: tuple[int, int], px: int) -> tuple[int, int]:
    scale = px / min(size)
    return max(px, round(size[0] * scale)), max(px, round(size[1] * scale))


def with_channels(image: np.ndarray, channels: int, where: str) -> np.ndarray:
    """u8[height, width] or [height, width, c] as [height, width, channels]; grey is repeated.

    Raises:
        UsageError: the image is neither grey nor of `channels` channels.
    """
    image = image[..., None] if image.ndim == 2 else image
    check(
        image.ndim == 3 and image.shape[-1] in (1, channels),
        f"{where}: got an image of shape {image.shape}; expected [height, width, {channels}] or "
        "grey [height, width]; see data.channels",
    )
    return np.broadcast_to(image, (*image.shape[:2], channels))


def encoded_again(blob: bytes, px: int, quality: int) -> bytes:
    """An image file with its shorter side `px` long, as a new JPEG or PNG; the very bytes where it is so already.

    Args:
        blob: the file's bytes.
        px: 0 keeps the size, and so the bytes.
        quality: as of `encoded`.

    Raises:
        Exception: whatever Pillow raises on a damaged file.
    """
    from PIL import Image

    if px == 0:
        return blob
    with Image.open(io.BytesIO(blob)) as image:
        if min(image.size) == px:
            return blob
        channels = 1 if image.mode in ("1", "L", "LA") or image.mode.startswith("I") else 3
    return encoded(decoded(blob, channels, px), quality)


def encoded(image: np.ndarray, quality: int) -> bytes:
    """u8[height, width, 1, 3 or 4] as a JPEG of quality 1 to 100; as a PNG, which loses nothing, where that is 0.

    Raises:
        UsageError: the image is of another shape or type.
    """
    from PIL import Image

    image = image[..., None] if image.ndim == 2 else image
    check(
        image.dtype == np.uint8 and image.ndim == 3 and image.shape[-1] in MODES,
        f"got an image {image.dtype}{list(image.shape)}; expected u8[height, width, 1, 3 or 4]",
    )
    check(quality == 0 or image.shape[-1] != 4, "JPEG has no transparency; give quality 0, which makes PNG")
    file = io.BytesIO()
    plain = Image.fromarray(image if image.shape[-1] > 1 else image[..., 0])
    plain.save(file, "JPEG", quality=quality) if quality else plain.save(file, "PNG")
    return file.getvalue()
