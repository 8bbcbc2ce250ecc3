"""The runs of a table's rows, with their settings."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dml_core.config import check_known, located, refuse_repeats, unknown_name
from dml_core.data.registry import DATASETS, parse_dataset
from dml_core.epochs import EPOCHS, Epoch
from dml_core.errors import ConfigError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.metric_info import METRICS, metric_info, recall_k
from dml_core.measurements.registry import measurement, parse_measurement
from dml_core.overrides import override, parse_overridden
from dml_core.training.config import TrainingConfig
from tasks.runs.identity import train_step
from tasks.runs.params.comparison import check_seeds
from tasks.runs.params.file import check_same_classes
from tasks.runs.protocols import COMMON, Protocol, Variant, load_protocol
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import Params, RunSpec, ScaleSpec
from tasks.runs.tuned import STANDING, TUNED, TunedFile, read_tuned
from tasks.tables.choice import Choice
from tasks.tables.file import Row, TableFile, load_table
from tasks.tables.smoke import make_small, one_of_each_table
from tasks.wording import check_listed

EVERYTHING = Choice()
COUNTS = ("num_queries", "num_queries_without_positive", "num_query_classes")  # scores of every run


def runs_of_tables(names: Sequence[str], choice: Choice) -> tuple[dict[tuple[str, str], list[RunSpec]], dict[str, list[str]]]:
    """Return the runs that several tables have, including those that this project cannot run.

    Returns:
        (Table, dataset of its columns) -> runs, in the order of columns and rows; and table -> reasons why rows have no run, a line each.

    Raises:
        ConfigError: a table is given twice, a row, dataset or variant is unknown, a named row is not run, or settings do not fit.
    """
    refuse_repeats("table", names)
    if STANDING in names:
        raise ConfigError(f"{STANDING} cannot be named as a table; run `dml reproduce` without a table: its runs are those of params.yaml")
    tables = {name: load_table(name) for name in names}
    _check_names("row", choice.rows, tables, (row for table in tables.values() for row in table.rows))
    _check_names("dataset", choice.datasets, tables, (dataset for table in tables.values() for dataset in table.datasets))
    variants = [variant for table in tables.values() for row in table.rows.values() for variant in row.variants]
    _check_names("variant", () if choice.variant is None else (choice.variant,), tables, [*variants, TUNED])
    left_out: dict[str, list[str]] = {name: [] for name in names}
    of_tables = {name: runs_of(name, table, choice, left_out[name]) for name, table in tables.items()}
    return {(name, dataset): specs for name, runs in of_tables.items() for dataset, specs in runs.items()}, left_out


def _check_names(kind: str, requested: Iterable[str], tables: Collection[str], known: Iterable[str]) -> None:
    """Refuse a requested name that no table has; the error suggests the nearest one."""
    names, where = list(dict.fromkeys(known)), next(iter(tables)) if len(tables) == 1 else f"{len(tables)} tables"
    for name in requested:
        check_listed(f"{kind} of {where}", name, names)


@dataclass(frozen=True)
class Chosen:
    """Runs that this project can start, as far as its parameters show.

    Attributes:
        runs: one list per table and dataset, on the project's dataset of that kind or on drawn images.
        left_out: table -> reasons why rows have no run, a line each.
        missing: requested datasets that the project does not have -> options that they must have.
    """

    runs: list[list[RunSpec]]
    left_out: dict[str, list[str]]
    missing: dict[str, dict[str, Any]]


def chosen_runs(params: Params, names: Sequence[str], choice: Choice) -> Chosen:
    """Return the runs of several tables that this project can start.

    Raises:
        ConfigError: as `runs_of_tables`, or there is nothing to run.
    """
    requested, left_out = runs_of_tables(names, choice)
    left_out = {name: reasons for name, reasons in left_out.items() if reasons}
    if not requested:
        why = "; ".join(dict.fromkeys(why for reasons in left_out.values() for why in reasons)) or "no row matches on these datasets"
        raise ConfigError(f"{', '.join(names)}: nothing can be run: {why}")
    if choice.smoke:
        small = [[make_small(spec) for spec in specs] for specs in requested.values()]
        return Chosen(one_of_each_table(small) if choice.one_row else small, left_out, {})
    tables = {name: load_table(name) for name in {name for name, _ in requested}}
    runs, missing = list[list[RunSpec]](), dict[str, dict[str, Any]]()
    for (name, column), specs in requested.items():
        options = tables[name].dataset_options(column)
        dataset = named_dataset(params, column, options)
        if dataset is None:
            missing[column] = options
        else:
            runs.append([spec.model_copy(update={"dataset": dataset}) for spec in specs])
    return Chosen(runs, left_out, missing)


def runs_of(name: str, table: TableFile, choice: Choice = EVERYTHING, left_out: list[str] | None = None) -> dict[str, list[RunSpec]]:
    """Return a table's runs by the dataset's name in its columns.

    Args:
        name: `<paper>/<file>`.
        choice: filters; names that the table does not have are ignored, and a row that is named must be one that is run. A row runs on the
            datasets on which the table has it, and on any dataset that is named with it.
        left_out: receives a line for every row that has no run.

    Raises:
        ConfigError: a named row is not run, settings do not fit, or runs on training images hold out different classes.
    """
    check_seeds(choice.seeds)
    runs: dict[str, list[RunSpec]] = {}
    reasons: dict[str, None] = {}
    for dataset in table.datasets:
        if choice.datasets and dataset not in choice.datasets:
            continue
        evaluation = scoring_of(name, table, dataset)
        for row, entry in table.rows.items():
            is_named_on_it = row in choice.rows and dataset in choice.datasets  # the table need not have it there
            if (choice.rows and row not in choice.rows) or not (belongs(table, entry, dataset) or is_named_on_it):
                continue
            why_not = _why_not(name, entry, dataset, choice)
            if why_not is not None:
                reasons[why_not] = None
            elif entry.is_run or choice.rows:
                specs, others = list(_runs_of_row(name, table, row, dataset, evaluation, choice)), runs.setdefault(dataset, [])
                twins = (table.rows[str(other.row)].label for other in others if specs[0].model_copy(update={"row": other.row}) == other)
                if choice.track == "common" and (twin := next(twins, None)) is not None:
                    reasons[f"'{entry.label}' has the loss of '{twin}', and the common track keeps nothing else of a row"] = None
                else:
                    others.extend(specs)
        with located(f"{name}: {dataset}"):
            on_training = [spec for spec in runs.get(dataset, ()) if spec.evaluation.role == "train"]
            check_same_classes({spec.label: spec.training for spec in on_training}, "train")
    if left_out is not None:
        left_out += reasons
    return runs


def _runs_of_row(name: str, table: TableFile, row: str, dataset: str, evaluation: EvaluationConfig, choice: Choice) -> Iterator[RunSpec]:
    """Yield a row's runs on a dataset: one for each of its epochs and each seed."""
    entry = table.rows[row]
    measurements = override(table.measurements, entry.measurements)
    variant, training, epochs = _training(name, table, row, dataset, choice)
    for epoch, seed in product(epochs, choice.seeds or (0,)):
        scored = {"role": entry.role or table.role, "epoch": epoch}
        yield RunSpec(
            dataset=dataset,
            variant=variant,
            seed=seed,
            training=training,
            evaluation=parse_overridden(EvaluationConfig, f"{name}: {row}: evaluation", evaluation.model_dump(mode="json"), scored),
            table=name,
            row=row,
            column=dataset,
            measurements=measurements,
        )


def _why_not(name: str, row: Row, dataset: str, choice: Choice) -> str | None:
    """Return why a row has no run; None if it has one, if the paper quotes it, or if it is named and therefore must have one."""
    if row.lacks and not choice.rows:
        return f"'{row.label}' lacks {row.lacks}"
    if not row.is_run:
        return None
    if choice.track == "paper":
        has_variant = choice.variant in (None, TUNED, *row.variants)
        return None if has_variant else f"'{row.label}' has no variant '{choice.variant}' (it has {', '.join(row.variants)})"
    if dataset not in load_protocol(COMMON).datasets:
        return f"{dataset} is not on the common track"
    loss = row_training(name, row, dataset).loss.name
    if loss not in load_protocol(COMMON).variants:
        return f"'{row.label}' has no equivalent on the common track (loss '{loss}')"
    values = common_training(name, row, dataset).model_dump(mode="json")
    own = ({key: value for key, value in layer.items() if key != "loss"} for layer in (row.training, row.datasets.get(dataset, {})))
    is_changed = override(values, *own) != values
    return f"'{row.label}' differs in more than the loss, and the common track keeps nothing else of a row" if is_changed else None


def _training(name: str, table: TableFile, called: str, dataset: str, choice: Choice) -> tuple[str, TrainingConfig, list[Epoch]]:
    """Return a row's variant on the chosen track, its training settings there, and the epochs whose weights are scored."""
    row = table.rows[called]
    if choice.track == "common":
        return COMMON, common_training(name, row, dataset), ["last"]
    _check_is_run(name, row)
    listed = row.epochs or row_protocol(name, row).epochs
    variant = choice.variant or row.variants[0]
    if variant == TUNED and not row_training(name, row, dataset).num_epochs:
        variant = row.variants[0]  # a row without training cannot be tuned
    tuned = read_tuned(name, called, table.tuned_on(dataset)) if variant == TUNED else None
    training = row_training(name, row, dataset, variant, tuned)
    training = _keeping(training, {*listed, *choice.epochs}, f"{name}: {row.label}, {dataset}, {variant}")
    return variant, training, [epoch for epoch in EPOCHS if epoch in (choice.epochs or listed)]


def _check_is_run(table: str, row: Row) -> None:
    if not row.is_run:
        raise ConfigError(f"{table}: '{row.label}' is not run: {row.lacks or 'the paper quotes it from elsewhere'}")


def row_training(table: str, row: Row, dataset: str, variant: str | None = None, tuned: TunedFile | None = None) -> TrainingConfig:
    """Return the training settings of a row on a dataset. Imports no torch: `tasks.checks.check_parts` checks the loss's own options.

    Args:
        table: `<paper>/<file>`.
        dataset: name in the table's columns.
        variant: variant of the protocol; by default the row's first. `tuned` is the first with the settings found by `dml tune`.
        tuned: these settings; only the variant `tuned` needs them.

    Raises:
        ConfigError: the row is not run, has no such variant, or its changes do not fit.
    """
    _check_is_run(table, row)
    variant = variant or row.variants[0]
    if variant not in (*row.variants, TUNED):
        raise unknown_name(f"variant of '{row.label}'", variant, list(row.variants))
    untuned = row.variants[0] if variant == TUNED else variant
    values = row_protocol(table, row).training_config(dataset, untuned).model_dump(mode="json")
    if row.loss is not None:
        values["loss"] = row.loss
    own = row.by_variant.get(untuned, Variant())
    layers = [row.training, row.datasets.get(dataset, {}), own.training, own.datasets.get(dataset, {})]
    if variant == TUNED:
        assert tuned is not None
        layers.append(tuned.training)
    return parse_overridden(TrainingConfig, f"{table}: {row.label}, {dataset}, {variant}", values, *layers)


def searched_on(training: TrainingConfig, dataset: DatasetRecord) -> str:
    """Return a hash of what a search starts from: a row's own settings, without what scores during training, and the dataset's content."""
    own = training.model_copy(update={"validation": None, "keep_epochs": (), "recall_every_epochs": None})
    return train_step(RunSpec(dataset=dataset.name, variant=TUNED, seed=0, training=own, evaluation=EvaluationConfig()), dataset).settings


def common_training(table: str, row: Row, dataset: str) -> TrainingConfig:
    """Return a row's settings on the common track: its loss's variant there, changed only by the row's own changes to the loss.

    Raises:
        ConfigError: the common track does not have the dataset or the loss, or the changes do not fit.
    """
    name = row_training(table, row, dataset).loss.name
    values = load_protocol(COMMON).training_config(dataset, name).model_dump(mode="json")
    losses = row.loss or {}, row.training.get("loss", {}), row.datasets.get(dataset, {}).get("loss", {})
    where = f"{table}: {row.label}, {dataset}, {COMMON} track"
    return parse_overridden(TrainingConfig, where, values, *({"loss": loss} for loss in losses))


def paper_protocol(table: str) -> Protocol:
    """Return the protocol of a table's paper."""
    return load_protocol(table.partition("/")[0])


def row_protocol(table: str, row: Row) -> Protocol:
    """Return the protocol that trains a row: that of its table's paper, unless it names another."""
    return paper_protocol(table) if row.protocol is None else load_protocol(row.protocol)


def _keeping(training: TrainingConfig, epochs: Collection[Epoch], where: str) -> TrainingConfig:
    """Return the training that also keeps these epochs; it is the same training whichever of them is scored."""
    keep = [epoch for epoch in EPOCHS if epoch != "last" and (epoch in epochs or epoch in training.keep_epochs)]
    if keep == list(training.keep_epochs):
        return training
    return parse_overridden(TrainingConfig, where, training.model_dump(mode="json"), {"keep_epochs": keep})


def belongs(table: TableFile, row: Row, dataset: str) -> bool:
    """Return whether the table has the row on this dataset: it is listed, has a value there or, as in a plot, has no value at all."""
    on = set(row.runs_on) or {column.dataset for column, value in zip(table.flat_columns, row.published, strict=True) if value is not None}
    return not on or dataset in on


def check_metrics(name: str, table: TableFile) -> None:
    """Check the options of a table's measurements, and that its rows bring the metrics of columns and claims. Measurements load torch.

    Raises:
        ConfigError: a measurement or one of its options does not exist, or a metric neither; the nearest name is given.
    """
    brought = dict[str, list[str]]()
    for row, entry in table.rows.items():
        measurements = override(table.measurements, entry.measurements)
        with located(f"{name}: {row}"):
            for measured, options in measurements.items():
                parse_measurement(measured, options)
        brought[row] = [metric for measured in measurements for metric in measurement(measured).METRICS]
    named = [("columns", [*brought], column.metric) for column in table.flat_columns]
    for claim in table.claims:
        where = f"claim '{claim.says}'"
        named.append((where, [claim.row], claim.metric))
        if isinstance(claim.reference, str):
            named.append((where, [claim.reference], claim.reference_metric or claim.metric))
    for where, rows, metric in named:
        if recall_k(metric) is None:
            with located(f"{name}: {where}"):
                check_known("metric", metric, ["recall@<K>", *METRICS, *COUNTS, *(known for row in rows for known in brought[row])])


def scoring_of(name: str, table: TableFile, dataset: str) -> EvaluationConfig:
    """Return the evaluation settings of a table on a dataset: the K of its columns and claims, k-means as the paper ran it."""
    metrics = [column.metric for column in table.flat_columns if column.dataset == dataset]
    claims = [claim for claim in table.claims if (claim.dataset or table.datasets[0]) == dataset]
    metrics += [metric for claim in claims for metric in (claim.metric, claim.reference_metric) if metric is not None]
    ks = sorted({k for metric in metrics if (k := recall_k(metric)) is not None}) or [1]
    values = {"recall_at": ks, "clustering": any(metric_info(metric).family == "clustering" for metric in metrics)}
    given = override(paper_protocol(name).evaluation, table.evaluation)
    for key in sorted({*values, "role", "epoch"} & given.keys()):
        raise ConfigError(f"{name}: evaluation.{key} has no effect: the table's columns, role and epochs decide it; remove it")
    return parse_overridden(EvaluationConfig, f"{name}: evaluation", given, values)


def named_dataset(params: Params, dataset: str, options: Mapping[str, Any]) -> str | None:
    """Return the project's name of a dataset of a table's columns: the one named after the reader, or the only one that it reads, or None.

    A column that names no reader names a dataset of the project itself. Only a request for a split by image (in `options`, which the
    dataset must have) gets a dataset whose test classes are trained on.

    Raises:
        ConfigError: several datasets match, and none has the reader's name.
    """
    if dataset not in DATASETS:
        return dataset if dataset in params.datasets else None
    shares_classes = parse_dataset(dataset, dict(options)).shares_classes
    configs = {name: parse_dataset(spec.reader, spec.options) for name, spec in params.datasets.items() if spec.reader == dataset}
    named = [
        name
        for name, config in configs.items()
        if config.shares_classes == shares_classes and all(getattr(config, option) == value for option, value in options.items())
    ]
    own = next((name for name in named if name.replace("-", "_") == dataset), None)
    if own is None and len(named) > 1:
        raise ConfigError(f"params.yaml: datasets {', '.join(named)} are all read by '{dataset}'; rename the tables' one to '{dataset}'")
    return own or next(iter(named), None)


def at_scale(params: Params, tables: Mapping[str, TableFile]) -> Params:
    """Return the parameters with the resources that the tables request, if one of them requests any; all must request the same.

    Raises:
        ConfigError: a request is invalid, or tables request different resources.
    """
    scales = [table.scale for table in tables.values()]
    if not any(scales):
        return params
    if any(scale != scales[0] for scale in scales):
        raise ConfigError(f"{', '.join(tables)} request different resources (scale); run them with separate commands")
    scale = parse_overridden(ScaleSpec, f"{next(iter(tables))}: scale", params.scale.model_dump(), scales[0])
    return params.model_copy(update={"scale": scale})


def run_together(names: Iterable[str], say: Callable[[str], None] = lambda line: None) -> dict[str, TableFile]:
    """Return the tables without those that request resources (`scale`) that others do not, and report these, which time something."""
    tables = {name: load_table(name) for name in names}
    plain = {name: table for name, table in tables.items() if not table.scale}
    if plain in (tables, {}):
        return tables
    for name in tables.keys() - plain.keys():
        say(f"{name}: omitted: it requests its own resources, so it runs alone: dml reproduce {name}")
    return plain


def not_in_params(datasets: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the message about datasets that the project does not have with these options, with the lines to add."""
    blocks = ", ".join(params_block(name, options) for name, options in datasets.items())
    quoted = [f"'{name}'{f' ({_listed(options)})' if options else ''}" for name, options in datasets.items()]
    subject = f"dataset {quoted[0]} is" if len(quoted) == 1 else f"datasets {', '.join(quoted[:-1])} and {quoted[-1]} are"
    return f"{subject} not in params.yaml; add below datasets: {blocks}"


def params_block(dataset: str, options: Mapping[str, Any]) -> str:
    """Return a dataset's block in `params.yaml`; a dataset that is split by image has the split in its name."""
    name = f"{dataset}-by-image" if options.get("split") == "images" else dataset
    return f"{name}: {{reader: {dataset}, raw: data/raw/{name}{f', options: {{{_listed(options)}}}' if options else ''}}}"


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{option}: {value}" for option, value in options.items())
