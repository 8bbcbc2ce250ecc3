"""Benchmark the training input pipeline against bare decoding and torchvision's ImageFolder, on the same images.

    .venv/bin/python benchmarks/input.py      (0.3 GB in the temporary folder)

All three make the same views on one core (random resized crop to 224, flip, ImageNet scaling) of the same JPEG files. The limit is the cost
of decoding and transforming alone: ours must reach 0.85 of it. Then ours and ImageFolder feed batches through two loader workers. Last, as
many gray images of 28 pixels as MNIST has are read a second time on one core, without augmentation, by ours and by torchvision's MNIST,
which has them in memory. `benchmarks/scale.py` measures long stores and memory.
"""

import itertools
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import drawn_photograph, encoded, image_folder
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from dml_core.data.prepare import pack, prepare
from dml_core.data.store.decode import decode_rgb
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Manifest, Row
from dml_core.data.views.batches import Loader, TrainView
from dml_core.data.views.transform_config import TransformConfig
from dml_core.data.views.transforms import scale, train_pixels

NUM_CLASSES, NUM_PER_CLASS, WIDTH, HEIGHT = 8, 40, 500, 375
BATCH_SIZE, NUM_REPEATS, NUM_LOADER_EPOCHS = 32, 5, 4
NUM_SMALL, SMALL_BATCH_SIZE = 55_000, 128
CONFIG = TransformConfig(crop="random_resized", crop_size=224, flip=True)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_photographs(root / "raw")
        prepare("folder", root / "raw", root / "packed", {})
        dataset = PackedDataset(root / "packed", "train")
        compare_on_one_core(dataset, root / "raw")
        compare_with_loader_workers(dataset, root / "raw")
        compare_small_images(root / "small")


def compare_on_one_core(dataset: PackedDataset, raw: Path) -> None:
    files = [dataset.raw_bytes(index) for index in range(len(dataset))]
    decoded = [decode_rgb(data) for data in files]
    seconds = interleaved(
        {
            "decode": lambda: exhaust(decode_rgb(data) for data in files),
            "transform": lambda: exhaust(
                scale(train_pixels(image, CONFIG, 0, 0, index), CONFIG.scaling) for index, image in enumerate(decoded)
            ),
            "ours": lambda: exhaust(our_batches(dataset, 1, 0)),
            "folder": lambda: exhaust(folder_batches(raw, len(dataset), 1, 0)),
        }
    )
    rates = {name: len(dataset) / value for name, value in seconds.items()}
    bound = len(dataset) / (seconds["decode"] + seconds["transform"])
    print(f"one core, {WIDTH}x{HEIGHT} JPEG of {np.mean([len(data) for data in files]) / 1024:.0f} KiB, images per second:")
    print(f"  bare decoding {rates['decode']:.0f}, transforms alone {rates['transform']:.0f}, both {bound:.0f}")
    print(f"  ours {rates['ours']:.0f}: {rates['ours'] / bound:.2f} of both (to reach: 0.85)")
    print(f"  ImageFolder {rates['folder']:.0f}: ours is {rates['ours'] / rates['folder']:.2f} times as fast (to reach: 1)")


def compare_with_loader_workers(dataset: PackedDataset, raw: Path) -> None:
    seconds = interleaved(
        {
            "ours": lambda: exhaust(our_batches(dataset, NUM_LOADER_EPOCHS, 2)),
            "folder": lambda: exhaust(folder_batches(raw, len(dataset), NUM_LOADER_EPOCHS, 2)),
        }
    )
    print(
        f"two loader workers, start included: ours is {seconds['folder'] / seconds['ours']:.2f} times as fast as ImageFolder (to reach: 1)"
    )


def compare_small_images(folder: Path) -> None:
    """Compare the epochs after the first, as a run of a hundred has them."""
    pixels = np.random.default_rng(0).integers(0, 256, (NUM_SMALL, 28, 28), dtype=np.uint8)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, NUM_SMALL, 28, 28) + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, NUM_SMALL) + bytes(NUM_SMALL))
    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5], [0.5])])
    digits = datasets.MNIST(str(folder), train=True, transform=steps)

    rows = [Row(f"{n}.png", 0, "all", "train") for n in range(NUM_SMALL)]
    pack("folder", {}, Manifest(rows, lambda row: encoded(pixels[int(row.path[:-4])], "PNG")), folder / "packed")
    dataset, view = PackedDataset(folder / "packed", "train"), TrainView(TransformConfig(crop="none", scaling="minus-one-one"), 0, 0)
    batches = np.split(np.random.default_rng(0).permutation(NUM_SMALL), range(SMALL_BATCH_SIZE, NUM_SMALL, SMALL_BATCH_SIZE))
    loader = Loader(dataset)
    exhaust(loader.batches(batches, view))
    seconds = interleaved(
        {
            "ours": lambda: exhaust(loader.batches(batches, view)),
            "MNIST": lambda: exhaust(iter(DataLoader(digits, SMALL_BATCH_SIZE, shuffle=True))),
        }
    )
    rates = {name: NUM_SMALL / value for name, value in seconds.items()}
    print(
        f"one core, {NUM_SMALL} gray images of 28 pixels, second epoch, images per second: ours {rates['ours']:.0f}, torchvision's MNIST "
        f"{rates['MNIST']:.0f}: ours is {rates['ours'] / rates['MNIST']:.1f} times as fast (to reach: 1)"
    )


def write_photographs(raw: Path) -> None:
    rng = np.random.default_rng(0)
    for label, number in itertools.product(range(2 * NUM_CLASSES), range(NUM_PER_CLASS)):
        path = raw / f"class_{label:02d}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn_photograph(rng, WIDTH, HEIGHT))


def our_batches(dataset: PackedDataset, num_epochs: int, num_workers: int) -> Iterator[Any]:
    batches = np.array_split(np.arange(len(dataset)), len(dataset) // BATCH_SIZE)
    return Loader(dataset, num_workers).batches(batches * num_epochs, TrainView(CONFIG, 0, 0))


def folder_batches(raw: Path, num_images: int, num_epochs: int, num_workers: int) -> Iterator[Any]:
    images = torch.utils.data.Subset(image_folder(raw, 224), list(range(num_images)) * num_epochs)
    return iter(DataLoader(images, batch_size=BATCH_SIZE, num_workers=num_workers))


def interleaved(runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return the minimum seconds of each; the runs alternate, so that other load affects all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(NUM_REPEATS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in seconds.items()}


def exhaust(items: Iterator[Any]) -> None:
    for _ in items:
        pass


if __name__ == "__main__":
    main()
