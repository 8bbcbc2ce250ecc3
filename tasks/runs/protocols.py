"""The papers' protocols: `flows/tables/<paper>/protocol.yaml` and the common track as typed training configurations.

A configuration is the protocol's `training` with the dataset's part, the variant's, and the variant's part for the dataset laid over it.
"""

from pathlib import Path
from typing import Any

from pydantic import Field

from dml_core.config import Config, Name, merge, parse, read_yaml, unknown_name
from dml_core.errors import ConfigError
from dml_core.losses.registry import parse_loss_options
from dml_core.training.config import TrainingConfig
from dml_core.training.epochs import Epoch

TABLES = Path(__file__).parents[2] / "flows" / "tables"
COMMON = "common"


class Variant(Config):
    """One way to run a system ("as_published", "as_released"), as changes to the protocol.

    Attributes:
        training: for every dataset.
        datasets: for one dataset.
    """

    training: dict[str, Any] = {}
    datasets: dict[str, dict[str, Any]] = {}


class Protocol(Config):
    """A protocol file.

    Attributes:
        paper: its name.
        training: what all datasets and variants share.
        datasets: dataset -> its changes.
        variants: variant -> its changes.
        evaluation: how its tables are scored, beside the columns' own K: k-means as the paper ran it.
        epochs: whose weights its tables score of each run: the last's, and what the paper's own figures are of where that is another.
        independent: what was found of re-evaluations by others where a row has none of its own, and where it was looked for.
        prints: the epoch of the paper's own figures: verdicts and claims are of that one.
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
        """The training settings of a variant on a dataset, its loss's options checked, which imports the loss and torch.

        Raises:
            ConfigError: no such dataset or variant here, or settings that do not fit.
        """
        config = self.settings(dataset, variant)
        parse_loss_options(config.loss.name, config.loss.options, f"protocol {self.paper}: {dataset} / {variant}: loss")
        return config

    def settings(self, dataset: str, variant: str) -> TrainingConfig:
        """As `training_config`, the loss's own options as they stand in the file. Imports no torch.

        Raises:
            ConfigError: as `training_config`.
        """
        for kind, name, known in (("dataset", dataset, self.datasets), ("variant", variant, self.variants)):
            if name not in known:
                raise unknown_name(f"{kind} of protocol '{self.paper}'", name, list(known))
        chosen = self.variants[variant]
        values = merge(merge(self.training, self.datasets[dataset]), merge(chosen.training, chosen.datasets.get(dataset, {})))
        return parse(TrainingConfig, values, f"protocol {self.paper}: {dataset} / {variant}")


def protocol_names() -> list[str]:
    """The papers that have a protocol, and the common track."""
    return [*sorted(path.parent.name for path in TABLES.glob("*/protocol.yaml")), COMMON]


def load_protocol(name: str) -> Protocol:
    """A paper's protocol, or the common track's, with every dataset and variant checked.

    Raises:
        ConfigError: no such protocol, or something in it is wrong.
    """
    protocol = read_protocol(name)
    for dataset in protocol.datasets:
        for variant in protocol.variants:
            protocol.training_config(dataset, variant)
    return protocol


def read_protocol(name: str) -> Protocol:
    """The same as it stands in the file, without a look at what its parts come to.

    Raises:
        ConfigError: as `load_protocol`.
    """
    if name not in protocol_names():
        raise unknown_name("protocol", name, protocol_names())
    path = TABLES / f"{name}.yaml" if name == COMMON else TABLES / name / "protocol.yaml"
    protocol = parse(Protocol, read_yaml(path), path.name if name == COMMON else f"{name}/{path.name}")
    if protocol.prints not in protocol.epochs:
        raise ConfigError(f"{path.name}: prints: epoch '{protocol.prints}' is not among the epochs that are scored")
    if protocol.paper != name:
        raise ConfigError(f"{path.name}: paper is '{protocol.paper}' in the folder of '{name}': name it after its folder")
    for variant, changes in protocol.variants.items():
        for dataset in changes.datasets:
            if dataset not in protocol.datasets:
                raise unknown_name(f"dataset of variant '{variant}'", dataset, list(protocol.datasets))
    return protocol
