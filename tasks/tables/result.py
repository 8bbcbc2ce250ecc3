"""Results of a table: one entry per run, stored in the project's state, read by every page and verdict.

They are written at the end of every run of a table and hold only numbers and locations; the values to compare with are in the table's file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dml_core.epochs import Epoch
from tasks.environment import Project
from tasks.runs.comparable import Facts, settings_identity, spec_settings
from tasks.runs.costs import Cost
from tasks.runs.params.comparison import row_name
from tasks.runs.protocols import COMMON
from tasks.runs.records import MetricRecord, Record
from tasks.runs.specs import RunSpec, run_label
from tasks.runs.tuned import TUNED
from tasks.sealed import DamagedError, read_or_set_aside, read_sealed, write_sealed
from tasks.tables.file import STANDING_VARIANT

Place = tuple[str, str, str, str, int]  # row, variant, epoch, dataset, seed
NOT_THE_ROWS = (COMMON, TUNED)  # variants with other settings than the row's: only its loss, and those that a search found


class TableRun(Record):
    """A run and its place in a table.

    Attributes:
        row, variant: as in the table's file and the protocol; with the epoch they form the run's label.
        dataset: name in the table's columns.
        epoch: epoch whose weights were scored; an oracle's were chosen on the test classes.
    """

    row: str
    variant: str
    dataset: str
    seed: int
    epoch: Epoch = "last"

    @property
    def label(self) -> str:
        """Label that the run shares with others of its row, variant and epoch."""
        return run_label(self.row, self.variant, self.epoch)

    @property
    def place(self) -> Place:
        """Place of the run in the table: a later run in the same place replaces it."""
        return self.row, self.variant, self.epoch, self.dataset, self.seed


def _place_fields(spec: RunSpec) -> dict[str, Any]:
    """Return a run's place in its table; the standing comparison's variants are the rows of its table."""
    is_standing = spec.row is None
    return {
        "row": row_name(spec.variant) if is_standing else spec.row,
        "variant": STANDING_VARIANT if is_standing else spec.variant,
        "dataset": spec.dataset if is_standing else spec.column,
        "seed": spec.seed,
        "epoch": spec.evaluation.epoch,
    }


class FailedRun(TableRun):
    """A run of a table whose last attempt failed, with the reason as one line."""

    reason: str

    @classmethod
    def of(cls, spec: RunSpec, reason: str) -> "FailedRun":
        """Return the entry of a run."""
        return cls(**_place_fields(spec), reason=reason)


class MeasuredRun(TableRun):
    """A measured run of a table.

    Attributes:
        project_dataset: the dataset's name in the project.
        identity: identity of its evaluation at the time of the measurement.
        scores: by the evaluator's and the measurements' names, as fractions, counts and so on.
        figures: key of the folder in the store with the scores, figures and measurements.
        training, evaluation: all settings; measurements: their options by name, empty for runs made before they were recorded.
        seconds: duration of its training, if known.
        older_code: source files that differ from those that made it, if it was kept nevertheless.
        digest: digest of the dataset's content; None for runs measured before it was recorded.
        costs: step -> what it cost; empty for runs made before costs were recorded.
        commit: git commit of its flow; None for runs made before it was recorded.
        is_imported: whether another project measured it (`dml tables import`); its files are not in this project's store.
    """

    project_dataset: str
    identity: str
    scores: dict[str, float]
    figures: str
    training: dict[str, Any]
    evaluation: dict[str, Any]
    measurements: dict[str, dict[str, Any]] = {}
    seconds: float | None = None
    older_code: tuple[str, ...] = ()
    digest: str | None = None
    costs: dict[str, Cost] = {}
    commit: str | None = None
    is_imported: bool = False

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        scores: MetricRecord,
        digest: str | None,
        seconds: float | None = None,
        older_code: tuple[str, ...] = (),
        costs: Mapping[str, Cost] | None = None,
        commit: str | None = None,
    ) -> "MeasuredRun":
        """Return the entry of a finished run, with the digest of its dataset, the duration of its training, its steps' costs and commit."""
        return cls(
            **_place_fields(spec),
            project_dataset=spec.dataset,
            identity=scores.identity,
            scores=scores.metrics,
            figures=scores.key,
            training=spec.training.model_dump(mode="json"),
            evaluation=spec.evaluation.model_dump(mode="json"),
            measurements=spec.measurements,
            seconds=seconds,
            older_code=older_code,
            digest=digest,
            costs=dict(costs or {}),
            commit=commit,
        )

    @property
    def facts(self) -> Facts:
        """Facts that decide which other runs it may be averaged and compared with."""
        settings = settings_identity(self.training, self.evaluation, self.digest, self.measurements)
        return Facts(self.dataset, self.label, self.seed, self.digest, settings)


def facts_of(spec: RunSpec, digest: str | None) -> Facts:
    """Return the facts that a table's run on a dataset with this digest will have when it is measured."""
    return Facts(str(spec.column), spec.label, spec.seed, digest, spec_settings(spec, digest))


class TableResult(Record):
    """Results of a table so far.

    Attributes:
        name: `<paper>/<file>`.
        runs: one for each place.
        failed: runs whose last attempt failed.
        made: git commit (with "-dirty" if files were changed) of the last run.
    """

    name: str
    runs: tuple[MeasuredRun, ...] = ()
    failed: tuple[FailedRun, ...] = ()
    made: str | None = None

    @property
    def of_rows(self) -> "TableResult":
        """The result without the common track and tuned settings, whose runs are not the systems of their rows."""
        runs, failed = (tuple(run for run in some if run.variant not in NOT_THE_ROWS) for some in (self.runs, self.failed))
        return self.model_copy(update={"runs": runs, "failed": failed})

    def updated(self, runs: Sequence[MeasuredRun], failed: Sequence[FailedRun], made: str | None) -> "TableResult":
        """Return the result with these runs in their places and the others unchanged."""
        measured = {run.place: run for run in (*self.runs, *runs)}
        failures = {run.place: run for run in self.failed if run.place not in {run.place for run in runs}}
        failures |= {run.place: run for run in failed}
        entries = {
            "runs": tuple(run for _, run in sorted(measured.items())),
            "failed": tuple(run for _, run in sorted(failures.items())),
        }
        return self.model_copy(update={**entries, "made": made})  # keeps fields that a newer program added


def result_path(project: Project, name: str) -> Path:
    """Return the path of a table's result."""
    return project.state / "tables" / f"{name}.json"


def imported_path(project: Project, name: str) -> Path:
    """Return the path of the copy of all imported runs of a table, also of those whose places others have taken: the store has none."""
    return result_path(project, f"{name}.imported")


def imported_runs(project: Project, result: TableResult) -> dict[Facts, MeasuredRun]:
    """Return the imported runs of a table by their facts: a run with the same facts need not be measured here.

    Among them are those whose places runs with other settings or data have taken since.
    """
    copy = read_or_set_aside(imported_path(project, result.name), TableResult)
    imported = [*(copy.runs if copy is not None else ()), *(run for run in result.runs if run.is_imported)]
    own = {run.facts for run in result.runs if imported and not run.is_imported}
    return {facts: run for run in imported if (facts := run.facts) not in own}


def read_result(project: Project, name: str) -> TableResult:
    """Read the results of a table; empty if there are none. `tasks.plans.results.load_result` repairs a damaged file.

    Raises:
        DamagedError: the file is damaged, or belongs to another table.
        NewerFormatError: a newer version of the program wrote it.
        StoreError: it cannot be read.
    """
    path = result_path(project, name)
    result = read_sealed(path, TableResult)
    if result is not None and result.name != name:
        raise DamagedError(f"{path}: damaged (the result of {result.name})")
    return result or TableResult(name=name)


def save_result(project: Project, result: TableResult) -> None:
    """Write a result, replacing the previous one.

    Raises:
        StoreError: it cannot be written.
    """
    write_sealed(result_path(project, result.name), result)
