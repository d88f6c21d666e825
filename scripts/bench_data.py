"""Images per second and core of loaders, and their delay of steps.

    python scripts/bench_data.py [--part peers formats] [--rounds 3] [--images 512] [--cores 0 1]

JPEG files of 500 x 375 px, quality 90, are cut from scikit-learn's two photographs. All contenders read the same files
and give u8[64, 224, 224, 3] batches of random-resized crops, mirrored half of the time. Each is a job of its own, with
one loader, pinned with all its processes to one core. Jobs take turns; the median of the rounds counts.

peers    bare: simplejpeg's decode of whole files, nothing else. Others: as their documentation has it, decoding with
         Pillow or OpenCV as the name says.
formats  the same photographs as a folder of JPEG files, and packed with the shorter side 256 px. The packed ones are
         also loaded into memory. The centres of 256 x 256 px are in batch files and in an array in memory.
"""

import argparse
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
    data = Data(dir=str(folder), loaders=1, prefetch=2, **options)
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


class Files:
    """Data set for PyTorch: files and a decoder."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path = self.paths[index]
        return by_pillow(path.read_bytes(), np.random.default_rng(index)), int(path.parent.name == "flower")


def torch_pillow(folder: Path) -> Iterator[int]:
    """PyTorch's DataLoader with one worker."""
    from torch.utils.data import DataLoader  # pyright: ignore[reportMissingImports]

    data: Any = Files(files(folder))
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    while True:
        for images, _ in loader:
            yield len(images)


def grain_by(decode: Callable[[bytes, np.random.Generator], np.ndarray]) -> Callable[[Path], Iterator[int]]:
    """Grain with one reading thread, which is quicker than one process."""

    def counts(folder: Path) -> Iterator[int]:
        import grain  # pyright: ignore[reportMissingImports]

        def example(path: Path, rng: np.random.Generator) -> tuple[np.ndarray, int]:
            return decode(path.read_bytes(), rng), int(path.parent.name == "flower")

        data = grain.MapDataset.source(files(folder)).seed(0).shuffle().repeat().random_map(example).batch(BATCH)
        for images, _ in data.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)):
            yield len(images)

    return counts


CONTENDERS: dict[str, Callable[[Path], Iterator[int]]] = {
    "bare": bare,
    "jaxmpi, a process": jaxmpi("imagefolder", "processes"),
    "jaxmpi, a thread": jaxmpi("imagefolder", "threads"),
    "torch, Pillow": torch_pillow,
    "grain, Pillow": grain_by(by_pillow),
    "grain, OpenCV": grain_by(by_opencv),
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
    """Be a contender, pinned to one core with all its processes."""
    os.sched_setaffinity(0, {cores[0]})
    contender = CONTENDERS[name] if name in CONTENDERS else jaxmpi(*FORMATS[name])
    return measure(contender(Path(folder)), seconds)


def rounds(names: list[str], folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Images/s: medians of jobs that take turns."""
    job = partial(harness.on_ranks, images_per_s, timeout_s=300)
    runs: dict[str, Any] = {name: partial(job, name, str(folder), options.cores, options.seconds) for name in names}
    rates = harness.take_turns(runs, options.rounds, clock=harness.result)
    return {name: statistics.median(values) for name, values in rates.items()}


# ---------------------------------------------------------------- tables


def show_peers(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Print images/s and core, with ratios to the bare decode and the best other."""
    names = options.only or list(CONTENDERS)
    rates = rounds(names, folder, options)
    bases = rates.get("bare"), max((rates[n] for n in names if not n.startswith(("jaxmpi", "bare"))), default=None)
    rows = [
        [name, f"{rate:.0f}", *(f"{rate / base:.2f}" if base else "-" for base in bases)]
        for name, rate in sorted(rates.items(), key=lambda item: -item[1])
    ]
    print(harness.table(("peers", "images/s", "of bare", "of the best other"), rows))
    return rates


def show_formats(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Print images/s and core of every format."""
    rates = rounds(list(FORMATS), folder, options)
    rows = [[name, f"{rate:.0f}", f"{rate / rates['imagefolder']:.2f}"] for name, rate in rates.items()]
    print(harness.table(("format", "images/s", "of folder"), rows))
    return rates


PARTS = {"peers": show_peers, "formats": show_formats}


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
