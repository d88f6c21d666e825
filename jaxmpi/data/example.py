"""One example as one row of a batch: augmentation, then checks; errors name the example.

Augmentation is by choices that are a function of (seed, epoch, index) alone. Mean and standard deviation per channel
are left to the device, so that a batch is sent as u8; a mean image is subtracted here, because it must be cropped as
the image is.

`ExampleReader.row` alone reads, augments and checks examples, since an error in a loader helps only if it names its
example. An image that cannot be decoded may be skipped. A file that cannot be read ends the run: to skip it would skip
a failed file system whole. A batch is one flat dict of arrays. Numbers become 32-bit ones, as devices have them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmpi.config.data import Data
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.core.host_arrays import check_holds
from jaxmpi.core.json_tree import nest
from jaxmpi.data import decode
from jaxmpi.data.decode import CorruptExample
from jaxmpi.data.sampler import random_bits
from jaxmpi.data.sources.base import Source, to_array, where
from jaxmpi.data.sources.numpy_files import Expected, load_array

STREAM = 4  # number of the stream of random bits for `data.augment`; no other part draws from it
TRIES = 10  # windows of random area and aspect before the largest one is taken
MEAN = Expected(
    "numbers[height, width, channels], for data.mean_image",
    lambda array: array.dtype.kind in "biuf" and 0 not in array.shape,
)


@dataclass(frozen=True)
class Augment:
    """Image preparation of one split: shorter side, mean image, crop, mirror.

    With `crop_area`, a training crop is cut from the image as it comes, not from the resized one. `mean_image` is
    f32[height, width, channels] in [0, 255].
    """

    config: Data
    train: bool
    seed: int
    mean_image: np.ndarray | None = None

    def __call__(self, image: np.ndarray, epoch: int, index: int, where: str) -> np.ndarray:
        """The image for a batch, crop x crop if `data.crop` is set; may be a view. Errors name `where`.

        u8 stays u8; with a mean image the result is f32, (x - mean) / 255 / std. An array that is not u8 is taken to be
        prepared by its owner: it may be of any shape, and only crop and mirror touch it.
        """
        config, mean = self.config, None
        if image.dtype == np.uint8:
            image = decode.with_channels(image, config.channels, where)
        if self.train and config.crop_area:
            if image.ndim != 3:
                raise UsageError(f"{where}: got shape {image.shape}; a crop needs 3 axes")
            (top, left, height, width), is_mirrored = self._scaled_choices(image.shape[:2], epoch, index)
            scaled = decode.stretched(image[top : top + height, left : left + width], config.crop)
            return decode.mirrored(scaled) if is_mirrored else scaled
        if image.dtype == np.uint8:
            image = decode.resized(image, config.resize, where) if config.resize else image
            if (mean := self.mean_image) is not None:
                down, across = (got - want for got, want in zip(image.shape[:2], mean.shape[:2], strict=True))
                if min(down, across) < 0:
                    raise UsageError(
                        f"{where}: got an image of shape {image.shape}; expected at least the {mean.shape} of "
                        "data.mean_image; set data.resize"
                    )
                image = image[down // 2 : down // 2 + mean.shape[0], across // 2 : across // 2 + mean.shape[1]]
        top, left, is_mirrored = self._choices(epoch, index, image, where)
        if config.crop:
            window = np.s_[top : top + config.crop, left : left + config.crop]
            image, mean = image[window], None if mean is None else mean[window]
        if mean is not None:
            std = np.asarray(config.std or 1, np.float32)
            image = (image.astype(np.float32) - mean) / np.float32(255) / std
        return decode.mirrored(image) if is_mirrored else image

    def encoded(self, blob: Any, epoch: int, index: int, where: str) -> np.ndarray:
        """Prepare a compressed image, decoded no larger than its crop needs; `CorruptExample` if it cannot be."""
        config = self.config
        with decode.corrupt_if_it_fails(blob, where, index):
            if self.train and config.crop_area:
                picture = decode.opened(blob, config.channels)
                window, is_mirrored = self._scaled_choices((picture.height, picture.width), epoch, index)
                crop = decode.window(picture, *window, config.crop)
                return decode.mirrored(crop) if is_mirrored else crop
            image = decode.decoded(blob, config.channels, config.resize)
        return self(image, epoch, index, where)

    def by_user(self, example: dict[str, np.ndarray], epoch: int, index: int, where: str) -> dict[str, np.ndarray]:
        """Pass copies of a training example's arrays through `data.augment`, if set; other fields are refused."""
        function = self.config.augment
        if function is None or not self.train:
            return example
        key = np.array([self.seed, epoch], np.uint64)
        bits = np.random.Philox(key=key, counter=np.array([0, 0, index, STREAM], np.uint64))
        copies = {field: np.array(value) for field, value in example.items()}
        got = function(np.random.Generator(bits), copies)
        if not isinstance(got, dict) or got.keys() != example.keys():
            words = f"a dict of {', '.join(map(str, got))}" if isinstance(got, dict) else type(got).__name__
            raise UsageError(
                f"{where}: data.augment returned {words}; expected the fields that it got, {', '.join(example)}"
            )
        return {field: to_array(got[field], f"{where}: {field} of data.augment") for field in example}

    def check_unused(self, where: str) -> None:
        """Raise `UsageError` if a setting is on that only images know."""
        on = [name for name in ("resize", "crop", "mirror", "mean_image") if getattr(self.config, name)]
        if on:
            raise UsageError(
                f"data.{'/'.join(on)}: got {where}, a dict of other fields than image and label; these settings are "
                "for (image, label): leave them out, and prepare examples in the source"
            )

    def _choices(self, epoch: int, index: int, image: np.ndarray, where: str) -> tuple[int, int, bool]:
        """Row and column of the window, and True to mirror it."""
        config = self.config
        if not (config.crop or (self.train and config.mirror)):
            return 0, 0, False
        if image.ndim != 3 or min(image.shape[:2]) < config.crop:
            raise UsageError(
                f"{where}: got an image of shape {image.shape}; expected 3 axes, and at least data.crop = "
                f"{config.crop} px; set data.resize >= {config.crop}"
            )
        high, wide = (side - config.crop if config.crop else 0 for side in image.shape[:2])
        if not self.train:
            return high // 2, wide // 2, False
        bits = random_bits(3, self.seed, epoch, stream=1, index=index).tolist()
        return bits[0] % (high + 1), bits[1] % (wide + 1), config.mirror and bits[2] % 2 == 1

    def _scaled_choices(self, size: tuple[int, int], epoch: int, index: int) -> tuple[tuple[int, int, int, int], bool]:
        """The window in `size` = (height, width), and True to mirror it."""
        *draws, last = random_bits(4 * TRIES + 1, self.seed, epoch, stream=1, index=index).tolist()
        shares = ([bits / 2**64 for bits in draws[i : i + 4]] for i in range(0, 4 * TRIES, 4))  # in [0, 1]
        window = random_window(size, self.config.crop_area, self.config.crop_aspect, shares)
        return window, bool(self.config.mirror and last % 2 == 1)


def random_window(
    size: tuple[int, int], area: tuple[float, ...], aspect: tuple[float, float], shares: Iterable[Sequence[float]]
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a window: area uniform, aspect log-uniform, place uniform (Szegedy et al. 2015).

    `shares` are f[tries][4] in [0, 1]: area, aspect, top, left of every try. The first window that fits is taken; if
    none does, the largest in the centre whose aspect is allowed.
    """
    high, wide = size
    for area_share, aspect_share, top_share, left_share in shares:
        px = high * wide * (area[0] + area_share * (area[1] - area[0]))
        ratio = aspect[0] * (aspect[1] / aspect[0]) ** aspect_share
        height, width = max(round((px / ratio) ** 0.5), 1), max(round((px * ratio) ** 0.5), 1)
        if height <= high and width <= wide:
            return _place(top_share, high - height), _place(left_share, wide - width), height, width
    ratio = min(max(wide / high, aspect[0]), aspect[1])
    height, width = min(high, round(wide / ratio)), min(wide, round(high * ratio))
    return (high - height) // 2, (wide - width) // 2, height, width


def _place(share: float, spare: int) -> int:
    return min(int(share * (spare + 1)), spare)  # evenly from 0 to `spare`, also of a share of 1


def load_mean_image(config: Data) -> np.ndarray | None:
    """`data.mean_image` as f32[height, width, channels] in [0, 255]; None if unset."""
    path = config.mean_image
    if not path:
        return None
    mean = decode.with_channels(load_array(path, MEAN), config.channels, f"data.mean_image {path}")
    if min(mean.shape[:2]) < config.crop:
        raise UsageError(f"data.mean_image {path}: got {mean.shape}; expected at least data.crop = {config.crop} px")
    return mean.astype(np.float32)


# ---------------------------------------------------------------- rows


MOST_CLASSES = 2**31 - 1  # labels are i32
Example = dict[str, np.ndarray]  # one example as a batch has it: `image` and `label`, or the fields of a dict


@dataclass(frozen=True)
class ExampleReader:
    """Reader of examples as batch rows; stateless, since loaders share it."""

    source: Source
    augment: Augment
    skip: bool  # True if a run goes on without corrupt examples
    classes: int = 0  # that labels may name if the source does not say; 0: any number
    # classes: numbers of classes, or of any number if that is not known; "classes or none": the same, or -1, which is
    # not counted; numbers: any.
    labels: str = "classes"

    def number(self, epoch: int, index: int) -> int:
        """Number by which the source knows an example."""
        return index + epoch * len(self.source) * bool(getattr(self.source, "endless", False))

    def row(self, epoch: int, index: int) -> Example:
        """Example `index` of the source.

        Raises:
            CorruptExample: it cannot be decoded.
            TrainingError: it cannot be read.
            Exception: whatever the source raises, with a note that names the example.
        """
        name = where(self.source, self.number(epoch, index))
        try:
            example = self._read(epoch, index, name)
            if isinstance(example, dict):
                example = self.augment.by_user(example, epoch, index, name)
                return {field: to_32_bits(value, f"{name}: {field}") for field, value in example.items()}
            image, label = example
            fields = {"image": image, "label": to_array(label, f"{name}: label")}
            image, label = self.augment.by_user(fields, epoch, index, name).values()
            if image.dtype.itemsize > 4:
                image = to_32_bits(image, f"{name}: image")
            if self.labels == "numbers":
                return {"image": image, "label": to_32_bits(label, f"{name}: label")}
            top, bottom = self.source.classes or self.classes or MOST_CLASSES, -(self.labels == "classes or none")
            if label.dtype.kind not in "iu":
                raise UsageError(f"{name}: got label {label} of {label.dtype}; expected a whole number")
            if label.size and (label.min() < bottom or label.max() >= top):
                raise UsageError(f"{name}: got label {label}; expected {bottom} <= label < {top}")
            return {"image": image, "label": label.astype(np.int32)}
        except CorruptExample:
            raise
        except OSError as error:
            raise unreadable(name, index, error) from error
        except Exception as error:
            error.add_note(f"while loading {name} (example {index}, epoch {epoch})")
            raise

    def _read(self, epoch: int, index: int, name: str) -> tuple[np.ndarray, Any] | Example:
        number, encoded = self.number(epoch, index), getattr(self.source, "encoded", None)
        if encoded is not None:
            blob, label = encoded(number)
            return self.augment.encoded(blob, epoch, index, name), label
        example = self.source[number]
        if isinstance(example, dict):
            self.augment.check_unused(name)
            return flatten(example, name)
        image, label = example
        return self.augment(to_array(image, name), epoch, index, name), label


def flatten(example: dict[str, Any], name: str) -> Example:
    """Flatten a dict: inner dicts to `outer/inner`, tuples to `outer/[0]`."""
    fields: Example = {}
    for key, value in example.items():
        if not isinstance(key, str) or "/" in key or key in ("", "weight"):
            raise UsageError(
                f"{name}: got a field {key!r}; expected a name without /, and not weight, which the trainer adds"
            )
        inner = {f"[{i}]": element for i, element in enumerate(value)} if isinstance(value, tuple) else value
        if isinstance(inner, dict):
            fields |= {f"{key}/{field}": element for field, element in flatten(inner, name).items()}
        else:
            fields[key] = to_array(value, f"{name}: {key}")
    if not fields:
        raise UsageError(f"{name}: got an example without fields; expected a dict of arrays")
    return fields


def nested(fields: dict[str, Any]) -> dict[str, Any]:
    """The dict of dicts and tuples whose `flatten` this is."""

    def with_tuples(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        parts = {key: with_tuples(value) for key, value in tree.items()}
        names = [f"[{i}]" for i in range(len(parts))]
        return tuple(parts[name] for name in names) if parts.keys() == {*names} else parts

    return with_tuples(nest(fields, lambda name: name.split("/"), "fields"))


def to_32_bits(value: np.ndarray, name: str) -> np.ndarray:
    """Return numbers, with 64-bit whole ones as i32; refuse all else, and numbers that do not fit.

    Floats become f32 when they are copied into a batch.
    """
    if value.dtype.kind not in "biuf":
        raise UsageError(f"{name}: got {value.dtype}; expected numbers")
    if value.dtype.itemsize <= 4:
        return value
    if value.dtype.kind == "f":
        check_holds(name, value, np.float32)
        return value
    limits = np.iinfo(np.int32)
    if value.size and (value.min() < limits.min or value.max() > limits.max):
        raise UsageError(f"{name}: got {value.dtype} from {value.min()} to {value.max()}; expected 32 bits")
    return value.astype(np.int32)


def unreadable(name: str, index: int, error: OSError) -> TrainingError:
    """A file system's error as one that ends the run; no `CorruptExample`, whose skipping would skip all files."""
    return TrainingError(
        f"{name} (example {index}) cannot be read: {error}; files must not change while a run reads them"
    )
