"""`dml tune` with real runs: a killed and resumed search equals the uninterrupted one; its table runs the winner; MLflow has its runs."""

import re
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from dml_core.config import merge, read_yaml
from tests.e2e.conftest import Project, make_project

pytestmark = [pytest.mark.slow, pytest.mark.proof]
ROW = "project/tiny/softtriple"
COMMAND = ("dml", "tune", ROW, "--trials", "5", "--folds", "2")
TUNED = "flows/tables/tuned/project/tiny/softtriple@synthetic.yaml"
TINY = {
    "model": {"backbone": {"width": 8}, "head": {"embedding_dim": 8}},
    "sampler": {"batch_size": 16},
    "transform": {"crop_size": 24, "padding": 2},
    "num_epochs": 1,
}
TABLE: dict[str, Any] = {
    "title": "A table of the tests",
    "states": "Nothing.",
    "columns": [{"dataset": "synthetic", "metrics": ["recall@1"]}],
    "search": {"optimiser.learning_rate": {"low": 3e-4, "high": 3e-2, "log": True}},
    "scale": {"num_workers": 1},
    "rows": {
        "softtriple": {
            "label": "SoftTriple",
            "kind": "own",
            "published": [None],
            "variants": ["ours"],
            "loss": {"name": "softtriple"},
            "training": TINY,
        },
        "elsewhere": {"label": "Elsewhere", "kind": "quoted", "source": "somebody", "published": [None]},
    },
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = make_project(tmp_path_factory.mktemp("project"), ("softtriple",))
    (made.root / "flows/tables/project/tiny.yaml").write_text(yaml.safe_dump(TABLE))
    made.change(datasets={"synthetic": {"options": {"num_classes": 16, "images_per_class": 6}}})
    made.commit("a table")
    made.run("dvc", "repro", "--quiet", "prepare@synthetic")
    return made


@pytest.fixture(scope="module")
def tuned(project: Project) -> tuple[str, dict[str, Any]]:
    """Output of an uninterrupted search, and the file that it wrote."""
    return project.run(*COMMAND), read_yaml(project.root / TUNED)


def own_rate(project: Project) -> float:
    """Return the row's own learning rate."""
    return float(read_yaml(project.root / "flows/tables/project/protocol.yaml")["training"]["optimiser"]["learning_rate"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((f"{ROW}s",), "unknown row of project/tiny 'softtriples'; did you mean 'softtriple'?"),
        (("project/tinny/softtriple",), "unknown table 'project/tinny'; did you mean 'project/tiny'?"),
        (("project/tiny/elsewhere",), "'Elsewhere' is not run: the paper quotes it from elsewhere"),
        ((ROW, "--folds", "5"), "5 folds of 8 training classes leave some with fewer than two; at most 4"),
        ((ROW, "--metric", "recal@1"), "unknown metric of a search 'recal@1'; did you mean 'recall@1'?"),
        ((ROW, "--dataset", "cub200"), "unknown dataset of project/tiny 'cub200'"),
        (("softtriple/table1/softtriple",), "dataset 'cub200' is not in params.yaml; add below datasets: cub200: {reader: cub200"),
    ],
)
def test_what_cannot_be_searched_is_said_in_one_line_before_anything_starts(
    project: Project, arguments: tuple[str, ...], said: str
) -> None:
    printed = project.run("dml", "tune", *arguments, code=2)
    assert printed.splitlines()[-1].startswith("error: ")
    assert said in printed.splitlines()[-1]
    assert "Prefect" not in printed


def test_a_row_that_is_not_tuned_names_the_command(project: Project) -> None:
    printed = project.run("dml", "reproduce", "project/tiny", "--variant", "tuned", code=2)
    assert "project/tiny/softtriple is not tuned on synthetic; run: dml tune project/tiny/softtriple --dataset synthetic" in printed


def test_a_search_prints_its_trials_and_writes_the_winner(project: Project, tuned: tuple[str, dict[str, Any]]) -> None:
    printed, found = tuned
    for number in range(5):
        assert re.search(rf"^trial {number}: recall@1 \d+\.\d over 1 pair of fold and seed; ", printed, re.MULTILINE), number
    assert str(project.root / TUNED) in printed
    tried = found["tried"]
    assert found["num_trials"] == len(tried) >= 5
    assert tried[0]["params"] == {}
    winner = tried[found["trial"]]
    assert len(winner["scores"]) == max(len(trial["scores"]) for trial in tried) == 6
    assert found["score"] == pytest.approx(sum(winner["scores"]) / 6)
    assert found["own_score"] == pytest.approx(sum(tried[0]["scores"]) / len(tried[0]["scores"]))
    assert bool(found["training"]) == (found["trial"] != 0 and found["confirmation"]["gain"] > found["confirmation"]["half_width"])
    assert (found["folds"], found["seed"], found["metric"]) == (2, 0, "recall@1")
    assert "dirty" not in found
    assert len(found["commit"]) == 40
    assert not list((project.root / "state/store").rglob("checkpoint.pt")), "nobody wants the networks of trials"
    assert not list((project.root / "state/mlartifacts").rglob("checkpoint.pt"))


def test_mlflow_has_the_runs_under_the_search(project: Project, tuned: tuple[str, dict[str, Any]]) -> None:
    def tagged(run: str) -> dict[str, str]:
        return dict(database.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run,)))

    with closing(sqlite3.connect(project.root / "state" / "mlflow.db")) as database:
        runs = dict(database.execute("SELECT run_uuid, name FROM runs WHERE lifecycle_stage = 'active'"))
        (parent,) = [run for run, name in runs.items() if name == f"tuning of {ROW} on synthetic (validation)"]
        children = {run: tagged(run) for run in runs if tagged(run).get("mlflow.parentRunId") == parent}
        scored = {run: dict(database.execute("SELECT key, value FROM latest_metrics WHERE run_uuid = ?", (run,))) for run in children}
        rates = dict(database.execute("SELECT run_uuid, value FROM params WHERE key = 'optimiser.learning_rate'"))
        note = tagged(parent)["mlflow.note.content"]
    tried = tuned[1]["tried"]
    scores = {(number, pair): score for number, trial in enumerate(tried) for pair, score in enumerate(trial["scores"])}
    confirmation = tuned[1].get("confirmation") or {"own": [], "winner": []}
    for number, side in ((0, "own"), (tuned[1]["trial"], "winner")):
        scores |= {(number, 6 + place): score for place, score in enumerate(confirmation[side])}
    assert {(int(tags["dml.trial"]), int(tags["dml.pair"])): scored[run]["recall_at_1"] for run, tags in children.items()} == scores
    assert {(tags["dml.table"], tags["dml.row"]) for tags in children.values()} == {("project/tiny", "softtriple")}
    for run, tags in children.items():
        changed = tried[int(tags["dml.trial"])]["params"].get("optimiser.learning_rate", own_rate(project))
        assert float(rates[run]) == changed
    assert "No test image was read" in note
    assert list((project.root / "state/mlartifacts").rglob("softtriple@synthetic.yaml"))


def without_results(project: Project, root: Path) -> Project:
    """Return a copy of the project without runs and tuned settings."""
    shutil.copytree(project.root, root, ignore=shutil.ignore_patterns("state", "tiny"), symlinks=True)
    return Project(root, project.environment | {"PYTHONPATH": str(root)})


def test_two_at_once_are_one_search(project: Project, tuned: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """Each prints every trial, and no run is trained or recorded twice."""
    other = without_results(project, tmp_path / "other")
    processes = [other.start(*COMMAND) for _ in range(2)]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    for text in printed:
        assert len(set(re.findall(r"^trial \d+", text, re.MULTILINE))) == len(tuned[1]["tried"])
    assert read_yaml(other.root / TUNED) == tuned[1]
    num_scores = [len(list((root / "state/store/evaluate").glob("*/metrics.json"))) for root in (other.root, project.root)]
    with closing(sqlite3.connect(other.root / "state" / "mlflow.db")) as database:
        identities = [value for (value,) in database.execute("SELECT value FROM tags WHERE key = 'dml.identity'")]
    assert num_scores[0] == num_scores[1] == len(identities) == len(set(identities))


def test_killed_and_resumed_it_is_the_same_search(project: Project, tuned: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    _, undisturbed = tuned
    other = without_results(project, tmp_path / "other")
    root = other.root
    process = other.start(*COMMAND)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("trial 1:"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    finished = {path: path.stat().st_mtime_ns for path in (root / "state/store/evaluate").glob("*/metrics.json")}
    assert 2 <= len(finished) < len(undisturbed["tried"])
    other.run(*COMMAND)
    assert read_yaml(root / TUNED) == undisturbed
    assert {path: path.stat().st_mtime_ns for path in finished} == finished, "finished scores are reused"


def test_the_table_runs_the_winner_and_says_where_it_came_from(project: Project, tuned: tuple[str, dict[str, Any]]) -> None:
    _, found = tuned
    printed = project.run("dml", "reproduce", "project/tiny", "--variant", "tuned")
    assert re.search(r"tuned, 1 seed \| \d+\.\d", printed)
    assert "were searched on other images" not in printed
    with closing(sqlite3.connect(project.root / "state" / "mlflow.db")) as database:
        (run,) = database.execute("SELECT run_uuid FROM tags WHERE key = 'dml.variant' AND value = 'softtriple tuned'").fetchone()
        logged = yaml.safe_load(next((project.root / "state/mlartifacts").rglob(f"{run}/artifacts/config.yaml")).read_text())["training"]
    assert merge(logged, found["training"]) == logged
    assert logged["validation"] is None, "the table trains on all training classes"
    page = (project.root / "results/site/project/tiny.html").read_text()
    assert f"dml tune, {found['num_trials']} trials, seed 0, commit {found['commit'][:10]}" in page
    longer = merge(TABLE, {"rows": {"softtriple": {"training": {"num_epochs": 2}}}})
    (project.root / "flows/tables/project/tiny.yaml").write_text(yaml.safe_dump(longer))
    printed = project.run("dml", "reproduce", "project/tiny", "--variant", "tuned")
    noted = "note: project/tiny/softtriple: its tuned settings were searched on other images of synthetic, or from other settings"
    assert (noted in printed) == bool(found["training"])
