"""Images per second of loaders.

    python scripts/bench_data.py [--part peers loaders formats] [--rounds 3] [--images 512] [--cores 0 1]

JPEG files of 500 x 375 px, quality 90, are cut from scikit-learn's two photographs. All contenders read the same files
and give u8[64, 224, 224, 3] batches of random-resized crops, half of them mirrored. Each is a job of its own, pinned
with all its processes to one core, with one loader. Jobs take turns; the median of the rounds counts.

peers    bare: simplejpeg's decode of whole files by one thread, nothing else. Others: as their documentation has it,
         decoding with Pillow, OpenCV or our decode as the name says; of packages that are installed (SPDL needs no
         more than `uv pip install --no-deps spdl spdl-core`).
loaders  the same on all cores, with a loader a core.
formats  the same photographs as a folder of JPEG files, and packed with the shorter side 256 px. The packed ones are
         also loaded into memory. The centres of 256 x 256 px are in batch files and in an array in memory.
"""

import argparse
import functools
import importlib.util
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np

BATCH, PX, WIDTH, HEIGHT, QUALITY = 64, 224, 500, 375, 90
LABELS = "china", "flower"  # names of the photographs
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)
SHORTER = 256  # px, of the images in batch files and in memory
Decode = Callable[[bytes, np.random.Generator], np.ndarray]


# ---------------------------------------------------------------- data


def jpegs(images: int) -> Iterator[tuple[int, bytes]]:
    """(label, file) of cuts at random places of scikit-learn's two photographs."""
    from PIL import Image

    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "datasets" / "images"
    photographs = [np.asarray(Image.open(folder / f"{name}.jpg")) for name in LABELS]
    rng = np.random.default_rng(0)
    for i in range(images):
        whole = photographs[i % 2]
        top, left = (rng.integers(0, have - want + 1) for have, want in zip(whole.shape, (HEIGHT, WIDTH), strict=False))
        file = io.BytesIO()
        Image.fromarray(whole[top : top + HEIGHT, left : left + WIDTH]).save(file, "JPEG", quality=QUALITY)
        yield i % 2, file.getvalue()


def write(folder: Path, images: int, formats: bool, held_out: int = 0) -> None:
    """Write the files of all contenders; the first are held out, too."""
    for i, (label, blob) in enumerate(jpegs(images)):
        for split in ("train", "validation") if i < held_out else ("train",):
            path = folder / split / LABELS[label] / f"{i:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(blob)
    if formats:
        from jaxmpi.config.data import Data
        from jaxmpi.data import ArraySource, open_source, write_batch_files
        from jaxmpi.data.packing import PackingOptions, pack

        source = open_source(Data(source="imagefolder", dir=str(folder), resize=SHORTER), "train")
        pack(source, folder / "packed" / "train", PackingOptions(resize=SHORTER))
        centres, labels = [], []
        for image, label in (source[i] for i in range(len(source))):
            top, left = ((side - SHORTER) // 2 for side in image.shape[:2])
            centres.append(image[top : top + SHORTER, left : left + SHORTER])
            labels.append(label)
        write_batch_files(ArraySource(np.stack(centres), labels), folder / "batches", "train", BATCH)


def files(folder: Path) -> list[Path]:
    """All JPEG files."""
    return sorted((folder / "train").glob("*/*.jpg"))


# ---------------------------------------------------------------- contenders: each an endless iterator of counts


def random_window(rng: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int, bool]:
    """A random window (left, top, right, bottom), and True to mirror it."""
    while True:
        area, ratio = rng.uniform(*AREA) * height * width, np.exp(rng.uniform(*np.log(ASPECT)))
        high, wide = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
        if high <= height and wide <= width:
            top, left = rng.integers(0, height - high + 1), rng.integers(0, width - wide + 1)
            return int(left), int(top), int(left + wide), int(top + high), bool(rng.random() < 0.5)


def by_pillow(blob: bytes, rng: np.random.Generator) -> np.ndarray:
    """Decode and crop with Pillow, as torchvision's RandomResizedCrop."""
    from PIL import Image

    image = Image.open(io.BytesIO(blob)).convert("RGB")
    left, top, right, bottom, mirror = random_window(rng, image.height, image.width)
    image = image.resize((PX, PX), Image.Resampling.BILINEAR, box=(left, top, right, bottom))
    return np.asarray(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else image)


def by_opencv(blob: bytes, rng: np.random.Generator) -> np.ndarray:
    """Decode and crop with OpenCV."""
    import cv2

    cv2.setNumThreads(1)
    pixels = cv2.imdecode(np.frombuffer(blob, np.uint8), cv2.IMREAD_COLOR)
    assert pixels is not None
    image = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
    left, top, right, bottom, mirror = random_window(rng, *image.shape[:2])
    scaled = cv2.resize(image[top:bottom, left:right], (PX, PX), interpolation=cv2.INTER_LINEAR)
    return cv2.flip(scaled, 1) if mirror else scaled


def by_jaxmpi(blob: bytes, rng: np.random.Generator) -> np.ndarray:
    """Decode and crop as jaxmpi's loaders do."""
    return our_augment().encoded(blob, 0, int(rng.integers(1 << 30)), "image")


@functools.cache
def our_augment() -> Any:
    """Augmentation of jaxmpi's loaders."""
    from jaxmpi.config.data import Data
    from jaxmpi.data.example import Augment

    return Augment(Data(crop=PX, crop_area=AREA, mirror=True), train=True, seed=0)


def cores() -> int:
    """Number of loaders: one a core that this job is pinned to."""
    return len(os.sched_getaffinity(0))


def bare(folder: Path) -> Iterator[int]:
    """Decode only."""
    import simplejpeg

    while True:
        for path in files(folder):
            simplejpeg.decode_jpeg(path.read_bytes())
            yield 1


FOLDERS = {"batchfiles": "batches", "array": "batches", "packed": "packed", "memory": "packed"}


def jaxmpi_loader(source: str, folder: Path, kind: str) -> Any:
    """A loader of jaxmpi."""
    from jaxmpi.config.data import Data
    from jaxmpi.data import ArraySource, Loader, Sampler, open_source
    from jaxmpi.data.memory_source import MemorySource

    options: dict[str, Any] = {"loader": kind, "crop": PX, "crop_area": AREA, "mirror": True}
    data = Data(dir=str(folder), loaders=cores(), prefetch=2, **options)
    place = folder / FOLDERS.get(source, "")
    if source == "array":
        files = open_source(Data("batchfiles", str(place)), "train")
        images, labels = zip(*[files[i] for i in range(len(files))], strict=True)
        opened: Any = ArraySource(np.stack(images), labels)
    elif source == "memory":
        opened = MemorySource(open_source(Data("packed", str(place)), "train"), data)
        opened.load(np.arange(len(opened)))
    else:
        opened = open_source(Data(source, str(place)), "train")
    return Loader(opened, Sampler(len(opened), BATCH), data, train=True)


def jaxmpi(source: str, kind: str) -> Callable[[Path], Iterator[int]]:
    """Batches of jaxmpi's loader."""

    def counts(folder: Path) -> Iterator[int]:
        for batch in jaxmpi_loader(source, folder, kind):
            assert batch.image.shape == (BATCH, PX, PX, 3)
            yield batch.count

    return counts


class Example:
    """Example of a file: image and label."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode

    def __call__(self, path: Path, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        return self.decode(path.read_bytes(), rng), int(path.parent.name == "flower")


class Files:
    """Data set for PyTorch: examples of files."""

    def __init__(self, paths: list[Path], decode: Decode) -> None:
        self.paths, self.example = paths, Example(decode)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.example(self.paths[index], np.random.default_rng(index))


def torch(folder: Path, decode: Decode) -> Iterator[int]:
    """PyTorch's DataLoader: worker processes."""
    from torch.utils.data import DataLoader  # pyright: ignore[reportMissingImports]

    data: Any = Files(files(folder), decode)
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=cores(), persistent_workers=True)
    while True:
        for images, _ in loader:
            yield len(images)


def grain(folder: Path, decode: Decode, processes: bool = False) -> Iterator[int]:
    """Grain with reading threads, or with processes of one each."""
    import grain  # pyright: ignore[reportMissingImports]
    from absl import flags

    data = grain.MapDataset.source(files(folder)).seed(0).shuffle().repeat().random_map(Example(decode)).batch(BATCH)
    threads = 1 if processes else cores()
    batches = data.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(2, threads)))
    if processes:
        flags.FLAGS.mark_as_parsed()
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=cores()))
    for images, _ in batches:
        yield len(images)


def spdl(folder: Path, decode: Decode) -> Iterator[int]:
    """SPDL with threads."""
    from spdl.pipeline import PipelineBuilder  # pyright: ignore[reportMissingImports]

    data = Files(files(folder), decode)

    def endless() -> Iterator[int]:
        rng = np.random.default_rng(0)
        while True:
            yield from rng.permutation(len(data)).tolist()

    def batch(examples: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
        images, labels = zip(*examples, strict=True)
        return np.stack(images), np.array(labels)

    builder = PipelineBuilder().add_source(endless()).pipe(data.__getitem__, concurrency=cores(), output_order="input")
    pipeline = builder.aggregate(BATCH).pipe(batch).add_sink(2).build(num_threads=cores())
    with pipeline.auto_stop():
        for images, _ in pipeline:
            yield len(images)


CONTENDERS: dict[str, Callable[[Path], Iterator[int]]] = {
    "bare": bare,
    "jaxmpi, processes": jaxmpi("imagefolder", "processes"),
    "jaxmpi, threads": jaxmpi("imagefolder", "threads"),
    "torch, Pillow": partial(torch, decode=by_pillow),
    "torch, our decode": partial(torch, decode=by_jaxmpi),
    "grain, Pillow": partial(grain, decode=by_pillow),
    "grain, OpenCV": partial(grain, decode=by_opencv),
    "grain, our decode": partial(grain, decode=by_jaxmpi),
    "grain, our decode, processes": partial(grain, decode=by_jaxmpi, processes=True),
    "spdl, our decode": partial(spdl, decode=by_jaxmpi),
}
FORMATS = {
    "imagefolder": ("imagefolder", "processes"),
    "packed": ("packed", "processes"),
    "packed, in memory": ("memory", "threads"),
    "batchfiles": ("batchfiles", "threads"),
    "array in memory": ("array", "threads"),
}


def measure(counts: Iterator[int], seconds: float) -> float:
    """Images a second, after prefetched batches are used up."""
    warm = time.perf_counter() + min(1.0, seconds)
    next(counts)
    while time.perf_counter() < warm:
        next(counts)
    begin, images = time.perf_counter(), 0
    while (took := time.perf_counter() - begin) < seconds:
        images += next(counts)
    return images / took


def images_per_s(name: str, folder: str, cores: list[int], seconds: float) -> float:
    """Be a contender, pinned to these cores with all its processes."""
    os.sched_setaffinity(0, cores)
    contender = CONTENDERS[name] if name in CONTENDERS else jaxmpi(*FORMATS[name])
    return measure(contender(Path(folder)), seconds)


def rounds(names: list[str], folder: Path, options: argparse.Namespace, cores: list[int]) -> dict[str, list[float]]:
    """Images/s of jobs that take turns."""
    job = partial(harness.on_ranks, images_per_s, timeout_s=300)
    runs: dict[str, Any] = {name: partial(job, name, str(folder), cores, options.seconds) for name in names}
    return harness.take_turns(runs, options.rounds, clock=harness.result)


# ---------------------------------------------------------------- tables


def show_peers(folder: Path, options: argparse.Namespace, cores: list[int]) -> dict[str, float]:
    """Print images/s with their spread, and ratios to the bare decode and the best other."""
    packages = {name: name.split(",")[0] for name in options.only or CONTENDERS}
    names = [name for name, package in packages.items() if package == "bare" or importlib.util.find_spec(package)]
    values = rounds(names, folder, options, cores)
    rates = {name: statistics.median(each) for name, each in values.items()}
    bases = rates.get("bare"), max((rates[n] for n in names if not n.startswith(("jaxmpi", "bare"))), default=None)
    rows = [
        [name, harness.interval(values[name], 0), *(f"{rate / base:.2f}" if base else "-" for base in bases)]
        for name, rate in sorted(rates.items(), key=lambda item: -item[1])
    ]
    print(harness.table((f"{len(cores)} loaders", "images/s", "of bare", "of the best other"), rows))
    return rates


def show_formats(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Print images/s and core of every format."""
    values = rounds(list(FORMATS), folder, options, options.cores[:1])
    rates = {name: statistics.median(each) for name, each in values.items()}
    rows = [[name, f"{rate:.0f}", f"{rate / rates['imagefolder']:.2f}"] for name, rate in rates.items()]
    print(harness.table(("format", "images/s", "of folder"), rows))
    return rates


PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, float]]] = {
    "peers": lambda folder, options: show_peers(folder, options, options.cores[:1]),
    "loaders": lambda folder, options: show_peers(folder, options, options.cores),
    "formats": show_formats,
}


def main() -> None:
    """Run the requested parts, and print tables."""
    parser = harness.parser(__doc__, rounds=3, json=None)
    parser.add_argument("--part", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--only", nargs="*", default=[], help="contenders; all if none is named")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--cores", type=int, nargs="*", default=sorted(os.sched_getaffinity(0))[:2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), options.images, "formats" in options.part)
        harness.save(options.json, {part: PARTS[part](Path(name), options) for part in options.part})


if __name__ == "__main__":
    main()
