"""The rows of a dataset: one per image, whatever the publisher's files look like."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal["train", "test", "query", "gallery"]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Row:
    """One image of a dataset.

    Attributes:
        path: unique name, relative to the raw folder, with forward slashes.
        label: the publisher's class number; only its order matters.
        label_name: the publisher's class name.
        role: "train", "test" or (In-shop) "query", "gallery"; classes are disjoint between training and the
            rest, unless the dataset is split by image.
        box: (left, top, right, bottom) in pixels of the original image, right and bottom exclusive, or None.
    """

    path: str
    label: int
    label_name: str
    role: Role
    box: Box | None = None


@dataclass(frozen=True)
class Manifest:
    """All rows of a dataset in packing order, and how the encoded bytes of one of them are read."""

    rows: list[Row]
    read_bytes: Callable[[Row], bytes]


@dataclass(frozen=True)
class Counts:
    """Images and classes of one role."""

    num_images: int
    num_classes: int


def as_role(text: object) -> Role | None:
    """The role of that name, or None where there is none."""
    return next((role for role in get_args(Role) if role == text), None)


def role_counts(rows: list[Row]) -> dict[str, Counts]:
    """Images and classes per role, in order of first appearance."""
    labels: dict[str, list[int]] = {}
    for row in rows:
        labels.setdefault(row.role, []).append(row.label)
    return {role: Counts(len(found), len(set(found))) for role, found in labels.items()}
