"""What was measured of a table: one entry for each run, kept beside the state, read by every page and verdict.

It is written at the end of every run of a table, and holds numbers and places only; what they are compared with is in the table's file.
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
        row, variant: of the table's file and of the protocol; with the epoch the run's label.
        dataset: as the table's columns name it; project_dataset: as the project does.
        seed: of the run.
        epoch: whose weights were scored; an oracle's were chosen on the test classes.
        identity: of its evaluation, as it was when it was measured.
        scores: by the evaluator's and the measurements' names, as fractions, counts and so on.
        figures: key of the folder in the store with the scores, figures and measurements.
        training: how it was trained, whole; evaluation: how it was scored.
        seconds: of its training, where it is known.
        older_code: source files that differ from those that made it, where it was kept all the same.
        digest: of the dataset's content; None of runs that were measured before it was recorded.
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
        """How the run is called, with others of its row, variant and epoch."""
        return run_label(self.row, self.variant, self.epoch)

    @property
    def facts(self) -> Facts:
        """What decides which other runs it may be averaged and compared with."""
        settings = settings_identity(self.training, self.evaluation, self.digest)
        return Facts(self.dataset, self.label, self.seed, self.digest, settings)

    @property
    def place(self) -> tuple[str, str, str, str, int]:
        """Which run of the table it is: a later one in the same place takes over from it."""
        return self.row, self.variant, self.epoch, self.dataset, self.seed


class TableResult(Record):
    """What was measured of a table so far.

    Attributes:
        name: `<paper>/<file>`.
        runs: one for each place.
        failures: "label, dataset, seed" -> why, of the last time it was run.
        made: git commit (with "-dirty" where files were changed) of the last run.
    """

    name: str
    runs: tuple[MeasuredRun, ...] = ()
    failures: dict[str, str] = {}
    made: str | None = None

    def updated(self, runs: tuple[MeasuredRun, ...], failures: dict[str, str], made: str | None) -> "TableResult":
        """With these runs in their places, the others as they were."""
        found = {run.place: run for run in (*self.runs, *runs)}
        ran = {f"{run.label}, {run.dataset}, seed {run.seed}" for run in runs}
        kept = {name: why for name, why in self.failures.items() if name not in ran}
        return TableResult(name=self.name, runs=tuple(found[place] for place in sorted(found)), failures=kept | failures, made=made)


RESULT = TypeAdapter(TableResult)


def result_path(project: Project, name: str) -> Path:
    """Where a table's result is kept."""
    return project.state / "tables" / f"{name}.json"


def read_result(project: Project, name: str) -> TableResult:
    """What was measured of a table so far; nothing where none was. `tasks.plans.results.load_result` repairs a damaged one.

    Raises:
        DamagedError: the file is damaged, or another table's.
        NewerFormatError: a newer version of the program wrote it.
        StoreError: it cannot be read.
    """
    path = result_path(project, name)
    found = read_sealed(path, RESULT)
    if found is not None and found.name != name:
        raise DamagedError(f"{path}: damaged (the result of {found.name})")
    return found or TableResult(name=name)


def save_result(project: Project, result: TableResult) -> None:
    """Keep it, in place of what was there.

    Raises:
        StoreError: it cannot be written.
    """
    write_sealed(result_path(project, result.name), result, RESULT)
