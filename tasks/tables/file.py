"""A table of a paper as a file, `flows/tables/<paper>/table1.yaml`: what the paper printed, and which runs would measure it again.

The project's own tables, of which nothing was printed, stand in the folder `project`.

Published figures stand as they are printed (per cent, or the column's unit). A row is *own* (the paper's system), *rerun* (a baseline that
the paper itself trained) or *quoted* (taken by the paper from elsewhere: shown, never run).
"""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from dml_core.config import Config, Name, parse, read_yaml
from dml_core.errors import ConfigError
from dml_core.search import Search
from dml_core.training.epochs import Epoch
from tasks.environment import find_project
from tasks.runs.protocols import TABLES, Variant
from tasks.runs.specs import load_params
from tasks.runs.tuned import STANDING as STANDING
from tasks.runs.tuned import TUNED
from tasks.tables.tolerances import Tolerance, common_tolerance

PROJECT = "project"  # the folder of the project's own tables
Value = float | None
ImageRole = Literal["test", "train"]
RowName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=100)]


class Columns(Config):
    """Neighbouring columns of one dataset.

    Attributes:
        dataset: a reader's name (`dml data list`), or one that `params.yaml` gives a dataset.
        metrics: the evaluator's and the measurements' names, in the paper's order.
        unit: of the printed figures; "share" is a fraction, per cent its hundredfold. Minutes are those of the authors' machine: a
            they have no tolerance, and are not judged.
        options: those that the project's dataset has to have, as `split: images`; without any it is split by class.
        stands_in_for: the paper's dataset, in whose place this one is measured; None of the paper's own. Stand-ins are counted apart.
        note: what a reader has to know of these columns.
    """

    dataset: Name
    stands_in_for: Name | None = None
    metrics: tuple[str, ...] = Field(min_length=1)
    unit: Literal["per cent", "share", "minutes", "distance", "count", "degrees"] = "per cent"
    options: dict[str, Any] = {}
    note: str | None = None


class Row(Config):
    """One line of a table.

    Attributes:
        label: as the paper calls it.
        kind: own, rerun or quoted.
        source: of a quoted row, whom the paper quotes.
        published: the printed figures, one for each column; null where the paper has none.
        runs_on: of the columns' datasets those that it runs on; those with printed figures, or all where there is none, if left out.
        released: those of logs that the authors released; independent: of somebody else's re-evaluation. Like `published`.
        independent_source: of those: where they stand (commit or table), and with which network, dimensions and protocol.
        protocol: whose protocol trains it; the table's paper where none is named.
        variants: of that protocol; the first is the row's default. `tuned` is the first with what `dml tune` found laid over.
        loss: instead of the protocol's loss, whole: `name` and `options`.
        training: changes to the protocol for this row; datasets: for one dataset of it.
        by_variant: variant -> changes that it alone has, laid over those: what a row with a loss of its own takes from each reading.
        tolerance: of the verdict; the table's, or that of metric and dataset, where none is given.
        epochs: whose weights are scored of each run; the protocol's where none are given.
        measurements: of this row's runs, beside the table's.
        role: the images that are scored and measured, instead of the table's.
        search: what `dml tune` tries of this row's settings, laid over the table's: dotted name -> range.
        lacks: what is not built yet that this row needs, in one line; such a row is shown and not run.
        note: what a reader has to know of this row.
    """

    label: str
    kind: Literal["own", "rerun", "quoted"]
    source: str | None = None
    published: tuple[Value, ...]
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

    @model_validator(mode="after")
    def _consistent(self) -> "Row":
        if (self.kind == "quoted") != (self.source is not None):
            raise ValueError("a quoted row, and no other, names its source")
        if self.kind == "quoted" and (
            self.variants or self.protocol or self.loss or self.training or self.datasets or self.epochs or self.lacks
        ):
            raise ValueError("a quoted row is never run: it has no protocol, variants, changes, epochs or lacks")
        if self.kind != "quoted" and not self.lacks and not self.variants:
            raise ValueError("a row to be run names the protocol's variants, or what it lacks")
        if (self.independent is None) != (self.independent_source is None):
            raise ValueError("independent figures, and nothing else, name their independent_source")
        for variant in self.by_variant:
            if variant not in self.variants:
                raise ValueError(f"by_variant: the row has no variant '{variant}'")
        if self.variants[:1] == (TUNED,):
            raise ValueError("variant 'tuned' is laid over the row's first, so it stands behind that")
        return self


class Claim(Config):
    """What a table or figure is there to show, as a difference that runs can show, paired by seed.

    Attributes:
        says: the claim, in our words.
        row, metric: whose value; metric as the evaluator or a measurement names it.
        reference: the row that it is compared with, or a number in the metric's own unit.
        reference_metric: of the reference, where it is another.
        side: of the reference on which the claim has the value; "either" where it is that the two differ.
        variant: of both rows; of each its first where none is named.
        dataset: of the table's columns; the first where none is named.
        evidence: where the paper has it.
        history: how the measurement was changed after a first look, and what that look had shown.
        exploratory: whether it was looked at again with other data or settings, and not confirmed on fresh seeds since.
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
    def _has_a_history(self) -> "Claim":
        if self.exploratory and self.history is None:
            raise ValueError("an exploratory claim has a history: what was changed after which look")
        return self


def run_label(row: str, variant: str, epoch: Epoch = "last") -> str:
    """How the runs of a row in a variant of its protocol are called, and which epoch's if it is not the last; no name has a space."""
    return f"{row} {variant}" if epoch == "last" else f"{row} {variant} {epoch}"


def label_parts(label: str) -> tuple[str, str]:
    """Row and variant of what `run_label` made."""
    row, variant = label.split(" ")[:2]
    return row, variant


FACTORS = {"per cent": 100.0}  # from a score of the evaluator to the column's unit


class Column(NamedTuple):
    """One column: what it measures, on what, in which unit."""

    dataset: str
    metric: str
    unit: str

    @property
    def factor(self) -> float:
        """From a run's score to the column's unit."""
        return FACTORS.get(self.unit, 1.0)


class TableFile(Config):
    """A table or figure of a paper.

    Attributes:
        title: what it shows, in our words.
        page: of the paper as published, counted from 1; None of the project's own.
        states: what the paper says of it, in our words; a figure's claim.
        columns: from left to right.
        rows: name -> row, from above.
        tolerance: of verdicts, where a row has none, instead of those of metric and dataset (`tolerances.yaml`).
        tolerances: of single metrics, instead of the table's.
        evaluation: changes to how the protocol scores, as the k-means of one table.
        measurements: of every run, beyond the evaluator's scores: name -> options (`dml_core.measurements`).
        claims: judged where their runs are there.
        reference: the row, in its first variant, with which the others are compared; the best by the scores where none is named.
        role: the images that are scored and measured: those of the test classes, or "train", those that the network was trained on.
        search: what `dml tune` tries of every row's settings, beside the ranges of the loss's own options: dotted name -> range.
        scale: what its runs may use, laid over `scale` of `params.yaml`; changes no result.
        note: what a reader has to know of the whole.
    """

    title: str
    page: int | None = Field(default=None, ge=1)
    states: str
    columns: tuple[Columns, ...] = Field(min_length=1)
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

    def tolerance_of(self, row: Row, column: Column) -> Tolerance | None:
        """The row's own, else the metric's, else the table's, else that of metric and dataset; of minutes none."""
        if column.unit == "minutes":
            return None
        dataset = self.stand_ins.get(column.dataset, column.dataset)
        return row.tolerance or self.tolerances.get(column.metric) or self.tolerance or common_tolerance(column.metric, dataset)

    def dataset_options(self, dataset: str) -> dict[str, Any]:
        """The options that the project's dataset has to have; the blocks of one dataset agree."""
        return next((block.options for block in self.columns if block.dataset == dataset), {})

    @property
    def stand_ins(self) -> dict[str, str]:
        """Dataset that the paper has not -> the paper's, in whose place it stands."""
        return {block.dataset: block.stands_in_for for block in self.columns if block.stands_in_for is not None}

    @cached_property
    def flat_columns(self) -> tuple[Column, ...]:
        """The columns one by one."""
        return tuple(Column(block.dataset, metric, block.unit) for block in self.columns for metric in block.metrics)

    @model_validator(mode="after")
    def _consistent(self) -> "TableFile":
        datasets = {block.dataset for block in self.columns}
        for metric in self.tolerances:
            if metric not in {column.metric for column in self.flat_columns}:
                raise ValueError(f"tolerances: no column is of metric '{metric}'")
        for block in self.columns:
            if block.options != self.dataset_options(block.dataset):
                raise ValueError(f"columns of dataset '{block.dataset}' ask for different options")
            if block.stands_in_for != self.stand_ins.get(block.dataset):
                raise ValueError(f"columns of dataset '{block.dataset}' stand in for different datasets")
        for name, row in self.rows.items():
            for kind in ("published", "released", "independent"):
                values = getattr(row, kind)
                if values is not None and len(values) != len(self.flat_columns):
                    raise ValueError(f"row '{name}': {len(values)} {kind} figures for {len(self.flat_columns)} columns")
            for dataset in (*row.datasets, *row.runs_on, *(on for changes in row.by_variant.values() for on in changes.datasets)):
                if dataset not in datasets:
                    raise ValueError(f"row '{name}': no column is of dataset '{dataset}'")
            printed = any(value is not None for value in row.published)
            if printed and self.page is None:
                raise ValueError(f"row '{name}' has published figures, and the table no page")
            for column, value in zip(self.flat_columns, row.published, strict=True):
                is_judged = value is not None and row.kind != "quoted" and not row.lacks and column.unit != "minutes"
                if is_judged and self.tolerance_of(row, column) is None:
                    raise ValueError(f"row '{name}' has no tolerance for {column.metric} on {column.dataset}, nor has the table")
        if self.reference is not None and (self.reference not in self.rows or self.rows[self.reference].kind == "quoted"):
            raise ValueError(f"reference: no row that is run is called '{self.reference}'")
        for claim in self.claims:
            for named in (claim.row, claim.reference):
                if isinstance(named, str) and named not in self.rows:
                    raise ValueError(f"claim '{claim.says}': no row is called '{named}'")
                if isinstance(named, str) and claim.variant not in (None, *self.rows[named].variants):
                    raise ValueError(f"claim '{claim.says}': row '{named}' has no variant '{claim.variant}'")
            if claim.dataset not in (None, *datasets):
                raise ValueError(f"claim '{claim.says}': no column is of dataset '{claim.dataset}'")
        return self


def table_names() -> list[str]:
    """Every table and figure, as `<paper>/<file>`: papers in alphabetical order, tables before figures, by number; the project's last."""
    found = [path for path in TABLES.glob("*/*.yaml") if path.stem != "protocol"]

    def order(path: Path) -> tuple[bool, str, bool, int, str]:
        kind = path.stem.rstrip("0123456789")
        return path.parent.name == PROJECT, path.parent.name, kind != "table", int(path.stem.removeprefix(kind) or 0), kind

    return [*(f"{path.parent.name}/{path.stem}" for path in sorted(found, key=order)), STANDING]


def paper_tables() -> list[str]:
    """Those of the papers: every table but the project's own."""
    return [name for name in table_names() if name.partition("/")[0] != PROJECT]


def project_tables() -> list[str]:
    """The project's own: its claims, its results on real images, and the standing comparison."""
    return [name for name in table_names() if name.partition("/")[0] == PROJECT]


def chosen_tables(patterns: Sequence[str]) -> list[str]:
    """The tables that names and shell-like patterns (`softtriple/*`, `*/table*`) mean, in the order of the patterns.

    A pattern means the project's own tables where it begins with their folder, else the papers' alone; never the standing comparison,
    whose runs are asked for without a table.

    Raises:
        ConfigError: one means none, and the nearest name is given; or two mean the same table.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        known = project_tables() if pattern.startswith(f"{PROJECT}/") else paper_tables()
        matches = [name for name in table_names() if name == pattern] or [
            name for name in known if fnmatchcase(name, pattern) and name != STANDING
        ]
        if not matches:
            raise _unknown_table(pattern)
        for name in matches:
            if name in found:
                raise ConfigError(f"{name} is given twice, by '{found[name]}' and by '{pattern}'; give each table once")
            found[name] = pattern
    return list(found)


def _unknown_table(name: str) -> ConfigError:
    near = get_close_matches(name, table_names(), n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return ConfigError(f"unknown table '{name}'; {hint}`dml tables` lists them")


def load_table(name: str) -> TableFile:
    """A table's file, checked.

    Raises:
        ConfigError: no such table, or something in it is wrong.
    """
    if name not in table_names():
        raise _unknown_table(name)
    if name == STANDING:
        from tasks.tables.standing import standing_table

        return standing_table(load_params(find_project().params_file))
    table = parse(TableFile, read_yaml(TABLES / f"{name}.yaml"), f"{name}.yaml")
    if (table.page is None) != (name.partition("/")[0] == PROJECT):
        raise ConfigError(f"{name}.yaml: page: a table of a paper says on which it is, one of the project's own has none")
    return table
