"""What a search shares with others and what it leaves in the store, without training."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from dml_core.errors import ConfigError, DataError, DmlError, StoreError, TrainingError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.training.history import HISTORY_FILE
from flows import tune
from flows.tune import Scores, SearchesFailedError, Tuned, locks_of
from tasks.environment import Project
from tasks.files import write_whole
from tasks.locks import FileLock
from tasks.runs.identity import step_identities, train_step
from tasks.runs.params.file import load_params
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.runs.tuned import TunedFile, read_tuned, write_tuned
from tasks.storage import Store
from tasks.tuning.proposals import Trial
from tasks.tuning.search import plan_searches
from tasks.tuning.space import lay_over
from tasks.workers.jobs import InfrastructureError, LostWorkersError
from tests.conftest import ROOT, small_training
from tests.tasks.runs.test_tuned import FOUND
from tests.tasks.test_git import committed

DATASET = DatasetRecord(name="d", folder="/packed", digest="0123", counts={}, source="synthetic")


def test_networks_of_runs_that_an_interrupted_search_had_scored_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec(dataset="d", variant="v", seed=0, training=small_training(), evaluation=EvaluationConfig())
    identities = step_identities(spec, DATASET)
    store = Store(str(tmp_path), tmp_path / "cache")
    trained, embedded = (store.folder(f"{step}/{identities[step]}") for step in ("train", "embed"))
    for path in (trained / "checkpoint.pt", trained / HISTORY_FILE, embedded / "manifest.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    search: Any = SimpleNamespace(spec=lambda number, params, pair: spec, metric="recall@1", own={})
    flow = {"project": SimpleNamespace(state=tmp_path), "code": "strict", "force": False, "submitted": {}}
    services: Any = SimpleNamespace(store=store, scale=ScaleSpec(), display=SimpleNamespace(say=lambda line: None), **flow)
    monkeypatch.setattr(Scores, "_finished", lambda self, spec: 0.5)
    (trial,) = Scores(search, DATASET, services).add([Trial(0, {})], range(1))
    assert trial.scores == (0.5,)
    assert [path.name for path in (*trained.iterdir(), *embedded.iterdir())] == [HISTORY_FILE]


def test_searches_that_share_trainings_wait_for_each_other(tmp_path: Path) -> None:
    """Each deletes the networks of runs that it has scored. They may differ in the metric, or be of equal rows of two tables."""
    project = Project(ROOT, tmp_path, "", "")
    params = load_params(ROOT / "params.yaml")
    recall, precision = (
        plan_searches(params, "project/standing/softtriple", ["synthetic"], 4, 0, metric)[0] for metric in ("recall@1", "map@r")
    )
    elsewhere = replace(recall, table="softtriple/table1", row="other")
    second, third = (replace(recall, training=lay_over(recall.training, {"loss.options.gamma": gamma})) for gamma in (0.2, 0.3))
    for one, other in ((recall, precision), (recall, elsewhere), (second, third)):  # the last two share the loss's published settings
        runs = [
            {train_step(search.spec(number, settings, 0), DATASET).identity for number, settings in enumerate(search.guesses)}
            for search in (one, other)
        ]
        assert runs[0] & runs[1]
        assert {*locks_of(one, DATASET, project)} & {*locks_of(other, DATASET, project)}
    unlike = plan_searches(params, "project/standing/contrastive", ["synthetic"], 4, 0, "recall@1")[0]
    for other, dataset in ((replace(recall, seed=1), DATASET), (unlike, DATASET), (recall, DATASET.model_copy(update={"digest": "4567"}))):
        assert not {*locks_of(recall, DATASET, project)} & {*locks_of(other, dataset, project)}


def test_a_search_that_waits_for_another_of_its_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, lines, has_said = Project(ROOT, tmp_path, "", ""), list[str](), Event()

    def say(line: str) -> None:
        lines.append(line)
        if "waiting" in line:
            has_said.set()

    search: Any = SimpleNamespace(table="t", row="r", dataset="d", title="t r on d", identity=lambda dataset: "0" * 64)
    search.on, search.space, search.guesses, search.draw, search.fits = lambda folder: search, (), ({},), None, None
    search.spec = lambda number, params, pair: RunSpec(
        dataset="d", variant="v", seed=0, training=small_training(), evaluation=EvaluationConfig()
    )
    services: Any = SimpleNamespace(project=project, display=SimpleNamespace(say=say))
    monkeypatch.setattr(tune, "training_rows", lambda *_: DATASET)
    monkeypatch.setattr(tune, "check_on", lambda *_: None)
    monkeypatch.setattr(tune.halving, "search", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    first = FileLock(*locks_of(search, DATASET, project))
    first.acquire()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(tune._tune, search, DATASET, 16, None, services)
        is_told = has_said.wait(30)
        first.release()
        with suppress(KeyboardInterrupt):
            second.result(60)
    assert is_told
    assert lines[1:] == [f"another dml ({first.holder()}) searches the same settings as t r on d; waiting for it"]
    assert first.acquire(wait=False), "an interrupted search leaves no lock"
    first.release()


def test_a_search_ends_if_its_workers_are_lost_and_goes_on_without_settings_that_cannot_be_trained() -> None:
    services: Any = SimpleNamespace(check_going_on=lambda: None)
    scores = Scores(SimpleNamespace(metric="recall@1"), DATASET, services)  # type: ignore[arg-type]

    def failed(error: Exception) -> Any:
        return SimpleNamespace(wait=lambda: error)

    assert scores._wait(failed(TrainingError("the loss is not finite"))) == "the loss is not finite"
    for error in (InfrastructureError("Ray does not answer"), LostWorkersError("given up"), DataError("unreadable"), StoreError("full")):
        with pytest.raises(type(error)):
            scores._wait(failed(error))


def left_by(monkeypatch: pytest.MonkeyPatch, tables: Path, before: TunedFile, found: TunedFile) -> tuple[Tuned, list[str]]:
    """Return what a search that finds `found` leaves where `before` is, and its lines."""
    lines: list[str] = []
    search: Any = SimpleNamespace(dataset="d", title="t", identity=lambda dataset: "0" * 64, space=(), guesses=(), draw="", fits=None)
    search.on = lambda folder: search
    services: Any = SimpleNamespace(project=None, tags={}, display=SimpleNamespace(say=lines.append))
    monkeypatch.setattr("tasks.runs.protocols.TABLES", tables)
    write_tuned(before)
    for name, result in {"training_rows": DATASET, "check_on": None, "locks_of": (), "tuned_file": found, "_publish": None}.items():
        monkeypatch.setattr(tune, name, lambda *given, result=result: result)
    monkeypatch.setattr(tune.halving, "search", lambda *given: None)
    return tune._tune(search, DATASET, 16, None, services), lines  # type: ignore[arg-type]


def test_a_search_that_confirms_nothing_keeps_what_another_confirmed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second look with another seed replaced the confirmed settings with none."""
    nothing = FOUND.model_copy(update={"training": {}, "seed": 4})
    left, lines = left_by(monkeypatch, tmp_path, FOUND, nothing)
    assert not [line for line in lines if "replaced" in line]
    assert read_tuned(FOUND.table, FOUND.row, FOUND.dataset) == FOUND
    assert left.place.startswith(
        f"not written: {left.path} keeps the settings that an earlier search confirmed (dml tune, 3 trials, seed 3"
    )
    replaced: list[tuple[TunedFile, dict[str, Any]]] = [
        (FOUND.model_copy(update={"training": {}}), {}),
        (FOUND, {"seed": FOUND.seed}),
        (FOUND, {"fingerprint": "4567"}),
        (FOUND, {"searched_on": "cdef"}),
        (FOUND, {"training": {"num_epochs": 9}}),
        (FOUND.model_copy(update={"requested_trials": None, "searched_on": None}), {}),  # as files of before 30 November 2026
    ]
    for before, changes in replaced:
        found = nothing.model_copy(update=changes)
        left, lines = left_by(monkeypatch, tmp_path, before, found)
        assert read_tuned(FOUND.table, FOUND.row, FOUND.dataset) == found
        assert left.place == f"settings: {left.path}"
        is_told = f"t: replaced {left.path}, whose settings an earlier search confirmed (dml tune, 3 trials, seed 3" in "\n".join(lines)
        assert is_told == bool(before.training and not found.training)


def searched(datasets: list[str], errors: dict[str, Exception], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Exception | list[str]]:
    """Return the datasets that searches began on, and what the flow returns or raises; `errors` of a dataset are raised by its search."""
    begun: list[str] = []

    def search_on(search: Any, prepared: Any, *others: Any) -> str:
        begun.append(search.dataset)
        if search.dataset in errors:
            raise errors[search.dataset]
        return f"result on {search.dataset}"

    def prepare(services: Any, name: str) -> DatasetRecord:
        if isinstance(errors.get(name), DataError):
            raise errors[name]
        return DATASET

    searches = [SimpleNamespace(title=f"row on {name}", dataset=name) for name in datasets]
    services = SimpleNamespace(display=SimpleNamespace(say=lambda line: None), stopping=Event(), close=lambda: None)
    monkeypatch.setattr(tune, "checked_searches", lambda *given: (SimpleNamespace(scale=None), searches))
    monkeypatch.setattr(tune, "Services", lambda *given: services)
    monkeypatch.setattr(tune, "prepare", prepare)
    monkeypatch.setattr(tune, "_tune", search_on)
    try:
        return begun, tune.tune.fn(["t/r"])
    except DmlError as error:
        return begun, error


def test_a_search_after_another_names_a_commit_without_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first one's new file made each further search one "with changes", though none reads it."""
    seen: list[dict[str, str]] = []
    project = committed(tmp_path / "project")
    monkeypatch.setattr(tune, "open_project", lambda: project)
    searched(["a"], {}, monkeypatch)
    monkeypatch.setattr(tune, "_tune", lambda *given: seen.append(given[-1].tags))
    write_whole(project.root / "flows/tables/tuned/project/standing/other@a.yaml", "")
    tune.tune.fn(["t/r"])
    write_whole(project.root / "flows/tables/project/other.yaml", "")
    tune.tune.fn(["t/r"])
    assert [tags["git_dirty"] for tags in seen] == ["false", "true"]


def test_a_search_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fails: dict[str, Exception] = {
        "a": DataError("a is not prepared"),
        "b": TrainingError("trial 0 cannot be trained\nmore"),
        "c": ConfigError("too few classes"),
        "e": LostWorkersError("given up after 3 attempts"),
    }
    begun, error = searched(["a", "b", "c", "e", "d"], fails, monkeypatch)
    assert begun == ["b", "c", "e", "d"]
    assert isinstance(error, SearchesFailedError)
    assert error.tuned == ("result on d",)
    assert str(error) == "4 of 5 searches failed; the first: row on a: a is not prepared"
    assert not error.unforeseen


@pytest.mark.parametrize(
    ("datasets", "error"),
    [(["a"], DataError("a is not prepared")), (["a", "b"], InfrastructureError("Ray does not answer")), (["a", "b"], DmlError("x"))],
)
def test_the_error_of_the_only_search_or_of_more_than_a_search_is_raised_itself(
    datasets: list[str], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, raised = searched(datasets, {"a": error}, monkeypatch)
    assert raised is error
    assert "b" not in begun
