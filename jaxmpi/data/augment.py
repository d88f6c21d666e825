"""What becomes of one image on its way into a batch.

Random choices are a function of (seed, epoch, index): the same on any number of workers, threads
or resumed runs. Mean and standard deviation per channel are left to the device, so that a batch
travels as u8; a mean image is subtracted here, because it must be cropped as the image is.
"""

from dataclasses import dataclass

import numpy as np

from jaxmpi.config import Data, UsageError, check
from jaxmpi.data.images import resized, with_channels
from jaxmpi.data.sampler import random_bits


@dataclass(frozen=True)
class Augment:
    """The chain of one split: shorter side, mean image, crop, mirror.

    Args:
        config: `resize`, `crop`, `mirror`, `channels` are used here.
        train: random crop and mirror; otherwise the centre crop and no mirror.
        seed: of the random choices.
        mean_image: f32[height, width, channels] in [0, 255], or None.
    """

    config: Data
    train: bool
    seed: int
    mean_image: np.ndarray | None = None

    def __call__(self, image: np.ndarray, epoch: int, index: int, where: str) -> np.ndarray:
        """The image as the batch holds it: crop x crop where `data.crop` is set, else its own size.

        u8 stays u8. With a mean image the result is f32, (x - mean) / 255 / std. An array that is
        not u8 is taken to be prepared by its owner: it may be of any shape and only crop and
        mirror touch it. The result may be a view.

        Raises:
            UsageError: the image is smaller than the crop or the mean image; `where` names it.
        """
        if image.dtype == np.uint8:
            image = self._sized(with_channels(image, self.config.channels, where))
            image, mean = self._mean(image, where)
        else:
            mean = None
        row, column, mirrored = self._choices(epoch, index, image, where)
        image = _window(image, row, column, self.config.crop)
        if mean is not None:
            mean = _window(mean, row, column, self.config.crop)
            std = np.asarray(self.config.std or 1, np.float32)
            image = (image.astype(np.float32) - mean) / np.float32(255) / std
        return image[:, ::-1] if mirrored else image

    def _sized(self, image: np.ndarray) -> np.ndarray:
        return resized(image, self.config.resize) if self.config.resize else image

    def _mean(self, image: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Image and mean over the same pixels: the centre of the image, as large as the mean."""
        mean = self.mean_image
        if mean is None:
            return image, None
        margins = [got - want for got, want in zip(image.shape[:2], mean.shape[:2], strict=True)]
        check(
            min(margins) >= 0,
            f"{where}: got an image of {_size(image)} px; expected at least the {_size(mean)} px "
            "of data.mean_image; set data.resize",
        )
        top, left = margins[0] // 2, margins[1] // 2
        return image[top : top + mean.shape[0], left : left + mean.shape[1]], mean

    def _choices(self, epoch: int, index: int, image: np.ndarray, where: str) -> tuple[int, int, bool]:
        """Row and column of the window, and whether to mirror it."""
        config = self.config
        if not (config.crop or (self.train and config.mirror)):
            return 0, 0, False
        check(image.ndim == 3, f"{where}: got shape {image.shape}; crop and mirror need 3 axes")
        high, wide = (side - config.crop if config.crop else 0 for side in image.shape[:2])
        check(
            min(high, wide) >= 0,
            f"{where}: got an image of {_size(image)} px; expected at least data.crop = "
            f"{config.crop} px; set data.resize >= {config.crop}",
        )
        if not self.train:
            return high // 2, wide // 2, False
        bits = random_bits(3, self.seed, epoch, stream=1, index=index).tolist()
        return bits[0] % (high + 1), bits[1] % (wide + 1), config.mirror and bits[2] % 2 == 1


def _window(image: np.ndarray, row: int, column: int, px: int) -> np.ndarray:
    return image[row : row + px, column : column + px] if px else image


def _size(image: np.ndarray) -> str:
    return f"{image.shape[0]} x {image.shape[1]}"


def load_mean_image(config: Data) -> np.ndarray | None:
    """`data.mean_image` as f32[height, width, channels] in [0, 255]; None where it is not set.

    Raises:
        UsageError: no such file, not a .npy file, or a shape that fits neither channels nor crop.
    """
    path = config.mean_image
    if not path:
        return None
    try:
        mean = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"data.mean_image {path}: {error}; expected a .npy file") from error
    mean = with_channels(mean, config.channels, f"data.mean_image {path}")
    check(
        min(mean.shape[:2]) >= config.crop,
        f"data.mean_image {path}: got {_size(mean)} px; expected at least data.crop = {config.crop}",
    )
    return mean.astype(np.float32)
