"""Full check of a raw folder before packing: counts, unreadable images, copies of train images in other roles, boxes.

`prepare` stops at the first problem; `check_dataset` checks every image and lists all problems.
"""

import hashlib
import io
import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from dml_core.data.readers.shared.archives import Progress
from dml_core.data.readers.shared.contract import OfficialDataset
from dml_core.data.readers.shared.rules import published_differences
from dml_core.data.registry import parse_dataset
from dml_core.data.store.decode import decode_rgb, decode_upright
from dml_core.data.store.rows import Counts, Manifest, Row, role_counts
from dml_core.data.store.sizes import Resize
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import DataError

_MAX_EXAMPLES = 5
_BOX_TOLERANCE_PIXELS = 1.0
_PNG_BIT_DEPTH = 24  # place of the byte
_OPAQUE = 255
_CHANGES = (
    _GRAYSCALE := "grayscale, converted to RGB",
    _CMYK := "CMYK, converted to RGB",
    _TRANSPARENT := "transparent pixels, replaced by the colours stored under them",
    _DEEP := "16 bits per channel, of which the lower 8 are dropped",
    _ANIMATED := "several pictures in the file, of which the first is used",
)


@dataclass(frozen=True)
class Finding:
    """A kind of finding, how often it occurs, and a few examples: paths of images, of an unreadable one with the reason."""

    what: str
    num_found: int
    examples: tuple[str, ...]


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
    """

    counts: dict[str, Counts]
    class_sizes: dict[str, tuple[int, int]]
    published: dict[str, Counts]
    notes: list[Finding]
    violations: list[Finding]
    short_sides: tuple[int, int, int]
    num_boxes: int


@dataclass(frozen=True)
class _Image:
    """A readable image: SHA-256 of its bytes and of its RGB pixels, what decoding changes (`_CHANGES`), and size (width, height)."""

    row: Row
    sha256: str
    pixels_sha256: str
    changes: tuple[str, ...]
    size: tuple[int, int]


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
        transforms: views that are made of the dataset; images that test views pad, or that lack a box to be cut to, are noted.

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
        "same bytes in train and in another role": _leaks(images),
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
    )


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
        if image.format == "PNG" and data[_PNG_BIT_DEPTH] == 16:
            yield _DEEP
        if getattr(image, "is_animated", False) and image.format != "MPO":  # a camera's JPEG with a preview
            yield _ANIMATED
        if image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema()[0] != _OPAQUE:
            yield _TRANSPARENT


def _changed_by_views(images: list[_Image], transforms: Collection[TransformConfig], stored_size: Resize | None) -> dict[str, list[str]]:
    """Return the images that test views pad, and those that lack a box where views are cut to boxes; stored images have none."""
    cut = any(config.crop_to_box for config in transforms)
    return {
        "smaller than the test views, padded with black": [
            image.row.path
            for image in images
            if any(_short_side(image, config, stored_size) < (config.crop_size or 0) for config in transforms)
        ],
        "without a box, where views are cut to boxes: a run stops there": [
            image.row.path for image in images if cut and (image.row.box is None or stored_size is not None)
        ],
    }


def _short_side(image: _Image, config: TransformConfig, stored_size: Resize | None) -> int:
    """Return the short side of an image, or of its box, before a test view is cropped."""
    resize = config.test_resize or stored_size
    if resize is not None:
        return min(resize) if isinstance(resize, tuple) else resize
    if image.row.box is None or not config.crop_to_box:
        return min(image.size)
    left, top, right, bottom = image.row.box
    return min(math.ceil(right) - int(left), math.ceil(bottom) - int(top))


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


def _leaks(images: list[_Image]) -> list[str]:
    """Return the images whose bytes are both in train and in another role, equal ones together."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for image in images:
        groups[image.sha256].append(image.row)
    return [row.path for rows in groups.values() if {"train"} < {row.role for row in rows} for row in rows]


def _box_is_outside(image: _Image) -> bool:
    if image.row.box is None:
        return False
    left, top, right, bottom = image.row.box
    width, height = (side + _BOX_TOLERANCE_PIXELS for side in image.size)
    return min(left, top) < -_BOX_TOLERANCE_PIXELS or right > width or bottom > height or left >= right or top >= bottom


def _findings(examples: Mapping[str, list[str]]) -> list[Finding]:
    return [Finding(what, len(paths), tuple(paths[:_MAX_EXAMPLES])) for what, paths in examples.items() if paths]
