"""A search that is kept: its trials in Optuna's storage, and by locks who works on which of them.

The storage is SQLite below the project's state, or the database of DML_TUNING_STORAGE. A round is begun, and a score is told, under one
lock for the search; who works on a trial holds the trial's own, which the system lets go with its holder. A trial that somebody was killed
over is taken up again, with its settings and the folds that it has.
"""

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from optuna.exceptions import DuplicatedStudyError
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from dml_core.errors import StoreError, TrainingError
from tasks.locks import FileLock, alone
from tasks.tuning.proposals import ROUND_SIZE, State, TrialRecord, distribution, is_hopeless, propose, running_means
from tasks.tuning.space import Params, Space

POLL_SECONDS = 0.5
SCORES, REASON = "scores", "reason"
STATES: dict[TrialState, State] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
Objective = Callable[[TrialRecord, int], float]  # a trial, the fold that is held out -> its score
Tell = Callable[[TrialRecord], None]


class TrialFailedError(Exception):
    """A trial's settings cannot be trained; the search goes on without it."""


class Study:
    """One search.

    Args:
        name: its identity.
        address: of the storage, as `sqlite:///...`.
        locks: a folder for the locks.
        space: what is searched.
        own: the row's own values of it, which trial 0 has.
        folds: of each trial.
        seed: of the proposals.
        facts: what a reader of the storage wants to know of the search.

    Raises:
        StoreError: the storage cannot be used.
    """

    def __init__(
        self, name: str, address: str, locks: Path, space: Space, own: Params, folds: int, seed: int, facts: Mapping[str, str]
    ) -> None:
        self.name = name
        self._space, self._own, self._folds, self._seed = space, own, folds, seed
        self._locks = locks
        self._stop = threading.Event()
        with alone(locks / "storage"):  # whoever comes first makes the tables
            self._storage = open_storage(address)
            self._id = self._find_or_create(facts)

    def trials(self) -> list[TrialRecord]:
        """Every trial that was begun or is to be, by number."""
        return [_record(trial) for trial in self._storage.get_all_trials(self._id, deepcopy=False)]

    def search(
        self, objective: Objective, num_trials: int, parallel: int, tell: Tell, after_round: Callable[[list[TrialRecord]], None]
    ) -> list[TrialRecord]:
        """Try settings until there are so many trials, and return all; what is over already is not tried again.

        Args:
            objective: trains a trial without a fold and scores it there; called from several threads.
            num_trials: in all, those of earlier calls included.
            parallel: how many trials this process works on at a time. It changes nothing of what is tried.
            tell: called with every trial that ends here.
            after_round: called with a round's trials when all of them are over, wherever they ran.

        Raises:
            TrainingError: the row's own settings, trial 0, cannot be trained.
        """
        for first in range(0, num_trials, ROUND_SIZE):
            numbers = range(first, min(first + ROUND_SIZE, num_trials))
            self._begin_round(first // ROUND_SIZE, numbers.stop)
            self._work_together(numbers, objective, parallel, tell)
            ended = self.trials()[numbers.start : numbers.stop]
            after_round(ended)
            if first == 0 and ended[0].state == "failed":
                raise TrainingError(f"the row's own settings, trial 0, cannot be trained: {ended[0].reason}")
        return self.trials()[:num_trials]

    def _begin_round(self, round_number: int, stop: int) -> None:
        """Write down what the round tries, up to trial `stop`, unless somebody has."""
        with self._alone():
            known = self.trials()
            if len(known) >= stop:
                return
            past = [trial for trial in known if trial.round < round_number]
            proposed = propose(self._space, self._own, past, self._seed, round_number)
            distributions = {path: distribution(search) for path, search in self._space.items()}
            for params in proposed[len(known) - round_number * ROUND_SIZE : stop - round_number * ROUND_SIZE]:
                self._storage.create_new_trial(self._id, create_trial(state=TrialState.WAITING, params=params, distributions=distributions))

    def _work_together(self, numbers: Sequence[int], objective: Objective, parallel: int, tell: Tell) -> None:
        """Have so many threads work on a round until all of it is over, here or elsewhere; each with this thread's context."""
        with ThreadPoolExecutor(min(parallel, len(numbers)), thread_name_prefix="trial") as pool:
            working = [
                pool.submit(contextvars.copy_context().run, self._work, numbers, objective, tell)
                for _ in range(min(parallel, len(numbers)))
            ]
            for one in working:
                one.result()

    def _work(self, numbers: Sequence[int], objective: Objective, tell: Tell) -> None:
        """Work on one free trial after another; wait for those that others have."""
        try:
            while not self._stop.is_set():
                known = self.trials()
                left = [number for number in numbers if not known[number].is_over]
                if not left:
                    return
                if not any(self._try(number, objective, tell) for number in left):
                    self._stop.wait(POLL_SECONDS)
        except BaseException:
            self._stop.set()
            raise

    def _try(self, number: int, objective: Objective, tell: Tell) -> bool:
        """Work on a trial to its end, if nobody else is at it; whether it was free."""
        lock = FileLock(self._locks / f"{self.name}-{number}")
        if not lock.acquire(wait=False):
            return False
        try:
            known = self.trials()
            if not known[number].is_over:  # its lock may have been let go because it ended
                self._run(known[number], [trial for trial in known if trial.round < known[number].round], objective)
                if not self._stop.is_set():
                    tell(self.trials()[number])
            return True
        finally:
            lock.release()

    def _run(self, trial: TrialRecord, past: Sequence[TrialRecord], objective: Objective) -> None:
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._id, trial.number)
        if trial.state == "waiting":
            self._write(lambda: self._storage.set_trial_state_values(trial_id, TrialState.RUNNING))
        scores = list(trial.scores)
        for fold in range(self._folds):
            if fold == len(scores):
                if self._stop.is_set():
                    return
                try:
                    scores.append(objective(trial, fold))
                except TrialFailedError as error:
                    self._fail(trial_id, str(error))
                    return
                self._keep(trial_id, scores)
            if trial.number and fold + 1 < self._folds and is_hopeless(scores[: fold + 1], past):
                self._end(trial_id, TrialState.PRUNED, scores[: fold + 1])
                return
        self._end(trial_id, TrialState.COMPLETE, scores)

    def _keep(self, trial_id: int, scores: Sequence[float]) -> None:
        fold = len(scores) - 1

        def write() -> None:
            self._storage.set_trial_intermediate_value(trial_id, fold, running_means(scores)[fold])
            self._storage.set_trial_user_attr(trial_id, SCORES, list(scores))

        self._write(write)

    def _end(self, trial_id: int, state: TrialState, scores: Sequence[float]) -> None:
        self._write(lambda: self._storage.set_trial_state_values(trial_id, state, [sum(scores) / len(scores)]))

    def _fail(self, trial_id: int, reason: str) -> None:
        def write() -> None:
            self._storage.set_trial_user_attr(trial_id, REASON, reason)
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)

        self._write(write)

    def _write(self, write: Callable[[], object]) -> None:
        with self._alone():
            write()

    def _alone(self) -> Any:
        return alone(self._locks / self.name)

    def _find_or_create(self, facts: Mapping[str, str]) -> int:
        try:
            study_id = self._storage.create_new_study([StudyDirection.MAXIMIZE], self.name)
        except DuplicatedStudyError:
            return self._storage.get_study_id_from_name(self.name)
        for name, value in facts.items():
            self._storage.set_study_user_attr(study_id, name, value)
        return study_id


def open_storage(address: str) -> RDBStorage:
    """Optuna's storage at an address; a local database's folder is made.

    Raises:
        StoreError: it cannot be used.
    """
    try:
        url = make_url(address)
        if url.drivername.startswith("sqlite") and url.database:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        arguments = {"timeout": 60} if url.drivername.startswith("sqlite") else {}
        return RDBStorage(address, engine_kwargs={"connect_args": arguments, "pool_pre_ping": True})
    except (SQLAlchemyError, OSError, ImportError, RuntimeError) as error:
        where = address if "@" not in address else address.rpartition("@")[2]  # no password on a screen
        why = str(error).splitlines()[0]
        raise StoreError(f"the searches' storage {where} cannot be used ({why}); set DML_TUNING_STORAGE to a database that can") from None


def best_of(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The finished trial with the highest mean; of equals the earliest: what replaces the row's own settings has to beat them."""
    return max((trial for trial in trials if trial.state == "finished"), key=lambda trial: (trial.mean, -trial.number), default=None)


def _record(trial: FrozenTrial) -> TrialRecord:
    return TrialRecord(
        trial.number, dict(trial.params), STATES[trial.state], tuple(trial.user_attrs.get(SCORES, ())), trial.user_attrs.get(REASON)
    )
