"""Which runs a table's rows are."""

from collections.abc import Collection, Sequence

from dml_core.config import merge, parse, unknown_name
from dml_core.errors import ConfigError
from dml_core.evaluation.columns import recall_k
from dml_core.evaluation.config import EvaluationConfig
from dml_core.losses.registry import parse_loss_options
from dml_core.training.config import TrainingConfig
from dml_core.training.epochs import EPOCHS, Epoch
from tasks.runs.protocols import Protocol, load_protocol
from tasks.runs.specs import Params, RunSpec
from tasks.tables.file import Row, TableFile, load_table, run_label
from tasks.tables.smoke import make_small

CLUSTERING = ("nmi", "nmi_geometric", "ami", "f1")


def table_runs(
    params: Params,
    name: str,
    rows: Sequence[str] | None = None,
    datasets: Sequence[str] | None = None,
    variant: str | None = None,
    seeds: Sequence[int] | None = None,
    smoke: bool = False,
    epochs: Sequence[Epoch] | None = None,
) -> dict[str, list[RunSpec]]:
    """A table's runs by the dataset's name in its columns, each run on the project's dataset of that kind.

    Raises:
        ConfigError: as `runs_of`, or the project has not the dataset.
    """
    runs = runs_of(name, load_table(name), rows, datasets, variant, seeds or (0,), smoke, epochs)
    for dataset in () if smoke else runs:
        own = project_dataset(params, dataset)
        runs[dataset] = [spec.model_copy(update={"dataset": own}) for spec in runs[dataset]]
    return runs


def runs_of(
    name: str,
    table: TableFile,
    rows: Sequence[str] | None = None,
    datasets: Sequence[str] | None = None,
    variant: str | None = None,
    seeds: Sequence[int] = (0,),
    smoke: bool = False,
    epochs: Sequence[Epoch] | None = None,
) -> dict[str, list[RunSpec]]:
    """A table's runs by dataset.

    Args:
        name: `<paper>/<file>`.
        table: its file.
        rows, datasets: narrow the table; a row that is named has to be one that is run.
        variant: of the protocol, for every row that has it; each row's first where none is given.
        seeds: every row runs once with each.
        smoke: the same systems on a few drawn images, without trained weights and for one epoch.
        epochs: whose weights are scored of each run; those of the row or of its protocol where none are given.

    Raises:
        ConfigError: an unknown row or dataset, a row that is not run, the best epoch on held-out classes where the row holds none out, or
            settings that do not fit.
    """
    for kind, chosen, known in (("row", rows, list(table.rows)), ("dataset", datasets, list(datasets_of(table)))):
        for one in chosen or ():
            if one not in known:
                raise unknown_name(f"{kind} of {name}", one, known)
    wanted = {row: entry for row, entry in table.rows.items() if row in (rows or table.rows) and (rows or is_run(entry))}
    found: dict[str, list[RunSpec]] = {}
    for dataset in datasets or datasets_of(table):
        evaluation = scoring_of(name, table, dataset)
        for row, entry in wanted.items():
            if rows is None and not _belongs(table, entry, dataset):
                continue
            chosen_variant = variant if variant in entry.variants else entry.variants[0]
            protocol = load_protocol(entry.protocol or name.partition("/")[0])
            listed = entry.epochs or protocol.epochs
            training = row_training(name, entry, dataset, chosen_variant, protocol)
            training = _keeping(training, {*listed, *(epochs or ())}, f"{name}: {entry.label}, {dataset}, {chosen_variant}")
            measured = merge(table.measurements, entry.measurements)
            for epoch in [epoch for epoch in EPOCHS if epoch in (epochs or listed)]:
                label, scored = run_label(row, chosen_variant, epoch), evaluation.model_copy(update={"epoch": epoch})
                spec = RunSpec(
                    dataset=dataset, variant=label, seed=0, training=training, evaluation=scored, table=name, measurements=measured
                )
                spec = make_small(spec) if smoke else spec
                found.setdefault(dataset, []).extend(spec.model_copy(update={"seed": seed}) for seed in seeds)
    if not found:
        raise ConfigError(
            f"{name} has no row that can be run yet: {next((row.lacks for row in table.rows.values() if row.lacks), 'all quoted')}"
        )
    return found


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


def _belongs(table: TableFile, row: Row, dataset: str) -> bool:
    """Whether the paper has the row on this dataset: some figure there, or, as in a plot, none anywhere."""
    on = {column.dataset for column, value in zip(table.flat_columns, row.published, strict=True) if value is not None}
    return not on or dataset in on


def scoring_of(name: str, table: TableFile, dataset: str) -> EvaluationConfig:
    """What is measured for a table on a dataset: its columns' K, k-means as the paper ran it."""
    metrics = [column.metric for column in table.flat_columns if column.dataset == dataset]
    ks = sorted({k for metric in metrics if (k := recall_k(metric)) is not None}) or [1]
    values = {"recall_at": ks, "clustering": any(metric in CLUSTERING for metric in metrics)}
    return parse(EvaluationConfig, merge(load_protocol(name.partition("/")[0]).evaluation, values), f"{name}: evaluation")


def project_dataset(params: Params, dataset: str) -> str:
    """The name that the project has for a table's dataset: that of the reader, or the one dataset that is read by it.

    Raises:
        ConfigError: the project has none; the line says what to add.
    """
    named = [name for name, spec in params.datasets.items() if spec.reader == dataset]
    if dataset in named or len(named) == 1:
        return dataset if dataset in named else named[0]
    if named:
        raise ConfigError(f"params.yaml: datasets {', '.join(named)} are all read by '{dataset}'; call the one of the tables '{dataset}'")
    block = f"{dataset}: {{reader: {dataset}, raw: data/raw/{dataset}}}"
    raise ConfigError(
        f"dataset '{dataset}' is not in params.yaml; add below datasets: {block} (or see the chain run on drawn images: --smoke)"
    )
