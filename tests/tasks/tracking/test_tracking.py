"""A real MLflow on a local database: records, a second publish that adds nothing, outages, and the packaged model."""

import base64
import json
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import boto3
import mlflow
import numpy as np
import psutil
import pytest
import torch
from click.testing import CliRunner
from mlflow import MlflowClient
from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.s3_artifact_repo import _cached_get_s3_client
from mlflow.tracking._model_registry import utils as registry_utils
from werkzeug.serving import make_server

from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import TrackingError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.network_description import DESCRIPTION_FILE, WEIGHTS_FILE
from dml_core.trained import load_model
from dml_core.training.checkpoints.file import weights_of
from dml_core.training.config import TrainingConfig
from dml_core.training.history import Progress, read_history
from dml_core.training.loop import fit
from dml_core.training.validation import ScoredImages, scorers
from tasks.data import read_packed
from tasks.environment import answers
from tasks.runs import identity as identities
from tasks.runs.best import NO_BEST, RULE, VALIDATION
from tasks.runs.comparable import UNKNOWN, settings_identity
from tasks.runs.embeddings import load_embeddings, save_kept_epoch
from tasks.runs.records import (
    CheckpointRecord,
    ComparisonReport,
    EmbeddingRecord,
    MetricRecord,
    RunReport,
    describe_folder,
)
from tasks.runs.specs import RunSpec
from tasks.scores.drawing import Drawing
from tasks.scores.evaluation import evaluate_run
from tasks.scores.measuring import load_system
from tasks.sealed import NewerFormatError
from tasks.storage import Store
from tasks.tracking import child_run, connection
from tasks.tracking.alarm_marks import mark_comparisons
from tasks.tracking.child_run import PublishedRun, experiment_name, process_tag
from tasks.tracking.live import LiveCurves
from tasks.tracking.outbox import keep_report, read_report
from tasks.tracking.published import (
    comparable_runs,
    compare_published,
    current_runs,
    in_order,
    older_code_lines,
    published_runs,
    search_published,
    standing_comparisons,
)
from tasks.tracking.registered import Registry, find_model, register_best
from tasks.tracking.tags import Tag
from tasks.tracking.tracker import Tracker
from tasks.tracking.versions import Version, registered_name, registered_versions
from tasks.workers.embedding import extract
from tests.conftest import ROOT, SYNTHETIC_OPTIONS, small_training
from tests.damage import DAMAGE, as_format, cut
from tests.training.test_kept_epochs import KEEPING, checkpoint_of

pytestmark = pytest.mark.slow
COMPARISON = "comparison on d"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    return Store(str(folder), folder / "cache")


@pytest.fixture(scope="module")
def report(packed: Path, store: Store) -> RunReport:
    """A small run made by the real steps."""
    return made(packed, store, "x", small_training("softtriple"), EvaluationConfig())


@pytest.fixture
def scored(report: RunReport) -> RunReport:
    """The same run, of which only settings, curves, scores and figures are published, in half of the time."""
    return report.model_copy(update={"scores_only": True})


def made(packed: Path, store: Store, key: str, training: TrainingConfig, evaluation: EvaluationConfig) -> RunReport:
    spec = RunSpec(dataset="d", variant="softtriple", seed=0, training=training, evaluation=evaluation)
    folders = {step: store.folder(f"{step}/{key}") for step in ("train", "embed", "evaluate")}
    fit(training, PackedDataset(packed, "train"), 0, folders["train"], CPU, score_test=scorers(packed, training, ScoredImages(CPU))[1])
    system = load_system(training, 0, packed, folders["train"], evaluation.epoch)
    if evaluation.epoch != "last":
        save_kept_epoch(folders["embed"], weights_of(checkpoint_of(folders["train"]), evaluation.epoch)[1])
    extract(system.model, training.transform, {"test": PackedDataset(packed, "test")}, folders["embed"], CPU)
    history = read_history(folders["train"])
    metrics = evaluate_run(evaluation, 0, history, folders["embed"], folders["evaluate"])
    Drawing("title", evaluation.metric, 0, history, packed, folders["embed"]).draw(folders["evaluate"])
    files = {step: describe_folder(folder) for step, folder in folders.items()}
    return RunReport(
        comparison=COMPARISON,
        identity=f"identity-of-{key}",
        dataset=read_packed(packed, "d"),
        variant=spec.variant,
        seed=0,
        parameters=spec.model_dump(mode="json", include={"training", "evaluation", "measurements"}),
        tags={"git_commit": "abc", "git_dirty": "false"},
        dvc_digest="ffff.dir",
        checkpoint=CheckpointRecord(
            step="train", identity="t", key=f"train/{key}", files=files["train"], facts={"device": "cpu", "num_workers": 1}
        ),
        embeddings=EmbeddingRecord(step="embed", identity="e", key=f"embed/{key}", files=files["embed"]),
        scores=MetricRecord(
            step="evaluate", identity=f"identity-of-{key}", key=f"evaluate/{key}", files=files["evaluate"], metrics=metrics
        ),
    )


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of every tracker's database: MLflow prepares its statements once for a file, and that is a sixth of a test."""
    return tmp_path_factory.mktemp("database") / "mlflow.db"


@pytest.fixture
def tracker(tmp_path: Path, store: Store, mlflow_database: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """A tracker with an empty database, whose curves are sent at once."""
    monkeypatch.setattr("tasks.tracking.live.SECONDS_BETWEEN", 0.0)
    with closing(sqlite3.connect(mlflow_database)) as empty, closing(sqlite3.connect(database)) as emptied:
        empty.backup(emptied)
    return Tracker(f"sqlite:///{database}", tmp_path, store)


def client_of(tracker: Tracker) -> MlflowClient:
    return MlflowClient(tracker.uri)


def points(tracker: Tracker, run_id: str) -> dict[str, int]:
    client = client_of(tracker)
    return {name: len(client.get_metric_history(run_id, name)) for name in client.get_run(run_id).data.metrics}


def spec_of(report: RunReport) -> RunSpec:
    return RunSpec(
        dataset="d", variant=report.variant, seed=report.seed, training=small_training("softtriple"), evaluation=EvaluationConfig()
    )


def other(
    tracker: Tracker,
    report: RunReport,
    identity: str,
    variant: str,
    seed: int,
    recall: float,
    validation: float | None = None,
    with_model: bool = False,
) -> RunReport:
    """Return a run like one of another variant or seed, with its scores in the store; its model is published only on request."""
    folder = tracker._store.folder(f"evaluate/{identity}-{variant}-{seed}-{recall}-{validation}")
    shutil.copytree(tracker._store.folder(report.scores.key), folder, dirs_exist_ok=True)
    metrics = report.scores.metrics | {"recall@1": recall} | ({} if validation is None else {VALIDATION: validation})
    (folder / "metrics.json").write_text(json.dumps(metrics))
    record = {"key": f"evaluate/{folder.name}", "files": describe_folder(folder), "metrics": metrics}
    changes = {"identity": identity, "variant": variant, "seed": seed, "scores": report.scores.model_copy(update=record)}
    return report.model_copy(update=changes | {"scores_only": report.scores_only or not with_model})


def comparison(folder: Path | None = None) -> ComparisonReport:
    return ComparisonReport(comparison=COMPARISON, dataset="d", role="test", folder=folder and str(folder), tags={"git_commit": "abc"})


def parent_of(tracker: Tracker) -> mlflow.entities.Run:
    client = client_of(tracker)
    experiment = client.get_experiment_by_name(experiment_name("d"))
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`{Tag.COMPARISON}` = '{COMPARISON}'")
    return run


def test_a_published_run_holds_everything_once(
    tracker: Tracker, report: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bin/dml", "reproduce"])
    import_path = list(sys.path)
    run_id = tracker.publish(report)
    assert sys.path == import_path, "MLflow puts each model's code folder first on the path; two hundred runs would leave them all"
    assert run_id is not None
    client = client_of(tracker)
    run = client.get_run(run_id)
    assert client.get_experiment(run.info.experiment_id).name == "dml-repro/d"
    assert run.info.run_name == "d / softtriple / seed 0"
    assert client.get_run(run.data.tags[Tag.PARENT]).info.run_name == COMPARISON
    assert run.data.params["loss.name"] == "softtriple"
    assert run.data.params["optimiser.groups.loss.learning_rate"] == "0.5"
    assert run.data.tags["dml.git_commit"] == run.data.tags["mlflow.source.git.commit"] == "abc"
    assert run.data.tags["dml.train.device"] == "cpu"
    assert run.data.tags[Tag.IDENTITY] == "identity-of-x"
    assert run.data.tags["mlflow.user"]
    assert run.data.tags["mlflow.source.name"] == "dml reproduce"
    assert run.data.metrics["recall_at_1"] == report.scores.metrics["recall@1"]
    assert run.data.metrics["detail/num_queries"] == report.scores.metrics["num_queries"]
    assert [(i.dataset.name, i.dataset.digest) for i in run.inputs.dataset_inputs] == [("d", report.dataset.digest)]
    assert [item.path for item in client.list_artifacts(run_id)] == [
        "class_recalls.json",
        "config.yaml",
        "figures",
        "metrics.json",
        "steps",
    ]
    artifacts = {item.path for folder in ("steps/train", "steps/embed", "figures") for item in client.list_artifacts(run_id, folder)}
    assert {"steps/train/checkpoint.pt", "steps/embed/manifest.json", "figures/gallery.png"} <= artifacts
    counted = points(tracker, run_id)
    assert counted["train/loss"] == 15
    assert counted["epoch/loss"] == 3
    monkeypatch.setattr(Tracker, "_log_files", None)  # nothing is uploaded again
    assert tracker.publish(report) == run_id
    assert points(tracker, run_id) == counted
    assert len(client.search_runs([run.info.experiment_id])) == 2
    assert not list((tmp_path / "outbox").iterdir())


def test_an_oracle_is_published_with_its_own_weights_and_says_what_it_is(
    tracker: Tracker, packed: Path, store: Store, tmp_path: Path
) -> None:
    report = made(packed, store, "oracle", KEEPING, EvaluationConfig(epoch="oracle"))
    weights, num_epochs = weights_of(checkpoint_of(store.folder("train/oracle")), "oracle")
    assert num_epochs < KEEPING.num_epochs
    run = client_of(tracker).get_run(tracker.publish(report))
    assert run.data.metrics["detail/kept_epoch"] == num_epochs
    assert (run.data.tags["dml.epoch"], run.data.params["evaluation.epoch"]) == ("oracle", "oracle")
    assert run.data.tags["mlflow.note.content"].startswith("Oracle: ")
    (packaged,) = tmp_path.rglob("network.pt")
    model = {f"model.{name}": value for name, value in torch.load(packaged).items()}
    assert model.keys() == {name for name in weights if name.startswith("model.")}
    assert all(torch.equal(value, weights[name]) for name, value in model.items())


def test_a_table_s_parent_says_what_it_is_and_has_its_page(tracker: Tracker, scored: RunReport, tmp_path: Path) -> None:
    tracker.publish(scored)
    for seed, recall in enumerate((0.8, 0.9, 0.85)):
        tracker.publish(other(tracker, scored, f"oracle-{seed}", "softtriple oracle", seed, recall))
    page, gone = tmp_path / "table1.html", tmp_path / "table1.json"
    page.write_text("<!doctype html>")
    tags = {"git_commit": "abc", "paper": "softtriple", "table": "softtriple/table1"}
    table = comparison().model_copy(update={"tags": tags, "about": "softtriple/table1: birds.", "files": (str(page), str(gone))})
    parent = tracker.publish(table)
    run = client_of(tracker).get_run(parent)
    assert (run.data.tags["dml.paper"], run.data.tags["dml.table"]) == ("softtriple", "softtriple/table1")
    note = run.data.tags["mlflow.note.content"]
    assert note.startswith("softtriple/table1: birds.\n\n| variant |")
    assert "| softtriple |" in note
    assert "Best mean" not in note, "a table is compared by its own rules, in its description"
    assert "**" not in note
    assert "the table's page, Markdown and JSON among this run's" in note
    assert [item.path for item in client_of(tracker).list_artifacts(parent)] == ["table1.html"]
    page.write_text("<!doctype html><p>")
    assert tracker.publish(table) == parent, "again: the same parent, the newer page"
    assert Path(client_of(tracker).download_artifacts(parent, "table1.html")).read_text() == "<!doctype html><p>"


def test_every_setting_is_recorded_and_those_that_differ_from_the_defaults_are_the_parameters(tracker: Tracker, scored: RunReport) -> None:
    run = client_of(tracker).get_run(tracker.publish(scored))
    defaults = dict(part.strip().split("=", 1) for part in run.data.tags["dml.defaults"].split(";") if part.strip())
    recorded = defaults | run.data.params
    training = scored.parameters["training"]
    assert recorded["sampler.batch_size"] == "8"
    assert recorded["optimiser.momentum"] == str(training["optimiser"]["momentum"])
    assert defaults["freeze_batchnorm" if "freeze_batchnorm" in defaults else "model.freeze_batchnorm"] == "none"
    assert not defaults.keys() & run.data.params.keys()
    found = client_of(tracker).search_runs([run.info.experiment_id], "tags.`dml.defaults` LIKE '%model.freeze_batchnorm=none;%'")
    assert [found.info.run_id for found in found] == [run.info.run_id]


def test_the_model_is_named_and_its_metrics_are_the_final_ones_on_its_dataset(tracker: Tracker, report: RunReport) -> None:
    live = LiveCurves(tracker, COMPARISON, report.identity, spec_of(report))
    live(Progress(0, 3, 5, 5, 100.0, {"loss": 9.0}, epoch_ended=True))
    run_id = tracker.publish(report)
    (model,) = client_of(tracker).search_logged_models([client_of(tracker).get_run(run_id).info.experiment_id])
    assert (model.name, model.source_run_id) == ("d-softtriple-seed-0", run_id)
    assert model.tags["mlflow.source.name"] == client_of(tracker).get_run(run_id).data.tags["mlflow.source.name"]
    assert {metric.key: metric.value for metric in model.metrics} == {
        name.replace("@", "_at_"): value
        for name, value in report.scores.metrics.items()
        if name in ("map@r", "r_precision", "nmi") or name.removeprefix("recall@").isdigit()
    }
    assert {(metric.dataset_name, metric.dataset_digest) for metric in model.metrics} == {("d", report.dataset.digest)}


def test_system_metrics_are_there_on_request(tracker: Tracker, scored: RunReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING", "1")
    live = LiveCurves(tracker, COMPARISON, scored.identity, spec_of(scored))
    live(Progress(0, 2, 5, 5, 100.0, {"loss": 9.0}, epoch_ended=True))
    until = time.monotonic() + 60
    (run,) = [run for run in all_runs(tracker) if "dml.identity" in run.data.tags]
    while "system/cpu_utilization_percentage" not in client_of(tracker).get_run(run.info.run_id).data.metrics:
        assert time.monotonic() < until
        time.sleep(0.1)
    live.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("SystemMetricsMonitor")]
    assert tracker.publish(scored) == run.info.run_id


def test_live_curves_are_not_published_again_and_a_killed_run_is_marked_and_then_completed(tracker: Tracker, scored: RunReport) -> None:
    live = LiveCurves(tracker, COMPARISON, scored.identity, spec_of(scored))
    for epoch in range(2):
        live(Progress(epoch, 3, 5, 5, 100.0, {"loss": 9.0}, epoch_ended=True))
    client = client_of(tracker)
    assert tracker.publish(other(tracker, scored, "identity-of-y", "softmax", 0, 0.5))
    tracker.publish(comparison())
    assert statuses(tracker)["d / softtriple / seed 0"] == "RUNNING"  # its process is this one, and is alive
    (running,) = [run for run in all_runs(tracker) if run.info.status == "RUNNING"]
    with subprocess.Popen(["sleep", "60"]) as ended:
        client.set_tag(running.info.run_id, Tag.PROCESS, process_tag(ended.pid))
        ended.kill()
    tracker.publish(comparison())
    assert statuses(tracker)["d / softtriple / seed 0"] == "KILLED"
    run_id = tracker.publish(scored)
    assert run_id == running.info.run_id
    assert statuses(tracker)["d / softtriple / seed 0"] == "FINISHED"
    history = client.get_metric_history(run_id, "epoch/loss")
    assert [(point.step, point.value == 9.0) for point in history] == [(1, True), (2, True), (3, False)]


def test_a_run_whose_step_failed_is_failed_in_mlflow_until_it_is_retried(tracker: Tracker, scored: RunReport) -> None:
    def train() -> str:
        LiveCurves(tracker, COMPARISON, scored.identity, spec_of(scored))(Progress(0, 3, 5, 5, 100.0, {"loss": 9.0}, epoch_ended=True))
        return statuses(tracker)["d / softtriple / seed 0"]

    tracker.end_failed(COMPARISON, scored.identity)  # before it was in MLflow
    assert train() == "RUNNING"
    tracker.end_failed(COMPARISON, scored.identity)
    tracker.publish(comparison())
    assert statuses(tracker)["d / softtriple / seed 0"] == "FAILED"
    assert train() == "RUNNING"
    assert tracker.publish(scored) is not None
    assert train() == "FINISHED", "it is forced, or its checkpoint was lost"
    tracker.end_failed(COMPARISON, scored.identity)
    assert statuses(tracker)["d / softtriple / seed 0"] == "FINISHED"


def test_an_epoch_that_is_trained_again_after_it_was_sent_has_one_point(tracker: Tracker, report: RunReport) -> None:
    """Its workers died before its checkpoint was saved, or the flow died and another one resumes."""
    for live in [LiveCurves(tracker, COMPARISON, report.identity, spec_of(report)) for _ in range(2)]:
        for epoch in (0, 0, 1):
            live(Progress(epoch, 3, 5, 5, 100.0, {"loss": 9.0}, epoch_ended=True))
    (run,) = [run for run in all_runs(tracker) if "dml.identity" in run.data.tags]
    assert [point.step for point in client_of(tracker).get_metric_history(run.info.run_id, "epoch/loss")] == [1, 2]


@pytest.mark.parametrize("call", ["log_batch", "set_terminated"])
def test_a_server_that_dies_while_a_run_is_created_leaves_nothing_out(
    tracker: Tracker, scored: RunReport, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The server dies between a run and its settings, or between a parent run and its end."""

    def dies(*arguments: object, **named: object) -> None:
        raise MlflowException("the server is gone")

    with monkeypatch.context() as patch:
        patch.setattr(tracker._client, call, dies)
        LiveCurves(tracker, COMPARISON, scored.identity, spec_of(scored))(Progress(0, 3, 5, 5, 100.0, {"loss": 9.0}, epoch_ended=True))
    run_id = tracker.publish(scored)
    undisturbed = tracker.publish(other(tracker, scored, "identity-of-y", "softtriple", 1, 0.5))
    settings = [client_of(tracker).get_run(found).data.params for found in (run_id, undisturbed)]
    assert settings[0] | {"seed": "1"} == settings[1]
    assert len(settings[0]) > 3
    assert set(statuses(tracker).values()) == {"FINISHED"}


def test_what_a_killed_worker_had_begun_to_write_is_not_published(tracker: Tracker, report: RunReport) -> None:
    folder = tracker._store.folder(report.embeddings.key)
    (folder / ".test-00000-of-00001.npy-4711").write_bytes(b"the beginning of a shard")
    run_id = tracker.publish(report)
    assert run_id is not None
    there = {entry.path for entry in client_of(tracker).list_artifacts(run_id, "steps/embed")}
    assert there == {f"steps/embed/{file.name}" for file in report.embeddings.files}


def all_runs(tracker: Tracker, view: int = ViewType.ACTIVE_ONLY) -> list[mlflow.entities.Run]:
    client = client_of(tracker)
    return list(client.search_runs([client.get_experiment_by_name(experiment_name("d")).experiment_id], run_view_type=view))


def current_identities(tracker: Tracker, title: str = COMPARISON) -> set[str]:
    """Return the identities of a comparison's complete runs of the present code."""
    return {identity for identity, _ in current_runs(tracker.uri, "d", title)}


def statuses(tracker: Tracker) -> dict[str, str]:
    return {run.info.run_name: run.info.status for run in all_runs(tracker)}


def test_a_superseded_run_is_out_of_the_way_and_comes_back_with_its_settings(tracker: Tracker, report: RunReport) -> None:
    first = tracker.publish(report)
    assert current_identities(tracker) == {report.identity}
    newer = report.model_copy(update={"identity": "identity-of-y"})
    second = tracker.publish(newer)
    assert current_identities(tracker) == {"identity-of-y"}
    assert [run.info.run_id for run in all_runs(tracker, ViewType.DELETED_ONLY)] == [first]
    assert [run.run_id for run in published_runs(tracker.uri, "d", COMPARISON)] == [second]
    counted = points(tracker, first)
    assert tracker.publish(report) == first
    assert current_identities(tracker) == {report.identity}
    assert points(tracker, first) == counted
    assert [run.info.run_id for run in all_runs(tracker, ViewType.DELETED_ONLY)] == [second]
    (model,) = client_of(tracker).search_logged_models([all_runs(tracker)[0].info.experiment_id])
    for run_id in (first, second):  # one network, of both
        assert find_model(client_of(tracker), client_of(tracker).get_run(run_id)) == model.model_id


def test_a_run_that_is_scored_again_has_the_same_model_in_a_version_of_its_own_which_outlives_the_first(
    tracker: Tracker, report: RunReport, tmp_path: Path
) -> None:
    first, second = tracker.publish(report), tracker.publish(report.model_copy(update={"identity": "identity-of-y"}))
    client = client_of(tracker)
    numbers = [register_best(client, "dml-d", client.get_run(run_id), "best run: x") for run_id in (first, second, second)]
    assert numbers == ["1", "2", "2"]
    assert client.get_model_version("dml-d", "1").description == "Registered as the best run: x", "true also when it no longer is"
    older, newer = registered_versions(tracker.uri, "d")
    assert (older.run_id, newer.run_id, newer.aliases) == (first, second, ("best",))
    assert older.model_id == newer.model_id
    registry = Registry(tracker.uri)
    assert [registry.of_address(f"models:/dml-d/{number}").run_id for number in (1, 2)] == [first, second]
    from mlflow.cli import gc  # a second, which the collection of tests need not take

    deleted = CliRunner().invoke(gc, ["--backend-store-uri", tracker.uri], env={"MLFLOW_TRACKING_URI": tracker.uri})
    assert deleted.exit_code == 0, deleted.output
    assert registry.of_address("models:/dml-d/1") is None
    network = registry.fetch("models:/dml-d@best", tmp_path / "cache")
    assert json.loads((network / DESCRIPTION_FILE).read_text())["identity"] == report.checkpoint.identity


@pytest.mark.parametrize("damage", [Path.unlink, cut], ids=["missing", "cut"])
def test_a_model_that_has_lost_files_is_not_shared(
    tracker: Tracker, report: RunReport, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    first = tracker.publish(report)
    (weights,) = (tmp_path / "mlartifacts").rglob(f"artifacts/network/{WEIGHTS_FILE}")
    damage(weights)
    second = tracker.publish(report.model_copy(update={"identity": "identity-of-y"}))
    client = client_of(tracker)
    lost, whole = (find_model(client, client.get_run(run_id)) for run_id in (first, second))
    assert lost != whole
    network = Registry(tracker.uri).fetch(f"models:/{whole}", tmp_path / "cache")
    assert load_model(network, "cpu").embed([PackedDataset(Path(report.dataset.folder), "train").raw_bytes(0)]).shape[0] == 1


def test_a_network_is_fetched_as_it_was_published(tracker: Tracker, report: RunReport, tmp_path: Path) -> None:
    """Its description has a hash, which a change of the identity would break."""
    run_id, client = tracker.publish(report), client_of(tracker)
    model_id = find_model(client, client.get_run(run_id))
    client.set_tag(run_id, "dml.epoch", "oracle")  # the identity that follows from the run is another now
    network = Registry(tracker.uri).fetch(f"models:/{model_id}", tmp_path / "cache")
    (published,) = (tmp_path / "mlartifacts").rglob(f"artifacts/network/{DESCRIPTION_FILE}")
    assert (network / DESCRIPTION_FILE).read_bytes() == published.read_bytes()
    assert load_model(network, "cpu").identity == report.checkpoint.identity


def test_what_a_user_deletes_in_mlflow_is_restored_by_the_next_publication(tracker: Tracker, report: RunReport) -> None:
    first, second = tracker.publish(report), tracker.publish(report.model_copy(update={"identity": "identity-of-y"}))
    parent, client = tracker.publish(comparison()), client_of(tracker)

    def publish_again() -> None:
        assert tracker.publish(report.model_copy(update={"identity": "identity-of-y"})) == second
        assert tracker.publish(comparison()) == parent == client.get_run(second).data.tags[Tag.PARENT]
        assert not list(tracker.outbox.glob("*.json"))
        assert [run.run_id for run in published_runs(tracker.uri, "d", COMPARISON)] == [second]
        assert [run.info.run_id for run in all_runs(tracker, ViewType.DELETED_ONLY)] == [first]  # superseded

    for deleted in (parent, second):
        client.delete_run(deleted)
        publish_again()
    client.delete_experiment(client.get_experiment_by_name(experiment_name("d")).experiment_id)
    publish_again()


def _files(tracker: Tracker, run_id: str) -> set[str]:
    folders = (None, "figures", "steps/train", "steps/embed")
    return {entry.path for folder in folders for entry in client_of(tracker).list_artifacts(run_id, folder)}


@pytest.mark.parametrize("lost", ["all files", "the model's files", "the model", "an embedding"])
def test_what_is_lost_of_a_published_run_is_published_again_after_the_run_is_deleted(
    tracker: Tracker, report: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """By a user, or a bucket's rule that deletes files by age."""
    validated = other(tracker, report, report.identity, "softtriple", 0, 0.5, 0.4, with_model=True)
    run_id, client = tracker.publish(validated), client_of(tracker)
    assert run_id is not None
    tracker.publish(comparison())
    files, counted = _files(tracker, run_id), points(tracker, run_id)
    model_id = find_model(client, client.get_run(run_id))
    if lost == "the model":
        client.delete_logged_model(model_id)
        assert tracker.publish(comparison()) is not None, "the comparison is published without it"
        assert "Model: MLflow has no model of the best run: softtriple, seed 0" in parent_of(tracker).data.tags[Tag.NOTE]
    else:
        (model,) = (tmp_path / "mlartifacts/d").glob(f"**/{model_id}")
        embedding = next((tmp_path / f"mlartifacts/d/{run_id}/artifacts/steps/embed").glob("*.npy"))
        gone = {"all files": tmp_path / "mlartifacts", "the model's files": model, "an embedding": embedding}[lost]
        gone.unlink() if gone.is_file() else shutil.rmtree(gone)
    client.delete_run(run_id)  # so that the next command publishes it
    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "_log_files", lambda *_: (_ for _ in ()).throw(MlflowException("the server is gone")))
        assert tracker.publish(validated) is None
    assert current_identities(tracker) == set(), "not before all is there"
    assert tracker.sync() == 1
    assert tracker.publish(comparison()) is not None
    assert [run.run_id for run in published_runs(tracker.uri, "d", COMPARISON)] == [run_id]
    assert _files(tracker, run_id) == files
    assert {name: count for name, count in points(tracker, run_id).items() if "/" in name} == {
        name: count for name, count in counted.items() if "/" in name
    }
    network = Registry(tracker.uri).fetch("models:/dml-d@best", tmp_path / "cache")
    assert load_model(network, "cpu").identity == report.checkpoint.identity
    (again,) = client.search_logged_models([client.get_run(run_id).info.experiment_id])
    assert (again.model_id == model_id) == (lost == "an embedding")
    assert "recall_at_1" in {metric.key for metric in again.metrics}


def test_a_deleted_run_whose_settings_are_used_again_supersedes_its_successor(tracker: Tracker, report: RunReport) -> None:
    first = report.model_copy(update={"scores_only": True})
    deleted = tracker.publish(first)
    client_of(tracker).delete_run(deleted)
    successor = tracker.publish(first.model_copy(update={"identity": "identity-of-y"}))
    assert tracker.publish(first) == deleted
    assert current_identities(tracker) == {first.identity}
    assert [run.info.run_id for run in all_runs(tracker, ViewType.DELETED_ONLY)] == [successor]
    assert tracker.publish(comparison()) is not None


def test_an_alarm_stays_in_the_description_when_the_comparison_is_published_again(tracker: Tracker, tmp_path: Path) -> None:
    tracker.publish(comparison())
    plain = parent_of(tracker).data.tags[Tag.NOTE]
    mark_comparisons(tracker.uri, tmp_path, "d", ["drifted."])
    tracker.publish(comparison())
    assert parent_of(tracker).data.tags[Tag.NOTE] == f"Not reproduced: drifted.\n\n{plain}"
    mark_comparisons(tracker.uri, tmp_path, "d", [])
    tracker.publish(comparison())
    assert parent_of(tracker).data.tags[Tag.NOTE] == plain


def test_a_run_that_older_code_made_is_tagged_until_it_is_not(tracker: Tracker, scored: RunReport) -> None:
    run_id = tracker.publish(scored)
    assert run_id is not None
    assert current_identities(tracker) == {scored.identity}
    recorded = points(tracker, run_id)
    file = "dml_core/losses/softtriple.py"
    assert tracker.publish(scored.model_copy(update={"tags": scored.tags | {"older_code": file}})) == run_id
    assert client_of(tracker).get_run(run_id).data.tags["dml.older_code"] == file
    assert current_runs(tracker.uri, "d", COMPARISON) == {}, "so that it is published again, and the tag goes"
    assert tracker.publish(scored) == run_id
    assert "dml.older_code" not in client_of(tracker).get_run(run_id).data.tags
    assert current_identities(tracker) == {scored.identity}
    assert points(tracker, run_id) == recorded


def test_a_published_run_gets_the_tags_of_a_later_version_and_is_in_its_comparison(
    tracker: Tracker, report: RunReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--code keep` it was left out for ever, as measured with other settings; a search for the new tag found no earlier run."""
    run = report.model_copy(update={"scores_only": True})
    run_id, client = tracker.publish(run), client_of(tracker)
    today = settings_identity(report.parameters["training"], report.parameters["evaluation"], report.dataset.digest, {})
    client.set_tag(run_id, Tag.SETTINGS, "of an earlier version")
    client.set_tag(run_id, "dml.git_commit", "earlier")
    published_tags = child_run.published_tags
    monkeypatch.setattr(child_run, "published_tags", lambda *given: published_tags(*given) | {"dml.train_images": "60"})
    client.delete_run(run_id)  # as docs/how-to/contribute.md says
    assert tracker.publish(run) == run_id
    tags = client.get_run(run_id).data.tags
    assert (tags["dml.train_images"], tags["dml.git_commit"]) == ("60", "earlier")
    tracker.publish(comparison().model_copy(update={"settings": {report.variant: today}, "is_one_protocol": True}))
    assert variants_in_view(tracker).keys() == {report.variant}


def test_seeds_of_older_code_are_marked_once_another_seed_of_their_variant_runs_again(
    tracker: Tracker, report: RunReport, tmp_path: Path, store: Store
) -> None:
    """After an edit of a loss and a run of seed 0, the mean had seeds of both codes without a word."""

    def run(seed: int, recall: float) -> RunReport:
        return other(tracker, report, real_identity(report, seed), report.variant, seed, recall)

    def publish(one: RunReport) -> None:
        Tracker(tracker.uri, tmp_path, store).publish(one)  # each in a process of its own, as after an edit

    def remarks() -> list[str]:
        return older_code_lines("d", published_runs(tracker.uri, "d", COMPARISON))

    before = [run(seed, 0.5) for seed in range(3)]
    for one in before:
        publish(one)
    for published in published_runs(tracker.uri, "d", COMPARISON):
        client_of(tracker).log_param(published.run_id, "operator", "a user's own")
    assert remarks() == []
    with pytest.MonkeyPatch.context() as edit:
        edit.setattr(identities, "source_digest", lambda modules: "edited")
        publish(run(0, 0.9))
        assert remarks() == ["softtriple on d, seeds 1, 2: made by other code: files not recorded"]
        publish(run(1, 0.9))
        assert remarks() == ["softtriple on d, seed 2: made by other code: files not recorded"]
    publish(before[0])  # the edit is undone
    assert remarks() == ["softtriple on d, seed 1: made by other code: files not recorded"]


@pytest.mark.parametrize("tag", [Tag.SEED, Tag.VARIANT, Tag.IDENTITY])
def test_a_run_whose_tag_was_deleted_in_mlflow_is_left_out_with_a_warning_and_stops_nothing(
    tracker: Tracker, report: RunReport, caplog: pytest.LogCaptureFixture, tag: str
) -> None:
    runs = [other(tracker, report, real_identity(report, seed), report.variant, seed, 0.5) for seed in range(2)]
    edited, _ = (tracker.publish(run) for run in runs)
    client = client_of(tracker)
    tracker.publish(comparison())
    (of_variant,) = client.search_runs([client.get_run(edited).info.experiment_id], f"tags.`{Tag.SUMMARY}` = '{COMPARISON}'")
    client.delete_tag(edited, tag)
    client.delete_tag(of_variant.info.run_id, Tag.VARIANT)
    assert current_identities(tracker) - {""} == {runs[1].identity}, "so that the next flow publishes the other again"
    assert (f"run {edited} in MLflow is left out: its tag dml.variant or dml.seed was deleted" in caplog.text) == (tag != Tag.IDENTITY)
    for record in (runs[1], comparison()):
        assert Tracker(tracker.uri, tracker._state, tracker._store).publish(record) is not None
    again = tracker.publish(runs[0])
    assert (again == edited) == (tag == Tag.SEED), "a seed is set again"
    if tag == Tag.VARIANT:
        client.delete_run(edited)  # as the warning says
    assert current_identities(tracker) == {run.identity for run in runs}
    caplog.clear()
    assert tracker.publish(comparison()) is not None
    assert not caplog.messages
    assert variants_in_view(tracker)[report.variant]["num_seeds"] == 2


def real_identity(report: RunReport, seed: int) -> str:
    """Return the identity that the present code gives the report's run with another seed."""
    scored = identities.step_identities(spec_of(report).model_copy(update={"seed": seed}), report.dataset)["evaluate"]
    return identities.identity_in(COMPARISON, scored)


def test_a_run_that_ran_again_with_other_scores_replaces_the_one_of_before(tracker: Tracker, report: RunReport) -> None:
    """With `--force`, on a GPU or after a change of the environment, the same steps give other scores."""
    before, after = (other(tracker, report, report.identity, report.variant, 0, recall) for recall in (0.25, 0.5))
    first, second = tracker.publish(before), tracker.publish(after)
    assert first != second
    (run,) = published_runs(tracker.uri, "d", COMPARISON)
    assert (run.run_id, run.metrics["recall_at_1"]) == (second, 0.5)
    assert [run.info.run_id for run in all_runs(tracker, ViewType.DELETED_ONLY)] == [first]
    assert tracker.publish(after) == second
    assert tracker.publish(before) == first, "it comes back"
    assert [run.run_id for run in published_runs(tracker.uri, "d", COMPARISON)] == [first]


def test_runs_of_another_folder_are_replaced_with_one_warning(
    tracker: Tracker, report: RunReport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As those of another project, which shares the server: each project has one warning."""
    elsewhere = report.dataset.model_copy(update={"folder": str(shutil.copytree(report.dataset.folder, tmp_path / "elsewhere"))})
    own = [other(tracker, report, f"own-{seed}", "softtriple", seed, 0.5) for seed in range(2)]
    theirs = [
        other(tracker, report, f"theirs-{seed}", "softtriple", seed, 0.6).model_copy(update={"dataset": elsewhere}) for seed in range(2)
    ]
    for run in (*own, other(tracker, report, "own-again", "softtriple", 0, 0.7)):
        tracker.publish(run)
    assert not caplog.messages, "its own runs"
    second = Tracker(tracker.uri, tmp_path, tracker._store)
    for run in theirs:
        second.publish(run)
    for run in own:
        Tracker(tracker.uri, tmp_path, tracker._store).publish(run)
    own_again = other(tracker, report, "own-again", "softtriple", 0, 0.8)
    Tracker(tracker.uri, tmp_path, tracker._store).publish(own_again)
    assert len(caplog.messages) == 3, "one of the other project; seeds 0 and 1 of this one, from separate processes"
    assert all(f"runs of '{COMPARISON}' that were published from another folder are replaced" in line for line in caplog.messages)


@pytest.mark.proof
def test_projects_that_share_a_server_see_only_their_workspace(
    report: RunReport, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    places = ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "artifacts")]
    command = [sys.executable, "-m", "mlflow", "server", "--enable-workspaces", "--port", str(port), "--workers", "1", *places]
    with (tmp_path / "log").open("w") as log:
        started = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while not answers(uri):
            assert started.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.5)
        for place, workspace in enumerate(("birds", "shoes")):
            MlflowClient(uri).create_workspace(workspace)
            monkeypatch.setenv("MLFLOW_WORKSPACE", workspace)
            tracker = Tracker(uri, tmp_path / workspace, store)
            for seed in range(2 - place):
                assert tracker.publish(other(tracker, report, f"{workspace}-{seed}", "softtriple", seed, 0.5, 0.4, with_model=True))
            assert tracker.publish(comparison())
        assert not [line for line in caplog.messages if "replaced" in line]
        for workspace, num_runs in (("birds", 2), ("shoes", 1)):
            monkeypatch.setenv("MLFLOW_WORKSPACE", workspace)
            identities = [f"{workspace}-{seed}" for seed in range(num_runs)]
            assert [run.tags[Tag.IDENTITY] for run in published_runs(uri, "d", COMPARISON)] == identities
            assert [version.name for version in registered_versions(uri)] == ["dml-d"]
            assert Registry(uri).logged(Tag.IDENTITY, "shoes-0") is None or workspace == "shoes"
            assert standing_comparisons(uri).keys() == {"d"}
    finally:
        for process in [*psutil.Process(started.pid).children(recursive=True), psutil.Process(started.pid)]:
            process.kill()
        started.wait()


def test_variants_and_datasets_that_share_an_identity_are_all_there(tracker: Tracker, report: RunReport) -> None:
    """The identity is of settings and data: it does not have the variant's name, nor the dataset's."""
    renamed = {"dataset": report.dataset.model_copy(update={"name": "e"}), "comparison": "comparison on e"}
    of_one_identity = [report, report.model_copy(update={"variant": "twin"}), report.model_copy(update=renamed)]
    numbers = [tracker.publish(each) for each in of_one_identity]
    assert [run.variant for run in published_runs(tracker.uri, "d", COMPARISON)] == ["softtriple", "twin"]
    assert [run.run_id for run in published_runs(tracker.uri, "e", "comparison on e")] == numbers[2:]
    assert current_runs(tracker.uri, "d", COMPARISON).keys() == {(report.identity, "softtriple"), (report.identity, "twin")}
    assert [tracker.publish(each) for each in of_one_identity] == numbers


def test_after_its_experiment_is_renamed_a_comparison_is_published_again_beside_it(tracker: Tracker, scored: RunReport) -> None:
    first, client = tracker.publish(scored), client_of(tracker)
    parent = tracker.publish(comparison())
    experiment = client.get_run(first).info.experiment_id
    client.rename_experiment(experiment, experiment_name("d-in-may"))
    assert published_runs(tracker.uri, "d", COMPARISON) == []
    assert search_published(tracker.uri, "d", COMPARISON) == []
    second = tracker.publish(scored)
    assert tracker.publish(comparison()) not in (None, parent)
    assert [run.run_id for run in published_runs(tracker.uri, "d", COMPARISON)] == [second]
    assert variants_in_view(tracker).keys() == {"softtriple"}
    assert client.get_run(first).info.lifecycle_stage == "active", "the renamed experiment stays as it is"


def test_a_comparison_of_many_settings_has_a_name_that_postgresql_takes_and_is_found_again(tracker: Tracker, report: RunReport) -> None:
    """SQLite takes any."""
    title = ", ".join([COMPARISON, *(f"comparison.protocol.setting_{number}={number}" for number in range(20))])
    run_id = tracker.publish(report.model_copy(update={"comparison": title, "scores_only": True}))
    parent = tracker.publish(comparison().model_copy(update={"comparison": title}))
    run = client_of(tracker).get_run(parent)
    assert (run.info.run_name, run.data.tags[Tag.COMPARISON]) == (title[:250], title)
    assert client_of(tracker).get_run(run_id).data.tags[Tag.PARENT] == parent


def test_two_processes_that_publish_the_same_run_at_once_leave_one(
    tracker: Tracker, report: RunReport, tmp_path: Path, store: Store
) -> None:
    summary = ComparisonReport(comparison=COMPARISON, dataset="d", role="test", folder=None, tags={})
    found: list[tuple[str | None, str | None]] = []

    def publish(own: Tracker) -> None:
        found.append((own.publish(report), own.publish(summary)))

    threads = [threading.Thread(target=publish, args=(Tracker(tracker.uri, tmp_path, store),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1, found
    assert None not in found[0]
    client = client_of(tracker)
    (experiment,) = client.search_experiments(filter_string="name LIKE 'dml-repro/%'")
    assert len(client.search_runs([experiment.experiment_id], "", ViewType.ALL)) == 3  # the run, its parent, and its variant's means
    assert list((tmp_path / "outbox").iterdir()) == []


def test_a_comparison_registers_the_model_that_held_out_classes_choose(tracker: Tracker, report: RunReport, tmp_path: Path) -> None:
    """On the test classes a, seed 1 is best; on the held-out training classes b is, with seed 0."""
    (tmp_path / "report").mkdir()
    (tmp_path / "report/report.md").write_text("# report")
    scores = (("a", 0, 0.25, 0.3), ("a", 1, 0.75, 0.9), ("b", 0, 0.4, 0.8), ("b", 1, 0.4, 0.6), ("c", 0, 0.2, None))
    for number, values in enumerate(scores):
        tracker.publish(other(tracker, report, f"identity-{number}", *values, with_model=number in (1, 2)))  # each is the best one once
    client = client_of(tracker)
    parent_id = tracker.publish(comparison(tmp_path / "report"))
    parent = parent_of(tracker)
    assert parent.info.run_id == parent_id
    assert parent.data.metrics == {}, "its page would draw a chart of one bar for each"
    note, page = (found["mlflow.note.content"] for found in (parent.data.tags, client.get_experiment(parent.info.experiment_id).tags))
    assert note.index("| a | 50.0 |") < note.index("| b | 40.0 |")
    runs = published_runs(tracker.uri, "d", COMPARISON)
    told = compare_published("d", runs)
    assert told is not None
    assert all(part in note for part in told.sentence.partition(". ")[::2])
    assert told.sentence in page
    of_run = {(run.variant, run.seed): run.run_id for run in runs}
    links = {f"#/experiments/{parent.info.experiment_id}/runs/{of_run[place]}?workflowType=machine_learning": place for place in of_run}
    assert {place for link, place in links.items() if link in note} == {("a", 1), ("b", 0), ("c", 0)}, "each variant's, by the same rule"
    assert page.startswith("Best mean R@1"), page
    assert note.startswith(told.sentence.partition(". ")[0])
    said = f"est run: b, seed 0: {RULE} (validation Recall@1 by cosine: mean 70.0, this seed 80.0)"
    assert said in note
    assert said in page
    assert "report.md" in [item.path for item in client.list_artifacts(parent_id)]
    version = client.get_model_version_by_alias("dml-d", "best")
    assert (str(version.version), version.run_id, version.description) == ("1", of_run["b", 0], f"Registered as the b{said}")

    counted = points(tracker, parent_id)
    assert tracker.publish(comparison(tmp_path / "report")) == parent_id
    assert points(tracker, parent_id) == counted
    assert len(client.search_model_versions("name = 'dml-d'")) == 1
    tracker.publish(other(tracker, report, "identity-5", "a", 0, 0.1, 0.8))
    tracker.publish(comparison(tmp_path / "report"))
    assert "| a | 42.5 |" in parent_of(tracker).data.tags["mlflow.note.content"]
    version = client.get_model_version_by_alias("dml-d", "best")
    assert (str(version.version), version.run_id) == ("2", of_run["a", 1])
    tracker.publish(other(tracker, report, "identity-0", *scores[0]))
    tracker.publish(comparison(tmp_path / "report"))
    assert str(client.get_model_version_by_alias("dml-d", "best").version) == "1"
    assert len(client.search_model_versions("name = 'dml-d'")) == 2


def test_a_comparison_that_holds_out_no_classes_registers_no_model(tracker: Tracker, report: RunReport) -> None:
    tracker.publish(other(tracker, report, "x-0", "a", 0, 0.9, with_model=True))
    tracker.publish(comparison())
    assert f"Model: {NO_BEST}" in parent_of(tracker).data.tags["mlflow.note.content"]
    assert client_of(tracker).search_registered_models() == []


def test_runs_on_other_data_or_of_other_settings_are_left_out_of_means_best_and_view(tracker: Tracker, report: RunReport) -> None:
    before, newer = report.dataset.model_copy(update={"digest": "fedcba"}), report
    older = report.model_copy(update={"dataset": before, "scores_only": True})
    longer = newer.model_copy(update={"parameters": {**report.parameters, "training": {**report.parameters["training"], "num_epochs": 9}}})
    measured = newer.model_copy(update={"parameters": {**report.parameters, "measurements": {"pair_cosines": {"epsilon": 0.5}}}})
    made = {  # name -> (the run it copies, variant, seed, recall, validation)
        "old-0": (older, "a", 0, 0.9, 0.9),
        "old-1": (older, "b", 1, 0.8, 0.8),
        "new-1": (newer, "a", 1, 0.5, 0.5),
        "new-2": (newer, "b", 0, 0.4, 0.4),
        "longer": (longer, "b", 2, 0.7, 0.95),
        "measured": (measured, "a", 2, 0.7, 0.95),
    }
    for identity, (of, *values) in made.items():
        tracker.publish(other(tracker, of, identity, *values, with_model=True))
    settings = settings_identity(report.parameters["training"], report.parameters["evaluation"], report.dataset.digest, {})
    today = {"digest": report.dataset.digest, "settings": {"a": settings, "b": settings}, "is_one_protocol": True}
    tracker.publish(comparison().model_copy(update=today))
    client, parent = client_of(tracker), parent_of(tracker)
    note = parent.data.tags["mlflow.note.content"]
    assert {variant: metrics["recall_at_1"] for variant, metrics in variants_in_view(tracker).items()} == {"a": 0.5, "b": 0.4}
    for line in (
        "- left out: a on d, seed 0: measured on other data than the present",
        "- left out: b on d, seed 1: measured on other data than the present",
        "- left out: a on d, seed 2: measured with other settings",
        "- left out: b on d, seed 2: measured with other settings",
    ):
        assert line in note
    of_run = {(run.variant, run.seed): run.run_id for run in published_runs(tracker.uri, "d", COMPARISON)}
    assert client.get_model_version_by_alias("dml-d", "best").run_id == of_run["a", 1]
    tracker.publish(comparison().model_copy(update=today | {"settings": {"a": settings}, "digest": "fedcba"}))
    assert variants_in_view(tracker) == {}, "b has no mean; of the digest of before a has other settings than those of today"


def variants_in_view(tracker: Tracker) -> dict[str, dict[str, float]]:
    """Return variant -> metrics in the saved view, by MLflow's own search."""
    client = client_of(tracker)
    experiment = client.get_experiment_by_name(experiment_name("d"))
    state = json.loads(json.loads(experiment.tags["mlflow.sharedViewState.variants"])["state"])
    assert "groupBy" not in state, "MLflow would average the 100 runs that its page has loaded"
    found = client.search_runs([experiment.experiment_id], state["searchFilter"])
    assert len(found) == len({run.data.tags[Tag.VARIANT] for run in found})
    return {run.data.tags[Tag.VARIANT]: run.data.metrics for run in found}


def test_the_saved_view_has_every_variant_s_mean_and_nothing_of_other_comparisons(tracker: Tracker, report: RunReport) -> None:
    for number, values in enumerate((("a", 0, 0.2), ("a", 1, 0.4), ("b", 0, 0.5))):
        tracker.publish(other(tracker, report, f"view-{number}", *values))
    trial = "comparison on d, comparison.protocol.num_epochs=1"
    tracker.publish(other(tracker, report, "trial", "a", 0, 0.9).model_copy(update={"comparison": trial}))
    tracker.publish(comparison().model_copy(update={"comparison": trial}))
    tracker.publish(comparison())
    found = variants_in_view(tracker)
    assert {variant: (metrics["recall_at_1"], metrics["num_seeds"]) for variant, metrics in found.items()} == {
        "a": (pytest.approx(0.3), 2),
        "b": (0.5, 1),
    }
    assert [run.variant for run in published_runs(tracker.uri, "d", COMPARISON)] == ["a", "a", "b"], "means are no runs"
    assert current_identities(tracker) == {f"view-{number}" for number in range(3)}
    tracker.publish(comparison().model_copy(update={"settings": {"b": "other"}, "is_one_protocol": True}))
    assert variants_in_view(tracker) == {}, "no run has today's settings, so there is no mean to show"
    tracker.publish(other(tracker, report, "view-3", "c", 0, 0.6))
    tracker.publish(comparison())
    assert variants_in_view(tracker).keys() == {"a", "b", "c"}


def test_a_host_whose_clock_is_behind_publishes_means_that_are_shown(
    tracker: Tracker, report: RunReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = report.model_copy(update={"scores_only": True})
    clocks = (3600, 0, -3600)  # of hosts that publish one after the other
    for seed, ahead in enumerate(clocks):
        tracker.publish(other(tracker, scored, f"clock-{seed}", "a", seed, (seed + 1) / 10))
        monkeypatch.setattr("tasks.tracking.comparison_run.time", SimpleNamespace(time=lambda ahead=ahead: time.time() + ahead))
        tracker.publish(comparison())
        (shown,) = variants_in_view(tracker).values()
        assert (shown["num_seeds"], shown["recall_at_1"]) == (seed + 1, pytest.approx((seed + 2) / 20))


def test_what_is_there_again_when_an_experiment_is_restored_is_put_away_by_the_next_comparison(tracker: Tracker, report: RunReport) -> None:
    """MLflow restores all of its runs: superseded ones, one that the user had deleted, and a mean."""
    client = client_of(tracker)
    for identity, variant, recall in (("old-a", "a", 0.2), ("new-a", "a", 0.6), ("old-b", "b", 0.3)):
        run_id = tracker.publish(other(tracker, report, identity, variant, 0, recall))
    client.delete_run(run_id)
    tracker.publish(other(tracker, report, "new-b", "b", 0, 0.5))
    parent = tracker.publish(comparison())
    experiment = client.get_run(parent).info.experiment_id
    (of_a,) = client.search_runs([experiment], f"tags.`{Tag.SUMMARY}` = '{COMPARISON}' and tags.`{Tag.VARIANT}` = 'a'")
    client.delete_run(of_a.info.run_id)
    tracker.publish(comparison())
    client.delete_experiment(experiment)
    client.restore_experiment(experiment)
    assert current_identities(tracker) == {"new-a", "old-b", "new-b"}
    tracker.publish(comparison())
    assert current_identities(tracker) == {"new-a", "new-b"}
    assert not client.search_runs([experiment], f"tags.`{Tag.PUBLISHED}` = 'superseded'")
    assert {variant: metrics["recall_at_1"] for variant, metrics in variants_in_view(tracker).items()} == {"a": 0.6, "b": 0.5}


def test_a_run_is_running_until_all_of_it_is_published_and_keeps_a_user_s_description(
    tracker: Tracker, report: RunReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as at_files:
        at_files.setattr(Tracker, "_log_files", killed)
        with pytest.raises(KeyboardInterrupt):
            tracker.publish(report)
    (run,) = [run for run in all_runs(tracker) if Tag.IDENTITY in run.data.tags]
    assert run.info.status == "RUNNING", "logging a model ends it"
    client_of(tracker).set_tag(run.info.run_id, Tag.NOTE, "mine")
    assert tracker.publish(report) == run.info.run_id
    run = client_of(tracker).get_run(run.info.run_id)
    assert (run.info.status, run.data.tags[Tag.NOTE]) == ("FINISHED", "mine")


def test_an_experiment_that_another_program_created_is_to_be_renamed(
    tracker: Tracker, report: RunReport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(tracker)
    experiment = client.create_experiment(experiment_name("d"))
    run = other(tracker, report, "x", "a", 0, 0.5)
    assert tracker.publish(run) is None
    assert f"not to {tmp_path}/mlartifacts/d: another program created it; rename it in MLflow, then dml reproduce" in caplog.text
    client.rename_experiment(experiment, "mine")
    assert tracker.publish(run) is not None


def test_two_current_runs_of_one_variant_and_seed_are_one_line(tracker: Tracker, scored: RunReport) -> None:
    """Two machines that publish the same run at the same moment leave two runs."""
    runs = published_runs(tracker.uri, "d", COMPARISON) if tracker.publish(scored) else []
    twin = PublishedRun("twin", dict(runs[0].metrics), dict(runs[0].tags))
    with pytest.raises(TrackingError, match=r"^MLflow has two runs of softtriple, seed 0 on d \(.* and twin\); delete one there$"):
        comparable_runs("d", [*runs, twin], UNKNOWN)


def test_means_are_the_same_to_the_bit_whichever_seed_ended_first(tracker: Tracker, report: RunReport) -> None:
    """0.1, 0.2 and 0.3 have two sums, depending on the order of addition."""
    assert (0.1 + 0.2) + 0.3 != (0.3 + 0.2) + 0.1
    for variant, order in (("rising", (0, 1, 2)), ("turned", (1, 2, 0)), ("falling", (2, 1, 0))):
        for seed in order:
            tracker.publish(other(tracker, report, f"{variant}-{seed}", variant, seed, (seed + 1) / 10))
    tracker.publish(comparison())
    found = variants_in_view(tracker)
    assert {found[variant]["recall_at_1"] for variant in ("rising", "turned", "falling")} == {((0.1 + 0.2) + 0.3) / 3}


def test_a_server_that_is_away_costs_no_record(tracker: Tracker, scored: RunReport, store: Store, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = Tracker("http://127.0.0.1:9", tmp_path, store)
    LiveCurves(away, COMPARISON, scored.identity, spec_of(scored))(Progress(0, 3, 5, 5, 100.0, {"loss": 9.0}, epoch_ended=True))
    assert away.publish(scored) is None
    assert away.publish(comparison()) is None
    assert tracker.publish(comparison()) is None  # waits with its runs, although this server would accept it
    assert current_runs(away.uri, "d", COMPARISON) == {}
    with pytest.raises(TrackingError, match=r"http://127\.0\.0\.1:9 cannot be used") as caught:
        away.sync()
    assert "\n" not in str(caught.value)
    assert tracker.sync() == 2
    assert [run.variant for run in published_runs(tracker.uri, "d", COMPARISON)] == ["softtriple"]
    assert variants_in_view(tracker).keys() == {"softtriple"}
    assert tracker.sync() == 0


def test_a_damaged_record_is_set_aside_the_rest_is_delivered_and_numbers_come_from_the_checked_file(
    tracker: Tracker, report: RunReport, store: Store, tmp_path: Path
) -> None:
    believed = report.scores.model_copy(update={"metrics": {"recall@1": 0.999}})
    keep_report(tracker.outbox, report.model_copy(update={"scores": believed}))
    of_gone = report.checkpoint.model_copy(update={"files": (report.checkpoint.files[0].model_copy(update={"sha256": "0" * 64}),)})
    waiting = {"gone": keep_report(tracker.outbox, report.model_copy(update={"variant": "gone", "checkpoint": of_gone})).name}
    for how, damage in DAMAGE.items():
        if how != "remove":
            path = keep_report(tracker.outbox, report.model_copy(update={"variant": how}))
            damage(path)
            waiting[how] = f"{path.name}.damaged-1"
    with pytest.raises(TrackingError, match=r"^records delivered: 1, failed: 6: .*changed or gone") as caught:
        tracker.sync()
    assert waiting["flip"] in str(caught.value)
    assert "\n" not in str(caught.value)
    (run_id,) = (run.run_id for run in published_runs(tracker.uri, "d", COMPARISON))
    assert client_of(tracker).get_run(run_id).data.metrics["recall_at_1"] == report.scores.metrics["recall@1"]
    assert sorted(path.name for path in tracker.outbox.iterdir() if not path.name.startswith(".")) == sorted(waiting.values())
    path = keep_report(tracker.outbox, report.model_copy(update={"variant": "flip"}))
    DAMAGE["cut"](path)
    said = rf"{path.name}: damaged, kept as {path.name}\.damaged-2; `dml reproduce` publishes it again"
    with pytest.raises(TrackingError, match=said):
        tracker.sync()
    assert {waiting["flip"], f"{path.name}.damaged-2"} <= {path.name for path in tracker.outbox.iterdir()}


def test_a_run_that_waits_is_replaced_by_a_newer_one_of_its_variant_and_seed(tracker: Tracker, scored: RunReport, store: Store) -> None:
    away = Tracker("http://127.0.0.1:9", tracker.outbox.parent, store)
    assert away.publish(scored) is None
    assert away.publish(scored.model_copy(update={"identity": "of-a-table", "comparison": "a table on d"})) is None
    newer = tracker.publish(scored.model_copy(update={"identity": "newer"}))
    assert tracker.sync() == 1
    assert [run.run_id for run in published_runs(tracker.uri, "d", COMPARISON)] == [newer]
    assert len(published_runs(tracker.uri, "d", "a table on d")) == 1


@pytest.mark.parametrize("is_offline_again", [False, True])
def test_a_record_that_waited_does_not_hide_a_run_that_was_published_meanwhile(
    tracker: Tracker, report: RunReport, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_offline_again: bool
) -> None:
    away, hers = Tracker("http://127.0.0.1:9", tmp_path, store), Tracker(tracker.uri, tmp_path, store)
    hers.outbox = tmp_path / "her outbox"
    mine = {seed: other(tracker, report, f"mine-{seed}", "softtriple", seed, 0.5) for seed in range(3)}
    before = hers.publish(other(tracker, report, "hers-2", "softtriple", 2, 0.4))
    assert [away.publish(run) for run in mine.values()] == [None] * 3
    time.sleep(0.01)
    newer = hers.publish(other(tracker, report, "hers-0", "softtriple", 0, 0.4))
    if is_offline_again:  # nothing ran, and every run is published again
        assert away.publish(mine[0]) is None
    for path in tracker.outbox.glob("*.json"):  # after a copy of the project
        path.touch()
    caplog.clear()
    assert tracker.sync() == 2
    (line,) = [line for line in caplog.messages if "is not delivered" in line]
    assert line.startswith(f"d / softtriple / seed 0: MLflow has a run of '{COMPARISON}' that was published after this record")
    assert current_identities(tracker) == {"hers-0", "mine-1", "mine-2"}
    assert before in {run.info.run_id for run in all_runs(tracker, ViewType.DELETED_ONLY)}, "an older run is replaced"
    assert newer in {run.info.run_id for run in all_runs(tracker)}
    assert not list(tracker.outbox.glob("*.json"))
    assert tracker.publish(mine[0]) is not None, "a command that runs it again"
    assert current_identities(tracker) == {"mine-0", "mine-1", "mine-2"}


def test_a_run_whose_packed_data_is_gone_keeps_no_other_from_being_delivered(tracker: Tracker, report: RunReport, tmp_path: Path) -> None:
    elsewhere = report.dataset.model_copy(update={"folder": str(tmp_path / "gone")})
    variants = [f"v{number}" for number in range(4)]  # so that some record is delivered after the first that cannot be
    for number, variant in enumerate(variants):
        place = {"identity": variant, "variant": variant}
        keep_report(tracker.outbox, report.model_copy(update=place | ({"dataset": elsewhere} if number < 2 else {})))
    with pytest.raises(TrackingError, match=r"^records delivered: 2, failed: 2: .*gone") as caught:
        tracker.sync()
    assert "\n" not in str(caught.value)
    assert [run.variant for run in published_runs(tracker.uri, "d", COMPARISON)] == variants[2:]
    assert len(list(tracker.outbox.glob("*.json"))) == 2


@pytest.mark.parametrize("head", ["linear", "two_layer"])
def test_a_network_is_not_published_with_the_description_of_a_dataset_that_was_prepared_again(
    tracker: Tracker, store: Store, tmp_path: Path, head: str
) -> None:
    folder, options = tmp_path / "packed", SYNTHETIC_OPTIONS
    materialise("synthetic", options, tmp_path / "raw")
    prepare("synthetic", tmp_path / "raw", folder, options)
    model = {"backbone": {"name": "small_cnn", "width": 8}, "head": {"kind": head, "embedding_dim": 8}}
    report = made(folder, store, f"before-{head}", small_training("softmax", model=model), EvaluationConfig())
    keep_report(tracker.outbox, report)
    keep_report(tracker.outbox, other(tracker, report, "of-scores", "contrastive", 3, 0.4))
    options = options | {"num_classes": 14}
    materialise("synthetic", options, tmp_path / "raw-14")
    shutil.rmtree(folder)
    prepare("synthetic", tmp_path / "raw-14", folder, options)
    for num_delivered in (1, 0):
        with pytest.raises(TrackingError, match=rf"^records delivered: {num_delivered}, failed: 1: .*packed: was prepared again"):
            tracker.sync()
    assert [run.variant for run in published_runs(tracker.uri, "d", COMPARISON)] == ["contrastive"]
    experiment = client_of(tracker).get_experiment_by_name(experiment_name("d"))
    assert client_of(tracker).search_logged_models([experiment.experiment_id]) == []


@pytest.mark.parametrize("damage", [None, cut], ids=["its dataset is gone", "damaged"])
def test_a_record_that_cannot_be_delivered_holds_back_no_other_comparison(
    tracker: Tracker, report: RunReport, tmp_path: Path, damage: Callable[[Path], None] | None
) -> None:
    nowhere = report.dataset.model_copy(update={"name": "former", "folder": str(tmp_path / "gone")})
    stuck = keep_report(tracker.outbox, report.model_copy(update={"comparison": "comparison on former", "dataset": nowhere}))
    if damage is not None:
        damage(stuck)
    assert tracker.publish(report.model_copy(update={"scores_only": True})) is not None
    assert tracker.publish(comparison()) is not None
    of_former = ComparisonReport(comparison="comparison on former", dataset="former", role="test", folder=None, tags={})
    assert (tracker.publish(of_former) is None) == (damage is None), "it waits with its run"
    assert stuck.exists()
    with pytest.raises(TrackingError, match=rf"failed: 1: \S*{stuck.name}"):  # the user finds the file, and may delete it
        tracker.sync()
    stuck.unlink(missing_ok=True)
    assert tracker.sync() == (damage is None)
    assert not list(tracker.outbox.glob("*.json"))


def test_a_record_that_mlflow_refuses_holds_back_only_its_own_comparison(tracker: Tracker, report: RunReport, monkeypatch) -> None:
    scores_only = report.model_copy(update={"scores_only": True})
    of_table = {"comparison": "a table on d"}
    refused = keep_report(tracker.outbox, scores_only.model_copy(update={"variant": "a"}))
    for record in (scores_only.model_copy(update=of_table), comparison(), comparison().model_copy(update=of_table)):
        keep_report(tracker.outbox, record)
    assert min(tracker.outbox.glob("*.json")) == refused, "it is the first"
    log_files = Tracker._log_files

    def refuse(self: Tracker, run_id: str, uploaded: RunReport) -> None:
        if uploaded.variant == "a":
            raise MlflowException("the file is too large")
        log_files(self, run_id, uploaded)

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "_log_files", refuse)
        with pytest.raises(TrackingError, match=rf"^records delivered: 2, failed: 1: {refused}: MLflow at .*: the file is too large$"):
            tracker.sync()
    assert published_runs(tracker.uri, "d", COMPARISON) == []
    assert len(published_runs(tracker.uri, "d", "a table on d")) == 1
    assert tracker.sync() == 2, "the run and its comparison"


def test_in_a_project_that_was_moved_records_wait_until_mlflow_has_another_database(
    report: RunReport, store: Store, mlflow_database: Path, tmp_path: Path
) -> None:
    before, after = tmp_path / "before/state", tmp_path / "after/state"
    before.mkdir(parents=True)
    shutil.copy(mlflow_database, before / "mlflow.db")
    first, second = (other(Tracker("", before, store), report, f"moved-{seed}", "a", seed, 0.5) for seed in (0, 1))
    assert Tracker(f"sqlite:///{before / 'mlflow.db'}", before, store).publish(first) is not None
    (tmp_path / "linked").symlink_to(tmp_path / "before")
    linked = Tracker(f"sqlite:///{tmp_path / 'linked/state/mlflow.db'}", tmp_path / "linked/state", store)
    assert linked.publish(first.model_copy(update={"variant": "b"})) is not None, "a link to the project is no other place"
    shutil.move(tmp_path / "before", tmp_path / "after")
    moved = Tracker(f"sqlite:///{after / 'mlflow.db'}", after, store)
    assert moved.publish(second) is None
    assert moved.publish(comparison()) is None
    with pytest.raises(
        TrackingError, match=rf"to {before}/mlartifacts/d, not to {after}/mlartifacts/d: the project was moved; move it back"
    ):
        moved.sync()
    assert not before.exists()
    shutil.copy(mlflow_database, after / "new.db")
    anew = Tracker(f"sqlite:///{after / 'new.db'}", after, store)
    assert anew.publish(first) is not None
    assert anew.sync() == 2
    assert all(client_of(anew).list_artifacts(run.run_id) for run in published_runs(anew.uri, "d", COMPARISON))


def test_a_damaged_record_is_not_overwritten_by_the_same_runs_new_one(report: RunReport, tmp_path: Path) -> None:
    path = keep_report(tmp_path, report)
    DAMAGE["cut"](path)
    damaged = path.read_bytes()
    assert keep_report(tmp_path, report) == path
    assert read_report(path).model_copy(update={"kept_at": None}) == report.model_copy(update={"kept_at": None})
    assert (tmp_path / f"{path.name}.damaged-1").read_bytes() == damaged


def test_a_record_of_a_newer_version_stays_in_the_outbox_and_the_others_are_delivered(tracker: Tracker, scored: RunReport) -> None:
    newer = keep_report(tracker.outbox, scored.model_copy(update={"variant": "newer"}))
    newer.write_text(as_format(newer.read_text(), 9))
    before = newer.read_bytes()
    keep_report(tracker.outbox, scored)
    with pytest.raises(
        TrackingError, match=rf"^records delivered: 1, failed: 1: .*{newer.name}: written by a newer version \(format 9, .* up to 1\)"
    ):
        tracker.sync()
    with pytest.raises(NewerFormatError, match=rf"{newer.name}: written by a newer version"):
        keep_report(tracker.outbox, scored.model_copy(update={"variant": "newer"}))
    assert newer.read_bytes() == before


@pytest.mark.parametrize("how", ["garble", "cut"])
def test_a_damaged_local_database_is_one_line_and_costs_no_record(report: RunReport, store: Store, tmp_path: Path, how: str) -> None:
    path = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE runs (name TEXT)")
        database.executemany("INSERT INTO runs VALUES (?)", [("x" * 100,)] * 500)
        database.commit()
    DAMAGE[how](path)
    damaged = path.read_bytes()
    tracker = Tracker(f"sqlite:///{path}", tmp_path, store)
    assert tracker.publish(report) is None
    assert current_runs(tracker.uri, "d", COMPARISON) == {}
    with pytest.raises(TrackingError, match=r"mlflow\.db cannot be used: .*(malformed|not a database)") as caught:
        tracker.sync()
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == damaged
    assert len(list(tracker.outbox.glob("*.json"))) == 1


@pytest.fixture
def server(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """MLflow's REST interface to the tracker's database, with MLflow's own handlers, in a thread."""
    monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", tracker.uri)
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "unused")
    monkeypatch.setattr(registry_utils, "_registry_uri", None)  # the handlers set it for the whole process
    from mlflow.server import app, handlers

    for name in ("_tracking_store", "_model_registry_store"):
        monkeypatch.setattr(handlers, name, None)  # of an earlier test's database
    served = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.port}"
    served.shutdown()


def test_a_server_a_database_and_mlflow_s_own_client_are_read_alike(tracker: Tracker, report: RunReport, server: str, monkeypatch) -> None:
    tracker.publish(report)
    tracker.publish(other(tracker, report, "identity-of-y", "softmax", 3, 0.5))
    tracker.publish(other(tracker, report, "identity-of-z", "softmax", 3, 0.25))  # supersedes the previous one
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
    by_file, by_rest = published_runs(tracker.uri, "d", COMPARISON), published_runs(server, "d", COMPARISON)
    by_client = in_order(search_published(tracker.uri, "d", COMPARISON))
    assert by_file == by_rest == by_client
    assert (by_file[0].variant, by_file[0].seed, by_file[0].metrics["recall_at_1"]) == ("softmax", 3, 0.25)
    assert published_runs(server, "e", "comparison on e") == []
    assert standing_comparisons(tracker.uri) == standing_comparisons(server) == {}, "only runs are published"
    tracker.publish(comparison())
    expected = {"d": client_of(tracker).get_experiment_by_name(experiment_name("d")).experiment_id}
    assert standing_comparisons(tracker.uri) == standing_comparisons(server) == expected
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "name")
    assert standing_comparisons(server) == expected


def test_a_published_run_stays_whole_where_its_bucket_is_another_one_and_is_completed_where_it_was_emptied(
    tracker: Tracker, report: RunReport, server: str, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's server names a bucket but no S3 server; another one lists nothing in its own bucket of that name."""
    client = MlflowClient(server)
    client.create_experiment(experiment_name("d"), artifact_location=f"s3://{s3_bucket}/mlflow")
    mine = Tracker(server, tmp_path, tracker._store)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        _cached_get_s3_client.cache_clear()
        assert mine.publish(report) is None
    _cached_get_s3_client.cache_clear()
    assert mine.sync() == 1, "what a bucket that is away does not take waits for it"
    (run_id,) = (run.run_id for run in search_published(server, "d", COMPARISON))
    before = client.get_run(run_id)
    _cached_get_s3_client.cache_clear()
    nothing = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    empty = make_server("127.0.0.1", 0, lambda _, start: (start("200 OK", [("Content-Type", "application/xml")]), [nothing])[1])
    threading.Thread(target=empty.serve_forever, daemon=True).start()
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{empty.port}")
        patch.setattr(connection, "may_have", lambda *_: True)  # as a server in another process, with another S3 server, would answer
        for published in ("true", "superseded"):
            client.set_tag(run_id, Tag.PUBLISHED, published)
            assert mine.publish(report) is None
            with pytest.raises(
                TrackingError, match=rf"the files of run {run_id} in s3://\S+ cannot be seen with this machine's AWS_ENDPOINT"
            ):
                mine.sync()
            assert client.get_run(run_id).data.tags[Tag.PUBLISHED] == published
            assert find_model(client, before) is not None
    empty.shutdown()
    _cached_get_s3_client.cache_clear()
    assert mine.sync() == 1
    assert mine.publish(report) == run_id
    assert client.get_run(run_id).outputs.model_outputs == before.outputs.model_outputs
    assert connection.may_have(server, run_id, "config.yaml")
    bucket = boto3.resource("s3").Bucket(s3_bucket)
    bucket.objects.delete()  # as if the stack's S3 server, whose objects are in memory, were started again
    assert not connection.may_have(server, run_id, "config.yaml")
    assert mine.publish(report) == run_id
    assert connection.may_have(server, run_id, "config.yaml")
    assert find_model(client, client.get_run(run_id)) is not None


def test_versions_are_read_alike_from_a_server_a_database_and_by_mlflow_s_own_client(tracker: Tracker, server: str, monkeypatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
    client = MlflowClient(tracker.uri, registry_uri=tracker.uri)
    for name, num_versions in (("dml-d", 11), ("dml-d-val", 1), ("dml-d.promotion", 1), ("other", 1), ("dml-empty", 0)):
        client.create_registered_model(name)
        for number in range(num_versions):
            client.create_model_version(name, f"s3://models/m-{number}", run_id="0" * 32)
    client.set_model_version_tag("dml-d", "2", "dml.gate", "better")
    client.set_model_version_tag("dml-d", "2", "another", "x")
    for alias, number in (("champion", "2"), ("best", "2"), ("old", "10")):
        client.set_registered_model_alias("dml-d", alias, number)
    client.delete_model_version("dml-d", "3")
    by_file, by_rest = registered_versions(tracker.uri), registered_versions(server)
    assert [(version.name, version.number) for version in by_file] == [
        *(("dml-d", str(number)) for number in (1, 2, *range(4, 12))),
        ("dml-d-val", "1"),
    ]
    assert by_file[1] == Version("dml-d", "2", ("best", "champion"), "s3://models/m-1", "0" * 32, "better")
    assert by_file[8].aliases == ("old",)
    assert by_file[0] == Version("dml-d", "1", (), "s3://models/m-0", "0" * 32, None)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")  # only MLflow's own client can log in
    assert by_file == by_rest == registered_versions(server)
    assert registered_versions(tracker.uri, "other") == []
    assert {version.name for version in registered_versions(tracker.uri, "d")} == {"dml-d"}, "another dataset's name begins like it"
    of_validation = registered_name("d", "validation")
    assert of_validation != registered_name("d-validation", "test"), "the model of another dataset"
    client.create_registered_model(of_validation)
    client.create_model_version(of_validation, "s3://models/m", run_id="0" * 32)
    assert {version.name for version in registered_versions(tracker.uri, "d")} == {"dml-d", of_validation}


def test_a_database_before_the_first_run_has_no_versions(tmp_path: Path) -> None:
    assert registered_versions(f"sqlite:///{tmp_path}/missing.db") == []
    (tmp_path / "empty.db").touch()
    assert registered_versions(f"sqlite:///{tmp_path}/empty.db") == []


def test_compare_and_an_empty_sync_import_nothing_heavy(tracker: Tracker, scored: RunReport, tmp_path: Path) -> None:
    tracker.publish(scored)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    code = """
import json, sys
from flows.cli.app import app
from tasks.environment import find_project
for words in (["sync"], ["compare", "d"]):
    app(words, standalone_mode=False)
print(json.dumps(sorted({"mlflow", "torch", "pandas", "prefect", "ray", "matplotlib", "sqlalchemy"} & set(sys.modules))))
"""
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "DML_STATE": str(tmp_path / "state"), "MLFLOW_TRACKING_URI": tracker.uri}
    printed = subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert json.loads(printed.splitlines()[-1]) == []
    assert f"{100 * scored.scores.metrics['recall@1']:.1f}" in printed


def test_a_port_in_use_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.cli.tracking import ui

    (tmp_path / "params.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(TrackingError, match=r"cannot be used \(Address already in use\); choose another: dml ui --port"):
            ui(None, taken.getsockname()[1])


def test_the_packaged_model_gives_the_run_s_embeddings_in_a_fresh_process(
    tracker: Tracker, report: RunReport, store: Store, packed: Path, tmp_path: Path
) -> None:
    run_id = tracker.publish(report)
    (model,) = client_of(tracker).search_logged_models([client_of(tracker).get_run(run_id).info.experiment_id])
    dataset = PackedDataset(packed, "test")
    for index in range(3):
        (tmp_path / f"{index}.jpg").write_bytes(dataset.raw_bytes(index))
    (weights,) = (tmp_path / "mlartifacts").rglob("network.pt")
    assert not [*(tmp_path / "mlartifacts").rglob("*.pyc")]
    code = f"""
import mlflow, numpy, pandas
mlflow.set_tracking_uri({tracker.uri!r})
model = mlflow.pyfunc.load_model("models:/{model.model_id}", suppress_warnings=True)
images = [open({str(tmp_path)!r} + f"/{{index}}.jpg", "rb").read() for index in range(3)]
rows = model.predict(pandas.DataFrame({{"image": images}}))
numpy.save({str(tmp_path / "served.npy")!r}, rows)
network = model.unwrap_python_model().model
assert "artifacts" in network.embed.__code__.co_filename, network.embed.__code__.co_filename
import base64
from fastapi.testclient import TestClient
from mlflow.pyfunc.scoring_server import init
client = TestClient(init(model), raise_server_exceptions=False)
text = [base64.b64encode(image).decode() for image in images]
asked = [("application/json", '{{"dataframe_split": {{"columns": ["image"], "data": [["%s"]]}}}}'), ("text/csv", "image\\n%s\\n")]
for kind, body in asked:
    answer = client.post("/invocations", content=body % text[0], headers={{"Content-Type": kind}})
    numpy.testing.assert_allclose(answer.json()["predictions"], rows[:1], atol=1e-5)
    answer = client.post("/invocations", content=body % {str(tmp_path / "0.jpg")!r}, headers={{"Content-Type": kind}})
    assert answer.status_code != 200, "a client has read a file of the server"
lines = base64.encodebytes(images[0]).decode()  # as `base64` writes them; of JSON MLflow itself decodes them
answer = client.post("/invocations", content='image\\n"%s"\\n' % lines, headers={{"Content-Type": "text/csv"}})
numpy.testing.assert_allclose(answer.json()["predictions"], rows[:1], atol=1e-5)
open({str(weights)!r}, "r+b").write(b"damaged")  # weights are verified by hash before they are loaded
mlflow.pyfunc.load_model("models:/{model.model_id}", suppress_warnings=True)
"""
    ran = subprocess.run([sys.executable, "-P", "-c", code], check=False, cwd=tmp_path, capture_output=True, text=True)
    assert "network.pt: the network's file is damaged" in ran.stderr, ran.stderr
    expected, _ = load_embeddings(store.folder("embed/x"), "test")
    np.testing.assert_allclose(np.load(tmp_path / "served.npy"), expected[:3], atol=1e-5)
    requirements = (Path(mlflow.artifacts.download_artifacts(f"models:/{model.model_id}")) / "requirements.txt").read_text()
    assert f"torch=={torch.__version__.partition('+')[0]}" in requirements
    raw = PackedDataset(packed, "train").raw_bytes(0)
    line = base64.encodebytes(raw).splitlines()[len(raw) // 114]  # from its middle
    files = [path.read_bytes() for path in Path(mlflow.artifacts.download_artifacts(f"models:/{model.model_id}")).rglob("*.json")]
    assert len(files) >= 3, "the examples and the network's description"
    assert not any(line in file or raw in file for file in files), "an image of the dataset"
    with zipfile.ZipFile(Path(mlflow.artifacts.download_artifacts(f"models:/{model.model_id}")) / "code" / "dml_core.zip") as code_files:
        names = {name.removeprefix("dml_core/") for name in code_files.namelist()}
    assert {"models/embedder.py", "models/backbones/small.py", "data/store/decode.py"} <= names
    assert {path.partition("/")[0] for path in names if "/" in path} == {"models", "data"}
    assert "models/backbones/resnet.py" not in names
