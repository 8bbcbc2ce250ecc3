"""Searches with a plain function for a network: whoever works on them, and however often they are killed, they try the same."""

import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dml_core.errors import StoreError, TrainingError
from dml_core.search import Search
from tasks.tuning.proposals import ROUND_SIZE, TrialRecord, is_hopeless, propose
from tasks.tuning.study import Study, TrialFailedError, best_of

SPACE = {"a": Search(low=1e-4, high=1.0, log=True), "b": Search(low=0.0, high=10.0, integer=True), "c": Search(choices=("x", "y"))}
OWN = {"a": 0.01, "b": 3, "c": "x"}
FOLDS = 3
Known = list[tuple[int, dict[str, object], str, tuple[float, ...]]]


def quality(trial: TrialRecord, fold: int) -> float:
    """Best at a = 0.1 and b = 7; the folds differ."""
    return 10 - abs(math.log10(trial.params["a"] / 0.1)) - abs(trial.params["b"] - 7) / 5 + fold / 10


def open_study(folder: Path, name: str = "search", seed: int = 0, address: str | None = None) -> Study:
    return Study(name, address or f"sqlite:///{folder / 'optuna.db'}", folder / "locks", SPACE, OWN, FOLDS, seed, {"row": "a row"})


def run(study: Study, objective: Callable[[TrialRecord, int], float] = quality, trials: int = 14, parallel: int = 1) -> list[TrialRecord]:
    return study.search(objective, trials, parallel, lambda trial: None, lambda trials: None)


def known(trials: list[TrialRecord]) -> Known:
    return [(trial.number, trial.params, trial.state, trial.scores) for trial in trials]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return known(run(open_study(tmp_path_factory.mktemp("undisturbed"))))


def test_it_begins_with_the_rows_own_settings_and_finds_better(undisturbed: Known) -> None:
    assert undisturbed[0][:3] == (0, OWN, "finished")
    assert {state for _, _, state, _ in undisturbed} == {"finished", "pruned"}
    assert max(sum(scores) / FOLDS for _, _, state, scores in undisturbed if state == "finished") > sum(undisturbed[0][3]) / FOLDS
    assert len({str(params) for _, params, _, _ in undisturbed}) == len(undisturbed)
    for _, params, _, _ in undisturbed:
        assert 1e-4 <= params["a"] <= 1.0
        assert params["b"] in range(11)


class Killed(BaseException):
    """Ends a search as nothing that it expects."""


@pytest.mark.parametrize("last", [1, 2, 3, 8, 13, 14])
def test_killed_after_any_score_and_resumed_it_tries_the_same(tmp_path: Path, undisturbed: Known, last: int) -> None:
    scored: Counter[tuple[int, int]] = Counter()

    def until_killed(trial: TrialRecord, fold: int) -> float:
        if scored.total() == last:
            raise Killed
        scored[trial.number, fold] += 1
        return quality(trial, fold)

    with pytest.raises(Killed):
        run(open_study(tmp_path), until_killed)
    last = 10**6
    assert known(run(open_study(tmp_path), until_killed)) == undisturbed
    assert set(scored.values()) == {1}, "a fold that has its score is not scored again"


def test_killed_between_a_score_and_what_follows_from_it(tmp_path: Path, undisturbed: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that was about to be given up, or to be told as finished, is when it is taken up again."""
    for _ in range(4):
        with monkeypatch.context() as patched:
            patched.setattr(Study, "_end", lambda *arguments: (_ for _ in ()).throw(Killed()))
            with pytest.raises(Killed):
                run(open_study(tmp_path))
        known(run(open_study(tmp_path), trials=len([trial for trial in open_study(tmp_path).trials() if trial.is_over]) + 3))
    assert known(run(open_study(tmp_path))) == undisturbed


@pytest.mark.parametrize("steps", [(3, 14), (5, 6, 14)])
def test_more_trials_go_on_with_the_same_search(tmp_path: Path, undisturbed: Known, steps: tuple[int, ...]) -> None:
    for trials in steps:
        found = known(run(open_study(tmp_path), trials=trials))
        assert found == undisturbed[:trials]


def test_how_many_run_at_a_time_and_which_end_first_changes_nothing(tmp_path: Path, undisturbed: Known) -> None:
    running = threading.Semaphore(0)
    most = [0]

    def slow_first(trial: TrialRecord, fold: int) -> float:
        running.release()
        most[0] = max(most[0], running._value)
        time.sleep(0.05 * (ROUND_SIZE - trial.number % ROUND_SIZE))
        running.acquire()
        return quality(trial, fold)

    assert known(run(open_study(tmp_path), slow_first, parallel=4)) == undisturbed
    assert most[0] > 1


def _search_in_a_process(folder: Path, log: Path, trials: int, kill_after: int | None) -> None:
    def logged(trial: TrialRecord, fold: int) -> float:
        with log.open("a") as file:
            file.write(f"{os.getpid()} {trial.number} {fold}\n")
        time.sleep(0.02)
        if kill_after is not None and len(log.read_text().splitlines()) >= kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return quality(trial, fold)

    run(open_study(folder), logged, trials)


def _in_processes(folder: Path, log: Path, kill_after: tuple[int | None, ...]) -> list[int | None]:
    spawn = multiprocessing.get_context("spawn")  # shells share nothing
    processes = [spawn.Process(target=_search_in_a_process, args=(folder, log, 14, kill)) for kill in kill_after]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def test_two_shells_share_a_search_and_double_no_trial(tmp_path: Path, undisturbed: Known) -> None:
    log = tmp_path / "log"
    assert _in_processes(tmp_path, log, (None, None)) == [0, 0]
    lines = [line.split() for line in log.read_text().splitlines()]
    worked_on = Counter((number, fold) for _, number, fold in lines)
    assert set(worked_on.values()) == {1}
    assert len({process for process, _, _ in lines}) == 2
    assert known(open_study(tmp_path).trials()) == undisturbed


def test_one_of_two_shells_is_killed_and_the_other_takes_up_its_trial(tmp_path: Path, undisturbed: Known) -> None:
    log = tmp_path / "log"
    assert _in_processes(tmp_path, log, (9, None)) == [-signal.SIGKILL, 0]
    assert known(open_study(tmp_path).trials()) == undisturbed


def test_what_cannot_be_trained_fails_and_the_search_goes_on(tmp_path: Path) -> None:
    def some_fail(trial: TrialRecord, fold: int) -> float:
        if trial.number == 2:
            raise TrialFailedError("the loss is not finite")
        return quality(trial, fold)

    told: list[TrialRecord] = []
    trials = open_study(tmp_path).search(some_fail, 6, 1, told.append, lambda trials: None)
    assert [trial.number for trial in told] == list(range(6))
    assert (trials[2].state, trials[2].reason) == ("failed", "the loss is not finite")
    assert all(trial.is_over for trial in trials)


def test_a_row_whose_own_settings_fail_says_so(tmp_path: Path) -> None:
    def own_fails(trial: TrialRecord, fold: int) -> float:
        if trial.number == 0:
            raise TrialFailedError("the loss is not finite")
        return quality(trial, fold)

    with pytest.raises(TrainingError, match="own settings, trial 0, cannot be trained: the loss is not finite"):
        run(open_study(tmp_path), own_fails)
    assert len(open_study(tmp_path).trials()) == ROUND_SIZE


def test_other_seeds_try_other_settings() -> None:
    rounds = [propose(SPACE, OWN, [], seed, 0) for seed in (0, 0, 1)]
    assert rounds[0] == rounds[1]
    assert rounds[0][0] == rounds[2][0] == OWN
    assert rounds[0][1:] != rounds[2][1:]


def test_a_trial_is_given_up_below_the_median_of_the_rounds_before() -> None:
    """By hand: the medians of 1, 2, 3, 4 and of their means over two folds, 2, 3, 4, 5, are 2.5 and 3.5."""
    past = [TrialRecord(number, OWN, "finished", (number + 1.0, number + 3.0, 0.0)) for number in range(4)]
    assert is_hopeless([2.4], past)
    assert not is_hopeless([2.6], past)
    assert is_hopeless([3.0, 3.8], past)
    assert not is_hopeless([3.0, 4.2], past)
    assert not is_hopeless([0.0], past[:3]), "three trials are too few to judge by"
    assert not is_hopeless([0.0], [*past[:3], TrialRecord(3, OWN, "failed", (9.0,))])


def test_the_best_has_to_beat_the_row_as_it_is() -> None:
    trials = [
        TrialRecord(number, OWN, state, (score,))
        for number, state, score in ((0, "finished", 0.5), (1, "finished", 0.5), (2, "pruned", 0.9))
    ]
    assert best_of(trials) == trials[0]
    assert best_of([*trials, TrialRecord(3, OWN, "finished", (0.6,))]).number == 3
    assert best_of([]) is None


def test_a_storage_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "optuna.db").write_bytes(b"no database at all, but long enough to be looked at" * 50)
    with pytest.raises(StoreError, match="DML_TUNING_STORAGE") as refused:
        open_study(tmp_path)
    assert "\n" not in str(refused.value)
    with pytest.raises(StoreError, match="cannot be used") as refused:
        open_study(tmp_path, address="postgresql://me:secret@127.0.0.1:1/none")
    assert "secret" not in str(refused.value)


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[str]:
    """The address of a PostgreSQL server of this test's own."""
    if shutil.which("initdb") is None:
        pytest.skip("PostgreSQL is not installed")
    data, port = tmp_path / "pg", 20000 + os.getpid() % 20000
    as_user = ["runuser", "-u", "nobody", "--"] if os.geteuid() == 0 else []
    data.mkdir()
    if as_user:
        for folder in (data, *[parent for parent in data.parents if parent != Path("/")]):
            folder.chmod(folder.stat().st_mode | 0o011)
        shutil.chown(data, "nobody")
    subprocess.run([*as_user, "initdb", "-D", str(data), "-A", "trust", "-U", "dml"], check=True, capture_output=True)
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories="
    log = data / "log"
    subprocess.run([*as_user, "pg_ctl", "-D", str(data), "-w", "-l", str(log), "-o", options, "start"], check=True, capture_output=True)
    yield f"postgresql+psycopg2://dml@127.0.0.1:{port}/postgres"
    subprocess.run([*as_user, "pg_ctl", "-D", str(data), "-m", "immediate", "stop"], check=True, capture_output=True)


@pytest.mark.slow
def test_postgresql_keeps_the_same_search(tmp_path: Path, undisturbed: Known, postgres: str) -> None:
    assert known(run(open_study(tmp_path, address=postgres), trials=6)) == undisturbed[:6]
    assert known(run(open_study(tmp_path, address=postgres), parallel=2)) == undisturbed
    assert not (tmp_path / "optuna.db").exists()
