"""Results of a table: one entry per run, stored in the project's state, read by every page and verdict.

They are written at the end of every run of a table and hold only numbers and locations; the values to compare with are in the table's file.
"""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dml_core.training.epochs import Epoch
from tasks.environment import Project
from tasks.runs.comparable import Facts, settings_identity
from tasks.runs.records import Record
from tasks.sealed import DamagedError, read_sealed, write_sealed
from tasks.tables.file import run_label


class MeasuredRun(Record):
    """One run of a table.

    Attributes:
        row, variant: as in the table's file and the protocol; with the epoch they form the run's label.
        dataset: name in the table's columns; project_dataset: name in the project.
        seed: seed of the run.
        epoch: epoch whose weights were scored; an oracle's were chosen on the test classes.
        identity: identity of its evaluation at the time of the measurement.
        scores: by the evaluator's and the measurements' names, as fractions, counts and so on.
        figures: key of the folder in the store with the scores, figures and measurements.
        training: all training settings; evaluation: all evaluation settings.
        seconds: duration of its training, if known.
        older_code: source files that differ from those that made it, if it was kept nevertheless.
        digest: digest of the dataset's content; None for runs measured before it was recorded.
    """

    row: str
    variant: str
    dataset: str
    project_dataset: str
    seed: int
    identity: str
    scores: dict[str, float]
    figures: str
    training: dict[str, Any]
    evaluation: dict[str, Any]
    seconds: float | None = None
    older_code: tuple[str, ...] = ()
    epoch: Epoch = "last"
    digest: str | None = None

    @property
    def label(self) -> str:
        """Label that the run shares with others of its row, variant and epoch."""
        return run_label(self.row, self.variant, self.epoch)

    @property
    def facts(self) -> Facts:
        """Facts that decide which other runs it may be averaged and compared with."""
        settings = settings_identity(self.training, self.evaluation, self.digest)
        return Facts(self.dataset, self.label, self.seed, self.digest, settings)

    @property
    def place(self) -> tuple[str, str, str, str, int]:
        """Place of the run in the table: a later run in the same place replaces it."""
        return self.row, self.variant, self.epoch, self.dataset, self.seed


class TableResult(Record):
    """Results of a table so far.

    Attributes:
        name: `<paper>/<file>`.
        runs: one for each place.
        failures: "label, dataset, seed" -> reason, of the last attempt.
        made: git commit (with "-dirty" if files were changed) of the last run.
    """

    name: str
    runs: tuple[MeasuredRun, ...] = ()
    failures: dict[str, str] = {}
    made: str | None = None

    def updated(self, runs: tuple[MeasuredRun, ...], failures: dict[str, str], made: str | None) -> "TableResult":
        """Return the result with these runs in their places and the others unchanged."""
        found = {run.place: run for run in (*self.runs, *runs)}
        ran = {f"{run.label}, {run.dataset}, seed {run.seed}" for run in runs}
        kept = {name: why for name, why in self.failures.items() if name not in ran}
        return TableResult(name=self.name, runs=tuple(found[place] for place in sorted(found)), failures=kept | failures, made=made)


RESULT = TypeAdapter(TableResult)


def result_path(project: Project, name: str) -> Path:
    """Return the path of a table's result."""
    return project.state / "tables" / f"{name}.json"


def read_result(project: Project, name: str) -> TableResult:
    """Read the results of a table; empty if there are none. `tasks.plans.results.load_result` repairs a damaged file.

    Raises:
        DamagedError: the file is damaged, or belongs to another table.
        NewerFormatError: a newer version of the program wrote it.
        StoreError: it cannot be read.
    """
    path = result_path(project, name)
    found = read_sealed(path, RESULT)
    if found is not None and found.name != name:
        raise DamagedError(f"{path}: damaged (the result of {found.name})")
    return found or TableResult(name=name)


def save_result(project: Project, result: TableResult) -> None:
    """Write a result, replacing the previous one.

    Raises:
        StoreError: it cannot be written.
    """
    write_sealed(result_path(project, result.name), result, RESULT)
