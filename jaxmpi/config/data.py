"""Settings of the data: source, decoding, augmentation, loaders.

One frozen dataclass has the settings of all sources, so that a flag can change the source of an experiment. It checks
itself when it is made: a bad value is refused before any file is read. Python objects, such as `train` and `augment`,
can be set in an experiment file only; all else has a flag. `to_loader_config` leaves out the objects that only the
source needs.
"""

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxmpi.config.validate import InPython, check_fields
from jaxmpi.core.errors import UsageError

MOST_LOADERS = 1024  # per worker; each is a thread or a process


@dataclass(frozen=True)
class Data:
    """Source of examples, and the way of an image to the model."""

    source: str = "digits"  # a row of docs/data.md#formats
    dir: str = ""  # root folder of sources that are files; JAXMPI_DATA if empty, but for text
    name: str = ""  # tfds: data set, such as imagenet2012 or mnist:3.0.1
    train_split: str = "train"  # folder under `dir` or tfds split
    validation_split: str = "validation"  # the same, for evaluation; several as val,test, each with figures of its own
    holdout: float = 0.0  # share of the training examples, of each class, to validate on in place of a validation split
    # tables: names of the input and of the label, or any other number of names for a task; empty: image label
    columns: tuple[str, ...] = ()
    resize: int = 0  # px: shorter side after decoding, aspect kept; 0 keeps the size; not for crops by `crop_area`
    crop: int = 0  # px: random square in training, the centre one in evaluation; 0 takes the whole image
    # smallest and largest share of the image that a training crop takes; empty: crops of `crop` px
    crop_area: tuple[float, ...] = ()
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)  # with crop_area: narrowest and widest width / height of a crop
    mirror: bool = False  # flip half of the training images left to right
    mean: tuple[float, ...] = ()  # per channel, of pixels in [0, 1], subtracted
    std: tuple[float, ...] = ()  # per channel, of pixels in [0, 1], divided by
    mean_image: str = ""  # .npy file, u8 or f32[height, width, channels] in [0, 255]; instead of `mean`
    channels: int = 3  # channels of the model's input; grey images are repeated
    synthetic_examples: int = 4096  # size of the synthetic training set
    window: int = 128  # text, stdlib: tokens that an example predicts
    # text, stdlib: JSON file of tokenizers; in Python also an object that encodes, or a function; empty: bytes
    tokenizer: Any = ""
    on_error: Literal["stop", "skip"] = "stop"  # action at a corrupt image
    max_skipped: float = 0.01  # largest share of the examples that a run may skip in an epoch, of each epoch begun
    # kind of loaders that make batches; auto: processes to decode images
    loader: Literal["auto", "processes", "threads", "spawn"] = "auto"
    loaders: int = 0  # loaders per worker; 0: one per core of the worker, 8 at most, to decode images, else 2
    prefetch: int = 2  # batches made ahead, per worker
    stall_timeout_s: float = 300.0  # seconds that a loader may be at one example before the run ends
    # unit that is put in a new order each epoch; auto: see docs/data.md
    shuffle_by: Literal["auto", "examples", "files", "files-mixed"] = "auto"
    # partition: compressed examples are kept in the memory of the workers, each group of which holds one full copy
    memory: Literal["none", "partition"] = "none"
    # partition: workers that hold one full copy together; 0 = all workers; auto: the fewest whose hosts have the memory
    group_size: int | str = 0
    shuffle_period: int = 1  # partition: epochs between two shuffles over a group; 0 = after the first none
    # array: anything with __len__ and __getitem__ -> (image, label); grain: a MapDataset; mixture: parts and weights
    train: InPython[Any] = None
    # examples for evaluation, as `array` takes them, or the Data of another source; several as a dict by name
    validation: InPython[Any] = None
    # (random generator, example as a dict of arrays) -> example, of each training example once it is cropped
    augment: InPython[Callable[[Any, dict[str, Any]], dict[str, Any]] | None] = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            "data.",
            max_skipped="[0, 1], a share",
            holdout="[0, 1), such as 0.2",
            resize=">= 0 px",
            crop=">= 0 px",
            channels=">= 1",
            prefetch=">= 1",
            loaders=f"[0, {MOST_LOADERS}]",
            synthetic_examples=">= 1",
            window=">= 1",
            stall_timeout_s="> 0 seconds",
            shuffle_period=">= 0 epochs",
        )
        if self.memory != "none" and self.shuffle_by in ("files", "files-mixed"):
            raise UsageError(
                f"data.shuffle_by: got {self.shuffle_by} with data.memory {self.memory}, which reads no file after the "
                "start; use auto"
            )
        for name in ("mean", "std"):
            got = len(getattr(self, name))
            if got not in (0, 1, self.channels):
                raise UsageError(
                    f"data.{name}: got {got} numbers; expected {self.channels}, one a channel, or 1 for all"
                )
        if not all(map(math.isfinite, self.mean)):
            raise UsageError(f"data.mean: got {self.mean}; every entry must be finite")
        if not all(s > 0 for s in self.std):
            raise UsageError(f"data.std: got {self.std}; every entry must be > 0")
        if self.mean and self.mean_image:
            raise UsageError("data.mean and data.mean_image: give one of the two")
        if len(set(self.columns)) != len(self.columns):
            raise UsageError(f"data.columns: got {', '.join(self.columns)}; expected each name once")
        if self.group_size != "auto" and not (type(self.group_size) is int and self.group_size >= 0):
            raise UsageError(
                f"data.group_size: got {self.group_size!r}; expected a number of workers, 0 for all of them, or auto"
            )
        has_name = self.validation is None or is_several(self.validation, self.train)
        if self.holdout and not (has_name and self.validation_split == "validation"):
            raise UsageError(
                f"data.holdout: got {self.holdout} beside data.validation or data.validation_split; give "
                '--data.holdout 0, or further sets by name: Data(validation={"other": Data(...)})'
            )
        validation_sets(self)  # says what is wrong with them
        area, (narrow, wide) = self.crop_area, self.crop_aspect
        if area and not (len(area) == 2 and 0 < area[0] <= area[1] <= 1):
            raise UsageError(f"data.crop_area: got {area}; expected two shares with 0 < smallest <= largest <= 1")
        if not 0 < narrow <= wide:
            raise UsageError(f"data.crop_aspect: got {self.crop_aspect}; expected 0 < narrowest <= widest")
        if area and self.crop == 0:
            raise UsageError("data.crop_area: data.crop is 0; expected the px that crops are scaled to")
        if area and self.mean_image:
            raise UsageError(
                "data.crop_area scales pixels, data.mean_image wants them in place; use data.mean, one number a "
                "channel, or crops of one size: --data.crop-area without numbers"
            )


def validation_sets(config: Data) -> dict[str, Data]:
    """Settings of each validation set by the prefix of its figures: `eval_` of one, `eval_clean_` of several.

    Raises:
        UsageError: two have one name.
    """
    sets = dict[str, Any]()
    if is_several(config.validation, config.train):
        sets = {name: {"validation": examples} for name, examples in config.validation.items()}
    elif "," in config.validation_split:
        sets = {split: {"validation_split": split} for split in config.validation_split.split(",")}
    if not sets:
        return {"eval_": config}
    if config.holdout:
        sets = {"holdout": {"validation": None}} | {name: part | {"holdout": 0.0} for name, part in sets.items()}
    named = {"eval_" + re.sub(r"[^\w-]+", "_", name) + "_": replace(config, **part) for name, part in sets.items()}
    if len(named) < len(sets):
        raise UsageError(f"data.validation: got {', '.join(sets)}; expected names that differ in letters and digits")
    return named


def is_several(validation: Any, train: Any) -> bool:
    """Return True for a dict of validation sets by name, in place of one set's arrays by field."""
    if not isinstance(validation, dict) or validation.keys() == {"image", "label"}:
        return False
    has_fields = any(hasattr(part, "shape") or isinstance(part, (list, tuple)) for part in validation.values())
    return not (has_fields or (isinstance(train, dict) and train.keys() == validation.keys()))


def to_loader_config(config: Data) -> Data:
    """Settings for loaders, without the objects that only the source needs."""
    return replace(config, train=None, validation=None, tokenizer="")


def data_dir(config: Data) -> str:
    """`data.dir`, or the environment's JAXMPI_DATA; empty if neither is set."""
    return config.dir or os.environ.get("JAXMPI_DATA", "")
