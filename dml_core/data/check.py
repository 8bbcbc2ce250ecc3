"""Full check of a raw folder before packing: counts, unreadable images, copies of train images in other roles, boxes.

`prepare` stops at the first problem; `check_dataset` checks every image and lists all problems. `check_own_images` is the part that is
repeated before each packing of the user's own images.
"""

import hashlib
import io
import math
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, TiffImagePlugin

from dml_core.data.readers.shared.annotations import read_file
from dml_core.data.readers.shared.archives import Progress
from dml_core.data.readers.shared.contract import OfficialDataset
from dml_core.data.readers.shared.rules import published_differences
from dml_core.data.registry import parse_dataset
from dml_core.data.store.decode import decode_rgb, decode_upright
from dml_core.data.store.rows import Counts, Manifest, Row, role_counts
from dml_core.data.store.sizes import Resize
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import DataError

_BOX_TOLERANCE_PIXELS = 1.0
_PNG_BIT_DEPTH = 24  # place of the byte
_JPEG2000_SIZE, _JPEG2000_BIT_DEPTH = b"\xff\x4f\xff\x51", 42  # start of the segment of sizes, and place of the byte from there
_OPAQUE = 255
_NUM_END_BYTES = 4096
_LEAK = "same bytes in train and in another role"
_CHANGES = (
    _GRAYSCALE := "grayscale, converted to RGB",
    _CMYK := "CMYK, converted to RGB",
    _TRANSPARENT := "transparent pixels, replaced by the colours stored under them",
    _DEEP := "more than 8 bits per channel, reduced to 8",
    _ANIMATED := "several pictures in the file, of which the first is used",
)


@dataclass(frozen=True)
class Finding:
    """A kind of finding, how often it occurs, and where: paths of images, of an unreadable one with the reason."""

    what: str
    num_found: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class _Image:
    """A readable image: SHA-256 of its bytes and of its RGB pixels, what decoding changes (`_CHANGES`), and size (width, height)."""

    row: Row
    sha256: str
    pixels_sha256: str
    changes: tuple[str, ...]
    size: tuple[int, int]


@dataclass(frozen=True)
class CheckReport:
    """Result of `check_dataset`.

    Attributes:
        counts: images and classes per role.
        class_sizes: images of the smallest and of the largest class, per role.
        published: published counts; empty if there are none.
        notes: findings that need no action (such as grayscale and CMYK).
        violations: findings that must be fixed.
        short_sides: minimum, median and maximum short side of the readable images, in pixels.
        num_boxes: number of images with a box.
        images: the readable images.
    """

    counts: dict[str, Counts]
    class_sizes: dict[str, tuple[int, int]]
    published: dict[str, Counts]
    notes: list[Finding]
    violations: list[Finding]
    short_sides: tuple[int, int, int]
    num_boxes: int
    images: tuple[_Image, ...] = field(default=(), repr=False)

    def notes_on_views(self, transforms: Collection[TransformConfig], stored_size: Resize | None) -> list[Finding]:
        """Return notes on the images that test views pad or mostly cut off, and on those without a box where views are cut to boxes."""
        return _findings(_changed_by_views(self.images, transforms, stored_size))


def check_dataset(
    name: str,
    raw: Path,
    options: Mapping[str, Any],
    progress: Progress | None = None,
    transforms: Collection[TransformConfig] = (),
) -> CheckReport:
    """Read the annotations of a raw folder and check every image.

    Args:
        name, raw, options: reader, folder and options of the dataset.
        progress: called with (images checked, total images).
        transforms: views that are made of the dataset; images that test views pad or mostly cut off, or without a box to cut to, are noted.

    Raises:
        ConfigError: unknown dataset or option.
        DataError: the annotations cannot be read or break a rule of every dataset.
    """
    dataset = parse_dataset(name, {**options, "stored_size": None})  # the files, not their resized copies, which have no boxes
    stored_size = parse_dataset(name, options).stored_size
    manifest = (dataset.model_copy(update={"published_counts": False}) if isinstance(dataset, OfficialDataset) else dataset).read(raw)
    rows, published = manifest.rows, dict(dataset.published_for(raw))
    images: list[_Image] = []
    unreadable: list[str] = []
    with ThreadPoolExecutor() as pool:
        read = pool.map(lambda row: _read_image(manifest, row, dataset.own_images), rows)
        for number, (row, image) in enumerate(zip(rows, read, strict=True), start=1):
            if isinstance(image, str):
                unreadable.append(f"{row.path} ({image})")
            else:
                images.append(image)
            if progress:
                progress(number, len(rows))
    notes = {
        **{change: [image.row.path for image in images if change in image.changes] for change in _CHANGES},
        **_changed_by_views(images, transforms, stored_size),
        "same pixels in two classes": _in_two_classes(images),
        "copies (same pixels) in a scored class: each finds the other first, which raises Recall@1": _found_by_a_copy(images),
        "classes whose names differ only in case, white space or Unicode form, one image of each": _alike_names(rows),
        **dataset.notes(raw),
    }
    violations = {
        "counts are not the published ones": published_differences(rows, published),
        "unreadable": unreadable,
        "fewer than two classes to train on, or to score": _single_classes(rows) if dataset.own_images else [],
        _LEAK: _leaks([(image.sha256, image.row) for image in images]),
        "box outside the image": [image.row.path for image in images if _box_is_outside(image)],
    }
    sides = sorted(min(image.size) for image in images) or [0]
    return CheckReport(
        counts=role_counts(rows),
        class_sizes=_class_sizes(rows),
        published=published,
        notes=_findings(notes),
        violations=_findings(violations),
        short_sides=(sides[0], sides[len(sides) // 2], sides[-1]),
        num_boxes=sum(row.box is not None for row in rows),
        images=tuple(images),
    )


def check_own_images(name: str, raw: Path, options: Mapping[str, Any]) -> None:
    """Check what packing does not: a single class in train or among the scored ones, and copies of training images in other roles.

    Datasets that are not the user's own images are not checked.

    Raises:
        ConfigError: unknown dataset or option.
        DataError: the annotations break a rule of every dataset, or one of these.
    """
    dataset = parse_dataset(name, {**options, "stored_size": None})
    if not dataset.own_images:
        return
    rows = dataset.read(raw).rows
    if single := _single_classes(rows):
        advice = "add classes, or name the roles (docs/reference/backbones-and-datasets.md)"
        raise DataError(f"{raw}: {single[0]}, at least two classes are needed; {advice}")
    with ThreadPoolExecutor() as pool:  # only files of one size and end are read as a whole
        alike = _in_train_and_another_role(zip(pool.map(lambda row: _size_and_end(raw / row.path), rows), rows, strict=True))
        leaks = _leaks(zip(pool.map(lambda row: hashlib.sha256(read_file(raw / row.path)).hexdigest(), alike), alike, strict=True))
    if leaks:
        raise DataError(f"{raw}: {len(leaks)} images: {_LEAK}, the first is {leaks[0]}; fix or remove them; `dml data check` lists all")


def _size_and_end(path: Path) -> str:
    """Return what differs for almost all different images, and takes one read: a file's size and hash of its end; a missing one's path."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _NUM_END_BYTES))
            return f"{size} {hashlib.sha256(file.read()).hexdigest()}"
    except OSError:  # packing names it
        return str(path)


def _class_sizes(rows: list[Row]) -> dict[str, tuple[int, int]]:
    labels: dict[str, Counter[int]] = defaultdict(Counter)
    for row in rows:
        labels[row.role][row.label] += 1
    return {role: (min(sizes.values()), max(sizes.values())) for role, sizes in labels.items()}


def _read_image(manifest: Manifest, row: Row, own_images: bool) -> _Image | str:
    """Return what is compared of an image, or the reason why it is unreadable."""
    try:
        data = manifest.read_bytes(row)
        pixels = (decode_upright if own_images else decode_rgb)(data)
    except (DataError, ValueError) as error:
        return str(error).rpartition(": ")[2]  # without the path
    _, height, width = pixels.shape
    of_pixels = hashlib.sha256(pixels.contiguous().numpy().data)
    return _Image(row, hashlib.sha256(data).hexdigest(), of_pixels.hexdigest(), tuple(_changes(data)), (width, height))


def _changes(data: bytes) -> Iterator[str]:
    """Yield what decoding changes; nothing if only Pillow refuses the file, for example its metadata: it is packed all the same."""
    with suppress(Exception), Image.open(io.BytesIO(data)) as image:  # Pillow raises errors of a dozen kinds
        if image.mode in ("L", "CMYK"):
            yield _GRAYSCALE if image.mode == "L" else _CMYK
        if _num_bits(image, data) > 8:
            yield _DEEP
        if getattr(image, "is_animated", False) and image.format != "MPO":  # a camera's JPEG with a preview
            yield _ANIMATED
        if image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema()[0] != _OPAQUE:
            yield _TRANSPARENT


def _num_bits(image: Any, data: bytes) -> int:
    """Return the bits per channel of a file that Pillow opened; 8 for formats without more of them."""
    if image.format == "PNG":
        return data[_PNG_BIT_DEPTH]
    if image.format == "TIFF":
        return int(max(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (8,))))
    if image.format == "PPM" and isinstance(image.tile[0].args, tuple):
        return int(image.tile[0].args[1]).bit_length()  # of the largest value
    if image.format == "JPEG2000":
        return 1 + (data[data.index(_JPEG2000_SIZE) + _JPEG2000_BIT_DEPTH] & 0x7F)  # the first bit is the sign
    return 8


def _changed_by_views(
    images: Collection[_Image], transforms: Collection[TransformConfig], stored_size: Resize | None
) -> dict[str, list[str]]:
    """Return the images that test views pad or cut most of, and those without a box where views are cut to boxes; stored ones have none."""
    cut = any(config.crop_to_box for config in transforms)
    # Sides of each image before a test view is cropped, and of the crop.
    views = [(image.row.path, _scaled(image, config, stored_size), config.crop_size) for image in images for config in transforms]
    cropped = [(path, sides, crop) for path, sides, crop in views if crop is not None]
    padded = [path for path, sides, crop in cropped if min(sides) < crop]
    mostly_cut = [path for path, (width, height), crop in cropped if 4 * min(crop, width) * min(crop, height) < width * height]
    return {
        "smaller than the test views, padded with black": list(dict.fromkeys(padded)),
        "images of which a test view shows less than a quarter": list(dict.fromkeys(mostly_cut)),
        "without a box, where views are cut to boxes: a run stops there": [
            image.row.path for image in images if cut and (image.row.box is None or stored_size is not None)
        ],
    }


def _scaled(image: _Image, config: TransformConfig, stored_size: Resize | None) -> tuple[int, int]:
    """Return width and height of an image, or of its box, before a test view is cropped."""
    width, height = image.size
    if image.row.box is not None and config.crop_to_box and stored_size is None:
        left, top, right, bottom = image.row.box
        width, height = math.ceil(right) - int(left), math.ceil(bottom) - int(top)
    for resize in (stored_size, config.test_resize):
        if isinstance(resize, tuple):
            height, width = resize
        elif resize is not None:
            short = max(1, min(width, height))
            width, height = round(width * resize / short), round(height * resize / short)
    return width, height


def _in_two_classes(images: list[_Image]) -> list[str]:
    """Return the images whose pixels are also those of an image of another class."""
    labels: dict[tuple[str, tuple[int, int]], set[int]] = defaultdict(set)
    for image in images:
        labels[image.pixels_sha256, image.size].add(image.row.label)
    return [image.row.path for image in images if len(labels[image.pixels_sha256, image.size]) > 1]


def _found_by_a_copy(images: list[_Image]) -> list[str]:
    """Return the images of a class with equal pixels that are searched for among each other: of `test`, or of `query` and `gallery`."""
    groups: dict[tuple[str, tuple[int, int], int], list[Row]] = defaultdict(list)
    for image in images:
        if image.row.role != "train":
            groups[image.pixels_sha256, image.size, image.row.label].append(image.row)
    return [
        row.path for rows in groups.values() if len(rows) > 1 and {row.role for row in rows} not in ({"query"}, {"gallery"}) for row in rows
    ]


def _alike_names(rows: list[Row]) -> list[str]:
    """Return the first image of each class whose name equals another's but for case, white space, or composed and decomposed letters."""
    first = {row.label_name: row.path for row in reversed(rows)}
    forms = {name: "".join(unicodedata.normalize("NFC", name.casefold()).split()) for name in first}
    sizes = Counter(forms.values())
    return [path for name, path in sorted(first.items()) if sizes[forms[name]] > 1]


def _single_classes(rows: list[Row]) -> list[str]:
    """Return the class of each part, trained on or scored (queries and gallery together), that has no other."""
    parts = {"to train on": {row.label_name for row in rows if row.role == "train"}}
    parts["to score"] = {row.label_name for row in rows if row.role != "train"}
    return [f"only class '{min(names)}' {use}" for use, names in parts.items() if len(names) == 1]


def _leaks(images: Iterable[tuple[str, Row]]) -> list[str]:
    """Return the images, given with the hash of their bytes, that are both in train and in another role, equal ones together."""
    return [row.path for row in _in_train_and_another_role(images)]


def _in_train_and_another_role(images: Iterable[tuple[str, Row]]) -> list[Row]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for key, row in images:
        groups[key].append(row)
    return [row for rows in groups.values() if {"train"} < {row.role for row in rows} for row in rows]


def _box_is_outside(image: _Image) -> bool:
    if image.row.box is None:
        return False
    left, top, right, bottom = image.row.box
    width, height = (side + _BOX_TOLERANCE_PIXELS for side in image.size)
    return min(left, top) < -_BOX_TOLERANCE_PIXELS or right > width or bottom > height or left >= right or top >= bottom


def _findings(examples: Mapping[str, list[str]]) -> list[Finding]:
    return [Finding(what, len(paths), tuple(paths)) for what, paths in examples.items() if paths]
