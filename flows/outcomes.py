"""Wait for runs, show them as they end, and separate the successful from the failed ones."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dml_core.errors import DmlError, TrainingError
from flows.services import Services
from tasks.runs.records import MetricRecord
from tasks.runs.specs import RunSpec
from tasks.tables.result import MeasuredRun

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        scores: its metrics, with the files behind them.
        ran: step -> whether it ran; False if a finished one was reused.
        delivered: whether MLflow has it; if not, it waits in the outbox.
        network, figures: folders of its checkpoint, and of its scores with their figures.
        seconds: time of training and embedding, if they ran.
        older_code: source files that differ from those that made it, as `dml_core/losses/softtriple.py`; empty without `--code keep`.
        training_seconds: time of its training, whenever that was.
        digest: digest of the dataset's content.
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

    @property
    def line(self) -> str:
        """The run as one line."""
        return f"{self.spec.title}: R@{self.spec.evaluation.recall_at[0]} {100 * self.first_recall:.1f} %, {self.seconds:.0f} s"

    @property
    def first_recall(self) -> float:
        """Recall at the first K of the settings."""
        return self.scores.metrics[f"recall@{self.spec.evaluation.recall_at[0]}"]


def measured_run(outcome: Outcome, row: str, variant: str, dataset: str) -> MeasuredRun:
    """Return a run's entry in a table's result, with the table's names for it."""
    return MeasuredRun(
        row=row,
        variant=variant,
        epoch=outcome.spec.evaluation.epoch,
        dataset=dataset,
        project_dataset=outcome.spec.dataset,
        seed=outcome.spec.seed,
        identity=outcome.scores.identity,
        scores=outcome.scores.metrics,
        figures=outcome.scores.key,
        training=outcome.spec.training.model_dump(mode="json"),
        evaluation=outcome.spec.evaluation.model_dump(mode="json"),
        seconds=outcome.training_seconds,
        older_code=outcome.older_code,
        digest=outcome.digest,
    )


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

    @property
    def line(self) -> str:
        """The failed run as one line."""
        return f"{self.spec.title}: FAILED: {self.reason}"


class RunsFailedError(TrainingError):
    """Some runs failed. `comparisons` has the results of the others, for display; the cause is the first unforeseen error."""

    def __init__(self, failures: Sequence[Failure], num_runs: int, comparisons: Sequence[Any]) -> None:
        others = f" of {num_runs} runs" if num_runs > 1 else ""
        super().__init__(f"{len(failures)}{others} failed; the first: {failures[0].spec.title}: {failures[0].reason}")
        self.__cause__ = next((failure.unforeseen for failure in failures if failure.unforeseen), None)
        self.unforeseen = self.__cause__ is not None
        self.failures = tuple(failures)
        self.comparisons = tuple(comparisons)


class Waited(Protocol):
    """One run's submitted steps (`flows.run.Chain`)."""

    @property
    def spec(self) -> RunSpec:
        """The run."""

    @property
    def must_train(self) -> bool:
        """True if it trains."""

    def wait(self) -> Exception | None:
        """Wait until every step has ended; return the first failed step's error, or None."""

    def outcome(self) -> Outcome:
        """Return the result of a run that did not fail."""


def finish(chains: Sequence[Waited], services: Services, fail_fast: bool = False) -> tuple[list[Outcome], list[Failure]]:
    """Wait for every run, and show each as it ends; with `fail_fast` a failure prevents further steps from starting."""
    outcomes: list[Outcome] = []
    failures: list[Failure] = []
    for chain in chains:
        error = chain.wait()
        if error is None:
            outcomes.append(chain.outcome())
            _show(outcomes[-1], chain.must_train, services)
        elif not services.stopping.is_set():
            reason = str(error).removeprefix(f"{chain.spec.title}: ") or type(error).__name__
            foreseen = isinstance(error, DmlError) and not error.unforeseen
            failures.append(Failure(chain.spec, reason.splitlines()[0], None if foreseen else error))
            services.display.finished(chain.spec.title, chain.must_train, failures[-1].line)
            if fail_fast:
                services.stop()
    reused = sum(not any(outcome.ran.values()) for outcome in outcomes)
    if reused:
        services.display.say(f"{reused} of {len(chains)} {'run' if len(chains) == 1 else 'runs'} reused")
    return outcomes, failures


def _show(outcome: Outcome, trained: bool, services: Services) -> None:
    """Print one line for a run if any of its steps ran, and log all its scores and folders."""
    services.display.finished(outcome.spec.title, trained, outcome.line if any(outcome.ran.values()) else None)
    scores = ", ".join(f"{name} {value:.4f}" for name, value in outcome.scores.metrics.items())
    logger.info("%s: %s; network in %s, figures in %s", outcome.spec.title, scores, outcome.network, outcome.figures)
