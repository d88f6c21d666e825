"""Loader processes read tables without JAX, which would cost each of them seconds and memory."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import jaxmpi
from jaxmpi.config.data import Data
from jaxmpi.data import open_source

wds = pytest.importorskip("webdataset")


def written(folder: Path, source: str) -> None:
    """One grey image."""
    image, label = np.full((1, 4, 4, 3), 7, np.uint8), np.zeros(1, int)
    if source == "numpy":
        np.savez(folder / "train.npz", image=image, label=label)
    elif source == "webdataset":
        with wds.TarWriter(str(folder / "train.tar")) as shard:
            shard.write({"__key__": "a", "png": image[0], "cls": 0})
    else:
        import datasets

        rows = datasets.Dataset.from_dict({"image": [Image.fromarray(image[0])], "label": label})
        if source == "parquet":
            rows.to_parquet(folder / "train.parquet")
        else:
            rows.save_to_disk(folder / "train")


@pytest.mark.parametrize("source", ["numpy", "parquet", "huggingface", "webdataset"])
def test_a_source_goes_to_a_process_without_jax(tmp_path, source):
    written(tmp_path, source)
    opened = pickle.dumps(open_source(Data(source, dir=str(tmp_path)), "train"))
    code = (
        "import pickle, sys, types; bare = types.ModuleType('jaxmpi'); bare.__path__ = sys.argv[1:]; "
        "sys.modules['jaxmpi'] = bare; "  # as a loader process starts
        "source = pickle.load(sys.stdin.buffer); "
        "print(source[0][0].sum(), [name for name in ('jax', 'torch', 'tensorflow') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(Path(jaxmpi.__file__).parent)]
    ended = subprocess.run(command, input=opened, capture_output=True, check=True)
    assert ended.stdout.decode().strip() == f"{7 * 48} []"
