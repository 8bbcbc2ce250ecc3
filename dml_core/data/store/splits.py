"""Class-disjoint validation: a seed selects the held-out training classes, and the split is saved with the run."""

from pathlib import Path

from dml_core.config import Config
from dml_core.data.store.info import read_info
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.split_config import ValidationConfig, held_out_classes
from dml_core.errors import StoreError
from dml_core.files import writing

SPLIT_FILE = "validation_split.json"


class ClassSplit(Config):
    """Training classes split into those for training and those for validation.

    Attributes:
        fingerprint: fingerprint of the packed dataset that was split.
        share, folds, fold, seed: settings that determine the split.
        train, validation: class names, each in the dataset's order.
    """

    fingerprint: str
    share: float | None = None
    folds: int | None = None
    fold: int | None = None
    seed: int
    train: tuple[str, ...]
    validation: tuple[str, ...]


def split_classes(folder: Path, config: ValidationConfig) -> ClassSplit:
    """Hold out training classes of a packed dataset, chosen by `held_out_classes`.

    Raises:
        ConfigError: fewer than two classes would remain for training, or be in a fold.
    """
    names = PackedDataset(folder, "train").class_names
    held_out = held_out_classes(names, config)
    return ClassSplit(
        fingerprint=read_info(folder).fingerprint,
        share=config.share,
        folds=config.folds,
        fold=config.fold,
        seed=config.seed,
        train=tuple(name for name in names if name not in held_out),
        validation=tuple(name for name in names if name in held_out),
    )


def open_role(folder: Path, role: str, validation: ValidationConfig | None) -> PackedDataset:
    """Open one role of a packed dataset for a run: "train" without the held-out classes, "validation" with only those.

    Raises:
        DataError: no prepared dataset in `folder`.
        ConfigError: it has no such role, or too few classes to hold some out.
    """
    if validation is None or role not in ("train", "validation"):
        return PackedDataset(folder, role)
    split = split_classes(folder, validation)
    return PackedDataset(folder, "train", split.train if role == "train" else split.validation)


def save_split(split: ClassSplit, folder: Path) -> None:
    """Write the split as `validation_split.json`.

    Raises:
        StoreError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with writing(folder / SPLIT_FILE) as file:
            file.write(f"{split.model_dump_json(indent=2, exclude_none=True)}\n".encode())
    except OSError as error:
        raise StoreError(f"{folder}: the validation split cannot be written ({error.strerror or error}); free space") from None
