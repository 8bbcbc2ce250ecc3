"""Class-disjoint validation: a seed selects the held-out training classes, and the split is saved with the run."""

import json
from pathlib import Path

from dml_core.data.store.info import read_info
from dml_core.data.store.packed import EncodedImages, PackedDataset
from dml_core.data.store.split_config import ValidationConfig, held_out_classes
from dml_core.files import write_errors, writing

SPLIT_FILE = "validation_split.json"


def split_classes(folder: Path, config: ValidationConfig) -> dict[str, tuple[str, ...]]:
    """Return the "train" and the "validation" classes of a packed dataset, each in the dataset's order (`held_out_classes` chooses).

    Raises:
        ConfigError: fewer than two classes would remain for training, or be in a fold.
    """
    names = PackedDataset(folder, "train").class_names
    held_out = held_out_classes(names, config)
    return {
        "train": tuple(name for name in names if name not in held_out),
        "validation": tuple(name for name in names if name in held_out),
    }


def open_role(folder: Path, role: str, validation: ValidationConfig | None, source: EncodedImages | None = None) -> PackedDataset:
    """Open one role of a packed dataset for a run: "train" without the held-out classes, "validation" with only those.

    Args:
        folder: folder of the packed dataset.
        role: role of the dataset, or "validation".
        validation: the run's validation split, None without one.
        source: source of the images; None for `images.arrow` in `folder`.

    Raises:
        DataError: no prepared dataset in `folder`.
        ConfigError: it has no such role, or too few classes to hold some out.
    """
    if validation is None or role not in ("train", "validation"):
        return PackedDataset(folder, role, source=source)
    return PackedDataset(folder, "train", split_classes(folder, validation)[role], source)


def save_split(packed: Path, validation: ValidationConfig, folder: Path) -> None:
    """Write a packed dataset's split, with its settings and the dataset's fingerprint, as `validation_split.json` in `folder`.

    Raises:
        StoreError: the folder cannot be written.
    """
    split = {"fingerprint": read_info(packed).fingerprint, **validation.model_dump(), **split_classes(packed, validation)}
    with write_errors(f"{folder}: the validation split", "free space"):
        folder.mkdir(parents=True, exist_ok=True)
        with writing(folder / SPLIT_FILE) as file:
            file.write(f"{json.dumps(split, indent=2, ensure_ascii=False)}\n".encode())
