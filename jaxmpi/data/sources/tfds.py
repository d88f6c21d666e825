"""Source: TensorFlow Datasets that are on disk already.

The data set must be prepared in a format with random access, such as array_record; TFDS reads it without TensorFlow.
The trainer neither downloads nor prepares it, and runs none of its code; an error names the command that prepares it.
Images come compressed and are decoded here, so that JPEG can be scaled while it is decoded, and a damaged image is
named.
"""

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmpi.config.data import Data, data_dir
from jaxmpi.core.env import installing
from jaxmpi.core.errors import UsageError
from jaxmpi.data.sources.base import Source, TableSource, check_plain_files, split_name

PREPARE = (
    'python -c "import tensorflow_datasets as tfds; '
    "tfds.builder('{name}'{where}, file_format='array_record').download_and_prepare()\""
)


class TfdsSource(TableSource):
    """One split, such as train or train[:80%], of a prepared data set with the features `image` and `label`."""

    def __init__(self, config: Data, builder: Any, split: str) -> None:
        import tensorflow_datasets as tfds

        super().__init__(config)
        features = builder.info.features
        missing = {"image", "label"} - set(features)
        if missing:
            raise UsageError(f"tfds {builder.name}: no feature {missing}; there are: {list(features)}")
        # Floats lie as four bytes of a PNG, which only TFDS puts together again.
        image: Any = features["image"]
        self.is_compressed = isinstance(image, tfds.features.Image) and image.np_dtype.kind == "u"  # pyright: ignore[reportAttributeAccessIssue]
        decoders = {"image": tfds.decode.SkipDecoding()} if self.is_compressed else None
        self.records = builder.as_data_source(split=split, decoders=decoders)
        self.name, self.config, self.split, self.builder = builder.name, config, split, builder
        self.classes = int(getattr(features["label"], "num_classes", None) or 0)

    def __reduce__(self) -> tuple[Any, ...]:  # by the folder, since readers do not pickle
        from tensorflow_datasets.core.features.feature import FeatureConnector

        modules = sorted({feature.__module__ for feature in FeatureConnector._registered_features.values()})
        return _open_folder, (self.config, str(self.builder.data_path), self.split, modules)

    def __len__(self) -> int:
        return len(self.records)

    def digest(self) -> str:
        return f"{self.builder.info.full_name}[{self.split}]"

    def where(self, index: int) -> str:
        return f"tfds {self.name}[{self.split}][{index}]"

    def cells(self, index: int) -> tuple[Any, Any]:
        """The image of record `index`, compressed if stored so, and its label."""
        try:
            record = self.records[index]
        except RuntimeError as error:  # all that array_record says of a file that is gone, damaged or cannot be read
            raise OSError(str(error)) from error
        if record["image"] is None:  # and of one that ends too early it says nothing
            raise OSError("its file became shorter")
        return record["image"], record["label"]


def tfds(config: Data, split: str) -> Source:
    """The data set `data.name`, prepared in `data.dir` or TFDS's default folder."""
    if not config.name:
        raise UsageError("tfds: set data.name to a data set, such as imagenet2012 or mnist:3.0.1")
    folder, name = data_dir(config), split_name(config, split)
    if folder:
        places = os.walk(os.path.join(folder, config.name.partition(":")[0]))
        check_plain_files((os.path.join(place, file) for place, _, files in places for file in files), "a file of TFDS")
    try:
        from tensorflow_datasets.core import read_only_builder

        with _known_features():
            builder = read_only_builder.builder_from_files(config.name, data_dir=folder or None)
        return TfdsSource(config, builder, name)
    except UsageError:
        raise
    except ImportError as error:  # tensorflow-datasets or array-record is missing
        raise UsageError(f"tfds: {error}; install it with {installing('jaxmpi[tfds]')}") from error
    except (LookupError, NotImplementedError, OSError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        place = f", data_dir={folder!r}" if folder else ""
        raise UsageError(
            f"tfds {config.name}[{name}]: {first_line}; if it is not prepared for random access in "
            f"{folder or 'the default folder'}, run: {PREPARE.format(name=config.name, where=place)}; if its images "
            f"are made from arrays that needs TensorFlow: {installing('tensorflow')}"
        ) from error


def _open_folder(config: Data, folder: str, split: str, modules: Sequence[str]) -> TfdsSource:
    """In a loader process, which imports the features that the trainer has imported."""
    from tensorflow_datasets.core import read_only_builder

    for module in modules:
        importlib.import_module(module)
    with _known_features():
        return TfdsSource(config, read_only_builder.builder_from_directory(folder), split)


@contextlib.contextmanager
def _known_features() -> Iterator[None]:
    """Keep TFDS from importing whatever modules features.json names: features of others are code."""
    from tensorflow_datasets.core.features.feature import FeatureConnector

    find, original = FeatureConnector.cls_from_name, vars(FeatureConnector)["cls_from_name"]

    def find_known(name: Any) -> Any:
        if not str(name).startswith("tensorflow_datasets.") and name not in FeatureConnector._registered_features:
            raise UsageError(
                f"tfds: features.json: got {name!r:.80}; expected features of TFDS itself: others are code; if you "
                "trust them, import their module in the experiment file"
            )
        return find(name)

    setattr(FeatureConnector, "cls_from_name", staticmethod(find_known))  # noqa: B010 - a method there
    try:
        yield
    finally:
        setattr(FeatureConnector, "cls_from_name", original)  # noqa: B010 - a method there
