"""The registry's gate on a real MLflow: a worse network is refused with the interval, and there is one champion."""

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
import yaml
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from scipy import stats

from dml_core import load_model
from dml_core.errors import ConfigError, TrackingError
from dml_core.evaluation.evaluator import ClassRecall
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.registry import build_backbone
from tasks.environment import Project
from tasks.models import listing, lookup, promotion
from tasks.models.listing import list_models
from tasks.models.lookup import find_run, resolve_model
from tasks.models.promotion import gain_by_class, level_of, promote
from tasks.runs.best import NO_BEST, RULE, VALIDATION
from tasks.runs.embeddings import load_embeddings
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import RunReport
from tasks.runs.specs import Params
from tasks.storage import Store
from tasks.tracking.child_run import SUPERSEDED
from tasks.tracking.registered import Registry
from tasks.tracking.tags import Tag
from tasks.tracking.tracker import Tracker
from tasks.tracking.versions import registered_versions
from tests.conftest import ROOT
from tests.tasks.models.conftest import make_run

pytestmark = pytest.mark.slow
NAME = "dml-own"


@pytest.fixture(scope="module")
def published(project: Project, mlflow_database: Path) -> Project:
    """The project with its three runs in MLflow."""
    shutil.copy(mlflow_database, project.state)
    tracker = Tracker(project.tracking_uri, project.state, Store(project.store, project.state / "cache"))
    for spec in comparison_runs(load_params(project.params_file), "own")[:3]:
        assert tracker.publish(make_run(project, spec)) is not None
    return project


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of every `fresh` project's database: MLflow prepares its statements once for a file."""
    return tmp_path_factory.mktemp("database") / "mlflow.db"


@pytest.fixture
def fresh(published: Project, database: Path, tmp_path: Path) -> Project:
    """The same project with its own registry, in which nothing is promoted yet."""
    with closing(sqlite3.connect(published.state / "mlflow.db")) as unpromoted, closing(sqlite3.connect(database)) as used:
        unpromoted.backup(used)
    return Project(published.root, tmp_path, published.store, f"sqlite:///{database}")


def recalls_by_hand(project: Project, text: str) -> np.ndarray:
    """Return Recall@1 of each test class from all cosines."""
    return recalls_of(project, f"embed/{find_run(project, text).embedded}")


def by_hand(project: Project, report: RunReport) -> np.ndarray:
    """Return the same of a run that is not of the project's `params.yaml`."""
    assert report.embeddings is not None
    return recalls_of(project, report.embeddings.key)


def recalls_of(project: Project, embeddings: str) -> np.ndarray:
    rows, labels = load_embeddings(Store(project.store, project.state).folder(embeddings), "test")
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -2)
    hits = labels[cosines.argmax(axis=1)] == labels
    return np.array([hits[labels == label].mean() for label in np.unique(labels)])


def test_a_better_network_is_promoted_and_a_worse_one_refused_with_the_interval(fresh: Project) -> None:
    first = promote(fresh, "own/untrained/0")
    assert first.reason == "the first; there was nothing to compare with"
    better = promote(fresh, "own/good/0")
    differences = recalls_by_hand(fresh, "own/good/0") - recalls_by_hand(fresh, "own/untrained/0")
    assert len(differences) == 16
    quantile = stats.t.ppf(1 - 0.05 * 6 / np.pi**2, 15)  # level of the first attempt
    low = differences.mean() - quantile * differences.std(ddof=1) / len(differences) ** 0.5
    said = f"Recall@1 {100 * differences.mean():+.1f} points, at least {100 * low:+.3g} by a one-sided test at level 0.03 (attempt 1), "
    assert better.reason.startswith(f"better by 0.5 points or more: {said}paired by 16 test classes, against version 1")
    assert low > 0.005
    refused = (
        r"no significant gain of 0.5 points or more: Recall@1 -[\d.]+ points, at least -[\d.]+ "
        r"by a one-sided test at level 0.0076 \(attempt 2\)"
    )
    with pytest.raises(ConfigError, match=refused):
        promote(fresh, "own/untrained/0")
    assert MlflowClient(fresh.tracking_uri).get_registered_model(NAME).tags["dml.attempts.champion"] == "2"
    registry = Registry(fresh.tracking_uri)
    assert registry.holder(NAME, "champion") == registered_versions(registry.uri, "own")[1]
    assert promote(fresh, "own/good/0").reason == f"own/good/0 is the champion of {NAME} already (version 2)"
    forced = promote(fresh, "own/untrained/0", forced_because="a rollback")
    assert (forced.version.number, forced.reason) == ("1", "forced, without comparison: a rollback")
    assert [version.aliases for version in registered_versions(registry.uri, "own")] == [("champion",), ()]


@pytest.fixture(scope="module")
def pretrained(project: Project, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunReport]:
    """Runs on a network with given weights: without training, trained, and trained at a rate of zero."""
    weights = tmp_path_factory.mktemp("weights") / "small.pt"
    torch.manual_seed(0)
    torch.save(build_backbone(BackboneConfig(name="small_cnn", width=8)).state_dict(), weights)
    params = load_params(project.params_file).model_dump()
    params["comparison"]["protocol"]["model"]["backbone"]["weights"] = str(weights)
    still = {"num_epochs": 1, "optimiser": {"learning_rate": 1e-12, "groups": {"loss": {"learning_rate": 1e-12}}}}
    params["comparison"]["variants"] = yaml.safe_load((ROOT / "params.yaml").read_text())["comparison"]["variants"] | {
        "good": {"loss": {"name": "normalised_softmax"}},
        "still": {"loss": {"name": "normalised_softmax"}, **still},
    }
    named = ("frozen", "good", "still")
    return {spec.variant: make_run(project, spec) for spec in comparison_runs(Params(**params), "own", named, (0,))}


def test_a_fine_tuned_network_must_beat_the_frozen_one(
    project: Project, pretrained: dict[str, RunReport], mlflow_database: Path, tmp_path: Path
) -> None:
    fresh = Project(project.root, tmp_path, project.store, f"sqlite:///{shutil.copy(mlflow_database, tmp_path)}")
    tracker = Tracker(fresh.tracking_uri, tmp_path, Store(project.store, tmp_path / "cache"))
    frozen_by_name = pretrained["still"].model_copy(update={"variant": "frozen by name"})  # a trained run, which is no reference
    for report in (pretrained["good"], frozen_by_name):
        assert tracker.publish(report) is not None
    good, still, frozen = (pretrained[variant].checkpoint.identity for variant in ("good", "still", "frozen"))
    with pytest.raises(ConfigError, match=r"'frozen' has scored .*; dml reproduce --dataset own --variant frozen, or"):
        promote(fresh, good)
    assert tracker.publish(pretrained["frozen"]) is not None
    with pytest.raises(ConfigError, match=r"not known to have gained anything: Recall@1 [-+][\d.]+ points, at least -[\d.]+ by a"):
        promote(fresh, still)
    assert not registered_versions(fresh.tracking_uri, "own")
    assert promote(fresh, frozen, alias="other").reason == "the first; there was nothing to compare with"
    said = promote(fresh, good).reason
    differences = by_hand(project, pretrained["good"]) - by_hand(project, pretrained["frozen"])
    low = differences.mean() - stats.t.ppf(0.95, 15) * differences.std(ddof=1) / 16**0.5
    assert low > 0
    assert said == (
        f"the first; there was nothing to compare with; Recall@1 {100 * differences.mean():+.1f} points, at least {100 * low:+.3g} "
        "by a one-sided test at level 0.05, against the pretrained network without training"
    )
    assert promote(fresh, still, forced_because="a trial").reason == "forced, without comparison: a trial"


def test_the_champion_has_a_card_and_scores_and_gives_the_run_s_rows(fresh: Project) -> None:
    version = promote(fresh, "own/good/0").version
    client = MlflowClient(fresh.tracking_uri)
    card = client.get_model_version(NAME, version.number).description
    run = find_run(fresh, "own/good/0")
    for part in (
        "# own / good / seed 0",
        "normalised_softmax, 10 epochs, from random weights",
        run.trained,
        "240 train, 240 test",
        "## Limits",
    ):
        assert part in card
    assert "licence of the images: drawn by this package, Apache-2.0" in card
    mean = recalls_by_hand(fresh, "own/good/0").mean()
    assert f"| recall@1, mean of the classes | {mean:.4f}, 95 % interval [" in card
    model = client.get_logged_model(version.model_id)
    linked = {metric.key: metric for metric in model.metrics}
    assert linked["recall_at_1"].value == pytest.approx(mean)  # classes have equally many images
    assert (linked["recall_at_1"].dataset_name, linked["recall_at_1"].run_id) == ("own", version.run_id)
    folder = resolve_model(f"models:/{NAME}@champion", fresh)
    found = load_model(folder)
    assert found.identity == run.trained
    assert load_model(resolve_model(f"models:/{NAME}/{version.number}", fresh)).title == "own / good / seed 0"
    pixels = np.random.default_rng(0).integers(0, 256, (3, 24, 24, 3), dtype=np.uint8)
    np.testing.assert_array_equal(found.embed(list(pixels)), load_model(resolve_model("own/good/0", fresh)).embed(list(pixels)))
    for address in (
        f"models:/{NAME}@nobody",
        f"models:/{NAME}/99",
        f"models:/{NAME}/newest",
        "models:/nothing@champion",
        f"models:/{NAME}",
        "models:/",
    ):
        with pytest.raises(ConfigError, match="not in MLflow's registry"):
            resolve_model(address, fresh)


def test_a_server_s_own_error_is_not_a_model_that_is_missing(fresh: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MlflowException("the database is locked")

    monkeypatch.setattr(MlflowClient, "get_model_version_by_alias", fails)
    with pytest.raises(TrackingError, match="the database is locked"):
        resolve_model(f"models:/{NAME}@champion", fresh)


def test_a_run_that_mlflow_has_not_is_refused(fresh: Project) -> None:
    with pytest.raises(ConfigError, match=r"0{32}: MLflow at .* has no such run with a network"):
        promote(fresh, "0" * 32)


@pytest.mark.proof
def test_a_registry_that_does_not_answer_is_one_line(project: Project) -> None:
    """The client's retries print no further lines."""
    environment = os.environ | {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flows.cli", "models", "promote", "own/good/0"]
    ran = subprocess.run(command, cwd=project.root, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "error: MLflow at http://127.0.0.1:9 cannot be used: no answer; start it, or correct MLFLOW_TRACKING_URI\n"


def test_a_run_is_found_by_its_training(fresh: Project) -> None:
    run = find_run(fresh, "own/good/1")
    assert promote(fresh, run.trained).version.number == "1"
    folder = Registry(fresh.tracking_uri).fetch_trained(run.trained, fresh.state / "models")
    assert folder is not None
    assert load_model(folder).title == "own / good / seed 1"


def test_the_identity_of_a_training_is_its_last_epoch_s_network(project: Project, mlflow_database: Path, tmp_path: Path) -> None:
    """A table scores two epochs of one training; MLflow's first answer is the run that was published last."""
    fresh = Project(project.root, tmp_path, project.store, f"sqlite:///{shutil.copy(mlflow_database, tmp_path)}")
    spec = comparison_runs(load_params(fresh.params_file), "own", ("good",), (0,))[0]
    training = spec.training.model_copy(update={"keep_epochs": ("oracle",), "num_epochs": 3})
    reports = {}
    for epoch in ("last", "oracle"):
        changes = {"evaluation": spec.evaluation.model_copy(update={"epoch": epoch}), "table": "paper/table", "row": "row", "column": "own"}
        reports[epoch] = make_run(fresh, spec.model_copy(update={"training": training} | changes))
    trained, registry, cache = reports["last"].checkpoint.identity, Registry(fresh.tracking_uri), fresh.state / "models"

    def fetched(identity: str) -> str | None:
        folder = registry.fetch_trained(identity, cache)
        return None if folder is None else load_model(folder).identity

    def publish(epoch: str) -> None:
        tracker = Tracker(fresh.tracking_uri, fresh.state, Store(fresh.store, fresh.state / "cache"))
        assert tracker.publish(reports[epoch]) is not None

    publish("last")
    assert (fetched(trained), fetched(f"{trained}-oracle")) == (trained, None)
    publish("oracle")
    assert (fetched(trained), fetched(f"{trained}-oracle")) == (trained, f"{trained}-oracle")
    for identity, label in ((trained, "row good"), (f"{trained}-oracle", "row good oracle")):  # no runs of the standing comparison
        network = load_model(resolve_model(identity, fresh))
        assert (network.identity, network.title) == (identity, f"own / {label} / seed 0")
    promote(fresh, trained)
    assert load_model(resolve_model(f"models:/{NAME}@champion", fresh)).identity == trained
    with pytest.raises(
        ConfigError, match=rf"^{trained}-oracle: its epoch was chosen on the test classes, so .*; name the network of another"
    ):
        promote(fresh, f"{trained}-oracle", alias="other")
    promote(fresh, f"{trained}-oracle", alias="other", forced_because="a trial")
    assert load_model(resolve_model(f"models:/{NAME}@other", fresh)).identity == f"{trained}-oracle"


def test_a_replaced_champion_is_still_found_for_its_index_and_promoted_again(fresh: Project, tmp_path: Path) -> None:
    """Its run was superseded: its settings or images have changed."""
    first = promote(fresh, "own/good/0").version
    fetched = resolve_model(f"models:/{NAME}@champion", fresh)
    identity = load_model(fetched).identity
    promote(fresh, "own/good/1", forced_because="newer images")
    client = MlflowClient(fresh.tracking_uri)
    client.set_tag(first.run_id, Tag.PUBLISHED, SUPERSEDED)
    client.delete_run(first.run_id)
    (tmp_path / "changed").mkdir()
    (tmp_path / "changed" / "params.yaml").write_text(fresh.params_file.read_text())  # its dataset is not prepared
    changed = Project(tmp_path / "changed", fresh.state, fresh.store, fresh.tracking_uri)
    assert resolve_model(identity, changed) == fetched
    with pytest.raises(ConfigError, match="no trained run has this identity"):
        resolve_model(identity[::-1], changed)
    (tmp_path / "damaged.db").write_text("no database")
    without = Project(changed.root, fresh.state, fresh.store, f"sqlite:///{tmp_path}/damaged.db")
    assert resolve_model(identity, without) == fetched, "MLflow cannot be used"
    with pytest.raises(TrackingError):
        resolve_model(identity[::-1], without)
    again = promote(changed, f"models:/{NAME}/{first.number}", forced_because="rolled back")
    assert (again.version.number, again.reason) == (first.number, "forced, without comparison: rolled back")
    assert Registry(fresh.tracking_uri).holder(NAME, "champion") == again.version
    with pytest.raises(ConfigError, match="not in MLflow's registry"):
        promote(changed, f"models:/{NAME}/99")


def test_a_run_is_registered_under_the_name_of_its_own_dataset(fresh: Project, tmp_path: Path) -> None:
    """The same images have runs of equal identities under two names; those of the other name were published later."""
    report = make_run(fresh, comparison_runs(load_params(fresh.params_file), "own", ("good",), (0,))[0])
    other = report.model_copy(update={"dataset": report.dataset.model_copy(update={"name": "other"}), "comparison": "other"})
    assert Tracker(fresh.tracking_uri, tmp_path, Store(fresh.store, tmp_path / "cache")).publish(other) is not None
    assert promote(fresh, "own/good/0").version.name == NAME


def test_a_downloaded_network_that_was_damaged_is_downloaded_again(fresh: Project) -> None:
    version = promote(fresh, "own/good/0").version
    folder = resolve_model(f"models:/{NAME}@champion", fresh)
    whole = (folder / "network.pt").read_bytes()
    (folder / "network.pt").write_bytes(whole[:-9])
    assert resolve_model(f"models:/{NAME}/{version.number}", fresh) == folder
    assert (folder / "network.pt").read_bytes() == whole


@pytest.mark.parametrize("seconds", [-1, 10**8], ids=["old", "of a clock that was wrong"])
def test_the_lock_of_one_that_was_killed_is_taken_away(seconds: float, fresh: Project, caplog: pytest.LogCaptureFixture) -> None:
    client = MlflowClient(fresh.tracking_uri)
    client.create_registered_model(f"{NAME}.promotion", tags={Tag.LOCKED_UNTIL: str(time.time() + seconds)})
    assert promote(fresh, "own/good/0").version.number == "1"
    waited = [record.getMessage() for record in caplog.records if record.name == "tasks.tracking.registered"]
    assert waited == [f"{NAME}: another promotion is under way; this one waits for it, at most 10 minutes if it was killed"]
    assert [model.name for model in client.search_registered_models()] == [NAME]


def test_a_promotion_whose_lock_was_taken_away_changes_no_alias_and_leaves_the_new_lock(
    fresh: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a promotion that took longer than its lock, while another one waited."""
    client, lock = MlflowClient(fresh.tracking_uri), f"{NAME}.promotion"
    compute = promotion.class_recalls

    def slow(*arguments: Any) -> promotion.ClassRecalls:
        client.delete_registered_model(lock)
        client.create_registered_model(lock, tags={Tag.LOCKED_UNTIL: str(time.time() + 600), Tag.LOCKED_BY: "another"})
        return compute(*arguments)

    monkeypatch.setattr(promotion, "class_recalls", slow)
    with pytest.raises(
        TrackingError,
        match=f"^{NAME}: the comparison took longer than 10 minutes, so its lock was removed; nothing was promoted; run it again$",
    ):
        promote(fresh, "own/good/0")
    assert client.get_registered_model(lock).tags[Tag.LOCKED_BY] == "another"
    assert [model.name for model in client.search_registered_models()] == [lock], "nothing else was written"


PROMOTE = """
import json, sys, time
from pathlib import Path
from dml_core.errors import ConfigError, TrackingError
from tasks.environment import Project
from tasks.models.promotion import promote
root, state, store, uri, run, ready, go = sys.argv[1:]
Path(ready).write_text("")
while not Path(go).exists():
    time.sleep(0.01)
try:
    print(json.dumps(promote(Project(Path(root), Path(state), store, uri), run).reason))
except ConfigError as error:
    print(json.dumps(str(error)))
"""


def promote_at_once(project: Project, uri: str, folder: Path) -> None:
    """Promote two networks, both better than the champion, from two processes at the same moment; check that one follows the other."""
    first = Project(project.root, project.state, project.store, uri)
    promote(first, "own/untrained/0")
    go, processes = folder / "go", []
    for number in (0, 1):
        words = [project.root, folder / f"state-{number}", project.store, uri, f"own/good/{number}", folder / f"ready-{number}", go]
        command = [sys.executable, "-c", PROMOTE, *map(str, words)]
        processes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    while not all((folder / f"ready-{number}").exists() for number in (0, 1)):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    go.write_text("")
    said = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    versions = registered_versions(uri, "own")
    assert [version.aliases.count("champion") for version in versions].count(1) == 1
    against = [re.search(r"against version (\d) of", line)[1] for line in said]  # type: ignore[index]
    assert sorted(re.search(r"attempt (\d)", line)[1] for line in said) == ["1", "2"], said  # type: ignore[index]
    assert sorted(against) == ["1", "2"], said  # one was compared with the old champion, the other with the new one
    last = said[against.index("2")]
    champion = next(version for version in versions if "champion" in version.aliases)
    assert champion.number == ("3" if last.startswith("better") else "2")


@pytest.mark.proof
def test_two_promotions_at_once_leave_one_champion(fresh: Project, tmp_path: Path) -> None:
    promote_at_once(fresh, fresh.tracking_uri, tmp_path)


@pytest.mark.proof
def test_two_promotions_at_once_through_a_server_leave_one_champion(fresh: Project, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = [
        "--backend-store-uri",
        fresh.tracking_uri,
        "--registry-store-uri",
        fresh.tracking_uri,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [sys.executable, "-m", "mlflow", "server", *where, "--workers", "2"]  # two processes: locks within one do not help
    server = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            with suppress(requests.ConnectionError):
                if requests.get(f"{address}/health", timeout=5).ok:
                    break
            time.sleep(0.5)
        promote_at_once(fresh, address, tmp_path)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


NUM_CLASSES, NUM_QUERIES = 12, 20
CHAMPION_SCORES = {label: ClassRecall(0.5, NUM_QUERIES) for label in range(NUM_CLASSES)}


def test_the_floor_of_the_spread_by_hand() -> None:
    """5 points of 20 queries in each class: at least one query differs, with variance (0.05 - 0.05^2) / 20 per class."""
    better = {label: ClassRecall(0.55, NUM_QUERIES) for label in range(NUM_CLASSES)}
    assert gain_by_class(better, CHAMPION_SCORES).deviation == pytest.approx(max(0.0475 / 20, 1 / 400) ** 0.5)
    with pytest.raises(ConfigError, match=r"too few test classes for a comparison: 9 \(minimum: 10\)"):
        gain_by_class({label: better[label] for label in range(9)}, {label: CHAMPION_SCORES[label] for label in range(9)})


def test_the_levels_of_all_attempts_add_up_to_the_level() -> None:
    assert sum(map(level_of, range(1, 100_001))) == pytest.approx(0.05, abs=1e-5)
    assert level_of(1) == pytest.approx(0.0304, abs=1e-4)


def share_of_years_with_a_promotion(num_years: int, num_nights: int, level_at: Callable[[int], float]) -> float:
    """Return the share of years with a promotion, for one candidate per night as good as the champion and 60 test classes of 15 queries."""
    rng, promoted = np.random.default_rng(0), 0
    for _ in range(num_years):
        ease = rng.normal(0.5, 0.15, 60)
        networks = np.clip(ease + rng.normal(0, 0.05, (num_nights + 1, 60)), 0, 1)
        found = rng.binomial(15, networks) / 15
        holder, *candidates = (dict(enumerate(map(ClassRecall, row.tolist(), [15] * 60))) for row in found)
        for attempt, recalls in enumerate(candidates, 1):
            gain = gain_by_class(recalls, holder)
            if gain.at_least(level_at(attempt)) > 0:
                promoted += 1
                break
    return promoted / num_years


def test_weeks_of_candidates_without_a_true_gain_replace_no_champion() -> None:
    assert share_of_years_with_a_promotion(40, 90, level_of) <= 0.13
    assert share_of_years_with_a_promotion(40, 90, lambda attempt: 0.025) > 0.25, "the same level every night, as it was before"


@pytest.mark.proof
def test_a_candidate_a_night_for_a_year_is_promoted_without_a_true_gain_in_5_of_100_years_at_most() -> None:
    assert share_of_years_with_a_promotion(400, 365, level_of) <= 0.05 + 2 * (0.05 * 0.95 / 400) ** 0.5


def test_equal_networks_are_not_better(fresh: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """`promote` refuses a second network with the champion's answers to all queries."""
    promote(fresh, "own/good/0")
    champion = Registry(fresh.tracking_uri).logged(Tag.TRAINED, find_run(fresh, "own/good/0").trained)
    assert champion is not None
    fetch = Registry.embeddings
    monkeypatch.setattr(Registry, "embeddings", lambda self, network, folder: fetch(self, champion, folder))
    with pytest.raises(ConfigError, match=r"no significant gain of 0.5 points or more: Recall@1 \+0\.0 points, at least -"):
        promote(fresh, "own/good/1")


def test_what_is_trained_is_listed(published: Project) -> None:
    models = list_models(published, None, every_seed=True)[0]
    assert [model.run for model in models] == ["own/good/0", "own/good/1", "own/untrained/0"], "no classes are held out: as in params.yaml"
    assert models[0].scores["recall@1"] > models[2].scores["recall@1"]
    network = load_model(resolve_model(models[0].run, published)).description
    assert models[0].num_parameters > network.embedding_dim * 16
    models, best = list_models(published, "own", every_seed=False)
    assert [(model.run, model.num_seeds) for model in models] == [("own/good/0", 2), ("own/untrained/0", 1)]
    assert best == {"own": NO_BEST}
    with pytest.raises(ConfigError, match="unknown dataset of the comparison 'other'"):
        list_models(published, "other", every_seed=True)


def test_a_name_without_a_seed_means_the_best_on_held_out_classes(published: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    validation = {("good", 0): 0.4, ("good", 1): 0.6, ("untrained", 0): 0.5}
    monkeypatch.setattr(lookup, "run_scores", lambda store, run: {VALIDATION: validation[run.spec.variant, run.spec.seed]})
    monkeypatch.setattr(listing, "run_scores", lookup.run_scores)
    assert find_run(published, "own/good").spec.seed == 1
    assert find_run(published, "own/good/0").spec.seed == 0
    models, best = list_models(published, None, every_seed=True)
    assert [model.run for model in models] == ["own/good/1", "own/good/0", "own/untrained/0"], "0.5 and 0.5: in params.yaml's order"
    assert [model.run for model in list_models(published, None, every_seed=False)[0]] == ["own/good/1", "own/untrained/0"]
    assert best["own"].startswith(f"best run: good, seed 1: {RULE}")
    validation["untrained", 0] = 0.55
    assert list_models(published, None, every_seed=False)[0][0].run == "own/untrained/0"
    validation["good", 0] = 0.6
    assert find_run(published, "own/good").spec.seed == 0, "of equals the lowest"
