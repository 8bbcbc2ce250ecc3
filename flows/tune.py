"""The flow of a search: try settings of a table's row on folds of the training classes, with one start of Ray for all of them.

prepare the dataset (DVC) -> its training rows packed separately -> trials, each a run's chain (flows/chain.py) for each pair of fold and
seed -> the winner's file

`tasks.tuning` chooses the trials and the number of pairs each is scored on. A trial's run uses the project's own steps; a finished score is
reused, which is how an interrupted search resumes.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import stdev

from prefect import flow, runtime
from prefect.artifacts import create_markdown_artifact

from dml_core.errors import ConfigError, DataError, DmlError, EvaluationError, TrainingError, first_line
from dml_core.training.history import HISTORY_FILE
from flows.chain import STEPS_AT_ONCE, Chain, prepare, runs_to_train, submit_chains
from flows.outcomes import Outcome
from flows.reports import artifact_key
from flows.reuse.planned import finished_record
from flows.reuse.step_cache import forget_failure
from flows.services import Services, if_server_answers
from tasks.checks import prepare_machine
from tasks.environment import Project, open_project
from tasks.git import git_tags
from tasks.locks import FileLock
from tasks.reports.kit import markdown_table
from tasks.runs.identity import step_identities, train_step
from tasks.runs.records import ComparisonReport, DatasetRecord, ScoreRecord, read_scores
from tasks.runs.specs import Params, RunSpec
from tasks.runs.tuned import TunedFile, confirmed_before, is_kept, tuned_path, write_tuned
from tasks.tuning import halving
from tasks.tuning.halving import SearchResult
from tasks.tuning.proposals import Trial
from tasks.tuning.search import Search, check_on, checked_searches, tuned_file
from tasks.tuning.training_rows import training_rows
from tasks.wording import counted
from tasks.workers.jobs import InfrastructureError, LostWorkersError

UNREAD = (":(exclude)flows/tables/tuned",)  # no search reads settings that another found, such as new files of earlier ones
SHOWN = 5  # number of best trials, plus the row's own settings


@dataclass(frozen=True)
class Tuned:
    """A search, its result, and the content and path of its file. `kept` is the earlier search whose file is there instead, if any."""

    search: Search
    result: SearchResult
    file: TunedFile
    path: Path
    kept: TunedFile | None = None

    @property
    def place(self) -> str:
        """Line that names the file of the settings, or those that stay."""
        if self.kept is None:
            return f"settings: {self.path}"
        return f"not written: {self.path} keeps the settings that an earlier search confirmed ({self.kept.says}); remove it to drop them"

    @property
    def rows(self) -> list[list[str]]:
        """A header, then a line each for the trials scored on most pairs and for the row's own settings, best first."""
        trials = [trial for trial in self.result.trials if trial.reason is None]
        best_first = sorted(trials, key=lambda trial: (-len(trial.scores), -trial.mean, trial.number))
        shown = [trial for place, trial in enumerate(best_first) if place < SHOWN or trial.number == 0]
        return [
            ["trial", "pairs of fold and seed", f"{self.search.metric}, mean ± standard deviation", "settings"],
            *([str(trial.number), str(len(trial.scores)), _score_of(trial), _settings_of(self.search, trial)] for trial in shown),
        ]


class SearchesFailedError(TrainingError):
    """Some searches failed. `tuned` has the others, for display."""

    def __init__(self, failed: Mapping[str, DmlError], tuned: Sequence[Tuned]) -> None:
        title, error = next(iter(failed.items()))
        super().__init__(f"{len(failed)} of {len(failed) + len(tuned)} searches failed; the first: {title}: {first_line(error)}")
        self.tuned = tuple(tuned)


def _flow_run_name() -> str:
    given = runtime.flow_run.parameters
    on = f" on {', '.join(given['datasets'])}" if given.get("datasets") else ""
    return f"tune {', '.join(given['rows'])}{on}: {given['num_trials']} trials, seed {given['seed']}"


@flow(name="tune", flow_run_name=_flow_run_name, task_runner=STEPS_AT_ONCE, on_failure=[forget_failure])
def tune(
    rows: list[str],
    datasets: list[str] | None = None,
    num_trials: int = 16,
    folds: int = 4,
    parallel: int | None = None,
    seed: int = 0,
    metric: str = "recall@1",
) -> list[Tuned]:
    """Search the settings of tables' rows on folds of the training classes; finished scores are reused. A failed search stops no other.

    Args:
        rows: each `<paper>/<table>/<row>`.
        datasets: names from the table's columns; by default all of the row's.
        num_trials: settings that each search tries.
        folds: disjoint parts of the training classes; each pair of fold and seed holds out one.
        parallel: trials to run at a time; by default `scale.concurrent_runs`.
        seed: seed of the search and of its runs.
        metric: metric to maximise: recall@K, map@r or r_precision.
    """
    project = open_project()
    params, searches = checked_searches(project, rows, datasets or (), folds, seed, metric, parallel)
    tuned: list[Tuned] = []
    failed: dict[str, DmlError] = {}
    with closing(Services(project, params.scale)) as services:
        services.tags = git_tags(project, UNREAD)
        prepared = _prepared(searches, services)
        for search in searches:
            try:
                if isinstance(dataset := prepared[search.dataset], DataError):
                    raise dataset
                tuned.append(_tune(search, dataset, num_trials, params, services))
            except (ConfigError, DataError, TrainingError) as error:
                ends_all = isinstance(error, InfrastructureError) and not isinstance(error, LostWorkersError)
                if len(searches) == 1 or ends_all or services.stopping.is_set():
                    raise
                failed[search.title] = error
                services.display.say(f"{search.title}: FAILED: {first_line(error)}")
    if failed:
        raise SearchesFailedError(failed, tuned)
    return tuned


def _prepared(searches: Sequence[Search], services: Services) -> dict[str, DatasetRecord | DataError]:
    """Return the searches' datasets, or why one cannot be prepared."""
    prepared: dict[str, DatasetRecord | DataError] = {}
    for name in dict.fromkeys(search.dataset for search in searches):
        try:
            prepared[name] = prepare(services, name)
        except DataError as error:
            prepared[name] = error
    return prepared


def _tune(search: Search, prepared: DatasetRecord, num_trials: int, params: Params, services: Services) -> Tuned:
    project, say = services.project, services.display.say
    search = search.on(Path(prepared.folder))
    dataset = training_rows(project, search.dataset, Path(prepared.folder))
    check_on(search, params, Path(dataset.folder))
    name = search.identity(dataset)
    say(f"{search.title}: {num_trials} trials; search {name[:10]}")
    scores = Scores(search, dataset, services)
    with ExitStack() as held:
        for path in locks_of(search, dataset, project):
            lock = FileLock(path)
            held.callback(lock.release)
            if not lock.acquire(wait=False):
                say(f"another dml ({lock.holder()}) searches the same settings as {search.title}; waiting for it")
                lock.acquire()
        result = halving.search(search.space, search.guesses, num_trials, search.draw, search.fits, scores.add)
    file = tuned_file(search, name, prepared, dataset, result, services.tags, num_trials)
    before = confirmed_before(file)
    kept = before if before is not None and is_kept(before, file) else None
    tuned = Tuned(search, result, file, write_tuned(file) if kept is None else tuned_path(file.table, file.row, file.dataset), kept)
    say(f"{search.title}: {file.says}")
    if before is not None and kept is None:
        why = "by the same command, or from settings or images that differ now or that it does not record"
        say(f"{search.title}: replaced {tuned.path}, whose settings an earlier search confirmed ({before.says}) {why}; git may have it")
    _publish(tuned, services)
    return tuned


def locks_of(search: Search, dataset: DatasetRecord, project: Project) -> list[Path]:
    """Return the files of the locks that a search holds, in the order to take them: a second shell waits, and then reuses finished scores.

    There is one for each of its first settings. Searches of equal rows, also of several tables, share their runs, and each clears the
    networks of those that it has scored.
    """
    first = (search.spec(number, params, 0) for number, params in enumerate(search.guesses))
    return [project.state / "tuning" / "locks" / identity for identity in sorted({train_step(spec, dataset).identity for spec in first})]


class Scores:
    """Scores of a search's trials on its training rows, each from a run's chain."""

    def __init__(self, search: Search, dataset: DatasetRecord, services: Services) -> None:
        self._search, self._dataset, self._services = search, dataset, services

    def add(self, trials: Sequence[Trial], pairs: range) -> list[Trial]:
        """Return the trials with their scores on these pairs added, or with the reason why one cannot be trained."""
        runs_of = {trial.number: [self._search.spec(trial.number, trial.params, pair) for pair in pairs] for trial in trials}
        runs = [spec for of_trial in runs_of.values() for spec in of_trial]
        finished = {spec.variant: self._finished(spec) for spec in runs}
        missing = [spec for spec in runs if finished[spec.variant] is None]
        prepared = {spec.dataset: self._dataset for spec in missing}
        to_train = runs_to_train(missing, prepared, self._services)
        prepare_machine(to_train, self._services.scale, self._services.display.say)
        chains = {chain.spec.variant: chain for chain in submit_chains(missing, prepared, self._services)}
        if chains:
            self._services.announce(len(chains), sum(chain.must_train for chain in chains.values()))
        results = finished | {variant: self._wait(chain) for variant, chain in chains.items()}
        for spec in runs:  # an interrupted search left networks of finished runs
            self._clear(spec)
        scored = [_scored(trial, [results[spec.variant] for spec in runs_of[trial.number]]) for trial in trials]
        for trial in scored:
            self._services.display.say(f"trial {trial.number}: {_result(self._search, trial)}; {_settings_of(self._search, trial)}")
        return scored

    def _finished(self, spec: RunSpec) -> float | None:
        """Return a finished run's score, or None. Its network and embeddings may be already deleted."""
        store = self._services.store
        record = finished_record("evaluate", step_identities(spec, self._dataset)["evaluate"], store, spec.title)
        if not isinstance(record, ScoreRecord):
            return None
        return read_scores(record, store.pull(record.key)).metrics[self._search.metric]

    def _wait(self, chain: Chain) -> float | str:
        """Return a run's score, or why its settings cannot be trained or scored.

        Raises:
            Exception: the run's error, if its settings are not the reason.
        """
        result = chain.wait()
        if isinstance(result, Outcome):
            self._services.display.finished(chain.spec.title, chain.must_train, None)
            return result.scores.metrics[self._search.metric]
        if not isinstance(result, (ConfigError, TrainingError, EvaluationError)) or isinstance(result, InfrastructureError):
            raise result
        self._services.check_going_on()
        return str(result).splitlines()[0]

    def _clear(self, spec: RunSpec) -> None:
        """Remove the network and the embeddings of a finished run from the store; its curves and scores stay."""
        store, identities = self._services.store, step_identities(spec, self._dataset)
        keys = {f"train/{identities['train']}": (HISTORY_FILE,), f"embed/{identities['embed']}": ()}
        for key, files in keys.items():
            if store.is_remote or store.folder(key).is_dir():
                store.clear(key, keep=files)


def _scored(trial: Trial, results: Sequence[float | str | None]) -> Trial:
    """Return a trial with the scores of its runs, or with the reason of the first that failed."""
    reason = next((result for result in results if isinstance(result, str)), None)
    if reason is not None:
        return replace(trial, reason=reason)
    return replace(trial, scores=(*trial.scores, *(result for result in results if isinstance(result, float))))


def _score_of(trial: Trial) -> str:
    """Return a trial's mean and standard deviation over its pairs of fold and seed, in per cent."""
    spread = f" ± {100 * stdev(trial.scores):.1f}" if len(trial.scores) > 1 else ""
    return f"{100 * trial.mean:.1f}{spread}"


def _settings_of(search: Search, trial: Trial) -> str:
    """Return the settings in which a trial differs from the row."""
    changed = search.changes(trial.params) if trial.number else {}
    texts = {path: f"{value:.4g}" if isinstance(value, float) else str(value) for path, value in changed.items()}
    return ", ".join(f"{path} {text}" for path, text in texts.items()) or "the row's own settings"


def _result(search: Search, trial: Trial) -> str:
    if trial.reason is not None:
        return f"FAILED: {trial.reason}"
    return f"{search.metric} {_score_of(trial)} over {counted(len(trial.scores), 'pair')} of fold and seed"


def _publish(tuned: Tuned, services: Services) -> None:
    """Publish the search's result on the MLflow page of its parent run and in Prefect."""
    search = tuned.search
    command = f"`{tuned.file.command}`; trial 0 has the row's own settings. No test image was read."
    about = "\n\n".join(
        [f"{search.title}: {tuned.file.says}.", markdown_table(tuned.rows), command, *([tuned.place] if tuned.kept else [])]
    )
    report = ComparisonReport(
        comparison=search.title,
        dataset=search.dataset,
        role="validation",
        folder=None,
        tags=services.tags | {"paper": search.table.partition("/")[0], "table": search.table, "row": search.row},
        about=about,
        files=() if tuned.kept else (str(tuned.path),),
        is_search=True,
    )
    services.tracker.publish(report)
    with if_server_answers("its page has no report of the search"):
        create_markdown_artifact(about, key=artifact_key("tuning", f"{search.table}-{search.row}"), description=search.title)
