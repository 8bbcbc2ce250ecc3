"""The request for runs, which the command line, the forms of Prefect's deployments and the flow `reproduce` share.

Prefect builds a form from these annotations when a flow is deployed, from within the project. Names of tables, datasets and variants become
choices of the form; a server refuses other values, and a flow started otherwise raises its own error, with the nearest name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from functools import cache
from typing import Annotated, Any

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, TypeAdapter
from pydantic.dataclasses import dataclass
from pydantic_core import CoreSchema

from dml_core.config import read_yaml
from dml_core.data.registry import DATASETS
from dml_core.errors import ConfigError, DmlError
from tasks.checks import check_before, check_parts, is_prepared_or_damaged
from tasks.data import changed_datasets
from tasks.environment import Project, find_project
from tasks.runs.finished import Code
from tasks.runs.params.file import dropped_options, load_params
from tasks.runs.params.requested import idle_evaluation, limited_overrides, setting_notes, standing_runs, unsearched_notes
from tasks.runs.params.without_effect import idle_notes, unreached_notes
from tasks.runs.protocols import Variant
from tasks.runs.replaced_data import users
from tasks.runs.specs import Params, RunSpec
from tasks.runs.tuned import STANDING
from tasks.tables.choice import Choice
from tasks.tables.file import chosen_tables, load_table, table_names
from tasks.tables.runs import at_scale, chosen_runs, run_together
from tasks.tables.seeds_auto import FIRST_SEEDS, MOST_SEEDS, Resolve
from tasks.wording import counted


@cache
def _names(kind: str) -> tuple[str, ...]:
    """Return the tables, the keys of `comparison.<kind>`, or every dataset; empty outside a project or if its file is unreadable."""
    if kind == "tables":
        return ("*", *table_names())
    try:
        params = read_yaml(find_project().params_file)
        names = {*params["datasets"], *DATASETS} if kind == "columns" else params["comparison"][kind]
    except (DmlError, KeyError, TypeError):
        return ()
    return tuple(sorted(names) if kind == "columns" else names)


@plain_dataclass(frozen=True)
class _OneOf:
    """Restricts a string in a form to the names of a kind."""

    kind: str

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        return {**schema, "enum": list(_names(self.kind))} if _names(self.kind) else schema


DatasetName = Annotated[str, _OneOf("datasets")]
VariantName = Annotated[str, _OneOf("variants")]
TableName = Annotated[str, _OneOf("tables")]
ColumnName = Annotated[str, _OneOf("columns")]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Request(Choice):
    """Runs to start: those of tables, or without a table those of the standing comparison of `params.yaml`; finished steps are reused."""

    tables: tuple[TableName, ...] = Field(
        default=(), description="Tables or figures; '*' for all of the papers; none for the standing comparison."
    )
    datasets: tuple[ColumnName, ...] = Field(
        default=(), description="Datasets of the tables' columns or of the comparison; by default all, or its default ones."
    )
    variants: tuple[VariantName, ...] = Field(default=(), description="Variants of the standing comparison; by default its default ones.")
    whole: bool = Field(
        default=False, description="All variants and seeds of the standing comparison if none are given, as reported in results/."
    )
    overrides: tuple[str, ...] = Field(
        default=(), description="Settings that override params.yaml for the standing comparison, each path=value."
    )
    changed_only: bool = Field(
        default=False,
        description="Skip datasets of the standing comparison that DVC finds unchanged; schedules use it to react to changes.",
    )
    resolve: float | None = Field(
        default=None,
        description="Instead of seeds: add seeds until half of the 95 % interval of each difference to the reference is at most this many "
        "points of the first compared metric.",
    )
    max_seeds: int | None = Field(default=None, description="Maximum number of seeds for resolve.")
    force: bool = Field(default=False, description="Run every step again.")
    fail_fast: bool = Field(default=False, description="Stop when a run fails; otherwise the others continue.")
    code: Code = Field(default="strict", description="strict: rerun what changed code made; keep: reuse and mark it.")

    def __post_init__(self) -> None:
        super().__post_init__()
        of_tables, is_auto = not self.is_standing, self.until is not None
        only_tables = (self.rows, self.variant, self.smoke, self.prepared_only, self.one_row, self.epochs, self.track == "common")
        rules: list[tuple[Any, str]] = [
            (self.max_seeds is not None and not is_auto, NEEDS_AUTO),
            (self.seeds and is_auto, "--seed cannot be combined with --seeds auto, which adds seeds as needed; give one of them"),
            (self.is_standing and any(only_tables), NEEDS_TABLE),
            (of_tables and self.overrides, "--set applies only to the standing comparison; a table's settings are in its file"),
            (of_tables and self.whole, "--all applies only to the standing comparison; a table always runs all of its rows"),
            (of_tables and (self.variants or self.changed_only), "variants and changed_only apply only to the standing comparison"),
            (self.force and self.code == "keep", "--force runs every step again, and --code keep reuses them; give one of them"),
            (self.one_row and not self.smoke, "--one-row requires --smoke: one run per table, as in continuous integration"),
            (self.track == "common" and self.variant, "--variant cannot be combined with --track common, which has its own protocol"),
            (
                self.track == "common" and {*self.epochs} - {"last"},
                "epochs cannot be combined with track common, which scores the last one",
            ),
            (self.smoke and is_auto, "--seeds auto compares scores, and a smoke run has none; remove --seeds auto or --smoke"),
        ]
        for is_broken, message in rules:
            if is_broken:
                raise ConfigError(message)

    @property
    def is_standing(self) -> bool:
        """True if the runs are those of the standing comparison."""
        return not self.tables or self.tables == (STANDING,)

    @property
    def until(self) -> Resolve | None:
        """Precision at which no more seeds are added; None if seeds are given."""
        return None if self.resolve is None else Resolve(self.resolve, MOST_SEEDS if self.max_seeds is None else self.max_seeds)


NEEDS_TABLE = "--row, --track, --prepared-only, --smoke and --one-row require a table, for example: dml reproduce softtriple/table1 --smoke"
NEEDS_AUTO = "--resolve and --max-seeds require --seeds auto, which adds seeds until differences are that precise"
REQUEST = TypeAdapter(Request)


def requested_runs(
    project: Project, request: Request, say: Callable[[str], None] = lambda line: None, before_first: Callable[[], None] = lambda: None
) -> tuple[Params, list[RunSpec]]:
    """Return the parameters and the runs of a request, checked as far as possible before anything starts.

    If seeds are added until differences are precise enough, each run is returned with one seed. `say` receives lines about what follows.
    `before_first` is called before the first loss or network is built to be checked, so only if a run has to be trained.

    Raises:
        ConfigError: a name is unknown, or settings do not fit.
        DataError: raw files are missing.
    """
    must_train: list[None] = []

    def first() -> None:
        must_train.append(None)
        before_first()

    params, runs = (_standing if request.is_standing else _of_tables)(project, request, say, first)
    if must_train and not request.smoke:  # which train one epoch
        for line in setting_notes(params, runs) if request.is_standing else _table_notes(runs):
            say(f"note: {line}")
    return params, runs


def _of_tables(
    project: Project, request: Request, say: Callable[[str], None], before_first: Callable[[], None]
) -> tuple[Params, list[RunSpec]]:
    from tasks.plans.needs import check_tables

    names = chosen_tables(request.tables)
    what = names[0] if len(names) == 1 else f"{len(names)} tables"
    say(f"checking the rows of {what}")
    params = load_params(project.params_file)
    table_runs = chosen_runs(params, names, request)
    if not request.smoke:
        starting = [runs[0] for runs in table_runs.runs]
        if request.prepared_only:
            starting = [spec for spec in starting if is_prepared_or_damaged(project, params, spec.dataset)]
        together = run_together(dict.fromkeys(str(spec.table) for spec in starting), say)
        omitted = {spec.table for spec in starting} - together.keys()
        table_runs = replace(table_runs, runs=[runs for runs in table_runs.runs if runs[0].table not in omitted])
        params = at_scale(params, together)
    runs = check_tables(project, params, table_runs, request, before_first)
    for name, reasons in table_runs.left_out.items():
        say(f"{name}: omitted: {'; '.join(reasons)}")
    if not (request.force or request.smoke or request.until):
        runs = _without_imported(project, runs, say)
    if runs:
        say(f"{what}: {_count(runs, request)} on {', '.join(dict.fromkeys(spec.dataset for spec in runs))}")
    return params, runs


def _table_notes(runs: Sequence[RunSpec]) -> list[str]:
    """Return a line for each setting of the runs' tables that has no effect on them, and for what their epochs do not reach."""
    tables = {name: load_table(name) for name in dict.fromkeys(str(run.table) for run in runs)}
    clustered = {run.table for run in runs if run.evaluation.clustering}
    idle = [name for name, table in tables.items() if "kmeans" in table.evaluation and name not in clustered]
    trained = {(run.comparison, run.label): run for run in runs if run.training.num_epochs}.values()

    def blocks_of(run: RunSpec) -> dict[str, dict[str, Any]]:
        row, place, column = tables[str(run.table)].rows[str(run.row)], f"{run.table}: rows.{run.row}", str(run.column)
        changes = {place: Variant(training=row.training, datasets=row.datasets)}
        changes |= {f"{place}.by_variant.{run.variant}": row.by_variant.get(run.variant, Variant())}
        blocks = {f"{place}.training": of.training for place, of in changes.items()}
        blocks |= {f"{place}.datasets.{column}": of.datasets.get(column, {}) for place, of in changes.items()}
        return {place: {"loss": row.loss or {}}} | blocks

    of_evaluation = [f"{name}: evaluation.kmeans has no effect: no column has a metric of clustering" for name in idle]
    for name in tables:
        why = idle_evaluation([run for run in runs if run.table == name]).get("evaluation.metric")
        of_evaluation += [f"{name}: evaluation.metric has no effect: {why}"] if why is not None else []
    of_rows = idle_notes((run.dataset, run.training, blocks_of(run)) for run in trained)
    return [*of_evaluation, *of_rows, *unreached_notes((run.dataset, run.label, run.training) for run in trained)]


def _without_imported(project: Project, runs: list[RunSpec], say: Callable[[str], None]) -> list[RunSpec]:
    """Return the runs that were not imported with the present data and settings, and report the others."""
    from tasks.plans.results import unmeasured_runs, use_imported

    remaining, reused, notes = unmeasured_runs(project, runs)
    use_imported(project, reused)
    for name, imported in reused.items():
        say(f"{name}: {counted(len(imported), 'imported run')} reused; --force measures {'it' if len(imported) == 1 else 'them'} here")
    for note in notes:
        say(note)
    return remaining


def _standing(
    project: Project, request: Request, say: Callable[[str], None], before_first: Callable[[], None]
) -> tuple[Params, list[RunSpec]]:
    params = load_params(project.params_file, request.overrides)
    for line in dropped_options(project.params_file, request.overrides):
        say(f"note: {line}")
    seeds = request.seeds if request.until is None else (0,)
    by_dataset = standing_runs(params, request.datasets, request.variants, seeds, request.overrides, request.whole)
    for line in limited_overrides(params, by_dataset, request.overrides):
        say(f"note: {line}")
    if request.changed_only:
        changed = changed_datasets(project, params, list(by_dataset))
        say(f"changed since they were prepared: {', '.join(changed) or 'none'}")
        in_use = {name: who for name in changed if (who := users(project, name))}
        for name, who in in_use.items():
            say(f"{name}: skipped: its former images are in use by {who}")
        by_dataset = {name: by_dataset[name] for name in changed if name not in in_use}
    for line in unsearched_notes(params, (run for runs in by_dataset.values() for run in runs)):
        say(f"note: {line}")
    packed = {name: check_before(project, params, runs) for name, runs in by_dataset.items()}
    for runs in by_dataset.values():
        say(f"{runs[0].comparison}: {_count(runs, request)}")
    say("checking losses and networks")
    for name, runs in by_dataset.items():
        check_parts(runs, packed[name], before_first)
    return params, [spec for runs in by_dataset.values() for spec in runs]


def _count(runs: list[RunSpec], request: Request) -> str:
    num_runs = len(runs) if request.until is None else len(runs) * min(FIRST_SEEDS, request.until.most)
    return f"{counted(num_runs, 'run')}{'' if request.until is None else ' to begin with'}"
