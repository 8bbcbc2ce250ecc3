"""Full check of a raw folder before packing: counts, unreadable images, copies of train images in other roles, boxes.

`prepare` stops at the first problem; `check_dataset` checks every image and lists all problems.
"""

import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from dml_core.data.readers.shared.contract import OfficialDataset
from dml_core.data.readers.shared.rules import published_differences
from dml_core.data.registry import parse_dataset
from dml_core.data.store.decode import decode_rgb, decode_upright
from dml_core.data.store.rows import Counts, Manifest, Row, role_counts
from dml_core.errors import DataError

_MAX_EXAMPLES = 5
_BOX_TOLERANCE_PIXELS = 1.0


@dataclass(frozen=True)
class Finding:
    """A kind of finding, how often it occurs, and a few examples (image paths)."""

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
        notes: findings that need no action (grayscale, CMYK).
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
class _Facts:
    row: Row
    sha256: str
    mode: str
    size: tuple[int, int]
    is_readable: bool


def check_dataset(name: str, raw: Path, options: Mapping[str, Any], progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """Read the annotations of a raw folder and check every image.

    Raises:
        ConfigError: unknown dataset or option.
        DataError: the annotations cannot be read or break a rule of every dataset.
    """
    dataset = parse_dataset(name, options)
    published: dict[str, Counts] = {}
    if isinstance(dataset, OfficialDataset) and dataset.published_counts:
        published, dataset = dict(dataset.published), dataset.model_copy(update={"published_counts": False})
    manifest = dataset.read(raw)
    facts = _look_at_all(manifest, dataset.own_images, progress)
    violations = _violations(facts, published_differences(manifest.rows, published))
    return CheckReport(
        role_counts(manifest.rows),
        _class_sizes(manifest.rows),
        published,
        _notes(facts),
        violations,
        _short_sides(facts),
        sum(row.box is not None for row in manifest.rows),
    )


def _class_sizes(rows: list[Row]) -> dict[str, tuple[int, int]]:
    sizes = Counter((row.role, row.label) for row in rows)
    per_role = {role: [size for (of, _), size in sizes.items() if of == role] for role in role_counts(rows)}
    return {role: (min(found), max(found)) for role, found in per_role.items()}


def _short_sides(facts: list[_Facts]) -> tuple[int, int, int]:
    sides = sorted(min(fact.size) for fact in facts if fact.is_readable) or [0]
    return sides[0], sides[len(sides) // 2], sides[-1]


def _look_at_all(manifest: Manifest, own_images: bool, progress: Callable[[int, int], None] | None) -> list[_Facts]:
    facts = []
    with ThreadPoolExecutor() as pool:
        for fact in pool.map(lambda row: _look_at(manifest, row, own_images), manifest.rows):
            facts.append(fact)
            if progress:
                progress(len(facts), len(manifest.rows))
    return facts


def _look_at(manifest: Manifest, row: Row, own_images: bool) -> _Facts:
    try:
        data = manifest.read_bytes(row)
        _, height, width = (decode_upright if own_images else decode_rgb)(data).shape
        with Image.open(io.BytesIO(data)) as image:
            return _Facts(row, hashlib.sha256(data).hexdigest(), image.mode, (width, height), is_readable=True)
    except (DataError, ValueError, OSError):
        return _Facts(row, "", "", (0, 0), is_readable=False)


def _notes(facts: list[_Facts]) -> list[Finding]:
    by_mode: dict[str, list[str]] = defaultdict(list)
    for fact in facts:
        by_mode[fact.mode].append(fact.row.path)
    kinds = {"L": "grayscale, converted to RGB", "CMYK": "CMYK, converted to RGB"}
    return [_finding(what, by_mode[mode]) for mode, what in kinds.items() if mode in by_mode]


def _violations(facts: list[_Facts], differences: list[str]) -> list[Finding]:
    found = {
        "counts are not the published ones": differences,
        "unreadable": [fact.row.path for fact in facts if not fact.is_readable],
        "same bytes in train and in another role": _leaks(facts),
        "box outside the image": [fact.row.path for fact in facts if fact.is_readable and _box_is_outside(fact)],
    }
    return [_finding(what, examples) for what, examples in found.items() if examples]


def _leaks(facts: list[_Facts]) -> list[str]:
    """Return the images whose bytes are both in train and in another role."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for fact in facts:
        if fact.is_readable:
            groups[fact.sha256].append(fact.row)
    roles = {sha256: {row.role for row in rows} for sha256, rows in groups.items()}
    return [row.path for sha256, rows in groups.items() if "train" in roles[sha256] and len(roles[sha256]) > 1 for row in rows]


def _box_is_outside(fact: _Facts) -> bool:
    if fact.row.box is None:
        return False
    left, top, right, bottom = fact.row.box
    width, height = (side + _BOX_TOLERANCE_PIXELS for side in fact.size)
    return min(left, top) < -_BOX_TOLERANCE_PIXELS or right > width or bottom > height or left >= right or top >= bottom


def _finding(what: str, examples: Iterable[str]) -> Finding:
    listed = list(examples)
    return Finding(what, len(listed), tuple(listed[:_MAX_EXAMPLES]))
