"""MLflow for real, on a local database: what is recorded, that a second publish adds nothing, outages, and the packaged model."""

import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from dml_core.data.store import PackedDataset
from dml_core.errors import TrackingError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.training.history import Progress, read_history
from dml_core.training.loop import fit
from tasks.embedding import extract, load_embeddings
from tasks.evaluation import evaluate_run
from tasks.records import CheckpointRecord, DatasetRecord, EmbeddingRecord, MetricRecord, RunReport, describe_folder
from tasks.specs import RunSpec
from tasks.storage import Store
from tasks.tracking import EXPERIMENT, IDENTITY_TAG, PARENT_TAG, Tracker
from tests.conftest import small_training

pytestmark = pytest.mark.slow
COMPARISON = "comparison on d"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    return Store(str(folder), folder / "cache")


@pytest.fixture(scope="module")
def report(packed: Path, store: Store) -> RunReport:
    """A small run, made by the real steps."""
    spec = RunSpec(dataset="d", variant="softtriple", seed=0, training=small_training("softtriple"), evaluation=EvaluationConfig())
    system = fit(spec.training, PackedDataset(packed, "train"), 0, store.folder("train/x"), CPU)
    extract(system.model, spec.training.transform, {"test": PackedDataset(packed, "test")}, store.folder("embed/x"), CPU)
    history = read_history(store.folder("train/x"))
    metrics = evaluate_run(spec.evaluation, 0, "title", history, packed, store.folder("embed/x"), store.folder("evaluate/x"))
    files = {step: describe_folder(store.folder(f"{step}/x")) for step in ("train", "embed", "evaluate")}
    return RunReport(
        comparison=COMPARISON,
        identity="identity-of-x",
        dataset=DatasetRecord(name="d", folder=str(packed), digest="0123456789abcdef", counts={"train": 36}, source="synthetic"),
        variant=spec.variant,
        seed=0,
        parameters=spec.model_dump(mode="json", include={"training", "evaluation"}),
        tags={"git_commit": "abc", "git_dirty": "false"},
        dvc_digest="ffff.dir",
        checkpoint=CheckpointRecord(
            step="train", identity="t", key="train/x", files=files["train"], facts={"device": "cpu", "num_workers": 1}
        ),
        embeddings=EmbeddingRecord(step="embed", identity="e", key="embed/x", files=files["embed"]),
        scores=MetricRecord(step="evaluate", identity="identity-of-x", key="evaluate/x", files=files["evaluate"], metrics=metrics),
    )


@pytest.fixture
def tracker(tmp_path: Path, store: Store) -> Tracker:
    return Tracker(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path, store)


def client_of(tracker: Tracker) -> MlflowClient:
    return MlflowClient(tracker.uri)


def points(tracker: Tracker, run_id: str) -> dict[str, int]:
    client = client_of(tracker)
    return {name: len(client.get_metric_history(run_id, name)) for name in client.get_run(run_id).data.metrics}


def test_a_published_run_holds_everything_once(tracker: Tracker, report: RunReport, tmp_path: Path) -> None:
    run_id = tracker.publish(report)
    assert run_id is not None
    client = client_of(tracker)
    run = client.get_run(run_id)
    parent = client.get_run(run.data.tags[PARENT_TAG])
    assert parent.info.run_name == COMPARISON
    assert run.data.params["training.loss.name"] == "softtriple"
    assert run.data.params["training.optimiser.groups.loss.learning_rate"] == "0.5"
    assert run.data.tags["dml.git_commit"] == "abc"
    assert run.data.tags["dml.train.device"] == "cpu"
    assert run.data.tags[IDENTITY_TAG] == "identity-of-x"
    assert run.data.metrics["recall_at_1"] == report.scores.metrics["recall@1"]
    assert [(i.dataset.name, i.dataset.digest) for i in run.inputs.dataset_inputs] == [("d", "ffff.dir")]
    artifacts = {
        item.path for folder in ("train", "embed", "evaluate", "evaluate/figures") for item in client.list_artifacts(run_id, folder)
    }
    assert {"train/checkpoint.pt", "embed/manifest.json", "evaluate/metrics.json", "evaluate/figures/gallery.png"} <= artifacts
    counted = points(tracker, run_id)
    assert counted["train/loss"] == 15
    assert counted["epoch/loss"] == 3
    assert tracker.publish(report) == run_id
    assert points(tracker, run_id) == counted
    assert len(client.search_runs([run.info.experiment_id])) == 2
    assert not list((tmp_path / "outbox").iterdir())


def test_live_curves_are_not_published_again(tracker: Tracker, report: RunReport) -> None:
    spec = RunSpec(dataset="d", variant="softtriple", seed=0, training=small_training("softtriple"), evaluation=EvaluationConfig())
    live = tracker.live(COMPARISON, report.identity, spec)
    for epoch in range(2):
        live(Progress(epoch, 3, 5, 5, 100.0, {"loss": 9.0}, epoch_ended=True))
    run_id = tracker.publish(report)
    history = client_of(tracker).get_metric_history(run_id, "epoch/loss")
    assert [(point.step, point.value == 9.0) for point in history] == [(0, True), (1, True), (2, False)]


def test_a_newer_run_of_the_same_variant_and_seed_supersedes(tracker: Tracker, report: RunReport) -> None:
    tracker.publish(report)
    assert tracker.published(COMPARISON) == {report.identity}
    newer = report.model_copy(update={"identity": "identity-of-y"})
    run_id = tracker.publish(newer)
    assert tracker.published(COMPARISON) == {"identity-of-y"}
    table = tracker.comparison_table(COMPARISON)
    assert list(table["run_id"]) == [run_id]
    assert tracker.publish(report) != run_id
    assert len(tracker.comparison_table(COMPARISON)) == 1


def test_a_server_that_is_away_costs_no_record(tracker: Tracker, report: RunReport, store: Store, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = Tracker("http://127.0.0.1:9", tmp_path, store)
    spec = RunSpec(dataset="d", variant="softtriple", seed=0, training=small_training("softtriple"), evaluation=EvaluationConfig())
    away.live(COMPARISON, report.identity, spec)(Progress(0, 3, 5, 5, 100.0, {"loss": 9.0}, epoch_ended=True))
    assert away.publish(report) is None
    assert away.published(COMPARISON) == frozenset()
    with pytest.raises(TrackingError, match=r"http://127\.0\.0\.1:9 cannot be used") as caught:
        away.sync()
    assert "\n" not in str(caught.value)
    assert tracker.sync() == 1
    assert list(tracker.comparison_table(COMPARISON)["variant"]) == ["softtriple"]
    assert tracker.sync() == 0


def test_a_comparison_that_is_not_there_is_one_line(tracker: Tracker) -> None:
    with pytest.raises(TrackingError, match="has no runs of 'comparison on e'"):
        tracker.comparison_table("comparison on e")


def test_the_packaged_model_gives_the_run_s_embeddings_in_a_fresh_process(
    tracker: Tracker, report: RunReport, store: Store, packed: Path, tmp_path: Path
) -> None:
    run_id = tracker.publish(report)
    (model,) = client_of(tracker).search_logged_models([mlflow.get_experiment_by_name(EXPERIMENT).experiment_id])
    assert model.source_run_id == run_id
    dataset = PackedDataset(packed, "test")
    for index in range(3):
        (tmp_path / f"{index}.jpg").write_bytes(dataset.raw_bytes(index))
    code = f"""
import mlflow, numpy, pandas
mlflow.set_tracking_uri({tracker.uri!r})
model = mlflow.pyfunc.load_model("models:/{model.model_id}")
images = [open({str(tmp_path)!r} + f"/{{index}}.jpg", "rb").read() for index in range(3)]
numpy.save({str(tmp_path / "served.npy")!r}, model.predict(pandas.DataFrame({{"image": images}})))
import dml_core
assert "artifacts" in dml_core.__file__, dml_core.__file__
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=tmp_path)
    expected, _ = load_embeddings(store.folder("embed/x"), "test")
    np.testing.assert_allclose(np.load(tmp_path / "served.npy"), expected[:3], atol=1e-5)
    requirements = (Path(mlflow.artifacts.download_artifacts(f"models:/{model.model_id}")) / "requirements.txt").read_text()
    assert f"torch=={torch.__version__.partition('+')[0]}" in requirements
