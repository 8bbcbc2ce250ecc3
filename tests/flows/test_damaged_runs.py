"""A chain whose finished files are damaged, each in every way, restores the bytes of an undisturbed run.

Also tested: two equal chains at once, changed code, and that failures leave no record. The chain, its records and Prefect's server are
real; instead of Ray, this process calls the functions that its workers call.
"""

import hashlib
import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import pytest
import torch
from prefect import Flow, Task, flow, get_client, task
from prefect.concurrency import _sync
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, PREFECT_LOCAL_STORAGE_PATH, temporary_settings
from prefect.states import Scheduled
from rich.console import Console

import flows.chain
import flows.reproduce
import flows.tune
from dml_core.data.store.info import read_info
from dml_core.errors import ConfigError, DataError, DmlError, StoreError, TrainingError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.training.history import Progress
from flows.chain import STEPS_AT_ONCE, submit_chains
from flows.local_database import copy_empty_database
from flows.outcomes import Outcome
from flows.reuse.planned import RunSteps, plan_runs
from flows.reuse.step_cache import SealedJSON, forget_failure
from flows.services import WORKERS_LIMIT, Services, ensure_limit, slots
from tasks.environment import Project
from tasks.plans import results
from tasks.runs import identity
from tasks.runs.costs import Cost, Meter, _Journal, journal_file
from tasks.runs.finished import Code, finished_scores
from tasks.runs.identity import step_identities, train_step
from tasks.runs.records import FIGURES_FOLDER, DatasetRecord, StepRecord
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.scores import drawing
from tasks.scores.earlier_figures import EarlierFigures
from tasks.sealed import seal, unseal, write_sealed
from tasks.start_times import StartTimes
from tasks.storage import Store
from tasks.tracking.child_run import PublishedRun
from tasks.tracking.live import LiveCurves
from tasks.tracking.published import CurrentRuns
from tasks.watch import evidence
from tasks.watch.evidence import environment_here
from tasks.workers import pool, work
from tasks.workers.group import Spent, WorkerGroup
from tasks.workers.jobs import Job
from tasks.workers.placement import Placement
from tasks.workers.pool import Workers
from tasks.workers.progress import ProgressDisplay
from tests.conftest import ROOT, small_training
from tests.damage import DAMAGE, contents, flip

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "quick_figures")]
CPU = torch.device("cpu")
SPEC = RunSpec(
    dataset="d",
    variant="v",
    seed=0,
    training=small_training(num_epochs=2, validation={"share": 0.5}, keep_epochs=["best_validation"], recall_every_epochs=1),
    evaluation=EvaluationConfig(recall_at=(1,), clustering=False, epoch="best_validation"),
)
STEPS = ("train", "embed", "evaluate")


def each(now: Sequence[str], *later: str) -> list[Any]:
    """Return kinds of damage as test parameters: `now` for every test run, `later` for `make proofs`."""
    return [*now, *(pytest.param(how, marks=pytest.mark.proof) for how in later)]


class InProcess:
    """A worker group in this process, which can be stopped after an epoch, or train to other bits, as a GPU may: with another `seed`."""

    def __init__(self, num_groups: int = 1) -> None:
        self._free = threading.BoundedSemaphore(num_groups)
        self.notes: list[str] = []
        self.num_epochs = 0
        self.stop_after: int | None = None
        self.seed: int | None = None
        self.sources: dict[str, dict[str, str]] = {}  # step -> those of its last job

    @contextmanager
    def turn(self, is_to_embed: bool) -> Iterator["InProcess"]:
        with self._free:
            yield self

    def run(self, job: Job, watch: Callable[[Progress], None], spent: Spent) -> dict[str, object]:
        def tell(message: Progress) -> None:
            self.num_epochs += message.epoch_ended
            self.notes += [message.note] if message.note else []
            watch(message)
            if message.epoch_ended and message.epoch == self.stop_after:
                raise DmlError("stopped")

        self.sources[job.step] = job.sources
        if job.step == "train" and self.seed is not None:
            job = replace(job, spec=job.spec.model_copy(update={"seed": self.seed}))
        work.WORK[job.step](job, CPU, tell, 0)
        return {"device": "cpu", "num_workers": 1, "seconds": 0.0}


@contextmanager
def records_in(folder: Path) -> Iterator[None]:
    """Let the project keep the steps' records in a folder, which Prefect does not read from the environment any more; publish no run."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PREFECT_LOCAL_STORAGE_PATH", str(folder))
        environment.setattr(RunSteps, "is_in", lambda *_: True)
        yield


class Place:
    """A state folder and its chain."""

    def __init__(self, state: Path, packed: Path, digest: str | None = None) -> None:
        self.state = state
        self.store = Store(str(state / "store"), state / "cache")
        self.workers = InProcess()
        tracker = SimpleNamespace(begin_run=lambda *_: "run", log_epochs=lambda *_: None, end_failed=lambda *_: None)
        self.services: Any = SimpleNamespace(
            project=SimpleNamespace(state=state),
            submitted={},
            force=False,
            fail_fast=False,
            code="strict",
            published=lambda spec: {},
            scorings=threading.BoundedSemaphore(),
            check_going_on=lambda: None,
            store=self.store,
            workers=self.workers,
            meter=Meter(state),
            tracker=tracker,
            display=ProgressDisplay(Console(quiet=True)),
            scale=ScaleSpec(),
            tags={},
            earlier_figures=EarlierFigures(state, self.store),
            turn=lambda is_to_embed: Services.turn(self.services, is_to_embed),
        )
        digest, counts = digest or read_info(packed).fingerprint, {"train": 18, "test": 36}
        self.dataset = DatasetRecord(name="d", folder=str(packed), digest=digest, counts=counts, source="synthetic")

    def run(self, force: bool = False, stop_after: int | None = None, code: Code = "strict") -> Outcome | Exception:
        """Run the chain without publishing, with its kept results in this folder."""
        self.workers.stop_after = stop_after
        self.services.submitted, self.services.force, self.services.code = {}, force, code
        self.services.earlier_figures = EarlierFigures(self.state, self.store)

        @flow(task_runner=STEPS_AT_ONCE)
        def chain() -> Outcome | Exception:
            return submit_chains([SPEC], {"d": self.dataset}, self.services)[0].wait()

        with records_in(self.state / "kept"), closing(self.services.meter):
            return chain()

    @property
    def project(self) -> Project:
        """This checkout as a project, with this folder as its state."""
        return Project(ROOT, self.state, str(self.state / "store"), f"sqlite:///{self.state / 'mlflow.db'}")

    @property
    def train_id(self) -> str:
        return train_step(SPEC, self.dataset).identity

    @property
    def evaluate_id(self) -> str:
        return step_identities(SPEC, self.dataset)["evaluate"]

    def files(self) -> dict[str, bytes]:
        return contents(self.state / "store")


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prefect's server for tests, with one worker, on a copy of this user's empty database if there is one: creating it takes 10 s.

    Flows have no heartbeats, for whose thread a flow's end waits a second, and the server keeps no list of steps, which nothing here reads.
    """
    from prefect.testing import utilities  # seconds, which the collection of tests need not take

    home = tmp_path_factory.mktemp("prefect")
    copy_empty_database(home)
    if (home / "prefect.db").exists():
        (home / "prefect.db").rename(home / "prefect-test.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "mkdtemp", lambda: str(home))
        patch.setenv("PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_ENABLED", "false")
        without_heartbeats = temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
        with without_heartbeats, utilities.prefect_test_harness(server_startup_timeout=120):
            ensure_limit(1, 1, print)
            yield


def test_flows_that_start_at_once_on_a_new_server_share_one_limit(prefect: None) -> None:
    with get_client(sync_client=True) as client:
        client.delete_global_concurrency_limit_by_name(WORKERS_LIMIT)
    with ThreadPoolExecutor(4) as flows:
        list(flows.map(lambda _: ensure_limit(1, 1, pytest.fail), range(4)))  # raises what one of them raised
    with pytest.raises(ConfigError, match="'dml-workers' is 1, but a run needs 2 workers"):
        ensure_limit(2, 2, pytest.fail)


def test_a_flow_with_more_runs_at_a_time_than_the_server_allows_says_so(prefect: None) -> None:
    said: list[str] = []
    ensure_limit(1, 16, said.append)
    limit = "Prefect's limit 'dml-workers' is 1: at most 1 run at a time"
    assert said == [f"{limit}; raise it: prefect gcl update dml-workers --limit 16, or lower scale.concurrent_runs"]


def test_a_server_that_is_away_when_slots_are_released_fails_no_step(
    prefect: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", str(PREFECT_API_URL.value()))

    def release(lease: UUID) -> None:
        released(lease)
        raise httpx.ConnectError("All connection attempts failed")

    released = _sync.release_concurrency_slots_with_lease
    monkeypatch.setattr(_sync, "release_concurrency_slots_with_lease", release)
    with slots(1, lambda: None):
        pass
    assert "(ConnectError): it takes back the slots of 'dml-workers' within 90 s" in caplog.text


def test_a_run_that_waits_for_slots_ends_when_the_flow_stops(prefect: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", str(PREFECT_API_URL.value()))
    monkeypatch.setattr(flows.services, "WAIT_SECONDS", 0.2)
    looks = iter([None, None, TrainingError("not run: another run failed before it")])

    def check_going_on() -> None:
        if (error := next(looks)) is not None:
            raise error

    with slots(1, lambda: None), pytest.raises(TrainingError, match="not run"), slots(1, check_going_on):
        pytest.fail("another flow has the only slot")
    with slots(1, lambda: None):
        pass


def test_a_forced_flow_run_that_is_retried_resumes(prefect: None, caplog: pytest.LogCaptureFixture) -> None:
    @flow
    def forced() -> bool:
        return flows.reproduce._is_forced(True)

    first = forced(return_state=True)
    assert first.result() is True
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(first.state_details.flow_run_id, Scheduled(name="AwaitingRetry"), force=True)  # as the automation does
        retried = client.read_flow_run(first.state_details.flow_run_id)
    assert run_flow(forced, flow_run=retried) is False
    assert "retried without force" in caplog.text


def draw_quickly(*arguments: Any) -> None:
    """Write two files that depend on the embeddings, instead of figures."""
    gallery, folder = arguments[1], arguments[-1]
    for name in ("curve.png", "map.png"):
        (folder / name).write_bytes(hashlib.sha256(gallery.embeddings).digest() + name.encode())


@pytest.fixture(scope="module")
def quick_figures() -> Iterator[None]:
    """Draw nothing that takes time: real figures would take two thirds of each chain's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "draw_figures", draw_quickly)
        yield


@pytest.fixture(scope="module")
def undisturbed(prefect: None, one_thread: None, quick_figures: None, packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("undisturbed"), packed)
    outcome = place.run()
    assert isinstance(outcome, Outcome), outcome
    assert outcome.ran == dict.fromkeys(STEPS, True)
    return place


@pytest.fixture
def place(undisturbed: Place, packed: Path, tmp_path: Path) -> Place:
    """A copy of the finished run."""
    shutil.copytree(undisturbed.state, tmp_path / "state")
    return Place(tmp_path / "state", packed)


def test_an_untouched_run_is_reused_whole(place: Place, undisturbed: Place) -> None:
    outcome = place.run()
    assert isinstance(outcome, Outcome)
    assert outcome.ran == dict.fromkeys(STEPS, False)
    assert outcome.scores.metrics == json.loads(next((place.state / "store/evaluate").rglob("metrics.json")).read_bytes())
    assert place.files() == undisturbed.files()


def test_a_run_begins_to_train_before_the_files_of_finished_runs_are_compared(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of finished runs that takes minutes. The outcomes stay in the order of the runs."""
    begun = threading.Event()

    def begin(*_: Any) -> dict[str, object]:
        begun.set()
        raise DmlError("begun")

    def compare(record: StepRecord) -> list[str]:
        assert begun.wait(60), "the workers wait"
        return compared(record)

    compared = place.store.changed_files
    monkeypatch.setattr(place.store, "changed_files", compare)
    place.workers.run = begin  # type: ignore[method-assign]
    specs = [SPEC, SPEC.model_copy(update={"seed": 1})]

    @flow(task_runner=STEPS_AT_ONCE)
    def both() -> list[Outcome | Exception]:
        return [chain.wait() for chain in submit_chains(specs, {"d": place.dataset}, place.services)]

    with records_in(place.state / "kept"):
        finished, begun_anew = both()
    assert isinstance(finished, Outcome)
    assert finished.ran == dict.fromkeys(STEPS, False)
    assert str(begun_anew) == "begun"


def test_what_runs_share_is_compared_once_and_its_damage_reported_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compared: list[str] = []
    compare = place.store.changed_files
    monkeypatch.setattr(place.store, "changed_files", lambda record: compared.append(record.step) or compare(record))
    for damaged in (False, True):
        if damaged:
            flip(place.state / "store/train" / place.train_id / "checkpoint.pt")
        with records_in(place.state / "kept"):
            runs = list(plan_runs([SPEC] * 8, {"d": place.dataset}, place.state, place.store))
        assert [run.records is None for run in runs] == [damaged] * 8
    assert compared == [*STEPS, *STEPS]
    assert caplog.text.count("checkpoint.pt changed or missing") == 1


@pytest.mark.parametrize("does", ["trains before the embedding", "trains and embeds after it"])
def test_a_network_that_a_flow_of_another_host_has_replaced_is_not_scored_as_this_flow_s(
    does: str, prefect: None, packed: Path, tmp_path: Path, s3_bucket: str
) -> None:
    """Hosts that share only a bucket do not know each other's locks: the scores were of the other network, the recorded files of this."""
    place, other = Place(tmp_path, packed), InProcess()
    place.store = place.services.store = Store(f"s3://{s3_bucket}/store", tmp_path / "cache")
    run_here, other.seed = place.workers.run, 1

    def run_elsewhere(job: Job) -> None:
        job = replace(job, cache=str(tmp_path / "other"))
        Store(job.store, tmp_path / "other").clear(job.train_key)
        other.run(replace(job, step="train"), lambda message: None, lambda attempt, cost: None)
        if does.endswith("after it"):
            other.run(job, lambda message: None, lambda attempt, cost: None)

    def run(job: Job, *listeners: Any) -> dict[str, object]:
        job, is_disturbed = replace(job, cache=str(tmp_path / "node")), job.step == "embed" and not other.num_epochs
        if is_disturbed and does.startswith("trains before"):
            run_elsewhere(job)
        facts = run_here(job, *listeners)
        if is_disturbed and does.endswith("after it"):
            run_elsewhere(job)
        return facts

    place.workers.run = run  # type: ignore[method-assign]
    error = place.run()
    whose = "another flow trained this run meanwhile, to another network, or its checkpoint is gone"
    assert str(error) == f"d / v / seed 0: {whose}; rerun the command"
    assert isinstance(error, StoreError)
    before = place.workers.num_epochs
    assert isinstance(again := place.run(), Outcome)
    assert again.ran == dict.fromkeys(STEPS, True)
    assert place.workers.num_epochs == before, "the other network is used"


def test_a_run_ends_well_while_another_host_repeats_its_complete_training(
    prefect: None, packed: Path, tmp_path: Path, s3_bucket: str
) -> None:
    """That host has no record of it, and removes the history until it pushes the same one again; the checkpoint stays."""
    place = Place(tmp_path, packed)
    place.store = place.services.store = Store(f"s3://{s3_bucket}/store", tmp_path / "cache")
    run_here = place.workers.run

    def run(job: Job, *listeners: Any) -> dict[str, object]:
        facts = run_here(replace(job, cache=str(tmp_path / "node")), *listeners)
        if job.step == "embed":
            Store(job.store, tmp_path / "other").clear(job.train_key, keep=("checkpoint.pt",))
        return facts

    place.workers.run = run  # type: ignore[method-assign]
    assert isinstance(outcome := place.run(), Outcome)
    assert outcome.ran == dict.fromkeys(STEPS, True)


def test_mlflow_hears_of_a_run_whose_step_failed(place: Place) -> None:
    failed: list[tuple[str, str]] = []
    place.services.tracker.end_failed = lambda *run: failed.append(run)
    assert str(place.run(force=True, stop_after=0)) == "stopped"
    assert failed == [(SPEC.comparison, identity.published_identity(SPEC, place.evaluate_id))]


def rounds_of_damage(place: Place) -> list[list[str]]:
    """Return files to damage together, at most one of each step: the first of each step alone, and each other file in one round."""
    files = {step: [f"../kept/{next((place.state / 'store' / step).iterdir()).name}"] for step in STEPS}
    for name in place.files():
        files[name.partition("/")[0]].insert(0, name)
    rounds = [[names.pop(0)] for names in files.values()]
    return rounds + [[name for name in names if name] for names in itertools.zip_longest(*files.values())]


@pytest.mark.parametrize("how", each(["flip"], "cut", "remove"))
def test_every_file_of_a_finished_run_is_made_again_to_the_byte(place: Place, undisturbed: Place, how: str) -> None:
    expected = undisturbed.files()
    rounds = rounds_of_damage(place)
    assert sorted(itertools.chain(*rounds)) == sorted([*expected, *(f"../kept/{path.name}" for path in (place.state / "kept").iterdir())])
    for names in rounds:
        for name in names:
            DAMAGE[how](place.state / "store" / name)
        before = place.workers.num_epochs
        outcome = place.run()
        assert isinstance(outcome, Outcome), (names, outcome)
        assert sum(outcome.ran.values()) == len(names), (names, outcome.ran)
        assert place.files() == expected, names
        assert place.workers.num_epochs - before == (2 if any(name.endswith("checkpoint.pt") for name in names) else 0), names
    assert len(place.workers.notes) == (how != "remove")


@pytest.mark.parametrize("how", each(["garble"], "lengthen", "empty"))
def test_all_files_at_once_and_what_others_left_in_the_folders(place: Place, undisturbed: Place, how: str) -> None:
    for path in [path for path in (place.state / "store").rglob("*") if path.is_file()]:
        DAMAGE[how](path)
    (next((place.state / "store/embed").iterdir()) / "test-00009-of-00010.npy").write_bytes(b"left over")
    (next((place.state / "store/train").iterdir()) / "more").mkdir()
    (next((place.state / "store/train").iterdir()) / "more" / "left.over").write_bytes(b"x")
    assert isinstance(place.run(), Outcome)
    assert place.files() == undisturbed.files()
    outcome = place.run()
    assert isinstance(outcome, Outcome)
    assert outcome.ran == dict.fromkeys(STEPS, False)


def test_force_trains_from_the_initial_weights_and_a_forced_run_that_was_stopped_is_ended_by_the_next(
    place: Place, undisturbed: Place
) -> None:
    paths = sorted(path for path in (place.state / "store").rglob("*") if path.is_file() and not path.name.startswith("."))
    before = {path: path.stat() for path in paths}
    costs_so_far = [journal_file(place.state, step, step_identities(SPEC, place.dataset)[step]) for step in STEPS]
    for path in costs_so_far:  # of killed attempts
        write_sealed(path, _Journal(cost=Cost(wall_seconds=1e6)))
    outcome = place.run(force=True)
    assert isinstance(outcome, Outcome)
    assert outcome.ran == dict.fromkeys(STEPS, True)
    assert place.workers.num_epochs == 2
    assert place.files() == undisturbed.files()
    assert all(path.stat().st_mtime_ns > before[path].st_mtime_ns for path in paths)
    assert max(cost.wall_seconds for cost in outcome.costs.values()) < 1e6
    assert str(place.run(force=True, stop_after=0)) == "stopped"
    assert [path.exists() for path in costs_so_far] == [True, False, False]
    assert place.files() != undisturbed.files()
    outcome = place.run()
    assert isinstance(outcome, Outcome)
    assert outcome.ran == {"train": True, "embed": False, "evaluate": False}
    assert place.workers.num_epochs == 2 + 1 + 1  # forced; forced and stopped; its remaining epoch
    assert not any(path.exists() for path in costs_so_far)
    assert place.files() == undisturbed.files()


@pytest.mark.parametrize("after_training", [False, True])
def test_a_forced_training_that_prefect_retries_resumes(
    place: Place, undisturbed: Place, monkeypatch: pytest.MonkeyPatch, after_training: bool
) -> None:
    """An error that is none of the user's, such as a worker's or a failing disk's, repeated the training from its initial weights."""

    def fail_once(*_: object) -> None:
        if not failed:
            failed.append(True)
            raise RuntimeError("no error of the user's")

    def watch_and_fail(curves: LiveCurves, message: Progress) -> None:
        if message.epoch_ended:
            fail_once()

    failed: list[bool] = []
    if after_training:
        monkeypatch.setattr(flows.chain, "note_rate", fail_once)
    else:
        monkeypatch.setattr(LiveCurves, "__call__", watch_and_fail)
    monkeypatch.setattr(flows.chain.train, "retry_delay_seconds", 0)
    outcome = place.run(force=True)
    assert isinstance(outcome, Outcome)
    assert (failed, outcome.ran) == ([True], dict.fromkeys(STEPS, True))
    assert place.workers.num_epochs == 2
    assert place.files() == undisturbed.files()


def train_other_network(place: Place) -> None:
    """Train again to other weights, and stop before their embeddings are made."""
    place.workers.seed = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(work.WORK, "embed", lambda *_: (_ for _ in ()).throw(DmlError("stopped")))
        assert str(place.run(force=True)) == "stopped"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_what_a_network_trained_to_other_bits_gives_is_made_again(place: Place, undisturbed: Place, is_stopped: bool) -> None:
    """In one flow, or in the next one after a forced run was stopped when it had trained."""
    place.workers.seed = 1
    if is_stopped:
        train_other_network(place)
        shutil.copytree(undisturbed.state / "store/embed", place.state / "store/embed", dirs_exist_ok=True)  # as if stopped before it
    else:
        flip(place.state / "store/train" / place.train_id / "checkpoint.pt")
    outcome = place.run()
    assert isinstance(outcome, Outcome)
    assert outcome.ran == {"train": not is_stopped, "embed": True, "evaluate": True}
    assert outcome.scores.metrics != json.loads(next((undisturbed.state / "store/evaluate").rglob("metrics.json")).read_bytes())
    again = place.run()
    assert isinstance(again, Outcome)
    assert again.ran == dict.fromkeys(STEPS, False)


def _collected(place: Place) -> object:
    environment = environment_here("a commit", ScaleSpec())
    return evidence.collect(SPEC, place.dataset, place.store, place.state / "kept", environment, str)


SHOWN: dict[str, Callable[[Place], object]] = {
    "a report": lambda place: finished_scores(
        place.store.folder(f"evaluate/{place.evaluate_id}"),
        **dict(zip(("trained", "embedded", "scored"), step_identities(SPEC, place.dataset).values(), strict=True)),
    ),
    "the evidence of a verification": _collected,
    "a table's rebuilt result": lambda place: results._measured(place.project, SPEC, place.dataset),
}


def test_scores_of_a_former_network_are_those_of_no_run(place: Place, undisturbed: Place) -> None:
    """A forced run was stopped between training and scoring: the scores that are there are not those of the present network."""

    def shown() -> dict[str, object]:
        with records_in(place.state / "kept"):
            return {reader: show(place) for reader, show in SHOWN.items()}

    assert all(shown().values())
    train_other_network(place)
    for step in ("embed", "evaluate"):  # as if it was stopped before these were cleared
        shutil.copytree(undisturbed.state / "store" / step, place.state / "store" / step, dirs_exist_ok=True)
    assert shown() == dict.fromkeys(SHOWN)
    assert isinstance(place.run(), Outcome)
    assert all(shown().values())


def test_records_from_before_their_inputs_were_kept_are_reused(place: Place) -> None:
    for name in ("embed", "evaluate"):
        (identity,) = (path.name for path in (place.state / "store" / name).iterdir())
        path = place.state / "kept" / identity
        outer = json.loads(path.read_text())
        result = json.loads(unseal(outer["result"]))
        assert result["data"].pop("inputs")
        path.write_text(json.dumps(outer | {"result": seal(json.dumps(result))}))
    outcome = place.run()
    assert isinstance(outcome, Outcome)
    assert outcome.ran == dict.fromkeys(STEPS, False)


def test_a_run_is_published_again_if_a_step_runs_or_its_scores_are_others(place: Place) -> None:
    def planned() -> RunSteps:
        with records_in(place.state / "kept"):
            return next(plan_runs([SPEC], {SPEC.dataset: place.dataset}, place.state, place.store))

    def published(recall: float, variant: str = SPEC.label) -> CurrentRuns:
        return {(place.evaluate_id, variant): PublishedRun("its id", {"recall_at_1": recall, "epoch/loss": 1.0})}

    recall = json.loads(next((place.state / "store/evaluate").rglob("metrics.json")).read_bytes())["recall@1"]
    assert planned().is_in(published(recall), place.store)
    assert not planned().is_in(published(recall + 0.01), place.store)
    assert not planned().is_in(published(recall, "of equal settings"), place.store)
    flip(place.state / "store/train" / place.train_id / "checkpoint.pt")
    assert not planned().is_in(published(recall), place.store)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders into which figures are drawn; the run is scored by more neighbours than before, and has the same figures."""
    folders: list[Path] = []

    def draw(*arguments: Any) -> None:
        folders.append(arguments[-1])
        draw_quickly(*arguments)

    monkeypatch.setattr(drawing, "draw_figures", draw)
    monkeypatch.setitem(globals(), "SPEC", SPEC.model_copy(update={"evaluation": SPEC.evaluation.model_copy(update={"recall_at": (1, 3)})}))
    return folders


def figures_of(place: Place) -> dict[str, bytes]:
    """Return the figures of the run's evaluation."""
    return contents(place.state / "store/evaluate" / place.evaluate_id / FIGURES_FOLDER)


def test_figures_are_copied_if_only_scores_change(place: Place, drawn: list[Path], undisturbed: Place) -> None:
    (before,) = (folder for folder in (undisturbed.state / "store/evaluate").iterdir() if folder.is_dir())
    outcome = place.run()
    assert isinstance(outcome, Outcome)
    assert outcome.ran == {"train": False, "embed": False, "evaluate": True}
    assert "recall@3" in outcome.scores.metrics
    assert figures_of(place) == contents(before / FIGURES_FOLDER) != {}
    assert drawn == []


@pytest.mark.parametrize("why", ["damaged figure", "damaged record", "no record of the evaluation's input", "code that draws", "force"])
def test_figures_are_drawn_again(place: Place, drawn: list[Path], undisturbed: Place, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    expected = contents(next((undisturbed.state / "store/evaluate").rglob(FIGURES_FOLDER)))
    if why == "damaged figure":
        flip(next((place.state / "store/evaluate").rglob("*.png")))
    elif why == "damaged record":
        (evaluated,) = (path.name for path in (place.state / "store/evaluate").iterdir())
        flip(place.state / "kept" / evaluated)
    elif why == "no record of the evaluation's input":
        shutil.rmtree(place.state / "made")
    elif why == "code that draws":
        monkeypatch.setattr(flows.chain, "source_digest", lambda modules: "other")
    outcome = place.run(force=why == "force")
    assert isinstance(outcome, Outcome)
    assert len(drawn) == 1
    assert figures_of(place) == expected


@pytest.mark.parametrize("how", each(["flip", "cut"], "lengthen", "garble", "empty", "remove"))
def test_every_file_of_an_unfinished_run_is_made_again_to_the_byte(
    place: Place, undisturbed: Place, packed: Path, tmp_path: Path, how: str
) -> None:
    """Only training is unfinished; the later steps are finished, so that each case costs one training."""
    assert str(place.run(force=True, stop_after=0)) == "stopped"
    (place.state / "kept" / place.train_id).unlink()
    names = [name for name in place.files() if name.startswith("train/")]
    assert {Path(name).name for name in names} == {"checkpoint.pt", "history.jsonl", "validation_split.json"}
    for number, name in enumerate(names):
        shutil.copytree(place.state, tmp_path / str(number))
        damaged = Place(tmp_path / str(number), packed)
        DAMAGE[how](damaged.state / "store" / name)
        outcome = damaged.run()
        assert isinstance(outcome, Outcome), (name, outcome)
        assert outcome.ran == {"train": True, "embed": False, "evaluate": False}
        assert damaged.files() == undisturbed.files(), name
        assert damaged.workers.num_epochs == (2 if name.endswith("checkpoint.pt") else 1), name


def tampered(kept: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the record inside Prefect's kept result without breaking its format."""
    outer = json.loads(kept.read_text())
    inner = json.loads(outer["result"])
    record = json.loads(inner["record"])
    change(record["data"])
    inner["record"] = json.dumps(record)
    outer["result"] = json.dumps(inner)
    kept.write_text(json.dumps(outer))


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "changes",
    [
        (lambda data: data.update(files=[]), lambda data: data["files"][0].update(sha256="0" * 64), lambda data: data.pop("identity")),
        (lambda data: data.update(metrics={"recall@1": 0.999}), lambda data: data.update(key="x/y"), lambda data: data.update(step="x")),
    ],
)
def test_a_kept_record_that_was_changed_is_not_believed(place: Place, undisturbed: Place, changes: tuple[Change, ...]) -> None:
    for kept, change in zip(sorted((place.state / "kept").iterdir()), changes, strict=True):
        tampered(kept, change)
    outcome = place.run()
    assert isinstance(outcome, Outcome)
    assert outcome.ran == dict.fromkeys(STEPS, True)
    assert outcome.scores.metrics.get("recall@1") != 0.999
    assert place.files() == undisturbed.files()
    assert place.workers.num_epochs == 0  # the checkpoint was verified


def test_scores_that_change_before_they_are_read_are_the_failure_of_their_run_and_not_of_the_flow(place: Place) -> None:
    """As when another process runs the step again, or a bucket does not answer."""

    @flow(task_runner=STEPS_AT_ONCE)
    def changed() -> Outcome | Exception:
        (chain,) = submit_chains([SPEC], {"d": place.dataset}, place.services)
        metrics = next((place.state / "store/evaluate").rglob("metrics.json"))
        metrics.write_text(metrics.read_text().replace("0.", "0.9", 1))
        return chain.wait()

    with records_in(place.state / "kept"):
        error = changed()
    assert isinstance(error, StoreError)
    assert "metrics.json: changed or gone" in str(error)


def test_two_flows_at_once_train_once_and_both_have_the_scores(undisturbed: Place, packed: Path, tmp_path: Path) -> None:
    """Each flow has separate services, as two processes have; the lock files are shared."""
    places = [Place(tmp_path / "state", packed) for _ in range(2)]

    @flow(task_runner=STEPS_AT_ONCE)
    def both() -> list[Outcome | Exception]:
        chains = [submit_chains([SPEC], {"d": place.dataset}, place.services)[0] for place in places]
        assert [chain.must_train for chain in chains] == [True, True]
        return [chain.wait() for chain in chains]

    with records_in(tmp_path / "state/kept"):
        one, other = both()
    assert isinstance(one, Outcome), one
    assert isinstance(other, Outcome), other
    assert [place.workers.num_epochs for place in places].count(2) == [place.workers.num_epochs for place in places].count(0) == 1
    assert [one.ran[step] + other.ran[step] for step in STEPS] == [1, 1, 1]
    assert one.scores == other.scores
    assert places[0].files() == undisturbed.files()


def test_two_rows_of_one_flow_that_are_the_same_run_train_once(place: Place) -> None:
    place.services.force = True

    @flow(task_runner=STEPS_AT_ONCE)
    def both() -> list[Outcome | Exception]:
        chains = submit_chains([SPEC] * 2, {"d": place.dataset}, place.services)
        assert [chain.must_train for chain in chains] == [True, False]
        return [chain.wait() for chain in chains]

    with records_in(place.state / "kept"):
        outcomes = both()
    assert [outcome.ran for outcome in outcomes if isinstance(outcome, Outcome)] == [
        dict.fromkeys(STEPS, True),
        dict.fromkeys(STEPS, False),
    ]
    assert place.workers.num_epochs == 2


class Delivered:
    """A delivered MLflow run."""

    state = SimpleNamespace(is_failed=lambda: False, is_crashed=lambda: False)

    def wait(self) -> None:
        """Return at once."""

    def result(self) -> str:
        return "its id"


def test_what_older_code_made_is_kept_and_named_or_trained_again(place: Place, undisturbed: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[tuple[str, ...]] = []
    monkeypatch.setattr(flows.chain, "publish", SimpleNamespace(submit=lambda *given: published.append(given[-1]) or Delivered()))
    kept = place.run(code="keep")
    assert isinstance(kept, Outcome)
    assert (kept.ran, kept.older_code, published) == (dict.fromkeys(STEPS, False), (), [])
    scores = kept.scores

    digest, digests = identity.source_digest, identity.source_digests
    loop = "dml_core/training/loop.py"
    monkeypatch.setattr(identity, "source_digest", lambda modules: digest(modules) + ("edited" if loop in digests(modules) else ""))
    monkeypatch.setattr(
        identity, "source_digests", lambda modules: digests(modules) | ({loop: "edited"} if loop in digests(modules) else {})
    )
    kept = place.run(code="keep")
    assert isinstance(kept, Outcome)
    assert (kept.ran, kept.older_code, published) == (dict.fromkeys(STEPS, False), (loop,), [(loop,)])
    assert kept.scores == scores
    assert place.files() == undisturbed.files()

    next((place.state / "store/evaluate").rglob("metrics.json")).write_text("{}")
    kept = place.run(code="keep")
    assert isinstance(kept, Outcome)
    assert kept.ran == {"train": False, "embed": False, "evaluate": True}, "the older scores are damaged, the older training is not"
    assert kept.older_code == (loop,)

    strict = place.run()
    assert isinstance(strict, Outcome)
    assert (strict.ran, strict.older_code) == (dict.fromkeys(STEPS, True), ())
    compared = place.workers.sources  # by each worker with its own files
    assert compared["train"][loop] == "edited"
    assert "tasks/workers/embedding.py" in compared["embed"]
    assert place.run(code="keep") == place.run() != strict


def test_with_a_server_the_first_embedding_waits_for_no_training_that_has_not_begun(
    prefect: None, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server grants its one slot in the order of requests, and four trainings are requested before the first embedding."""
    monkeypatch.setenv("PREFECT_API_URL", str(PREFECT_API_URL.value()))
    place, steps, slots = Place(tmp_path, packed), list[str](), list[int]()
    in_process = place.workers.run

    def run(_: WorkerGroup, job: Job, watch: Callable[[Progress], None], spent: Spent) -> dict[str, object]:
        with get_client(sync_client=True) as client:
            slots.append(client.read_global_concurrency_limit_by_name(WORKERS_LIMIT).active_slots)
        steps.append(job.step)
        time.sleep(0.3)
        return in_process(job, watch, spent)

    monkeypatch.setattr(WorkerGroup, "run", run)
    monkeypatch.setattr(pool, "start_ray", lambda scale, num_runs: Placement("cpu", 1, 1))
    place.services.workers = Workers(place.services.scale, tmp_path, str, StartTimes(tmp_path, str))

    @flow(task_runner=STEPS_AT_ONCE)
    def four() -> list[Outcome | Exception]:
        specs = [SPEC.model_copy(update={"seed": seed}) for seed in range(4)]
        chains = submit_chains(specs, {"d": place.dataset}, place.services)
        return [chain.wait() for chain in chains]

    with records_in(tmp_path / "kept"):
        assert [type(result) for result in four()] == [Outcome] * 4
    assert (steps.count("train"), steps.count("embed"), slots) == (4, 4, [1] * 8)
    assert "train" in steps[steps.index("embed") :], steps


def test_as_many_runs_train_at_a_time_as_there_are_workers_for(
    prefect: None, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run waits in its training until all 24 have started, and then fails, so that none is trained."""
    monkeypatch.setattr(flows.services, "slots", lambda *_: nullcontext())  # the server of these tests has one slot
    place, together = Place(tmp_path, packed), threading.Barrier(24, timeout=300)
    place.workers = place.services.workers = InProcess(24)

    def meet(job: Job, watch: Callable[[Progress], None], spent: Spent) -> dict[str, object]:
        together.wait()
        raise DmlError("met")

    place.workers.run = meet  # type: ignore[method-assign]
    specs = [SPEC.model_copy(update={"seed": seed}) for seed in range(24)]

    @flow(task_runner=STEPS_AT_ONCE)
    def all_runs() -> list[str]:
        chains = submit_chains(specs, {"d": place.dataset}, place.services)
        return [str(chain.wait()) for chain in chains]

    with records_in(tmp_path / "kept"):
        assert all_runs() == ["met"] * 24


def test_every_flow_and_every_kept_step_has_the_hook() -> None:
    found_here = [found for module in (flows.chain, flows.reproduce, flows.tune) for found in vars(module).values()]
    kept = [found for found in found_here if isinstance(found, Flow) or (isinstance(found, Task) and found.persist_result)]
    assert {found.name for found in kept} >= {"reproduce", "run", "tune", "train", "embed", "evaluate"}
    for found in kept:
        assert forget_failure in found.on_failure_hooks, found.name


def test_only_finished_records_stay(prefect: None, tmp_path: Path) -> None:
    @task(persist_result=True, result_serializer=SealedJSON(), cache_key_fn=lambda _, given: str(given["key"]), on_failure=[forget_failure])
    def step(key: str, broken: bool) -> dict[str, Any]:
        if broken:
            raise DataError("the step")
        return {"key": key}

    @flow(on_failure=[forget_failure])
    def failing(fails: str) -> None:
        step("finished", False)
        if fails == "the step":
            step.submit("broken", True).result()
        raise DataError("the flow")

    with temporary_settings({PREFECT_LOCAL_STORAGE_PATH: tmp_path / "kept"}):
        for fails in ("the step", "the flow"):
            with pytest.raises(DataError, match=fails):
                failing(fails)
            assert [path.name for path in (tmp_path / "kept").iterdir()] == ["finished"]
