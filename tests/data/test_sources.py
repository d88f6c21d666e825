import contextlib
import ctypes
import gzip
import importlib
import io
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from jaxmpi.comm.topology import gather_workers
from jaxmpi.config.data import Data
from jaxmpi.config.schema import Experiment
from jaxmpi.core.errors import UsageError
from jaxmpi.data import (
    ArraySource,
    CorruptExample,
    FileSampler,
    Loader,
    Sampler,
    Source,
    load_mean_image,
    open_source,
    packing,
    write_batch_files,
)
from jaxmpi.data.augment import Augment
from jaxmpi.data.decode import _check_scans as check_scans
from jaxmpi.data.decode import _without_rows_below as without_rows_below
from jaxmpi.data.decode import decoded, encoded_again, opened, resized, stretched, window
from jaxmpi.data.feed import open_feed
from jaxmpi.data.packing import pack
from jaxmpi.data.sources import arrays
from jaxmpi.models.cnn import digits_cnn_tiny
from launching import PATH, ROOT, train

RNG = np.random.default_rng(0)
GREY = (np.arange(24 * 32).reshape(24, 32) // 3).astype(np.uint8)
COLOUR = np.stack([GREY, GREY[::-1], GREY[:, ::-1]], axis=-1)


def blob(image: Image.Image, form: str, **kwargs) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **kwargs)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "split", "said"), [(Data("digits"), "val", "train, validation"), (Data("digit"), "train", "'digits'")]
)
def test_another_split_or_source_is_refused_with_those_there_are(data, split, said):
    with pytest.raises(UsageError, match=said):
        open_source(data, split)


def test_importing_and_reading_digits_stays_light():
    """Eight workers start at once on few cores: what the package alone imports is what they pay."""
    code = (
        "import sys; from jaxmpi.data import open_source; from jaxmpi.config import Data; "
        "open_source(Data(), 'train')[0]; "
        "print([m for m in ('jax', 'sklearn', 'PIL', 'pandas', 'mpi4py') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
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


class TestAnimals:
    def test_the_held_out_fifth_repeats_no_image_of_training(self):
        train, held_out = (open_source(Data("animals", resize=32), split) for split in ("train", "validation"))
        assert (len(train), len(held_out), train.classes) == (7769, 1947, 10)
        assert train[0][0].shape == (32, 32, 1)
        seen = {train[i][0].tobytes() for i in range(len(train))}
        assert not [i for i in range(len(held_out)) if held_out[i][0].tobytes() in seen]
        per_class = np.bincount([held_out[i][1] for i in range(len(held_out))])
        assert (per_class.min(), per_class.max()) == (163, 200)

    def test_a_file_that_calls_anything_or_is_none_is_refused(self, tmp_path, monkeypatch, capsys):
        class Calls:
            def __reduce__(self):
                return print, ("called",)

        bad = tmp_path / arrays.FILES[0]
        installed = tmp_path / "animal_shape_mnist-0.39.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text("Name: animal-shape-mnist\nVersion: 0.39\n")
        (installed / "RECORD").write_text(f"{bad.name},,\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        for content in (gzip.compress(pickle.dumps(Calls())), b"no gzip"):
            bad.write_bytes(content)
            with pytest.raises(UsageError, match=arrays.FILES[0]):
                open_source(Data("animals"), "train")
        assert capsys.readouterr().out == ""

    def test_without_the_package_the_error_says_how_to_get_it(self, monkeypatch):
        monkeypatch.setattr(arrays, "PACKAGE", "no-such-package")
        with pytest.raises(UsageError, match=r"install it with .*pip install 'jaxmpi\[animals\]'"):
            open_source(Data("animals"), "train")


def test_synthetic_images_are_fixed_and_their_classes_can_be_told_apart():
    data = Data(source="synthetic", crop=32, synthetic_examples=2000)
    train, again, held_out = (open_source(data, split) for split in ("train", "train", "validation"))
    assert (len(train), len(held_out), train.classes) == (2000, 250, 1000)
    assert (train[7][0].shape, train[7][0].dtype) == ((32, 32, 3), np.uint8)
    assert np.array_equal(train[7][0], again[7][0])
    means, tests = (np.stack([each[i][0].astype(float).ravel() for i in range(20)]) for each in (train, held_out))
    assert not np.array_equal(means, tests)
    nearest = ((tests[:, None] - means[None]) ** 2).sum(-1).argmin(1)
    assert nearest.tolist() == list(range(20))


class TestArray:
    def test_array_source(self):
        source = ArraySource(COLOUR[None].repeat(3, 0), [0, 4, 1])
        assert isinstance(source, Source)
        assert (len(source), source.classes, source[1][1]) == (3, 5, 4)
        with pytest.raises(UsageError, match="2 images, 3 labels"):
            ArraySource(np.zeros((2, 4, 4)), [0, 1, 2])
        with pytest.raises(UsageError, match=r"data\.validation"):
            open_source(Data(source="array", train=[(COLOUR, 0)]), "validation")

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

    @pytest.mark.parametrize(
        "examples",
        [
            lambda masked: ArraySource(masked, [0]),
            lambda masked: ArraySource(COLOUR[None], np.ma.array([0], mask=[True])),
            lambda masked: {"image": masked, "label": [0]},
            lambda masked: {"any": {"inner": (masked, masked)}},
            lambda masked: [(masked[0], 0)],
            lambda masked: [{"any": masked[0]}],
            lambda masked: [(COLOUR, np.ma.masked)],
        ],
    )
    @pytest.mark.parametrize("use", ["train", "pack"])
    def test_a_masked_array_is_refused_by_name(self, examples, use, tmp_path):
        def run() -> None:
            masked = np.ma.array(COLOUR[None], mask=COLOUR[None] > 9)
            source = open_source(Data("array", train=examples(masked)), "train")
            if use == "pack":
                pack(source, tmp_path)
            else:
                with Loader(source, Sampler(1, 1), Data(loader="threads"), train=True) as batches:
                    next(batches)

        with pytest.raises(UsageError, match=r"masked|fields"):  # packing takes no other fields
            run()

    @pytest.mark.parametrize("mode", ["P", "YCbCr", "1"])
    def test_a_pillow_image_whose_numbers_are_no_colours_is_refused(self, mode):
        source = open_source(Data("array", train=[(Image.fromarray(COLOUR).convert(mode), 0)]), "train")
        with pytest.raises(UsageError, match=f"mode {mode}"):
            source[0]


PALETTE = Image.fromarray(COLOUR).quantize(16)
ODD = {
    "grey jpeg": (lambda: blob(Image.fromarray(GREY), "JPEG", quality=95), GREY),
    "grey png": (lambda: blob(Image.fromarray(GREY), "PNG"), GREY),
    "16-bit png": (lambda: blob(Image.fromarray(GREY.astype(np.uint16) * 256 + 7), "PNG"), GREY),
    "cmyk jpeg": (lambda: blob(Image.fromarray(COLOUR).convert("CMYK"), "JPEG", quality=95), COLOUR),
    "rgba png": (lambda: blob(Image.fromarray(COLOUR).convert("RGBA"), "PNG"), COLOUR),
    "grey with alpha": (lambda: blob(Image.fromarray(GREY).convert("LA"), "PNG"), GREY),
    "palette": (lambda: blob(PALETTE, "PNG"), np.asarray(PALETTE.convert("RGB"))),
    "palette, alpha": (
        lambda: blob(PALETTE, "PNG", transparency=bytes(range(16))),
        np.asarray(PALETTE.convert("RGB")),
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

    @pytest.mark.parametrize(("mode", "kind"), [("I;16", "PNG"), ("I;16", "TIFF"), ("I;16B", "TIFF"), ("I;16", "PPM")])
    def test_of_16_bits_a_pixel_the_highest_8_are_taken(self, mode, kind):
        pixels = (GREY.astype(np.uint16) * 256 + 7).astype(">u2" if mode == "I;16B" else "<u2")
        image = Image.frombytes(mode, (32, 24), pixels.tobytes())
        np.testing.assert_array_equal(decoded(blob(image, kind), 1, 0)[..., 0], GREY)

    @pytest.mark.parametrize("pixels", [GREY / np.float32(255), GREY.astype(np.int32), GREY.astype(np.int32) * 1000])
    @pytest.mark.parametrize("way", [lambda found: decoded(found, 3, 0), lambda found: encoded_again(found, 8, 90)])
    def test_an_image_of_32_bits_a_pixel_is_refused_by_its_mode(self, pixels, way):
        image = Image.fromarray(pixels)
        with pytest.raises(UsageError, match=f"mode {image.mode} "):
            way(blob(image, "TIFF"))

    @pytest.mark.parametrize("px", [8, 12, 24, 60])
    def test_shorter_side(self, px):
        jpeg = blob(Image.fromarray(COLOUR), "JPEG", quality=95)
        image = decoded(jpeg, 3, resize=px)
        assert image.shape == (px, round(32 * px / 24), 3)
        full = resized(decoded(jpeg, 3, 0), px)
        assert np.abs(image.astype(int) - full).mean() < 12  # decoded at a small scale, then resized

    @pytest.mark.parametrize("form", ["PNG", "JPEG"])
    def test_an_extreme_aspect_is_not_scaled_whatever_it_takes(self, form):
        line = Image.new("RGB", (30000, 1))
        said = "1 x 30000 px"
        with pytest.raises(CorruptExample, match=rf"line\.png \(example 7\) .*{said}"):
            Augment(Data(resize=256, crop=224), True, 0).encoded(blob(line, form), 0, 7, "line.png")
        with pytest.raises(UsageError, match=said):  # as when packed
            encoded_again(blob(line, form), 256, 90)
        with pytest.raises(UsageError, match=rf"array\[7\]: got {said}"):
            Augment(Data(resize=256, crop=224), True, 0)(np.asarray(line), 0, 7, "array[7]")
        assert decoded(blob(line, form), 3, resize=4).shape == (4, 120000, 3)


def photograph(**kwargs) -> bytes:
    """A JPEG of 90 x 120 px that is smooth, with three colours that differ."""
    rows, columns = np.mgrid[0:90, 0:120]
    pixels = np.stack([rows * 2, columns * 2, 128 + 100 * np.sin(rows / 9) * np.cos(columns / 7)], axis=-1)
    return blob(Image.fromarray(pixels.astype(np.uint8)), "JPEG", quality=90, **kwargs)


class TestWindow:
    """A window is decoded no larger, and no further down, than it needs."""

    @pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
    @pytest.mark.parametrize("extra", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
    def test_rows_that_are_not_decoded_change_no_others(self, subsampling, extra):
        picture = opened(photograph(subsampling=subsampling, **extra), channels=3)
        whole = picture.pixels(90, 120)
        for bottom in (1, 8, 40, 70, 90):
            cut = without_rows_below(picture, bottom)
            fewer = 0 if "progressive" in extra else 90 - min(-(-bottom // 16) * 16, 90)
            assert bottom <= cut.height <= 90 - fewer
            assert np.array_equal(cut.pixels(cut.height, 120)[:bottom], whole[:bottom])
        assert np.array_equal(window(picture, 10, 20, 40, 50, 32), stretched(whole[10:50, 20:70], 32))

    def test_a_large_window_is_decoded_small(self):
        picture = opened(photograph(), channels=3)
        assert picture.pixels(20, 30).shape == (23, 30, 3)
        got = window(picture, 8, 12, 72, 96, 16).astype(int)
        assert np.abs(got - stretched(picture.pixels(90, 120)[8:80, 12:108], 16)).mean() < 3

    @pytest.mark.parametrize("damage", ["empty", "truncated", "end cut off"])
    @pytest.mark.parametrize("area", [(), (0.1, 0.3)])
    def test_damage_is_seen_wherever_the_window_is(self, damage, area):
        """With half of the file missing, no window of any size is given out."""
        whole = photograph()
        broken = {
            "empty": b"",
            "truncated": whole[: len(whole) // 2],
            "end cut off": whole[:-40],
        }[damage]
        for index in range(4):
            with pytest.raises(CorruptExample, match=r"odd\.jpg \(example \d\) is corrupt"):
                Augment(Data(crop=12, crop_area=area), True, 0).encoded(broken, 0, index, "odd.jpg")

    @pytest.mark.parametrize("train", [True, False])
    def test_encoded_and_decoded_images_give_the_same_crops(self, train):
        whole = photograph()
        for data in (Data(crop=40, mirror=True), Data(resize=60, crop=40), Data(crop=60, crop_area=(0.5, 1.0))):
            augment = Augment(data, train, 0)
            pixels = decoded(whole, 3, data.resize if not (train and data.crop_area) else 0)
            for index in range(3):
                expected = augment(pixels, 0, index, "x")
                for found in (whole, whole + b"xx"):  # bytes after the end are no damage
                    assert np.array_equal(augment.encoded(found, 0, index, "x"), expected)


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

    def test_missing_folders_are_named(self, folder, monkeypatch):
        monkeypatch.delenv("JAXMPI_DATA", raising=False)
        (folder / "empty").mkdir()
        (folder / "validation" / "fox").mkdir()
        for data, said in (
            (Data(source="imagefolder"), "JAXMPI_DATA"),
            (folder_data(Path("/nowhere")), "/nowhere/train"),
            (folder_data(folder, train_split="empty"), "empty"),
            (folder_data(folder / "train"), f"so they are classes: move them into {folder}/train/train/"),
            (folder_data(folder, channels=2), r"data\.channels: got 2"),
        ):
            with pytest.raises(UsageError, match=said):
                open_source(data, "train")
        with pytest.raises(UsageError, match=r"\['fox'\]"):
            open_source(folder_data(folder), "validation")

    def test_what_is_left_out_is_said(self, folder):
        for path in folder.rglob("notes.txt"):
            path.unlink()
        assert open_source(folder_data(folder), "train").notes == ()  # type: ignore[attr-defined]
        (folder / "train" / "cat" / "more.webp").write_bytes(b"")
        (folder / "train" / "dog" / "gone.jpg").symlink_to("/nowhere")
        (note,) = open_source(folder_data(folder), "train").notes  # type: ignore[attr-defined]
        assert "left out 2" in note
        assert f"{folder}/train/cat/more.webp" in note

    @pytest.mark.parametrize("damage", ["empty", "text", "truncated jpeg", "truncated png"])
    def test_corrupt_file_is_named(self, folder, damage):
        path = folder / "train" / "dog" / ("1.PNG" if "png" in damage else "0.jpg")
        noise = Image.fromarray(RNG.integers(0, 255, (64, 64, 3), dtype=np.uint8))
        whole = blob(noise, "PNG" if "png" in damage else "JPEG")
        path.write_bytes({"empty": b"", "text": b"<html>404</html>"}.get(damage, whole[: len(whole) // 2]))
        source = open_source(folder_data(folder), "train")
        index = 4 if "png" in damage else 3
        with pytest.raises(CorruptExample) as caught:
            source[index]
        assert (caught.value.where, caught.value.index) == (str(path), index)
        assert " object at " not in caught.value.fault

    def test_any_class_name(self, folder):
        digests, path = [], folder / "train" / "cat"
        for name in (b"cat", b"\xfe", b"\xff"):
            try:
                path = path.rename(folder / "train" / os.fsdecode(name))
            except OSError:
                pytest.skip("this file system wants UTF-8")
            source: Any = open_source(folder_data(folder), "train")
            assert os.fsdecode(name) in source.names
            digests.append(source.digest())
        assert len(set(digests)) == 3


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
    @pytest.mark.parametrize("name", ["tiny_colours:1.0.0"])
    def test_reads_what_was_prepared(self, prepared, name):
        source = open_source(tfds_data(prepared, name), "train")
        assert (len(source), source.classes) == (12, 3)
        seen = sorted((int(image[0, 0, 0]), label) for image, label in map(source.__getitem__, range(12)))
        assert seen == [(i, i % 3) for i in range(12)]
        assert source[0][0].shape == (8, 10, 3)
        assert "tensorflow" not in sys.modules

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

    @pytest.mark.parametrize("trouble", ["cannot be opened", "became shorter"])
    def test_a_file_that_cannot_be_read_is_named(self, prepared, tmp_path, trouble):
        source: Any = open_source(tfds_data(shutil.copytree(prepared, tmp_path / "copy")), "train")
        path = next(tmp_path.rglob("*-train.array_record-*"))
        if trouble == "became shorter":
            source[0]  # opens it
            os.truncate(path, 100)
        else:
            path.unlink()
        said = {"cannot be opened": f"No such file or directory; opening {path}"}.get(trouble, trouble)
        for read in (source.encoded, source.__getitem__):
            with pytest.raises(OSError, match=said):
                read(5)
        with pytest.raises(UsageError, match=rf"tfds tiny_colours\[train\]\[\d+\] .*cannot be read: .*{said}"):
            packing.pack(source, tmp_path / "out")

    @pytest.mark.e2e
    def test_the_shipped_experiment_trains_on_a_data_set_by_name_and_folder(self, prepared, tmp_path):
        flags = f"--data.dir {prepared} --data.name tiny_colours --data.validation-split train --data.loaders 1"
        lengths = f"--local-batch 3 --train-for 2st --run-dir {tmp_path / 'run'}"
        ended = train(1, "experiments/tfds.py", *flags.split(), *lengths.split(), timeout_s=280)
        assert ended.code == 0, ended.out
        assert "evaluation on 12" in ended.out

    def test_what_is_not_there_is_named_with_the_way_out(self, prepared):
        for data, said in (
            (tfds_data(prepared, train_split="dev"), "'dev'.*'train'"),
            (tfds_data(prepared, "mnist"), r"run: python -c .*tfds\.builder\('mnist', data_dir="),
            (tfds_data(prepared, ""), r"data\.name"),
        ):
            with pytest.raises(UsageError, match=said):
                open_source(data, "train")
        import tensorflow_datasets

        builder = tensorflow_datasets.builder("mnist", data_dir=prepared, file_format="array_record")
        assert builder.url_infos  # which preparing reads, with no other packages than `jaxmpi[tfds]` has


# ---------------------------------------------------------------- batch files


@pytest.fixture
def batch_files(tmp_path: Path) -> Path:
    """Ten images of 5 x 6 px, image i all i, labelled i % 4, in files of 4; three for validation."""
    for split, n in (("train", 10), ("validation", 3)):
        images = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, 5, 6, 3))
        write_batch_files(ArraySource(images, np.arange(n) % 4), tmp_path, split, rows=4, seed=None)
    return tmp_path


def batch_data(folder: Path, **kwargs) -> Data:
    return Data(source="batchfiles", dir=str(folder), **kwargs)


def opened_batch_files(folder: Path) -> Any:
    return open_source(batch_data(folder), "train")


def npy_head(fields: str) -> bytes:
    """That of a .npy file, with an integer type and C order if the fields do not say."""
    text = "{'descr': '<i8', 'fortran_order': False, " + fields + "}\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@contextlib.contextmanager
def opens_in(folder: Path) -> Iterator[Callable[[], int]]:
    """How often files of a folder have been opened by any process, as the system counts it (inotify)."""
    system, in_open = ctypes.CDLL(None, use_errno=True), 0x20  # sys/inotify.h
    watch = system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert system.inotify_add_watch(watch, os.fsencode(folder), in_open) >= 0
    names: list[str] = []

    def opened() -> int:
        with contextlib.suppress(BlockingIOError):
            while events := os.read(watch, 1 << 16):
                at = 0
                while at < len(events):  # i32 watch, u32 mask, u32 cookie, u32 length of the name, name
                    size = int.from_bytes(events[at + 12 : at + 16], sys.byteorder)
                    names.append(events[at + 16 : at + 16 + size].rstrip(b"\0").decode())
                    at += 16 + size
        return sum(name.endswith(".npy") for name in names)

    try:
        yield opened
    finally:
        os.close(watch)


class TestBatchFiles:
    def test_files_and_labels(self, batch_files):
        assert sorted(os.listdir(batch_files / "train")) == ["00000.npy", "00001.npy", "00002.npy"]
        assert np.load(batch_files / "train" / "00002.npy").shape == (2, 5, 6, 3)
        source: Any = open_source(batch_data(batch_files), "train")
        assert (len(source), source.classes) == (10, 4)
        for i in range(10):
            image, label = source[i]
            assert (image.shape, int(image.min()), int(image.max()), int(label)) == ((5, 6, 3), i, i, i % 4)
        assert source.where(9) == f"{batch_files}/train/00002.npy[1]"

    def test_classes_are_those_of_training_and_of_the_split(self, batch_files):
        source = open_source(batch_data(batch_files), "validation")
        assert (len(source), source.classes) == (3, 4)
        np.save(batch_files / "validation_labels.npy", [0, 5, 1])
        train, held_out = (open_source(batch_data(batch_files), split) for split in ("train", "validation"))
        assert (train.classes, held_out.classes) == (4, 6)
        assert [getattr(source, "is_counted", False) for source in (train, held_out)] == [True, True]

    def test_mean_image(self, batch_files):
        mean = load_mean_image(batch_data(batch_files, mean_image=str(batch_files / "train_mean.npy")))
        assert mean is not None
        assert np.array_equal(mean, np.full((5, 6, 3), 4.5, np.float32))

    def test_the_digest_tells_other_data_apart(self, batch_files):
        digests = {opened_batch_files(batch_files).digest() for _ in range(2)}
        np.save(batch_files / "train_labels.npy", np.arange(10) % 3)
        digests.add(opened_batch_files(batch_files).digest())
        assert len(digests) == 2

    @pytest.mark.parametrize(
        ("array", "message"),
        [
            (np.array([{}], object), "object"),
            (np.zeros((2, 5, 6, 3), np.float32), "float32"),
            (np.zeros((5, 6, 3), np.uint8), r"\[5, 6, 3\]"),
            (np.asfortranarray(np.zeros((2, 5, 6, 3), np.uint8)), "Fortran"),
            (np.zeros((2, 5, 7, 3), np.uint8), r"\(5, 6, 3\)"),
        ],
    )
    def test_files_that_are_none(self, batch_files, array, message):
        np.save(batch_files / "train" / "00001.npy", array, allow_pickle=True)
        with pytest.raises(UsageError, match=rf"00001\.npy: .*{message}"):
            open_source(batch_data(batch_files), "train")

    HEADS: ClassVar = {
        "no bytes": b"",
        "no end": npy_head("'shape': (10,), '"),
        "nested": npy_head("-" * 9000 + "1"),
        "objects": npy_head("'descr': '|O', 'shape': (10,)"),
        "petabytes": npy_head(f"'shape': ({10**15},)"),
        "cut off": npy_head("'shape': (10,)") + bytes(79),
    }

    @pytest.mark.parametrize("damage", HEADS)
    def test_damage_is_named_in_every_file(self, batch_files, damage):
        mean_image = batch_files / "train_mean.npy"
        for path in (batch_files / "train" / "00001.npy", batch_files / "train_labels.npy", mean_image):
            whole = path.read_bytes()
            path.write_bytes(self.HEADS[damage])
            with pytest.raises(UsageError, match=rf"^{path}: "):
                load_mean_image(Data(mean_image=str(path))) if path == mean_image else opened_batch_files(batch_files)
            path.write_bytes(whole)

    def test_big_endian_labels_and_those_in_fortran_order(self, batch_files):
        np.save(batch_files / "train_labels.npy", np.arange(10, dtype=">i2"))
        assert opened_batch_files(batch_files).labels.tolist() == list(range(10))
        image = np.arange(24.0).reshape(2, 4, 3)
        np.save(batch_files / "train_mean.npy", np.asfortranarray(image))
        mean = load_mean_image(Data(mean_image=str(batch_files / "train_mean.npy")))
        assert mean is not None
        assert np.array_equal(mean, image)

    @pytest.mark.parametrize("loader", ["threads", "processes"])
    def test_each_file_is_opened_once_in_an_epoch_of_more_files_than_stay_open(self, tmp_path, loader):
        """90 files, of which 64 stay open; by one loader, since each of several may open a file for its own rows."""
        images = np.broadcast_to(np.arange(180, dtype=np.uint8)[:, None, None, None], (180, 5, 6, 3))
        write_batch_files(ArraySource(images, np.arange(180) % 4), tmp_path, "train", rows=2)
        data = batch_data(tmp_path, loader=loader, loaders=1)
        source: Any = open_source(data, "train")
        sampler = FileSampler(180, 12, file_ends=source.file_ends)
        with opens_in(tmp_path / "train") as opened:
            with Loader(source, sampler, data, True, stop_step=15) as batches:
                seen = [int(image[0, 0, 0]) for batch in batches for image in batch.image]
            assert opened() == 90
        assert sorted(seen) == list(range(180))

    def test_the_order_is_taken_up_in_the_middle_of_an_epoch_by_another_number_of_workers(self, batch_files):
        data, opened = batch_data(batch_files), opened_batch_files(batch_files)

        def images(step: int, size: int) -> list[int]:
            samplers = [FileSampler(10, 4, rank, size, seed=3, file_ends=opened.file_ends) for rank in range(size)]
            loaders = [Loader(opened, sampler, data, True, step, step + 1) for sampler in samplers]
            rows = [(batch, image) for loader in loaders for batch in loader for image in batch.image[batch.weight > 0]]
            return [int(image[0, 0, 0]) for _, image in rows]

        assert [images(step, 1) for step in range(6)] == [images(step, 3) for step in range(6)]

    @pytest.mark.parametrize(
        ("shuffle_by", "reads", "is_in_sequence"), [("auto", 5, False), ("files", 5, True), ("examples", 61, False)]
    )
    def test_an_epoch_reads_each_file_in_one_go(self, tmp_path, monkeypatch, shuffle_by, reads, is_in_sequence):
        """The files have 12, 12, 12 and 24 examples, the last in two spans.

        If all are mixed each is read, the first twice.
        """
        images = np.broadcast_to(np.arange(60, dtype=np.uint8)[:, None, None, None], (60, 5, 6, 3))
        write_batch_files(ArraySource(images, np.arange(60) % 7), tmp_path, "train", rows=12, seed=None)
        last = [tmp_path / "train" / f"0000{i}.npy" for i in (3, 4)]
        np.save(last[0], np.concatenate([np.load(path) for path in last]))
        last[1].unlink()
        monkeypatch.setattr("jaxmpi.data.sources.batch_files.SPAN_BYTES", 20 * 90)
        monkeypatch.setattr("jaxmpi.data.sources.open_files.KEPT_BYTES", 0)  # then two spans are kept
        data = batch_data(tmp_path, shuffle_by=shuffle_by, loaders=1)
        feed = open_feed(Experiment(model=digits_cnn_tiny(), data=data), "train", 10, gather_workers(1))
        asked, real = [], os.preadv

        def preadv(file: int, into: Any, offset: int) -> int:
            asked.append(offset)
            return real(file, into, offset)

        with contextlib.closing(feed.batches(0, 6)) as batches:
            monkeypatch.setattr(os, "preadv", preadv)
            seen = [int(image[0, 0, 0]) for batch in batches for image in np.asarray(batch["image"])]
        assert sorted(seen) == list(range(60))
        assert len(asked) == reads
        files = [min(i // 12, 3) for i in seen]
        assert (np.count_nonzero(np.diff(files)) <= 4) == (shuffle_by != "examples")
        assert bool(np.all((np.diff(seen) == 1) | (np.diff(files) != 0))) == is_in_sequence

    def test_a_source_that_reads_no_file_in_one_go_cannot_mix_inside(self, tmp_path):
        experiment = Experiment(model=digits_cnn_tiny(), data=Data(shuffle_by="files-mixed"))
        with pytest.raises(UsageError, match="got files-mixed; digits has no files of several examples: use auto"):
            open_feed(experiment, "train", 10, gather_workers(1))

    def test_a_span_that_cannot_be_read_is_no_span_for_any_thread(self, batch_files):
        source = opened_batch_files(batch_files).whole_files()
        path = batch_files / "train" / "00001.npy"
        whole = path.read_bytes()
        path.write_bytes(whole[:-90])
        with ThreadPoolExecutor(4) as threads:
            errors = [future.exception() for future in [threads.submit(source.__getitem__, 5) for _ in range(8)]]
        assert all("00001.npy ends 90 bytes before byte" in str(error) for error in errors)
        path.write_bytes(whole)
        assert source[5][0][0, 0, 0] == 5

    @pytest.mark.parametrize(
        "labels",
        [np.arange(9), np.arange(10) - 1, np.zeros(10), np.array([{}], object), None],
        ids=["fewer", "below 0", "floats", "objects", "gone"],
    )
    def test_labels_that_cannot_be(self, batch_files, labels):
        path = batch_files / "train_labels.npy"
        path.unlink() if labels is None else np.save(path, labels, allow_pickle=True)
        with pytest.raises(UsageError, match=r"train_labels\.npy: "):
            open_source(batch_data(batch_files), "train")

    def test_missing(self, batch_files, monkeypatch):
        monkeypatch.delenv("JAXMPI_DATA", raising=False)
        (batch_files / "empty").mkdir()
        for data, said in (
            (Data(source="batchfiles"), r"data\.dir"),
            (batch_data(batch_files, train_split="other"), "/other"),
            (batch_data(batch_files, train_split="empty"), r"no \.npy file"),
        ):
            with pytest.raises(UsageError, match=said):
                open_source(data, "train")

    def test_numbers_without_leading_zeros(self, batch_files):
        folder = batch_files / "train"
        for number in range(3):
            (folder / f"{number:05}.npy").rename(folder / f"part{number + 8}-a.npy")
        with pytest.raises(UsageError, match=r"part10-a\.npy and part8-a\.npy, .*leading zeros"):
            opened_batch_files(batch_files)
        (folder / "part10-a.npy").rename(folder / "zz1234.npy")  # another name altogether
        assert opened_batch_files(batch_files).files == ["part8-a.npy", "part9-a.npy", "zz1234.npy"]

    def test_written_over_others(self, batch_files):
        fewer = ArraySource(np.full((5, 4, 4, 3), 9, np.uint8), [2] * 5)
        write_batch_files(fewer, batch_files, "train", rows=4)
        source = opened_batch_files(batch_files)
        assert (len(source), source.shape, source.labels.tolist()) == (5, (4, 4, 3), [2] * 5)

    def test_an_unfinished_set_over_another_does_not_open(self, batch_files):
        images = [np.zeros((5, 6, 3), np.uint8)] * 9 + [np.zeros((5, 7, 3), np.uint8)]
        with pytest.raises(UsageError, match=r"array\[9\]"):
            write_batch_files(ArraySource(images, [3] * 10), batch_files, "train", rows=4, seed=None)
        with pytest.raises(UsageError, match=r"train_labels\.npy: .*No such file"):
            opened_batch_files(batch_files)

    @pytest.mark.parametrize("label", [np.int64(2**40), -1, 0.5])
    def test_labels_that_files_cannot_hold_are_refused(self, tmp_path, label):
        with pytest.raises(UsageError, match="label"):
            write_batch_files(ArraySource(COLOUR[None], [label], classes=3), tmp_path, "train", seed=None)
        assert not list((tmp_path / "train").glob("*.npy"))


# ---------------------------------------------------------------- strangers' files


@pytest.mark.parametrize("name", ["train/00000.npy", "train_labels.npy"])
def test_batch_files_that_are_pipes_are_refused_without_waiting(batch_files, name):
    (batch_files / name).unlink()
    os.mkfifo(batch_files / name)
    with pytest.raises(UsageError, match=rf"{name}: got no plain file; expected a .npy file"):
        opened_batch_files(batch_files)


def test_batch_files_with_holes_ask_for_no_memory(batch_files):
    """Some kilobytes on the disk, terabytes by their size."""
    for path in (batch_files / "train").iterdir():
        path.unlink()
    path = batch_files / "train" / "00000.npy"
    path.write_bytes(npy_head("'descr': '|u1', 'fortran_order': False, 'shape': (1, 1048576, 1048576, 3)"))
    os.truncate(path, (3 << 40) + 1000)
    np.save(batch_files / "train_labels.npy", np.zeros(1, int))
    with pytest.raises(UsageError, match=rf"got {3 << 40} bytes an image; expected <= 268435456"):
        opened_batch_files(batch_files)


def test_links_in_a_circle_are_no_images_and_no_classes(folder):
    before = len(open_source(folder_data(folder), "train"))
    (folder / "train" / "circle").symlink_to("circle")
    (next((folder / "train").iterdir()) / "circle.jpg").symlink_to("circle.jpg")
    assert len(open_source(folder_data(folder), "train")) == before


def test_an_image_file_with_holes_is_corrupt_and_not_read(folder):
    source: Any = open_source(folder_data(folder), "train")
    os.truncate(source.where(0), 1 << 40)
    with pytest.raises(CorruptExample, match=rf"got {1 << 40} bytes; expected at most {1 << 30}"):
        source.encoded(0)


def test_names_of_files_do_not_steer_the_terminal(folder):
    odd = next(path for path in (folder / "train").rglob("*") if path.is_file())
    odd = odd.rename(odd.with_name("\x1b]0;title\x07\u202e.png"))
    odd.write_bytes(b"no image")
    source: Any = open_source(folder_data(folder), "train")
    index = next(i for i in range(len(source)) if source.where(i) == str(odd))
    with pytest.raises(CorruptExample) as caught:
        source[index]
    assert r"\x1b]0;title\x07\u202e.png" in str(caught.value)
    assert "\x1b" not in str(pickle.loads(pickle.dumps(caught.value)))


def test_an_eps_file_starts_no_ghostscript(tmp_path, monkeypatch):
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(UsageError, match="an EPS file is a program"):
        decoded(eps, 3, 0)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_of_thousands_of_scans_is_refused(progressive):
    """Each takes a few bytes and goes over all pixels; a scan of another kind of file needs bits for all of them."""
    whole = photograph(progressive=progressive)
    assert decoded(whole, 3, 0).ndim == 3
    many = whole[:-2] + b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00" * 1000 + b"\xff\xd9"
    if not progressive:
        return check_scans(memoryview(many))
    with pytest.raises(UsageError, match=r"got a JPEG of 10\d\d scans; expected at most 500"):
        decoded(many, 3, 0)


def test_tfds_imports_no_module_that_a_data_set_names(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_datasets")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "got_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    made = tmp_path / "mnist" / "3.0.1"
    made.mkdir(parents=True)
    (made / "features.json").write_text('{"pythonClassName": "got_evil.Feature", "featuresDict": {}}')
    (made / "dataset_info.json").write_text('{"name": "mnist", "version": "3.0.1", "fileFormat": "array_record"}')
    with pytest.raises(UsageError, match=r"got 'got_evil\.Feature'; expected features of TFDS itself"):
        open_source(Data("tfds", dir=str(tmp_path), name="mnist:3.0.1"), "train")
    assert not (tmp_path / "ran").exists()


IMAGE = "tensorflow_datasets.core.features.image_feature.Image"
FEATURE = """
import tensorflow_datasets as tfds

class Photo(tfds.features.Image):
    pass
"""


def test_tfds_takes_features_that_the_user_has_imported(prepared, tmp_path, monkeypatch):
    """Loader processes import them too."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_photos.py").write_text(FEATURE)
    root = shutil.copytree(prepared, tmp_path / "data")
    [features] = root.glob("tiny_colours/*/features.json")
    features.write_text(features.read_text().replace(IMAGE, "my_photos.Photo"))
    assert "my_photos.Photo" in features.read_text()
    with pytest.raises(UsageError, match=r"got 'my_photos\.Photo'; .* import their module in the experiment file"):
        open_source(tfds_data(root), "train")
    importlib.import_module("my_photos")
    source: Any = open_source(tfds_data(root), "train")
    read = "import pickle, sys; print(len(pickle.load(sys.stdin.buffer)[0][0]))"
    env = os.environ | {"PYTHONPATH": f"{PATH}:{tmp_path}"}
    other = subprocess.run([sys.executable, "-c", read], input=pickle.dumps(source), capture_output=True, env=env)
    assert int(other.stdout) == len(source[0][0]), other.stderr.decode()
