import io
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import jaxmpi.config
from jaxmpi.config import Data, UsageError
from jaxmpi.data import SOURCES, ArraySource, CorruptExample, Source, open_source
from jaxmpi.data.images import decoded, resized

RNG = np.random.default_rng(0)
GREY = (np.arange(24 * 32).reshape(24, 32) // 3).astype(np.uint8)
COLOUR = np.stack([GREY, GREY[::-1], GREY[:, ::-1]], axis=-1)


def blob(image: Image.Image, form: str, **kwargs) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **kwargs)
    return file.getvalue()


def test_every_source_is_in_the_table():
    assert set(SOURCES) == {"digits", "synthetic", "array", "imagefolder", "tfds", "packed", "text", "stdlib"}
    with pytest.raises(UsageError, match="did you mean 'digits'"):
        open_source(Data(source="digit"), "train")


def test_importing_and_reading_digits_stays_light():
    """Eight workers start at once on few cores: what the package alone imports is what they pay."""
    code = (
        "import sys, types; bare = types.ModuleType('jaxmpi'); bare.__path__ = sys.argv[1:]; "
        "sys.modules['jaxmpi'] = bare; "  # in place of __init__.py, which imports everything
        "from jaxmpi.data import open_source; from jaxmpi.config import Data; "
        "open_source(Data(), 'train')[0]; "
        "print([m for m in ('jax', 'sklearn', 'PIL', 'pandas', 'mpi4py') if m in sys.modules])"
    )
    package = str(Path(jaxmpi.config.__file__).parent)
    command = [sys.executable, "-c", code, package]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


class TestDigits:
    def test_split_is_fixed_and_disjoint(self):
        train, held_out = (open_source(Data(), split) for split in ("train", "validation"))
        assert (len(train), len(held_out)) == (1437, 360)
        assert train.classes == held_out.classes == 10
        per_class = np.bincount([held_out[i][1] for i in range(360)])
        assert per_class.min() >= 35
        assert per_class.max() <= 37

    def test_pixels_are_scikit_learns(self):
        from sklearn.datasets import load_digits

        bunch: Any = load_digits()
        expected = {
            (np.round(image * 255 / 16).astype(np.uint8).tobytes(), int(label))
            for image, label in zip(bunch["images"], bunch["target"], strict=True)
        }
        sources = [open_source(Data(), split) for split in ("train", "validation")]
        got = {(s[i][0].tobytes(), int(s[i][1])) for s in sources for i in range(len(s))}
        assert {label for _, label in got} == set(range(10))
        assert len(got) == len(expected)
        for (a, la), (b, lb) in zip(sorted(got), sorted(expected), strict=True):
            assert la == lb
            # 16ths that end in .5 are rounded up here and to even by NumPy.
            assert np.abs(np.frombuffer(a, np.uint8).astype(int) - np.frombuffer(b, np.uint8)).max() <= 1

    def test_resized_once_and_grey(self):
        source = open_source(Data(resize=64), "validation")
        assert source[5][0].shape == (64, 64, 1)
        small = open_source(Data(), "validation")[5][0]
        assert np.array_equal(source[5][0], resized(small, 64))
        assert abs(source[5][0].mean() - small.mean()) < 6


class TestSynthetic:
    def test_deterministic_and_apart(self):
        data = Data(source="synthetic", crop=32, synthetic_examples=2000)
        train, again = open_source(data, "train"), open_source(data, "train")
        held_out = open_source(data, "validation")
        assert (len(train), len(held_out), train.classes) == (2000, 250, 1000)
        assert train[7][0].shape == (32, 32, 3)
        assert train[7][0].dtype == np.uint8
        assert np.array_equal(train[7][0], again[7][0])
        assert not np.array_equal(train[7][0], held_out[7][0])

    def test_classes_can_be_told_apart(self):
        data = Data(source="synthetic", crop=32, synthetic_examples=2000)
        train, held_out = open_source(data, "train"), open_source(data, "validation")
        means = np.stack([train[i][0].astype(float).ravel() for i in range(20)])
        tests = np.stack([held_out[i][0].astype(float).ravel() for i in range(20)])
        nearest = ((tests[:, None] - means[None]) ** 2).sum(-1).argmin(1)
        assert nearest.tolist() == list(range(20))

    @pytest.mark.parametrize(("resize", "crop", "px"), [(0, 0, 224), (0, 48, 48), (64, 48, 64)])
    def test_size(self, resize, crop, px):
        source = open_source(Data(source="synthetic", resize=resize, crop=crop), "train")
        assert source[0][0].shape == (px, px, 3)


class TestArray:
    def test_array_source(self):
        source = ArraySource(COLOUR[None].repeat(3, 0), [0, 4, 1])
        assert isinstance(source, Source)
        assert (len(source), source.classes, source[1][1]) == (3, 5, 4)
        with pytest.raises(UsageError, match="got 2 images, 3 labels"):
            ArraySource(np.zeros((2, 4, 4)), [0, 1, 2])

    @pytest.mark.parametrize(
        "examples",
        [[(COLOUR, 3)], [{"image": COLOUR, "label": 3}], ArraySource(COLOUR[None], [3])],
        ids=["pairs", "dicts", "source"],
    )
    def test_what_users_give(self, examples):
        source = open_source(Data(source="array", train=examples), "train")
        image, label = source[0]
        assert np.array_equal(image, COLOUR)
        assert label == 3

    def test_nothing_given(self):
        with pytest.raises(UsageError, match=r"data\.validation: got NoneType; expected an object"):
            open_source(Data(source="array", train=[(COLOUR, 0)]), "validation")


def palette() -> Image.Image:
    return Image.fromarray(COLOUR).quantize(16)


def cmyk() -> Image.Image:
    return Image.fromarray(COLOUR).convert("CMYK")


ODD = {
    "grey jpeg": (lambda: blob(Image.fromarray(GREY), "JPEG", quality=95), GREY),
    "grey png": (lambda: blob(Image.fromarray(GREY), "PNG"), GREY),
    "16-bit png": (lambda: blob(Image.fromarray(GREY.astype(np.uint16) * 256 + 7), "PNG"), GREY),
    "cmyk jpeg": (lambda: blob(cmyk(), "JPEG", quality=95), COLOUR),
    "rgba png": (lambda: blob(Image.fromarray(COLOUR).convert("RGBA"), "PNG"), COLOUR),
    "grey with alpha": (lambda: blob(Image.fromarray(GREY).convert("LA"), "PNG"), GREY),
    "palette": (lambda: blob(palette(), "PNG"), np.asarray(palette().convert("RGB"))),
    "palette, alpha": (
        lambda: blob(palette(), "PNG", transparency=bytes(range(16))),
        np.asarray(palette().convert("RGB")),
    ),
    "1-bit": (lambda: blob(Image.fromarray(GREY > 99), "PNG"), (GREY > 99) * np.uint8(255)),
    "animated": (
        lambda: blob(Image.fromarray(GREY), "PNG", save_all=True, append_images=[Image.fromarray(255 - GREY)]),
        GREY,
    ),
}


class TestDecoded:
    @pytest.mark.parametrize("kind", ODD)
    def test_odd_images_become_three_channels(self, kind):
        make, expected = ODD[kind]
        image = decoded(make(), channels=3, resize=0)
        assert image.shape == (24, 32, 3)
        assert image.dtype == np.uint8
        expected = np.broadcast_to(expected.reshape(24, 32, -1), image.shape).astype(int)
        assert np.abs(image.astype(int) - expected).mean() <= 6  # JPEG is lossy

    @pytest.mark.parametrize("channels", [1, 3, 4])
    def test_channels(self, channels):
        image = decoded(blob(Image.fromarray(COLOUR), "PNG"), channels, resize=0)
        assert image.shape == (24, 32, channels)

    def test_exif_orientation_is_ignored(self):
        exif = Image.Exif()
        exif[0x0112] = 6  # rotated by 90 degrees
        rotated = blob(Image.fromarray(COLOUR), "JPEG", exif=exif)
        assert decoded(rotated, 3, 0).shape == (24, 32, 3)

    @pytest.mark.parametrize("px", [8, 12, 24, 60])
    def test_shorter_side(self, px):
        jpeg = blob(Image.fromarray(COLOUR), "JPEG", quality=95)
        image = decoded(jpeg, 3, resize=px)
        assert image.shape == (px, round(32 * px / 24), 3)
        full = resized(decoded(jpeg, 3, 0), px)
        assert np.abs(image.astype(int) - full).mean() < 12  # decoded at a small scale, then resized


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, classes in (("train", "cat dog emu"), ("validation", "cat emu")):
        for label, name in enumerate(classes.split()):
            place = tmp_path / split / name
            place.mkdir(parents=True)
            for i in range(3):
                suffix = ("jpg", "PNG", "jpeg")[i]
                pixels = np.full((24 + i, 32, 3), 40 * label + i, np.uint8)
                form = "PNG" if suffix == "PNG" else "JPEG"
                (place / f"{i}.{suffix}").write_bytes(blob(Image.fromarray(pixels), form))
            (place / "notes.txt").write_text("no image")
            (place / "._0.jpg").write_bytes(b"left by a file manager")
    return tmp_path


def folder_data(folder: Path, **kwargs) -> Data:
    return Data(source="imagefolder", dir=str(folder), **kwargs)


class TestImageFolder:
    def test_files_and_labels(self, folder):
        source = open_source(folder_data(folder), "train")
        assert (len(source), source.classes) == (9, 3)
        assert [source[i][1] for i in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert source[4][0].shape == (25, 32, 3)
        assert abs(int(source[4][0].mean()) - 41) <= 1

    def test_validation_labels_are_those_of_training(self, folder):
        source = open_source(folder_data(folder), "validation")
        assert source.classes == 3
        assert [source[i][1] for i in range(6)] == [0, 0, 0, 2, 2, 2]

    def test_folder_from_the_environment(self, folder, monkeypatch):
        monkeypatch.setenv("JAXMPI_DATA", str(folder))
        assert len(open_source(Data(source="imagefolder"), "train")) == 9

    def test_missing_folders(self, folder, monkeypatch):
        monkeypatch.delenv("JAXMPI_DATA", raising=False)
        layout = re.escape("DIR/<split>/<class>/<image>.jpg")
        with pytest.raises(UsageError, match=f"JAXMPI_DATA.*{layout}"):
            open_source(Data(source="imagefolder"), "train")
        with pytest.raises(UsageError, match=f"no folder /nowhere/train; expected {layout}"):
            open_source(folder_data(Path("/nowhere")), "train")
        (folder / "empty").mkdir()
        with pytest.raises(UsageError, match=f"empty: found no .*{layout}"):
            open_source(folder_data(folder, train_split="empty"), "train")

    def test_class_that_training_does_not_have(self, folder):
        (folder / "validation" / "fox").mkdir()
        with pytest.raises(UsageError, match=r"\['fox'\] are not among the training classes"):
            open_source(folder_data(folder), "validation")

    def test_channels(self, folder):
        with pytest.raises(UsageError, match=r"data\.channels: got 2; imagefolder makes 1, 3, 4"):
            open_source(folder_data(folder, channels=2), "train")

    @pytest.mark.parametrize("damage", ["empty", "text", "truncated jpeg", "truncated png"])
    def test_corrupt_file_is_named(self, folder, damage):
        path = folder / "train" / "dog" / ("1.PNG" if "png" in damage else "0.jpg")
        noise = Image.fromarray(RNG.integers(0, 255, (64, 64, 3), dtype=np.uint8))
        whole = blob(noise, "PNG" if "png" in damage else "JPEG")
        path.write_bytes({"empty": b"", "text": b"<html>404</html>"}.get(damage, whole[: len(whole) // 2]))
        source = open_source(folder_data(folder), "train")
        index = 4 if "png" in damage else 3
        with pytest.raises(CorruptExample, match=rf"{path} \(example {index}\) is corrupt") as caught:
            source[index]
        assert (caught.value.where, caught.value.index) == (str(path), index)

    def test_a_file_that_vanished_is_not_called_corrupt(self, folder):
        source = open_source(folder_data(folder), "train")
        (folder / "train" / "cat" / "0.jpg").unlink()
        with pytest.raises(FileNotFoundError, match=r"cat/0\.jpg"):
            source[0]

    @pytest.mark.skipif(sys.platform == "win32", reason="names there are not bytes")
    def test_any_file_name(self, folder):
        name = os.fsdecode(b"caf\xc3\xa9 \xff.png")
        path = folder / "train" / "cat" / name
        try:
            path.write_bytes(blob(Image.fromarray(COLOUR), "PNG"))
        except OSError:
            pytest.skip("this file system wants UTF-8")
        source = open_source(folder_data(folder), "train")
        assert any(np.array_equal(source[i][0], COLOUR) for i in range(len(source)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A small TFDS data set in ArrayRecord files, built without TensorFlow."""
    root = tmp_path_factory.mktemp("tfds")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what third-party modules warn of while they are imported
        tfds = pytest.importorskip("tensorflow_datasets")
        pytest.importorskip("array_record")

        class TinyColours(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.0.0")

            def _info(self):
                image = tfds.features.Image(shape=(None, None, 3))
                label = tfds.features.ClassLabel(names=["red", "green", "blue"])
                features = tfds.features.FeaturesDict({"image": image, "label": label})
                return tfds.core.DatasetInfo(builder=self, features=features)

            def _split_generators(self, dl_manager):
                return {"train": self._generate_examples(12), "test": self._generate_examples(5)}

            def _generate_examples(self, n):
                for i in range(n):
                    pixels = np.full((8, 10, 3), i, np.uint8)
                    damaged = b"damaged" if n == 5 and i == 4 else b""
                    png = damaged or blob(Image.fromarray(pixels), "PNG")
                    yield i, {"image": io.BytesIO(png), "label": i % 3}

        TinyColours(data_dir=root, file_format="array_record").download_and_prepare()
    assert "tensorflow" not in sys.modules
    return root


def tfds_data(root: Path, name: str = "tiny_colours", **kwargs) -> Data:
    return Data(source="tfds", dir=str(root), name=name, validation_split="test", **kwargs)


class TestTfds:
    @pytest.mark.parametrize("name", ["tiny_colours", "tiny_colours:1.0.0"])
    def test_reads_what_was_prepared(self, prepared, name):
        source = open_source(tfds_data(prepared, name), "train")
        assert (len(source), source.classes) == (12, 3)
        seen = sorted((int(image[0, 0, 0]), label) for image, label in map(source.__getitem__, range(12)))
        assert seen == [(i, i % 3) for i in range(12)]
        assert source[0][0].shape == (8, 10, 3)
        assert "tensorflow" not in sys.modules

    def test_resize_channels_and_sub_split(self, prepared):
        data = tfds_data(prepared, resize=16, channels=1, train_split="train[:50%]")
        source = open_source(data, "train")
        assert len(source) == 6
        assert source[0][0].shape == (16, 20, 1)

    def test_corrupt_record_is_named(self, prepared):
        source = open_source(tfds_data(prepared), "validation")
        corrupt = []
        for i in range(5):
            try:
                source[i]
            except CorruptExample as error:
                corrupt.append((str(error), error.where == f"tfds tiny_colours[test][{i}]"))
        assert len(corrupt) == 1
        assert corrupt[0][1], corrupt

    def test_unknown_split(self, prepared):
        with pytest.raises(UsageError, match=r"Unknown split 'dev'.*'train'"):
            open_source(tfds_data(prepared, train_split="dev"), "train")

    def test_not_prepared(self, prepared):
        with pytest.raises(UsageError, match=r"run: python -c .*tfds\.builder\('mnist', data_dir="):
            open_source(tfds_data(prepared, "mnist"), "train")
        with pytest.raises(UsageError, match=r"set data\.name"):
            open_source(tfds_data(prepared, ""), "train")
