"""Results of runs: their outcomes, and their failures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dml_core.errors import DmlError, TrainingError, first_line, printable
from tasks.environment import without_secrets
from tasks.runs.costs import Cost, costs_of
from tasks.runs.records import MetricRecord, ScoreRecord, StepRecord, read_scores
from tasks.runs.specs import RunSpec
from tasks.storage import Store


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        scores: its metrics, with the files behind them; of a table's run without the recalls of each class and epoch, which no table has.
        ran: step -> whether it ran; False if a finished one was reused.
        delivered: whether MLflow has it; if not, it waits in the outbox.
        network, figures: folders of its checkpoint, and of its scores with their figures.
        seconds: time of training and embedding, if they ran.
        older_code: source files that differ from those that made it, as `dml_core/losses/softtriple.py`; empty without `--code keep`.
        training_seconds: time of its training, whenever that was.
        digest: digest of the dataset's content.
        costs: step -> what it cost when it ran; steps that were made before costs were recorded have none.
    """

    spec: RunSpec
    scores: MetricRecord
    ran: dict[str, bool]
    delivered: bool
    network: str
    figures: str
    seconds: float
    older_code: tuple[str, ...] = ()
    training_seconds: float | None = None
    digest: str | None = None
    costs: dict[str, Cost] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        records: Sequence[StepRecord],
        ran: dict[str, bool],
        delivered: bool,
        store: Store,
        digest: str,
        older_code: tuple[str, ...] = (),
    ) -> "Outcome":
        """Return the outcome of a run from its steps' records, with the numbers from the file whose hash was recorded.

        Raises:
            StoreError: that file has changed since.
        """
        trained, embedded, scored = records
        assert isinstance(scored, ScoreRecord)
        seconds = sum(float(record.facts.get("seconds", 0)) for record in (trained, embedded) if ran[record.step])
        metrics = read_scores(scored, store.checked(scored))
        if spec.table is not None:  # a megabyte a run of 11,000 classes, kept until the end of the flow
            metrics = metrics.model_copy(update={"class_recalls": {}, "recall_by_epoch": {}})
        network, figures = (str(store.folder(record.key)) for record in (trained, scored))
        costs = costs_of(records)
        return cls(spec, metrics, ran, delivered, network, figures, seconds, older_code, trained.facts.get("seconds"), digest, costs)

    @property
    def line(self) -> str:
        """The run as one line."""
        first = self.spec.evaluation.recall_at[0]
        return f"{self.spec.title}: R@{first} {100 * self.scores.metrics[f'recall@{first}']:.1f} %, {self.seconds:.0f} s"


@dataclass(frozen=True)
class Failure:
    """A run that failed.

    Attributes:
        reason: the reason, as one line.
        unforeseen: the error, if it is a fault of this program.
    """

    spec: RunSpec
    reason: str
    unforeseen: Exception | None = None

    @classmethod
    def of(cls, spec: RunSpec, error: Exception) -> "Failure":
        """Return the failure of a run whose step raised this error."""
        foreseen = isinstance(error, DmlError) and not error.unforeseen
        reason = without_secrets(first_line(error)).removeprefix(f"{spec.title}: ")  # stored, and shown on pages
        return cls(spec, printable(reason), None if foreseen else error)

    @property
    def line(self) -> str:
        """The failed run as one line."""
        return f"{self.spec.title}: FAILED: {self.reason}"


Add = Callable[[Sequence[Outcome], Sequence[Failure]], None]


class RunsFailedError(TrainingError):
    """Some runs failed. `reports` has the results of the others, for display; the cause is the first unforeseen error."""

    def __init__(self, failures: Sequence[Failure], num_runs: int, reports: Sequence[Any]) -> None:
        others = f" of {num_runs} runs" if num_runs > 1 else ""
        super().__init__(f"{len(failures)}{others} failed; the first: {failures[0].spec.title}: {failures[0].reason}")
        self.__cause__ = next((failure.unforeseen for failure in failures if failure.unforeseen), None)
        self.unforeseen = self.__cause__ is not None
        self.failures = tuple(failures)
        self.reports = tuple(reports)
