"""Registry of datasets, each in its own module, so that `dvc.yaml` can name the file; imported only when used."""

from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from dml_core.config import check_known, parse
from dml_core.data.readers.shared.archives import Progress
from dml_core.data.readers.shared.contract import DatasetConfig, OfficialDataset

DATASETS: dict[str, str] = {
    "cars196": "dml_core.data.readers.cars196:Cars196",
    "cub200": "dml_core.data.readers.cub200:Cub200",
    "fashion_mnist": "dml_core.data.readers.fashion_mnist:FashionMnist",
    "folder": "dml_core.data.readers.folder:Folder",
    "glyphs": "dml_core.data.readers.glyphs:Glyphs",
    "icons": "dml_core.data.readers.icons:Icons",
    "inshop": "dml_core.data.readers.inshop:Inshop",
    "manifest": "dml_core.data.readers.manifest:ManifestFile",
    "mnist": "dml_core.data.readers.mnist:Mnist",
    "sop": "dml_core.data.readers.sop:Sop",
    "synthetic": "dml_core.data.readers.synthetic:Synthetic",
}


def dataset_class(name: str) -> type[DatasetConfig]:
    """Return the class of a dataset.

    Raises:
        ConfigError: unknown dataset; the message suggests the nearest name.
    """
    check_known("dataset", name, DATASETS)
    return resolve_name(DATASETS[name])


def published_dataset(name: str) -> type[OfficialDataset] | None:
    """Return the class of a published dataset, which the user provides as an archive or a folder; None for any other name."""
    dataset = dataset_class(name) if name in DATASETS else None
    return dataset if dataset is not None and issubclass(dataset, OfficialDataset) else None


def parse_dataset(name: str, options: Mapping[str, Any]) -> DatasetConfig:
    """Return the named dataset with its options.

    Raises:
        ConfigError: unknown dataset, unknown option, or an option outside its range.
    """
    return parse(dataset_class(name), options, f"dataset '{name}'")


def fetch(name: str, options: Mapping[str, Any], raw: Path, progress: Progress | None = None) -> None:
    """Provide the named dataset's raw files in `raw`, downloading them if a link works; see `DatasetConfig.fetch`."""
    parse_dataset(name, options).fetch(raw, progress)


def materialise(name: str, options: Mapping[str, Any], raw: Path) -> None:
    """Ensure that the named dataset's raw files are in `raw`, never overwriting the user's files.

    Raises:
        ConfigError: unknown dataset or option.
        DataError: the files are missing and the user must provide them; the message says how.
    """
    parse_dataset(name, options).materialise(raw)
