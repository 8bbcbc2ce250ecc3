"""A comparison's run in MLflow carries the alarms of its dataset or table while they last."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from dml_core.errors import TrackingError
from tasks.locks import alone
from tasks.runs.records import ComparisonReport
from tasks.runs.specs import comparison_title, table_comparison
from tasks.tracking import alarm_marks, connection
from tasks.tracking.alarm_marks import mark_comparisons
from tasks.tracking.connection import EXPERIMENT_PREFIX, LOCKS
from tasks.tracking.tags import Tag

TEXT = "softmax, seed 0: drifted: recall@1 0.30 is below its band."


@pytest.mark.slow
def test_an_alarm_is_a_tag_and_a_note_of_its_comparison_and_goes_with_it(
    mlflow_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(mlflow_database, tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment(f"{EXPERIMENT_PREFIX}synthetic", artifact_location=tmp_path.as_uri())
    titles = (comparison_title("synthetic", "test"), table_comparison("softtriple/table1", "synthetic"), comparison_title("icons", "test"))
    runs = [client.create_run(experiment, tags={Tag.COMPARISON: title, Tag.NOTE: "Best: a.\n\nMore."}).info.run_id for title in titles]

    for seed in range(3):
        client.create_run(experiment, tags={Tag.PART: titles[0], Tag.SEED: str(seed)})
    read: list[str] = []

    def project_runs(*arguments: Any) -> list[Any]:
        found = connection.project_runs(*arguments)
        read.extend(run.info.run_id for run in found)
        return found

    monkeypatch.setattr(alarm_marks, "project_runs", project_runs)

    def shown() -> list[tuple[str | None, str]]:
        tags = [client.get_run(run).data.tags for run in runs]
        return [(of_run.get(Tag.ALARM), of_run[Tag.NOTE]) for of_run in tags]

    before = shown()
    assert mark_comparisons(uri, tmp_path, "synthetic", [TEXT]) == 1
    assert mark_comparisons(uri, tmp_path, "softtriple/table1", [TEXT]) == 1
    marked = (TEXT, f"Not reproduced: {TEXT}\n\nBest: a.\n\nMore.")
    assert shown() == [marked, marked, before[2]]
    assert mark_comparisons(uri, tmp_path, "synthetic", [TEXT]) == 0
    mark_comparisons(uri, tmp_path, "synthetic", [TEXT] * 200)
    alarm, note = shown()[0]
    assert alarm is not None
    assert alarm.endswith(" ... (results/site/verification.html has all)")
    assert note == f"Not reproduced: {alarm}\n\nBest: a.\n\nMore.", "MLflow cuts a tag after 8000 letters"
    mark_comparisons(uri, tmp_path, "synthetic", [])
    mark_comparisons(uri, tmp_path, "softtriple/table1", [])
    assert shown() == before
    assert set(read) == set(runs), "not those of seeds, which may be thousands"


@pytest.mark.slow
def test_a_description_that_is_published_meanwhile_stays(mlflow_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(mlflow_database, tmp_path)
    uri, title = f"sqlite:///{tmp_path}/mlflow.db", comparison_title("synthetic", "test")
    client = MlflowClient(uri)
    experiment = client.create_experiment(f"{EXPERIMENT_PREFIX}synthetic", artifact_location=tmp_path.as_uri())
    run = client.create_run(experiment, tags={Tag.COMPARISON: title, Tag.NOTE: "Best: a."}).info.run_id
    waiting = threading.Event()

    def runs_then_wait(*_: object) -> list[object]:
        runs = [client.get_run(run)]
        waiting.set()
        return runs

    report = ComparisonReport(comparison=title, dataset="synthetic", role="test", folder=None, tags={})
    monkeypatch.setattr(alarm_marks, "project_runs", runs_then_wait)
    with ThreadPoolExecutor(1) as pool:
        with alone(tmp_path / LOCKS / report.outbox_name):  # a flow publishes the comparison (`Tracker.publish`)
            marking = pool.submit(mark_comparisons, uri, tmp_path, "synthetic", [TEXT])
            assert waiting.wait(60)
            client.set_tag(run, Tag.NOTE, "Best: b.")
        assert marking.result(60) == 1
    assert client.get_run(run).data.tags[Tag.NOTE] == f"Not reproduced: {TEXT}\n\nBest: b."


def test_a_missing_database_is_created_whole_before_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(path: Path, lock: Path) -> None:
        raise TrackingError(f"{path.name} is created under {lock.name}")

    monkeypatch.setattr(connection, "create_database", create)
    with pytest.raises(TrackingError, match=r"mlflow\.db is created under creation"):
        mark_comparisons(f"sqlite:///{tmp_path}/mlflow.db", tmp_path, "synthetic", [TEXT])
