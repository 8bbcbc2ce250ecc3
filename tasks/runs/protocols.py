"""Protocols of the papers (`flows/tables/<paper>/protocol.yaml`) and of the common track, as typed training configurations.

A configuration is the protocol's `training`, overridden by the dataset's part, the variant's, and the variant's part for the dataset.
"""

from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from dml_core.config import Config, Name, check_known, parse, read_yaml
from dml_core.epochs import Epoch
from dml_core.errors import ConfigError
from dml_core.overrides import parse_overridden
from dml_core.training.config import TrainingConfig

TABLES = Path(__file__).parents[2] / "flows" / "tables"
COMMON = "common"


class Variant(Config):
    """One way to run a system ("as_published", "as_released"), as changes to the protocol.

    Attributes:
        training: changes for every dataset.
        datasets: dataset -> changes for it.
    """

    training: dict[str, Any] = {}
    datasets: dict[str, dict[str, Any]] = {}


class Protocol(Config):
    """A protocol file.

    Attributes:
        paper: its name.
        training: settings that all datasets and variants share.
        datasets: dataset -> its changes.
        variants: variant -> its changes.
        evaluation: scoring of its tables, in addition to the columns' own K: k-means as the paper ran it.
        epochs: epochs whose weights its tables score in each run: the last, and that of the paper's own values if different.
        independent: findings about re-evaluations by others for rows without one, and where they were searched for.
        prints: epoch of the paper's own values, which verdicts and claims use.
    """

    paper: str
    evaluation: dict[str, Any] = {}
    epochs: tuple[Epoch, ...] = Field(default=("last",), min_length=1)
    independent: str | None = None
    prints: Epoch = "last"
    training: dict[str, Any]
    datasets: dict[Name, dict[str, Any]] = Field(min_length=1)
    variants: dict[Name, Variant] = Field(min_length=1)

    def training_config(self, dataset: str, variant: str) -> TrainingConfig:
        """Return the training settings of a variant on a dataset; the loss's own options are unchecked. Imports no torch.

        Raises:
            ConfigError: the dataset or variant is unknown, or settings do not fit.
        """
        for kind, name, known in (("dataset", dataset, self.datasets), ("variant", variant, self.variants)):
            check_known(f"{kind} of protocol '{self.paper}'", name, known)
        changes = self.variants[variant]
        layers = self.datasets[dataset], changes.training, changes.datasets.get(dataset, {})
        return parse_overridden(TrainingConfig, f"protocol {self.paper}: {dataset} / {variant}", self.training, *layers)


def protocol_names() -> list[str]:
    """Return the papers that have a protocol, and the common track."""
    return [*sorted(path.parent.name for path in TABLES.glob("*/protocol.yaml")), COMMON]


def load_protocol(name: str) -> Protocol:
    """Return a paper's protocol, or the common track's, without checking the configurations that its parts give.

    Raises:
        ConfigError: the protocol does not exist or has an error.
    """
    path = TABLES / f"{name}.yaml" if name == COMMON else TABLES / name / "protocol.yaml"
    return _parsed_protocol(name, path, content_of(path))


def content_of(path: Path) -> bytes:
    """Return a file's content, by which parsed settings are cached: it may be edited during a flow. Empty if it cannot be read."""
    with suppress(OSError):
        return path.read_bytes()
    return b""


@lru_cache(maxsize=256)
def _parsed_protocol(name: str, path: Path, content: bytes) -> Protocol:
    check_known("protocol", name, protocol_names())
    protocol = parse(Protocol, read_yaml(path), path.relative_to(TABLES).as_posix())
    if protocol.prints not in protocol.epochs:
        raise ConfigError(f"{path.name}: prints: epoch '{protocol.prints}' is not among the epochs that are scored")
    if protocol.paper != name:
        raise ConfigError(f"{path.name}: paper is '{protocol.paper}', but the folder is '{name}': use the name of the folder")
    for variant, changes in protocol.variants.items():
        for dataset in changes.datasets:
            check_known(f"dataset of variant '{variant}'", dataset, protocol.datasets)
    return protocol
