"""Which runs a table's rows are."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dml_core.config import merge, parse, unknown_name
from dml_core.data.registry import DATASETS, parse_dataset
from dml_core.errors import ConfigError
from dml_core.evaluation.columns import recall_k
from dml_core.evaluation.config import EvaluationConfig
from dml_core.losses.registry import parse_loss_options
from dml_core.training.config import TrainingConfig
from dml_core.training.epochs import EPOCHS, Epoch
from tasks.runs.protocols import COMMON, Protocol, load_protocol
from tasks.runs.specs import Params, RunSpec, ScaleSpec
from tasks.tables.choice import Choice, narrowed
from tasks.tables.file import STANDING, Row, TableFile, load_table, run_label
from tasks.tables.smoke import make_small

EVERYTHING = Choice()
CLUSTERING = ("nmi", "nmi_geometric", "ami", "f1")


@dataclass(frozen=True)
class Chosen:
    """The runs of tables.

    Attributes:
        runs: table -> its runs, on the project's datasets, in the order of its columns and rows.
        left_out: table -> why it has none, or why some of its rows have none, a line each.
        missing: datasets that runs were asked for on and the project has not -> the options that they would have to have.
    """

    runs: dict[str, list[RunSpec]]
    left_out: dict[str, list[str]]
    missing: dict[str, dict[str, Any]]

    def by_dataset(self) -> list[list[RunSpec]]:
        """The runs of one table on one dataset together."""
        found: dict[tuple[str, str], list[RunSpec]] = {}
        for name, runs in self.runs.items():
            for spec in runs:
                found.setdefault((name, spec.dataset), []).append(spec)
        return list(found.values())


def chosen_runs(params: Params, names: Sequence[str], choice: Choice) -> Chosen:
    """The runs of several tables.

    Raises:
        ConfigError: an unknown row or dataset, a row that is named and not run, settings that do not fit, or nothing to run at all.
    """
    if STANDING in names:
        raise ConfigError(f"{STANDING} is run by itself, as `dml reproduce` without a table: its runs are those of params.yaml")
    tables = {name: load_table(name) for name in names}
    rows = narrowed("row", choice.rows, {name: list(table.rows) for name, table in tables.items()})
    datasets = narrowed("dataset", choice.datasets, {name: datasets_of(table) for name, table in tables.items()})
    runs: dict[str, list[RunSpec]] = {}
    left_out: dict[str, list[str]] = {}
    missing: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        runs[name], left_out[name] = [], []
        for dataset, found in runs_of(name, table, choice, rows[name], datasets[name], left_out[name]).items():
            own = dataset if choice.smoke else project_dataset(params, dataset, table.dataset_options(dataset))
            if own is None:
                missing.setdefault(dataset, table.dataset_options(dataset))
                continue
            runs[name] += [make_small(spec) if choice.smoke else spec.model_copy(update={"dataset": own}) for spec in found]
    if not any(runs.values()) and not missing:
        why = "; ".join(dict.fromkeys(why for reasons in left_out.values() for why in reasons)) or "no such row on such a dataset"
        raise ConfigError(f"{', '.join(names)}: nothing can be run: {why}")
    return Chosen({name: found for name, found in runs.items() if found}, {k: v for k, v in left_out.items() if v}, missing)


def runs_of(
    name: str,
    table: TableFile,
    choice: Choice = EVERYTHING,
    rows: Sequence[str] | None = None,
    datasets: Sequence[str] | None = None,
    left_out: list[str] | None = None,
) -> dict[str, list[RunSpec]]:
    """A table's runs by the dataset's name in its columns.

    Args:
        name: `<paper>/<file>`.
        table: its file.
        choice: the variant, the track and the seeds; a row that it names has to be one that is run.
        rows, datasets: of this table; all of them where none is given.
        left_out: gets a line for every row that has no run.

    Raises:
        ConfigError: a row that is named and not run, or settings that do not fit.
    """
    found: dict[str, list[RunSpec]] = {}
    said: dict[str, None] = {}
    for dataset in datasets_of(table) if datasets is None else datasets:
        evaluation = scoring_of(name, table, dataset)
        for row, entry in table.rows.items():
            if (rows is not None and row not in rows) or not (choice.rows or belongs(table, entry, dataset)):
                continue
            why_not = _why_not(name, entry, dataset, choice)
            if why_not is not None:
                said[why_not] = None
            elif is_run(entry) or choice.rows:
                measured = merge(table.measurements, entry.measurements)
                variant, training, epochs = _training(name, entry, dataset, choice)
                for epoch in epochs:
                    label = run_label(row, variant, epoch)
                    scored = evaluation.model_copy(update={"role": entry.role or table.role, "epoch": epoch})
                    spec = RunSpec(
                        dataset=dataset, variant=label, seed=0, training=training, evaluation=scored, table=name, measurements=measured
                    )
                    found.setdefault(dataset, []).extend(spec.model_copy(update={"seed": seed}) for seed in choice.seeds)
    if left_out is not None:
        left_out += said
    return found


def _why_not(name: str, row: Row, dataset: str, choice: Choice) -> str | None:
    """Why a row has no run, in one line; None where it has one, where the paper quotes it, or where it is named and has to have one."""
    if row.lacks and not choice.rows:
        return f"'{row.label}' lacks {row.lacks}"
    if choice.track == "paper" or not is_run(row):
        return None
    if dataset not in load_protocol(COMMON).datasets:
        return f"{dataset} is not on the common track"
    loss = row_training(name, row, dataset).loss.name
    return None if loss in load_protocol(COMMON).variants else f"'{row.label}' has no equivalent on the common track (loss '{loss}')"


def _training(name: str, row: Row, dataset: str, choice: Choice) -> tuple[str, TrainingConfig, list[Epoch]]:
    """What a row is called on the chosen track, how it is trained there, and which epochs' weights are scored."""
    if choice.track == "common":
        return COMMON, common_training(name, row, dataset), ["last"]
    variant = choice.variant if choice.variant in row.variants else row.variants[0]
    protocol = load_protocol(row.protocol or name.partition("/")[0])
    listed = row.epochs or protocol.epochs
    training = row_training(name, row, dataset, variant, protocol)
    training = _keeping(training, {*listed, *choice.epochs}, f"{name}: {row.label}, {dataset}, {variant}")
    return variant, training, [epoch for epoch in EPOCHS if epoch in (choice.epochs or listed)]


def common_training(table: str, row: Row, dataset: str) -> TrainingConfig:
    """A row on the common track: its variant there is its loss's, with the row's own changes to the loss laid over, and with no others.

    Raises:
        ConfigError: the common track has not the dataset or the loss, or the changes do not fit.
    """
    name = row_training(table, row, dataset).loss.name
    values = load_protocol(COMMON).training_config(dataset, name).model_dump(mode="json")
    changes = merge(row.training, row.datasets.get(dataset, {})).get("loss", {})
    loss = merge(merge(values["loss"], row.loss or {}), changes)
    where = f"{table}: {row.label}, {dataset}, {COMMON} track"
    config = parse(TrainingConfig, values | {"loss": loss}, where)
    parse_loss_options(config.loss.name, config.loss.options, f"{where}: loss")
    return config


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
    if not is_run(row):
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


def _keeping(training: TrainingConfig, epochs: Collection[Epoch], where: str) -> TrainingConfig:
    """The training that keeps these epochs beside the last. Whichever of them is scored, it is the same one."""
    kept = [epoch for epoch in EPOCHS if epoch != "last" and (epoch in epochs or epoch in training.keep_epochs)]
    if kept == list(training.keep_epochs):
        return training
    return parse(TrainingConfig, merge(training.model_dump(mode="json"), {"keep_epochs": kept}), where)


def is_run(row: Row) -> bool:
    """Whether a row can be run: it is not quoted, and what it needs is built."""
    return row.kind != "quoted" and row.lacks is None


def datasets_of(table: TableFile) -> tuple[str, ...]:
    """The datasets of a table's columns, each once, from left to right."""
    return tuple(dict.fromkeys(block.dataset for block in table.columns))


def belongs(table: TableFile, row: Row, dataset: str) -> bool:
    """Whether the table has the row on this dataset: it says so, or some figure is there, or, as in a plot, none anywhere."""
    on = set(row.runs_on) or {column.dataset for column, value in zip(table.flat_columns, row.published, strict=True) if value is not None}
    return not on or dataset in on


def scoring_of(name: str, table: TableFile, dataset: str) -> EvaluationConfig:
    """What is measured for a table on a dataset: its columns' K, k-means as the paper ran it."""
    metrics = [column.metric for column in table.flat_columns if column.dataset == dataset]
    ks = sorted({k for metric in metrics if (k := recall_k(metric)) is not None}) or [1]
    values = {"recall_at": ks, "clustering": any(metric in CLUSTERING for metric in metrics)}
    return parse(EvaluationConfig, merge(load_protocol(name.partition("/")[0]).evaluation, values), f"{name}: evaluation")


def project_dataset(params: Params, dataset: str, options: Mapping[str, Any] | None = None) -> str | None:
    """The name that the project has for a table's dataset: that of the reader, or the one dataset that is read by it; None where none is.

    A column that names no reader names a dataset of the project itself.

    Args:
        params: the project's parameters.
        dataset: as the table's columns name it.
        options: those that the table asks for. Only one that asks for a split by image gets a dataset whose test classes are trained on.

    Raises:
        ConfigError: several are.
    """
    if dataset not in DATASETS:
        return dataset if dataset in params.datasets else None
    asked = options or {}
    shares_classes = parse_dataset(dataset, asked).shares_classes
    read = {name: parse_dataset(spec.reader, spec.options) for name, spec in params.datasets.items() if spec.reader == dataset}
    named = [
        name
        for name, found in read.items()
        if found.shares_classes == shares_classes and all(getattr(found, option) == value for option, value in asked.items())
    ]
    if dataset in named or len(named) == 1:
        return dataset if dataset in named else named[0]
    if named:
        raise ConfigError(f"params.yaml: datasets {', '.join(named)} are all read by '{dataset}'; call the one of the tables '{dataset}'")
    return None


def column_dataset(params: Params, table: TableFile, own: str) -> str:
    """How a table's columns name a dataset of the project: the way back from `project_dataset`."""
    return own if own in datasets_of(table) else params.datasets[own].reader


def at_scale(params: Params, tables: Iterable[TableFile]) -> Params:
    """The parameters with what the runs of these tables may use: what the tables ask for, where all ask for the same.

    Raises:
        ConfigError: a table asks for what there is not.
    """
    (title, asked), *others = ((table.title, table.scale) for table in tables)
    if not asked or any(scale != asked for _, scale in others):
        return params
    scale = parse(ScaleSpec, merge(params.scale.model_dump(), asked), f"{title}: scale")
    return params.model_copy(update={"scale": scale})
