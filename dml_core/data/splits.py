"""Class-disjoint validation: some of the training classes are held out, chosen by a seed, and the choice is saved with the run."""

from pathlib import Path

import numpy as np
from pydantic import ValidationError

from dml_core.config import Config
from dml_core.data.info import read_info
from dml_core.data.store import PackedDataset
from dml_core.errors import ConfigError, DataError


class ClassSplit(Config):
    """Which training classes train and which validate.

    Attributes:
        fingerprint: of the packed dataset that was split.
        seed, val_share: what the choice derives from.
        train, val: class names, each in the dataset's order.
    """

    fingerprint: str
    seed: int
    val_share: float
    train: tuple[str, ...]
    val: tuple[str, ...]


def split_classes(folder: Path, val_share: float, seed: int) -> ClassSplit:
    """Choose `val_share` of the training classes of a packed dataset, at least two, for validation.

    Raises:
        ConfigError: fewer than two classes would be left for training, or the share is not within (0, 1).
    """
    names = PackedDataset(folder, "train").class_names
    num_val = max(2, round(val_share * len(names)))
    if not 0 < val_share < 1 or len(names) - num_val < 2:
        raise ConfigError(f"val_share {val_share} of {len(names)} training classes leaves fewer than two to train; choose a smaller share")
    chosen = set(np.random.default_rng(seed).permutation(len(names))[:num_val].tolist())
    return ClassSplit(
        fingerprint=read_info(folder).fingerprint,
        seed=seed,
        val_share=val_share,
        train=tuple(name for index, name in enumerate(names) if index not in chosen),
        val=tuple(name for index, name in enumerate(names) if index in chosen),
    )


def save_split(split: ClassSplit, path: Path) -> None:
    """Write the split as JSON."""
    path.write_text(split.model_dump_json(indent=2) + "\n", encoding="utf-8")


def load_split(path: Path, folder: Path) -> ClassSplit:
    """Read a saved split of the packed dataset in `folder`.

    Raises:
        DataError: no such file, not a split, or the split of another dataset.
    """
    try:
        split = ClassSplit.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; make the validation split again") from None
    except ValidationError:
        raise DataError(f"{path}: not a saved validation split; make it again") from None
    if split.fingerprint != read_info(folder).fingerprint:
        raise DataError(f"{path}: belongs to another dataset than {folder}; make the validation split again")
    return split
