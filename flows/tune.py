"""The flow of a search: settings of a table's row, tried on folds of the training classes; one start of Ray for all of them.

prepare the dataset (DVC) -> its training rows packed alone -> trials, each a run's chain (flows/run.py) for each fold -> the winner's file

Which trials there are, and when one is given up, is `tasks.tuning`'s; here is how a trial's run goes through the project's own steps.
"""

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any

from prefect import flow, runtime
from prefect.artifacts import create_markdown_artifact

from dml_core.errors import ConfigError, EvaluationError, TrainingError
from dml_core.training.history import HISTORY_FILE
from flows.run import STEPS_AT_ONCE, Chain, prepare
from flows.services import Services
from tasks.environment import Project, open_project
from tasks.runs.identity import embed_identity, train_identity
from tasks.runs.records import ComparisonReport, DatasetRecord
from tasks.runs.specs import Params, RunSpec
from tasks.runs.tuned import TunedFile, write_tuned
from tasks.tuning.proposals import ROUND_SIZE, TrialRecord
from tasks.tuning.search import Search, check_on, found_file, planned
from tasks.tuning.study import Study, TrialFailedError, best_of
from tasks.tuning.training_rows import training_rows

STORAGE = "DML_TUNING_STORAGE"
SHOWN = 5  # of the best trials, beside the row as it is


@dataclass(frozen=True)
class Tuned:
    """What a search came to.

    Attributes:
        trials: all that were asked for.
        path: of the winner's file.
    """

    search: Search
    trials: tuple[TrialRecord, ...]
    found: TunedFile
    path: Path

    @property
    def shown(self) -> list[TrialRecord]:
        """The best trials, and the row as it is wherever it stands, best first."""
        finished = sorted((trial for trial in self.trials if trial.state == "finished"), key=lambda trial: (-trial.mean, trial.number))
        return [trial for place, trial in enumerate(finished) if place < SHOWN or trial.number == 0]


def _flow_run_name() -> str:
    asked = runtime.flow_run.parameters
    on = f" on {', '.join(asked['datasets'])}" if asked.get("datasets") else ""
    return f"tune {', '.join(asked['rows'])}{on}: {asked['num_trials']} trials, seed {asked['seed']}"


@flow(name="tune", flow_run_name=_flow_run_name, task_runner=STEPS_AT_ONCE)
def tune(
    rows: list[str],
    datasets: list[str] | None = None,
    num_trials: int = 50,
    folds: int = 4,
    parallel: int | None = None,
    seed: int = 0,
    metric: str = "recall@1",
) -> list[Tuned]:
    """Search the settings of tables' rows on folds of the training classes; what was tried already is not tried again.

    Args:
        rows: each `<paper>/<table>/<row>`.
        datasets: of the table's columns; all that a row runs on when none is given.
        num_trials: of each search, in all; more than before goes on with the same search.
        folds: disjoint parts of the training classes; each is held out once in every trial.
        parallel: how many trials run at a time; those that `scale.concurrent_runs` allows when none is given. It changes no result.
        seed: of the search and of its runs.
        metric: what is to be high: recall@K, map@r or r_precision.
    """
    project = open_project()
    params, searches = planned(project, rows, datasets or (), folds, seed, metric, parallel)
    with closing(Services(project, params.scale)) as services:
        prepared = {name: prepare(project, name) for name in dict.fromkeys(search.dataset for search in searches)}
        return [_tune(search, prepared[search.dataset], num_trials, params, services) for search in searches]


def storage_address(project: Project) -> str:
    """Where searches are kept."""
    return os.environ.get(STORAGE) or f"sqlite:///{project.state / 'tuning' / 'optuna.db'}"


def _tune(search: Search, prepared: DatasetRecord, num_trials: int, params: Params, services: Services) -> Tuned:
    project, say = services.project, services.display.say
    search = search.on(Path(prepared.folder))
    dataset = training_rows(project, search.dataset, Path(prepared.folder))
    check_on(search, params, Path(dataset.folder))
    name = search.identity(dataset)
    facts = {"table": search.table, "row": search.row, "dataset": search.dataset, "metric": search.metric, "fingerprint": dataset.digest}
    study = Study(
        name, storage_address(project), project.state / "tuning" / "locks", search.space, search.own, search.folds, search.seed, facts
    )
    known = study.trials()[:num_trials]
    num_left = num_trials - sum(trial.is_over for trial in known)
    say(f"{search.title}: {num_trials} trials of {search.folds} folds, {num_trials - num_left} of them done; search {name[:10]}")
    if num_left:
        services.announce(num_left * search.folds, num_left * search.folds)
    runs = _Runs(search, dataset, services)
    trials = study.search(
        runs.score, num_trials, min(services.scale.concurrent_runs, ROUND_SIZE), lambda trial: say(_line(search, trial, study)), runs.clear
    )
    best = best_of(trials)
    assert best is not None, "trial 0 is finished, or the search has ended with an error"
    found = found_file(search, name, dataset, trials, best, services.tags)
    tuned = Tuned(search, tuple(trials), found, write_tuned(found))
    _publish(tuned, services)
    return tuned


class _Runs:
    """The runs of a search, through the chain that every run goes through.

    Args:
        search: whose.
        dataset: its training rows, packed alone.
        services: the flow's.
    """

    def __init__(self, search: Search, dataset: DatasetRecord, services: Services) -> None:
        self._search, self._dataset, self._services = search, dataset, services
        self._published = services.tracker.published(search.title)

    def score(self, trial: TrialRecord, fold: int) -> float:
        """Train a trial without a fold, and score it on that.

        Raises:
            TrialFailedError: its settings cannot be trained or scored.
        """
        try:
            chain = Chain(self._spec(trial, fold), self._dataset, self._services, force=False, published=self._published)
            error = chain.wait()
            if error is not None:
                raise error
            outcome = chain.outcome()
        except (ConfigError, TrainingError, EvaluationError) as error:
            self._services.check_going_on()
            raise TrialFailedError(str(error).splitlines()[0]) from error
        self._services.display.finished(outcome.spec.title, chain.must_train, None)
        return outcome.scores.metrics[self._search.metric]

    def clear(self, trials: Sequence[TrialRecord]) -> None:
        """Take the networks and embeddings of ended trials out of the store: nobody wants two hundred of them, and the scores are kept."""
        store = self._services.store
        for trial in trials:
            for fold in range(len(trial.scores)):
                spec = self._spec(trial, fold)
                keys = {f"train/{train_identity(spec, self._dataset)}": (HISTORY_FILE,), f"embed/{embed_identity(spec, self._dataset)}": ()}
                for key, kept in keys.items():
                    if store.is_remote or store.folder(key).is_dir():
                        store.clear(key, keep=kept)

    def _spec(self, trial: TrialRecord, fold: int) -> RunSpec:
        return self._search.spec(trial.number, trial.params, fold)


def score_of(trial: TrialRecord) -> str:
    """A trial's mean with the standard deviation over its folds, in per cent."""
    spread = f" ± {100 * stdev(trial.scores):.1f}" if len(trial.scores) > 1 else ""
    return f"{100 * trial.mean:.1f}{spread}"


def settings_of(search: Search, trial: TrialRecord) -> str:
    """What a trial has other than the row."""
    own = search.own
    changed = [f"{path} {_plain(value)}" for path, value in trial.params.items() if value != own[path]]
    return ", ".join(changed) if trial.number and changed else "the row's own settings"


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _line(search: Search, trial: TrialRecord, study: Study) -> str:
    """A trial that has ended, with the best so far."""
    best = best_of(study.trials())
    so_far = f"; best so far: trial {best.number}, {100 * best.mean:.1f}" if best is not None else ""
    if trial.state == "failed":
        return f"trial {trial.number}: FAILED: {trial.reason}; {settings_of(search, trial)}{so_far}"
    how = f"given up after {len(trial.scores)} of {search.folds} folds" if trial.state == "pruned" else f"over {search.folds} folds"
    return f"trial {trial.number}: {search.metric} {score_of(trial)} {how}; {settings_of(search, trial)}{so_far}"


def _publish(tuned: Tuned, services: Services) -> None:
    """What a search came to, on MLflow's page of its parent run and on Prefect's."""
    search = tuned.search
    lines = [f"| {trial.number} | {score_of(trial)} | {settings_of(search, trial)} |" for trial in tuned.shown]
    about = "\n".join(
        [
            f"**{search.title}**: {tuned.found.says}.",
            "",
            f"| trial | {search.metric}, mean ± standard deviation over folds | settings |",
            "|---|---|---|",
            *lines,
            "",
            f"`{search.command}`; trial 0 is the row as it is. No test image was read.",
        ]
    )
    tags = services.tags | {"paper": search.table.partition("/")[0], "table": search.table, "row": search.row}
    report = ComparisonReport(
        comparison=search.title,
        dataset=search.dataset,
        role="validation",
        folder=None,
        tags=tags,
        about=about,
        files=(str(tuned.path),),
        is_search=True,
    )
    services.tracker.publish(report)
    key = f"tuning-{search.table}-{search.row}".replace("/", "-").replace("_", "-").replace(".", "-")
    create_markdown_artifact(about, key=key, description=search.title)
