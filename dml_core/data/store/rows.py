"""Rows of a dataset, one per image, independent of the publisher's file formats."""

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
        role: "train", "test" or (In-shop) "query", "gallery"; the classes of training and the other roles are disjoint,
            unless the dataset is split by image.
        box: (left, top, right, bottom) in pixels of the image as decoded (the user's own images upright), right and bottom exclusive, or
            None.
    """

    path: str
    label: int
    label_name: str
    role: Role
    box: Box | None = None


@dataclass(frozen=True)
class Manifest:
    """All rows of a dataset in packing order, and a function that reads the encoded bytes of a row."""

    rows: list[Row]
    read_bytes: Callable[[Row], bytes]


@dataclass(frozen=True)
class Counts:
    """Images and classes of one role."""

    num_images: int
    num_classes: int


def as_role(text: object) -> Role | None:
    """Return the role of that name, or None."""
    return next((role for role in get_args(Role) if role == text), None)


def role_counts(rows: list[Row]) -> dict[str, Counts]:
    """Return images and classes per role, in order of first appearance."""
    labels: dict[str, list[int]] = {}
    for row in rows:
        labels.setdefault(row.role, []).append(row.label)
    return {role: Counts(len(of_role), len(set(of_role))) for role, of_role in labels.items()}
