"""What datasets of a person's own share: image file names, and the split by class where none is given."""

from pathlib import PurePath

from dml_core.data.rows import Role

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"})


def is_image_name(path: PurePath) -> bool:
    """Whether the name says that the file is an image."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def split_by_class(names: set[str]) -> dict[str, Role]:
    """Role of each class: in order of their names, the first half trains, the rest tests, as in CUB."""
    ordered = sorted(names)
    return {name: "train" if index < len(ordered) // 2 else "test" for index, name in enumerate(ordered)}
