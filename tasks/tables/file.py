"""A table of a paper as a file, `flows/tables/<paper>/table1.yaml`: the published values, and the runs that measure them again.

The project's own tables, which have no published values, are in the folder `project`.

Published values are written as printed (per cent, or the column's unit). A row is *own* (the paper's system), *rerun* (a baseline that the
paper's authors trained) or *quoted* (taken by the paper from elsewhere: shown, never run).
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationInfo, field_validator, model_validator

from dml_core.config import Config, Name, nearest_hint, parse, read_yaml
from dml_core.epochs import Epoch
from dml_core.errors import ConfigError
from dml_core.evaluation.metric_info import HEADLINES, table_columns
from dml_core.search_space import Search
from tasks.environment import find_project
from tasks.runs.params.comparison import row_name, variants_on
from tasks.runs.params.file import load_params
from tasks.runs.protocols import TABLES, Variant, content_of
from tasks.runs.specs import Params
from tasks.runs.tuned import STANDING, TUNED
from tasks.tables.tolerances import Tolerance, common_tolerance

STANDING_VARIANT = "standing"  # of each row of the standing comparison
PROJECT = "project"  # the folder of the project's own tables
Value = float | None
ImageRole = Literal["test", "train"]
RowName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=100)]


class Columns(Config):
    """Neighbouring columns of one dataset.

    Attributes:
        dataset: a reader's name (`dml data list`), or the name of a dataset in `params.yaml`.
        metrics: names of the evaluator's metrics and of measurements, in the paper's order.
        unit: unit of the published values; "share" is a fraction, "per cent" is 100 times the fraction. Minutes depend on the authors'
            machine: they have no tolerance and are not judged.
        options: options that the project's dataset must have, such as `split: images`; with none it is split by class.
        stands_in_for: the paper's dataset that this one replaces; None for the paper's own. Stand-ins are counted separately.
        tuned_on: dataset of this table on which `dml tune` found the settings of the variant `tuned`, such as a part of this one; None for
            this one. None of its training classes may be a test class here, which a run checks if both datasets are prepared.
        note: remark on these columns for readers.
    """

    dataset: Name
    stands_in_for: Name | None = None
    tuned_on: Name | None = None
    metrics: tuple[str, ...] = Field(min_length=1)
    unit: Literal["per cent", "share", "minutes", "distance", "count", "degrees"] = "per cent"
    options: dict[str, Any] = {}
    note: str | None = None


class Row(Config):
    """One row of a table.

    Attributes:
        label: name of the row in the paper.
        kind: own, rerun or quoted.
        source: for a quoted row, whom the paper quotes.
        published: the published values, one per column; null where the paper has none. Absent in the project's own tables.
        runs_on: datasets of the columns on which the row runs; by default those with published values, or all if there are none.
        released: values of logs that the authors released; independent: values of re-evaluations by others. Both like `published`.
        independent_source: source of the independent values (commit or table), with network, dimensions and protocol.
        protocol: paper whose protocol trains the row; by default the table's paper.
        variants: variants of that protocol, by default the table's; the first is the row's default. `tuned` is the first with the settings
            found by `dml tune`.
        loss: complete replacement of the protocol's loss: `name` and `options`.
        training: changes to the protocol for this row; datasets: changes for one dataset.
        by_variant: variant -> further changes, overriding these; a row with its own loss sets here what differs between variants.
        tolerance: tolerance of the verdicts; by default the table's, or that of metric and dataset.
        epochs: epochs whose weights are scored in each run; by default the protocol's.
        measurements: measurements of this row's runs, in addition to the table's.
        role: images that are scored and measured, instead of the table's.
        search: dotted name -> range that `dml tune` searches for this row; overrides the table's.
        lacks: missing feature that this row needs, in one line; such a row is shown and not run.
        note: remark on this row for readers.
    """

    label: str
    kind: Literal["own", "rerun", "quoted"]
    source: str | None = None
    published: tuple[Value, ...] = ()
    runs_on: tuple[str, ...] = ()
    released: tuple[Value, ...] | None = None
    independent: tuple[Value, ...] | None = None
    independent_source: str | None = None
    protocol: str | None = None
    variants: tuple[str, ...] = ()
    loss: dict[str, Any] | None = None
    training: dict[str, Any] = {}
    datasets: dict[str, dict[str, Any]] = {}
    by_variant: dict[str, Variant] = {}
    tolerance: Tolerance | None = None
    epochs: tuple[Epoch, ...] | None = Field(default=None, min_length=1)
    measurements: dict[str, dict[str, Any]] = {}
    role: ImageRole | None = None
    search: dict[str, Search] = {}
    lacks: str | None = None
    note: str | None = None

    @property
    def is_run(self) -> bool:
        """True if the row can be run: it is not quoted, and it lacks nothing."""
        return self.kind != "quoted" and self.lacks is None

    @model_validator(mode="after")
    def _consistent(self) -> "Row":
        if (self.kind == "quoted") != (self.source is not None):
            raise ValueError("a quoted row must name its source, and no other row may")
        if self.kind == "quoted" and (
            self.variants or self.protocol or self.loss or self.training or self.datasets or self.epochs or self.lacks
        ):
            raise ValueError("a quoted row is never run: it cannot have a protocol, variants, changes, epochs or lacks")
        if (self.independent is None) != (self.independent_source is None):
            raise ValueError("independent and independent_source must be set together")
        if self.variants[:1] == (TUNED,):
            raise ValueError("variant 'tuned' changes the row's first variant, so it cannot be the first")
        return self


class Claim(Config):
    """A claim of a table or figure, as a difference that runs can show, paired by seed.

    Attributes:
        says: the claim, paraphrased.
        row, metric: row and metric of the value; metric as named by the evaluator or a measurement.
        reference: row that the value is compared with, or a number in the metric's own unit, as 0.6 for 60 per cent.
        reference_metric: metric of the reference, if different.
        side: side of the reference on which the claim puts the value; "either" if it only says that the two differ.
        variant: variant of both rows; by default the first of each.
        dataset: dataset of the table's columns; by default the first.
        evidence: place of the claim in the paper.
        history: how the measurement was changed after a first look, and what that look had shown.
        exploratory: whether it was examined again with other data or settings, and not confirmed on fresh seeds since.
    """

    says: str
    row: RowName
    metric: str
    reference: RowName | float
    reference_metric: str | None = None
    side: Literal["above", "below", "either"]
    variant: str | None = None
    dataset: str | None = None
    evidence: str | None = None
    history: str | None = None
    exploratory: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> "Claim":
        if self.exploratory and self.history is None:
            raise ValueError("an exploratory claim needs a history: what was changed after which look at the results")
        if isinstance(self.reference, float) and self.reference > 1 and table_columns([self.reference_metric or self.metric]):
            raise ValueError(f"claim '{self.says}': reference is {self.reference:g}, but scores are from 0 to 1: 0.6 is 60 per cent")
        return self


class Column(NamedTuple):
    """One column: dataset, metric and unit."""

    dataset: str
    metric: str
    unit: str

    @property
    def factor(self) -> float:
        """Factor from a run's score to the column's unit."""
        return 100.0 if self.unit == "per cent" else 1.0


class TableFile(Config):
    """A table or figure of a paper.

    Attributes:
        title: what it shows, paraphrased.
        page: page of the published paper, counted from 1; None for the project's own tables.
        states: what the paper says about it, paraphrased; for a figure, its claim.
        columns: from left to right.
        variants: of the rows that name none.
        rows: name -> row, from top to bottom.
        tolerance: default tolerance of the rows' verdicts, instead of those of metric and dataset (`tolerances.yaml`).
        tolerances: metric -> tolerance, instead of the table's.
        evaluation: changes to the protocol's scoring, such as the k-means of one table.
        measurements: measurements of every run, in addition to the evaluator's scores: name -> options (`dml_core.measurements`).
        claims: judged once their runs exist.
        reference: row that the others are compared with, in its first variant; by default the best by the scores.
        role: images that are scored and measured: those of the test classes, or "train", those that the network was trained on.
        search: dotted name -> range that `dml tune` searches for every row, in addition to the ranges of the loss's own options.
        scale: resources of its runs, overriding `scale` of `params.yaml`; changes no score. They run with a command of their own.
        note: remark on the whole table for readers.
    """

    title: str
    page: int | None = Field(default=None, ge=1)
    states: str
    columns: tuple[Columns, ...] = Field(min_length=1)
    variants: tuple[str, ...] = ()
    rows: dict[RowName, Row] = Field(min_length=1)
    tolerance: Tolerance | None = None
    tolerances: dict[str, Tolerance] = {}
    evaluation: dict[str, Any] = {}
    measurements: dict[str, dict[str, Any]] = {}
    claims: tuple[Claim, ...] = ()
    reference: RowName | None = None
    role: ImageRole = "test"
    scale: dict[str, Any] = {}
    search: dict[str, Search] = {}
    note: str | None = None

    @field_validator("rows")
    @classmethod
    def _complete(cls, rows: dict[str, Row], info: ValidationInfo) -> dict[str, Row]:
        """Fill in the table's variants, and that rows of a table without a page have no published figures."""
        nothing = (None,) * sum(len(block.metrics) for block in info.data.get("columns", ()) if info.data.get("page") is None)
        variants = info.data.get("variants", ())
        return {
            name: row.model_copy(
                update={"published": row.published or nothing, "variants": row.variants or (variants if row.is_run else ())}
            )
            for name, row in rows.items()
        }

    def tolerance_of(self, row: Row, column: Column) -> Tolerance | None:
        """Return a cell's tolerance: the row's, else the metric's, else the table's, else that of metric and dataset; None for minutes."""
        if column.unit == "minutes":
            return None
        dataset = self.stand_ins.get(column.dataset, column.dataset)
        return row.tolerance or self.tolerances.get(column.metric) or self.tolerance or common_tolerance(column.metric, dataset)

    def dataset_options(self, dataset: str) -> dict[str, Any]:
        """Return the options that the project's dataset must have; all column blocks of one dataset have the same."""
        return next((block.options for block in self.columns if block.dataset == dataset), {})

    def tuned_on(self, dataset: str) -> str:
        """Return the dataset on which the settings of a dataset's variant `tuned` were searched."""
        return next((block.tuned_on for block in self.columns if block.dataset == dataset), None) or dataset

    @property
    def datasets(self) -> tuple[str, ...]:
        """The datasets of the columns, each once, from left to right."""
        return tuple(dict.fromkeys(block.dataset for block in self.columns))

    @property
    def stand_ins(self) -> dict[str, str]:
        """Stand-in dataset -> the paper's dataset that it replaces."""
        return {block.dataset: block.stands_in_for for block in self.columns if block.stands_in_for is not None}

    @cached_property
    def flat_columns(self) -> tuple[Column, ...]:
        """All columns, one by one."""
        return tuple(Column(block.dataset, metric, block.unit) for block in self.columns for metric in block.metrics)

    @model_validator(mode="after")
    def _consistent(self) -> "TableFile":
        for metric in self.tolerances:
            if metric not in {column.metric for column in self.flat_columns}:
                raise ValueError(f"tolerances: no column is of metric '{metric}'")
        for block in self.columns:
            if block.options != self.dataset_options(block.dataset):
                raise ValueError(f"columns of dataset '{block.dataset}' have different options")
            if block.stands_in_for != self.stand_ins.get(block.dataset):
                raise ValueError(f"columns of dataset '{block.dataset}' stand in for different datasets")
            if (block.tuned_on or block.dataset) != self.tuned_on(block.dataset):
                raise ValueError(f"columns of dataset '{block.dataset}' have different tuned_on")
            searched = self.tuned_on(block.dataset)
            if searched not in self.datasets or self.tuned_on(searched) != searched:
                raise ValueError(f"tuned_on: '{searched}' must be a dataset of the table that has its own searches")
        for name, row in self.rows.items():
            self._check_row(name, row)
        if self.reference is not None and (self.reference not in self.rows or self.rows[self.reference].kind == "quoted"):
            raise ValueError(f"reference: no row that is run is called '{self.reference}'")
        for claim in self.claims:
            self._check_claim(claim)
        return self

    def _check_row(self, name: str, row: Row) -> None:
        if row.is_run and not row.variants:
            raise ValueError(f"row '{name}' must name variants of the protocol, unless the table does, or set lacks")
        for variant in row.by_variant:
            if variant not in row.variants:
                raise ValueError(f"row '{name}': by_variant: it has no variant '{variant}'")
        for kind, values in (("published", row.published), ("released", row.released), ("independent", row.independent)):
            if values is not None and len(values) != len(self.flat_columns):
                raise ValueError(f"row '{name}': {len(values)} {kind} figures for {len(self.flat_columns)} columns")
        for dataset in (*row.datasets, *row.runs_on, *(on for changes in row.by_variant.values() for on in changes.datasets)):
            if dataset not in self.datasets:
                raise ValueError(f"row '{name}': no column is of dataset '{dataset}'")
        if self.page is None and any(value is not None for value in row.published):
            raise ValueError(f"row '{name}' has published figures, but the table has no page")
        for column, value in zip(self.flat_columns, row.published, strict=True):
            is_judged = value is not None and row.is_run and column.unit != "minutes"
            if is_judged and self.tolerance_of(row, column) is None:
                raise ValueError(f"row '{name}' has no tolerance for {column.metric} on {column.dataset}, and neither has the table")

    def _check_claim(self, claim: Claim) -> None:
        for named in (claim.row, claim.reference):
            if isinstance(named, str) and named not in self.rows:
                raise ValueError(f"claim '{claim.says}': no row is called '{named}'")
            if isinstance(named, str) and claim.variant not in (None, *self.rows[named].variants):
                raise ValueError(f"claim '{claim.says}': row '{named}' has no variant '{claim.variant}'")
        if claim.dataset not in (None, *self.datasets):
            raise ValueError(f"claim '{claim.says}': no column is of dataset '{claim.dataset}'")


def table_names() -> list[str]:
    """Return all tables and figures as `<paper>/<file>`: papers alphabetically, tables before figures, by number; the project's last."""
    paths = [path for path in TABLES.glob("*/[!.]*.yaml") if path.stem != "protocol"]

    def order(path: Path) -> tuple[bool, str, bool, int, str]:
        kind = path.stem.rstrip("0123456789")
        return path.parent.name == PROJECT, path.parent.name, kind != "table", int(path.stem.removeprefix(kind) or 0), kind

    return [*(f"{path.parent.name}/{path.stem}" for path in sorted(paths, key=order)), STANDING]


def paper_tables() -> list[str]:
    """Return the papers' tables: all except the project's own."""
    return [name for name in table_names() if name.partition("/")[0] != PROJECT]


def chosen_tables(patterns: Sequence[str]) -> list[str]:
    """Return the tables that match names and shell-like patterns (`softtriple/*`, `*/table*`), in the order of the patterns.

    A pattern that begins with the project's folder matches only the project's own tables, any other pattern only the papers'. No pattern
    matches the standing comparison, whose runs are requested without a table.

    Raises:
        ConfigError: a pattern matches no table (the error suggests the nearest name), or two match the same one.
    """
    patterns_by_name: dict[str, str] = {}
    for pattern in patterns:
        is_own = pattern.startswith(f"{PROJECT}/")
        known = [name for name in table_names() if name.startswith(f"{PROJECT}/") == is_own and name != STANDING]
        matches = [pattern] if pattern in table_names() else [name for name in known if fnmatchcase(name, pattern)]
        if not matches:
            raise _unknown_table(pattern)
        for name in matches:
            if name in patterns_by_name:
                raise ConfigError(f"{name} is given twice, by '{patterns_by_name[name]}' and by '{pattern}'; give each table once")
            patterns_by_name[name] = pattern
    return list(patterns_by_name)


def _unknown_table(name: str) -> ConfigError:
    folders = {table.partition("/")[0] for table in table_names()}
    if name in folders:
        return ConfigError(f"'{name}' is a folder of tables; name one of them, or all as '{name}/*'; `dml tables {name}` lists them")
    hint = nearest_hint(name, table_names() if "/" in name else folders) or ";"
    return ConfigError(f"unknown table '{name}'{hint} `dml tables` lists them")


def load_table(name: str) -> TableFile:
    """Read and check a table's file.

    Raises:
        ConfigError: the table does not exist, or its file has an error.
    """
    if name not in table_names():
        raise _unknown_table(name)
    if name == STANDING:
        return standing_table(load_params(find_project().params_file))
    path = TABLES / f"{name}.yaml"
    return _parsed_table(name, path, content_of(path))


@lru_cache(maxsize=256)
def _parsed_table(name: str, path: Path, content: bytes) -> TableFile:
    """Return the table of a file with this content; parsing takes a tenth of a second, and commands need each table several times."""
    table = parse(TableFile, read_yaml(path), f"{name}.yaml")
    if (table.page is None) != (name.partition("/")[0] == PROJECT):
        raise ConfigError(f"{name}.yaml: page: required for a table of a paper, not allowed for one of the project's own")
    return table


def standing_table(params: Params) -> TableFile:
    """Return the standing comparison of `params.yaml` as a table: each variant is a row, each dataset a block of columns."""
    comparison = params.comparison
    metrics = (f"recall@{params.evaluation.recall_at[0]}", *HEADLINES[1 : 3 if params.evaluation.clustering else 2])
    columns = tuple(Columns(dataset=dataset, metrics=metrics) for dataset in comparison.datasets)
    present = {variant for dataset in comparison.datasets for variant in variants_on(params, dataset)}
    rows = {row_name(name): Row(label=name, kind="own", variants=(STANDING_VARIANT,)) for name in comparison.variants if name in present}
    return TableFile(
        title="The standing comparison",
        states="Every loss on one network, one budget and one augmentation, on the datasets of the comparison in params.yaml.",
        columns=columns,
        rows=rows,
        reference=None if comparison.reference is None else row_name(comparison.reference),
        search=comparison.search,
    )
