"""The registry's gate, on a real MLflow: a worse network is refused with the interval, and there is one champion."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import requests
from mlflow import MlflowClient

from dml_core import load_model
from dml_core.errors import ConfigError
from tasks.environment import Project
from tasks.runs.embeddings import load_embeddings
from tasks.runs.specs import comparison_runs, load_params
from tasks.storage import Store
from tasks.tracking.registered import LOCK_TAG, Registry
from tasks.tracking.tracker import Tracker
from tasks.use.listing import list_models
from tasks.use.models import find_run, resolve_model
from tasks.use.promotion import difference_by_class, promote
from tests.conftest import ROOT
from tests.tasks.use.conftest import make_run

pytestmark = pytest.mark.slow
NAME = "dml-own"


@pytest.fixture(scope="module")
def published(project: Project) -> Project:
    """The project with its three runs in MLflow."""
    tracker = Tracker(project.tracking_uri, project.state, Store(project.store, project.state / "cache"))
    for spec in comparison_runs(load_params(project.params_file), "own")[:3]:
        assert tracker.publish(make_run(project, spec)) is not None
    return project


@pytest.fixture
def fresh(published: Project, tmp_path: Path) -> Project:
    """The same with a registry of its own: nothing is promoted yet."""
    shutil.copy(published.state / "mlflow.db", tmp_path / "mlflow.db")
    return Project(published.root, tmp_path, published.store, f"sqlite:///{tmp_path / 'mlflow.db'}")


def recalls_by_hand(project: Project, text: str) -> np.ndarray:
    """Recall@1 of each test class, by all cosines."""
    run = find_run(project, text)
    rows, labels = load_embeddings(Store(project.store, project.state).folder(f"embed/{run.embedded}"), "test")
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -2)
    hits = labels[cosines.argmax(axis=1)] == labels
    return np.array([hits[labels == label].mean() for label in np.unique(labels)])


def test_a_better_network_is_promoted_and_a_worse_one_refused_with_the_interval(fresh: Project) -> None:
    first = promote(fresh, "own/untrained/0")
    assert first.said == "the first; there was nothing to compare with"
    better = promote(fresh, "own/good/0")
    differences = recalls_by_hand(fresh, "own/good/0") - recalls_by_hand(fresh, "own/untrained/0")
    half_width = 2.1314 * differences.std(ddof=1) / len(differences) ** 0.5  # Student's t of 15 degrees of freedom
    assert len(differences) == 16
    low, high = differences.mean() - half_width, differences.mean() + half_width
    said = f"Recall@1 {100 * differences.mean():+.1f} points, 95 % interval [{100 * low:.1f}, {100 * high:.1f}], paired by 16 test classes"
    assert said in better.said
    assert low > 0
    with pytest.raises(ConfigError, match=r"not known to be better: Recall@1 -[\d.]+ points, 95 % interval \[-[\d.]+, -[\d.]+\]"):
        promote(fresh, "own/untrained/0")
    registry = Registry(fresh.tracking_uri)
    assert registry.holder(NAME, "champion") == registry.versions(NAME)[1]
    assert promote(fresh, "own/good/0").said == f"own/good/0 is the champion of {NAME} already (version 2)"
    forced = promote(fresh, "own/untrained/0", forced_because="a rollback")
    assert (forced.version.number, forced.said) == ("1", "forced, without comparison: a rollback")
    assert [version.aliases for version in registry.versions(NAME)] == [("champion",), ()]


def test_the_champion_has_a_card_and_scores_and_gives_the_run_s_rows(fresh: Project) -> None:
    version = promote(fresh, "own/good/0").version
    client = MlflowClient(fresh.tracking_uri)
    card = client.get_model_version(NAME, version.number).description
    run = find_run(fresh, "own/good/0")
    for part in (
        "# own / good / seed 0",
        "normalised_softmax, 16 epochs, from random weights",
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
    with pytest.raises(ConfigError, match="not in MLflow's registry"):
        resolve_model(f"models:/{NAME}@nobody", fresh)


def test_a_run_that_mlflow_has_not_is_refused(fresh: Project) -> None:
    with pytest.raises(ConfigError, match=r"0{32}: MLflow at .* has no such run with a network"):
        promote(fresh, "0" * 32)


@pytest.mark.proof
def test_a_registry_that_does_not_answer_is_one_line(project: Project) -> None:
    """And not a line for every attempt besides."""
    environment = os.environ | {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flows.cli", "models", "promote", "own/good/0"]
    ran = subprocess.run(command, cwd=project.root, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "error: MLflow at http://127.0.0.1:9 cannot be used: no answer\n"


def test_a_run_is_found_by_its_training(fresh: Project) -> None:
    run = find_run(fresh, "own/good/1")
    assert promote(fresh, run.trained).version.number == "1"
    folder = Registry(fresh.tracking_uri).fetch_trained(run.trained, fresh.state / "models")
    assert folder is not None
    assert load_model(folder).title == "own / good / seed 1"


def test_the_lock_of_one_that_was_killed_is_taken_away(fresh: Project) -> None:
    client = MlflowClient(fresh.tracking_uri)
    client.create_registered_model(f"{NAME}.promotion", tags={LOCK_TAG: str(time.time() - 1)})
    assert promote(fresh, "own/good/0").version.number == "1"
    assert [model.name for model in client.search_registered_models()] == [NAME]


PROMOTE = """
import json, sys, time
from pathlib import Path
from dml_core.errors import ConfigError
from tasks.environment import Project
from tasks.use.promotion import promote
root, state, store, uri, run, ready, go = sys.argv[1:]
Path(ready).write_text("")
while not Path(go).exists():
    time.sleep(0.01)
try:
    print(json.dumps(promote(Project(Path(root), Path(state), store, uri), run).said))
except ConfigError as error:
    print(json.dumps(str(error)))
"""


def promote_at_once(project: Project, uri: str, folder: Path) -> None:
    """Two processes promote two networks, both better than the champion, at the same moment: they follow each other."""
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
    versions = Registry(uri).versions(NAME)
    assert [version.aliases.count("champion") for version in versions].count(1) == 1
    against = [re.search(r"against version (\d) of", line)[1] for line in said]  # type: ignore[index]
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
    command = [sys.executable, "-m", "mlflow", "server", *where, "--workers", "2"]  # two processes: no lock of one of them helps
    server = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{address}/health", timeout=5).ok:
                    break
            time.sleep(0.5)
        promote_at_once(fresh, address, tmp_path)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def test_equal_networks_are_not_better() -> None:
    same = dict.fromkeys(range(8), 0.5)
    assert difference_by_class(same, same).mean == 0
    with pytest.raises(ConfigError, match="8 and 7 test classes cannot be paired"):
        difference_by_class(same, dict(list(same.items())[1:]))


def test_what_is_trained_is_listed(published: Project) -> None:
    models = list_models(published, None, every_seed=True)
    assert [model.run for model in models][-1] == "own/untrained/0"
    assert {model.run for model in models} == {"own/good/0", "own/good/1", "own/untrained/0"}
    recalls = [model.scores["recall@1"] for model in models]
    assert recalls == sorted(recalls, reverse=True)
    network = load_model(resolve_model(models[0].run, published)).description
    assert models[0].num_parameters > network.embedding_dim * 16
    (best, worst) = list_models(published, "own", every_seed=False)
    assert (best.run, best.num_seeds, worst.num_seeds) == (models[0].run, 2, 1)
    assert list_models(published, "other", every_seed=True) == []
