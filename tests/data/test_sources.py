"""Sources in memory, folders of images and TensorFlow Datasets: what they give, and what is refused by name."""

import contextlib
import dataclasses
import gzip
import importlib
import io
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxmpi.comm.topology import gather_workers
from jaxmpi.config.data import Data
from jaxmpi.core.errors import UsageError
from jaxmpi.data import ArraySource, CorruptExample, Loader, Sampler, Source, open_source, packing
from jaxmpi.data.feed import open_feed
from jaxmpi.data.sources import arrays
from jaxmpi.experiments.tfds import experiment as tfds_experiment
from launching import PATH, ROOT
from test_decode import COLOUR, blob

RNG = np.random.default_rng(0)


class TestDigits:
    def test_split_is_fixed_and_disjoint(self):
        train, held_out = (open_source(Data(), split) for split in ("train", "validation"))
        assert (len(train), len(held_out)) == (1437, 360)
        assert train.classes == held_out.classes == 10
        per_class = np.bincount([held_out[i][1] for i in range(360)])
        assert 35 <= per_class.min() <= per_class.max() <= 37

    def test_pixels_are_scikit_learns(self):
        from sklearn.datasets import load_digits

        bunch: Any = load_digits()
        expected = sorted(
            (np.round(image * 255 / 16).astype(np.uint8).tobytes(), int(label))
            for image, label in zip(bunch["images"], bunch["target"], strict=True)
        )
        sources = [open_source(Data(), split) for split in ("train", "validation")]
        got = sorted((s[i][0].tobytes(), int(s[i][1])) for s in sources for i in range(len(s)))
        assert [label for _, label in got] == [label for _, label in expected]
        pixels = [np.frombuffer(b"".join(image for image, _ in each), np.uint8).astype(int) for each in (got, expected)]
        assert np.abs(pixels[0] - pixels[1]).max() <= 1  # 16ths that end in .5: rounded up here, to even by NumPy


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
        with pytest.raises(UsageError, match=r"jaxmpi\[animals\]"):
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
        with pytest.raises(UsageError, match="'images': 2, 'labels': 3"):
            ArraySource(np.zeros((2, 4, 4)), [0, 1, 2])
        with pytest.raises(UsageError, match=r"data\.validation"):
            open_source(Data(source="array", train=[(COLOUR, 0)]), "validation")

    @pytest.mark.parametrize(
        "examples",
        [[(COLOUR, 3)], [{"image": COLOUR, "label": 3}], ArraySource(COLOUR[None], [3])],
        ids=["pairs", "dicts", "source"],
    )
    def test_what_users_give(self, examples):
        image, label = open_source(Data(source="array", train=examples), "train")[0]
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
                packing.pack(source, tmp_path)
            else:
                with Loader(source, Sampler(1, 1), Data(loader="threads"), train=True) as batches:
                    next(batches)

        with pytest.raises(UsageError, match=r"masked|fields"):  # packing takes no other fields
            run()

    def test_a_pillow_image_with_a_palette_has_its_colours(self):
        palette = Image.fromarray(COLOUR).quantize(16)
        source = open_source(Data("array", train=[(palette, 0)]), "train")
        assert np.array_equal(source[0][0], np.asarray(palette.convert("RGB")))


# ---------------------------------------------------------------- a folder of images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, classes in (("train", "cat dog emu"), ("validation", "cat emu")):
        for label, name in enumerate(classes.split()):
            place = tmp_path / split / name
            place.mkdir(parents=True)
            for i, suffix in enumerate(("jpg", "PNG", "jpeg")):
                pixels = np.full((24 + i, 32, 3), 40 * label + i, np.uint8)
                form = "PNG" if suffix == "PNG" else "JPEG"
                (place / f"{i}.{suffix}").write_bytes(blob(Image.fromarray(pixels), form))
            (place / "notes.txt").write_text("no image")
            (place / "._0.jpg").write_bytes(b"left by a file manager")
    return tmp_path


def folder_data(folder: Path, **kwargs) -> Data:
    return Data(source="imagefolder", dir=str(folder), **kwargs)


def opened(folder: Path, split: str = "train") -> Any:
    return open_source(folder_data(folder), split)


class TestImageFolder:
    def test_files_and_labels(self, folder, monkeypatch):
        monkeypatch.setenv("JAXMPI_DATA", str(folder))
        for source in (opened(folder), open_source(Data(source="imagefolder"), "train")):
            assert (len(source), source.classes) == (9, 3)
            assert [source[i][1] for i in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
            assert source[4][0].shape == (25, 32, 3)
            assert abs(int(source[4][0].mean()) - 41) <= 1
        held_out = opened(folder, "validation")  # labels are those of training
        assert held_out.classes == 3
        assert [held_out[i][1] for i in range(6)] == [0, 0, 0, 2, 2, 2]

    def test_missing_folders_are_named(self, folder, monkeypatch):
        monkeypatch.delenv("JAXMPI_DATA", raising=False)
        (folder / "empty").mkdir()
        (folder / "validation" / "fox").mkdir()
        for data, named in (
            (Data(source="imagefolder"), "JAXMPI_DATA"),
            (folder_data(Path("/nowhere"), holdout=0.2), "no folder /nowhere; (?!.*holdout)"),
            (folder_data(folder, train_split="empty"), "empty"),
            (folder_data(folder / "train"), r"data\.holdout"),
            (folder_data(folder, channels=2), r"data\.channels: got 2"),
        ):
            with pytest.raises(UsageError, match=named):
                open_source(data, "train")
        with pytest.raises(UsageError, match="fox"):
            opened(folder, "validation")

    @pytest.mark.parametrize("damage", ["empty", "text", "truncated jpeg", "truncated png"])
    def test_corrupt_file_is_named(self, folder, damage):
        index = 4 if "png" in damage else 3
        path = folder / "train" / "dog" / ("1.PNG" if "png" in damage else "0.jpg")
        whole = blob(Image.fromarray(RNG.integers(0, 255, (64, 64, 3), np.uint8)), "PNG" if "png" in damage else "JPEG")
        path.write_bytes({"empty": b"", "text": b"<html>404</html>"}.get(damage, whole[: len(whole) // 2]))
        with pytest.raises(CorruptExample) as caught:
            opened(folder)[index]
        assert (caught.value.where, caught.value.index) == (str(path), index)
        assert " object at " not in caught.value.fault

    def test_any_class_name(self, folder):
        digests, path = set(), folder / "train" / "cat"
        for name in (b"cat", b"\xfe", b"\xff"):
            try:
                path = path.rename(folder / "train" / os.fsdecode(name))
            except OSError:
                pytest.skip("this file system wants UTF-8")
            assert os.fsdecode(name) in opened(folder).names
            digests.add(opened(folder).digest())
        assert len(digests) == 3

    def test_a_file_with_holes_is_corrupt_and_not_read(self, folder):
        source = opened(folder)
        os.truncate(source.where(0), 1 << 40)
        with pytest.raises(CorruptExample, match=f"got {1 << 40} bytes"):
            source.encoded(0)

    def test_names_of_files_do_not_steer_the_terminal(self, folder):
        (folder / "train" / "cat" / "\x1b]0;title\x07\u202e.png").write_bytes(b"no image")
        source = opened(folder)
        with pytest.raises(CorruptExample) as caught:
            source[0]
        assert r"\x1b]0;title\x07\u202e.png" in str(pickle.loads(pickle.dumps(caught.value)))


# ---------------------------------------------------------------- TensorFlow Datasets


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
                    damaged = b"damaged" if n == 5 and i == 4 else b""
                    png = damaged or blob(Image.fromarray(np.full((8, 10, 3), i, np.uint8)), "PNG")
                    yield i, {"image": io.BytesIO(png), "label": i % 3}

        TinyColours(data_dir=root, file_format="array_record").download_and_prepare()
    assert "tensorflow" not in sys.modules
    return root


def tfds_data(root: Path, name: str = "tiny_colours", **kwargs) -> Data:
    return Data(source="tfds", dir=str(root), name=name, validation_split="test", **kwargs)


class TestTfds:
    def test_reads_what_was_prepared(self, prepared):
        source = open_source(tfds_data(prepared, "tiny_colours:1.0.0"), "train")
        assert (len(source), source.classes) == (12, 3)
        seen = sorted((int(image[0, 0, 0]), label) for image, label in map(source.__getitem__, range(12)))
        assert seen == [(i, i % 3) for i in range(12)]
        assert source[0][0].shape == (8, 10, 3)
        assert "tensorflow" not in sys.modules

    def test_a_corrupt_record_is_named(self, prepared):
        source, corrupt = open_source(tfds_data(prepared), "validation"), []
        for i in range(5):
            try:
                source[i]
            except CorruptExample as error:
                corrupt.append(error.where == f"tfds tiny_colours[test][{i}]")
        assert corrupt == [True]

    @pytest.mark.parametrize("trouble", ["cannot be opened", "became shorter"])
    def test_a_file_that_cannot_be_read_is_named(self, prepared, tmp_path, trouble):
        source: Any = open_source(tfds_data(shutil.copytree(prepared, tmp_path / "copy")), "train")
        path = next(tmp_path.rglob("*-train.array_record-*"))
        if trouble == "became shorter":
            source[0]  # opens it
            os.truncate(path, 100)
        else:
            path.unlink()
        named = {"cannot be opened": f"No such file or directory; opening {path}"}.get(trouble, trouble)
        for read in (source.encoded, source.__getitem__):
            with pytest.raises(OSError, match=named):
                read(5)
        with pytest.raises(UsageError, match=rf"tfds tiny_colours\[train\]\[\d+\] .*cannot be read: .*{named}"):
            packing.pack(source, tmp_path / "out")

    def test_the_shipped_experiment_reads_a_data_set_by_name_and_folder(self, prepared):
        data = dataclasses.replace(tfds_experiment.data, dir=str(prepared), name="tiny_colours", loaders=1)
        feed = open_feed(dataclasses.replace(tfds_experiment, data=data), "train", 3, gather_workers(1))
        assert feed.model.classes == 3
        with contextlib.closing(feed.batches(0, 1)) as batches:
            assert next(batches)["image"].shape == (3, 32, 32, 3)
        feed.pool.stop()

    def test_what_is_not_there_is_named_with_the_way_out(self, prepared):
        for data, named in (
            (tfds_data(prepared, train_split="dev"), "'dev'.*'train'"),
            (tfds_data(prepared, "mnist"), r"run: python -c .*tfds\.builder\('mnist', data_dir="),
            (tfds_data(prepared, ""), r"data\.name"),
            (tfds_data(prepared, channels=2), r"data\.channels: got 2"),
        ):
            with pytest.raises(UsageError, match=named):
                open_source(data, "train")
        import tensorflow_datasets

        builder = tensorflow_datasets.builder("mnist", data_dir=prepared, file_format="array_record")
        assert builder.url_infos  # which preparing reads, with no other packages than `jaxmpi[tfds]` has

    def test_no_module_that_a_data_set_names_is_imported(self, tmp_path, monkeypatch):
        pytest.importorskip("tensorflow_datasets")
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "got_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        made = tmp_path / "mnist" / "3.0.1"
        made.mkdir(parents=True)
        (made / "features.json").write_text('{"pythonClassName": "got_evil.Feature", "featuresDict": {}}')
        (made / "dataset_info.json").write_text('{"name": "mnist", "version": "3.0.1", "fileFormat": "array_record"}')
        with pytest.raises(UsageError, match=r"got_evil\.Feature"):
            open_source(Data("tfds", dir=str(tmp_path), name="mnist:3.0.1"), "train")
        assert not (tmp_path / "ran").exists()

    def test_features_that_the_user_has_imported_are_taken(self, prepared, tmp_path, monkeypatch):
        """Loader processes import them too."""
        monkeypatch.syspath_prepend(tmp_path)
        feature = "import tensorflow_datasets as tfds\nclass Photo(tfds.features.Image): pass\n"
        (tmp_path / "my_photos.py").write_text(feature)
        root = shutil.copytree(prepared, tmp_path / "data")
        [features] = root.glob("tiny_colours/*/features.json")
        image = "tensorflow_datasets.core.features.image_feature.Image"
        features.write_text(features.read_text().replace(image, "my_photos.Photo"))
        with pytest.raises(UsageError, match=r"my_photos\.Photo"):
            open_source(tfds_data(root), "train")
        importlib.import_module("my_photos")
        source: Any = open_source(tfds_data(root), "train")
        read = "import pickle, sys; print(len(pickle.load(sys.stdin.buffer)[0][0]))"
        env = os.environ | {"PYTHONPATH": f"{PATH}:{ROOT}:{tmp_path}"}
        other = subprocess.run([sys.executable, "-c", read], input=pickle.dumps(source), capture_output=True, env=env)
        assert int(other.stdout) == len(source[0][0]), other.stderr.decode()
