"""Which runs a table's rows are."""

from collections.abc import Sequence

from dml_core.config import merge, parse, unknown_name
from dml_core.errors import ConfigError
from dml_core.losses.registry import parse_loss_options
from dml_core.training.config import TrainingConfig
from tasks.runs.protocols import Protocol, load_protocol
from tasks.tables.file import Row, TableFile


def row_training(table: str, row: Row, dataset: str, variant: str | None = None, protocol: Protocol | None = None) -> TrainingConfig:
    """How a row of a table is trained on a dataset.

    Args:
        table: `<paper>/<file>`.
        row: one that is to be run.
        dataset: of the table's columns.
        variant: of the protocol; the row's first where none is given.
        protocol: the row's, where it is loaded already.

    Raises:
        ConfigError: the row is not run, has no such variant, or its changes do not fit.
    """
    if row.kind == "quoted" or row.lacks:
        raise ConfigError(f"{table}: '{row.label}' is not run: {row.lacks or 'the paper quotes it from elsewhere'}")
    variant = variant or row.variants[0]
    if variant not in row.variants:
        raise unknown_name(f"variant of '{row.label}'", variant, list(row.variants))
    protocol = protocol or load_protocol(row.protocol or table.partition("/")[0])
    values = protocol.training_config(dataset, variant).model_dump(mode="json")
    if row.loss is not None:
        values["loss"] = row.loss
    where = f"{table}: {row.label}, {dataset}, {variant}"
    config = parse(TrainingConfig, merge(merge(values, row.training), row.datasets.get(dataset, {})), where)
    parse_loss_options(config.loss.name, config.loss.options, f"{where}: loss")
    return config


def datasets_of(table: TableFile) -> Sequence[str]:
    """The datasets of a table's columns, each once, from left to right."""
    return tuple(dict.fromkeys(block.dataset for block in table.columns))
