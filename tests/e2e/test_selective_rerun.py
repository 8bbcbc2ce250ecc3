"""What a change reruns, through real DVC, Prefect, Ray and MLflow: one story in order, each chapter a change and a count of what ran.

Two datasets, two variants (one of them untrained), one seed: a full run is 4 x (train, embed, evaluate).
"""

import json
import re

import pytest
from mlflow import MlflowClient

from tests.e2e.conftest import Project, steps_run

pytestmark = pytest.mark.slow


def stages_run(printed: str) -> list[str]:
    """The stages whose command DVC ran."""
    return re.findall(r"Running stage '([^']+)'", printed)


def test_from_nothing_everything_is_built(project: Project) -> None:
    printed = project.run("dvc", "repro")
    assert sorted(stages_run(printed)) == sorted(
        f"{stage}@{name}" for stage in ("fetch", "prepare", "comparison") for name in ("synthetic", "fashion-mnist")
    )
    assert steps_run(printed) == {"train": 4, "embed": 4, "evaluate": 4}
    metrics = json.loads((project.root / "results/fashion-mnist/metrics.json").read_text())
    assert set(metrics) == {"untrained", "softtriple"}
    shown = project.run("dvc", "metrics", "show", "--json")
    assert "recall@1" in shown


def test_an_untouched_tree_reruns_nothing(project: Project) -> None:
    (project.root / "docs").mkdir()
    (project.root / "docs/page.md").write_text("a file that no step uses")
    assert stages_run(project.run("dvc", "repro")) == []


def test_a_changed_raw_image_reruns_its_dataset_only(project: Project) -> None:
    images = sorted((project.root / "data/raw/synthetic").rglob("*.jpg"))
    images[0].write_bytes(images[1].read_bytes())
    printed = project.run("dvc", "repro")
    assert "comparison@synthetic" in stages_run(printed)
    assert not [stage for stage in stages_run(printed) if stage.endswith("@fashion-mnist")]
    assert steps_run(printed) == {"train": 2, "embed": 2, "evaluate": 2}
    client = MlflowClient(f"sqlite:///{project.root / 'state/mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    for dataset, num_contents in (("synthetic", 2), ("fashion-mnist", 1)):
        runs = client.search_runs(experiments, f"params.dataset = '{dataset}' and params.variant = 'softtriple'")
        assert len(runs) == len({run.data.tags["dml.dataset_digest"] for run in runs}) == num_contents
        assert len({run.inputs.dataset_inputs[0].dataset.digest for run in runs}) == num_contents


def test_changed_evaluation_reruns_no_training_and_dvc_tells_the_difference(project: Project) -> None:
    project.commit("results")
    project.change(evaluation={"recall_at": [1, 3]})
    assert steps_run(project.run("dvc", "repro", "comparison@synthetic")) == {"evaluate": 2}
    changed = json.loads(project.run("dvc", "metrics", "diff", "--json"))
    assert list(changed) == ["results/synthetic/metrics.json"]
    of_softtriple = {
        name: entry for name, entry in changed["results/synthetic/metrics.json"].items() if name.startswith("softtriple.recall@")
    }
    assert {name.partition(".")[2] for name, entry in of_softtriple.items() if "new" in entry} >= {"recall@3"}
    project.run("dvc", "plots", "show", "--out", "plots")
    page = (project.root / "plots/index.html").read_text()
    assert '"recall"' in page
    assert "softtriple" in page


def test_a_new_variant_is_the_only_one_that_trains(project: Project) -> None:
    project.change(comparison={"variants": {"softmax": {"loss": {"name": "softmax"}}}})
    assert steps_run(project.run("dvc", "repro", "comparison@synthetic")) == {"train": 1, "embed": 1, "evaluate": 1}


def test_an_edited_loss_reruns_its_own_runs_only(project: Project) -> None:
    with (project.root / "dml_core/losses/softtriple.py").open("a") as file:
        file.write("\n# an edit\n")
    assert steps_run(project.run("dml", "reproduce")) == {"train": 1, "embed": 1, "evaluate": 1}


def test_a_damaged_file_is_made_again_and_an_edit_of_a_loss_that_no_variant_uses_reruns_nothing(project: Project) -> None:
    with (project.root / "dml_core/losses/tuplet_margin.py").open("a") as file:
        file.write("\n# an edit\n")
    metrics = sorted((project.root / "state/store/evaluate").glob("*/metrics.json"), key=lambda path: path.stat().st_mtime)[-1]
    metrics.write_text("{}")
    assert steps_run(project.run("dml", "reproduce")) == {"evaluate": 1}


def test_mlflow_has_one_current_run_for_each_variant_and_the_terminal_shows_them(project: Project) -> None:
    shown = project.run("dml", "compare", "synthetic")
    assert [word for word in ("untrained", "softtriple", "softmax") if word not in shown] == []


def test_runs_scored_on_validation_classes_are_a_comparison_of_their_own(project: Project) -> None:
    of_test = project.run("dml", "compare", "synthetic")
    project.change(comparison={"protocol": {"validation": {"share": 0.5}}}, evaluation={"role": "validation"})
    assert steps_run(project.run("dml", "reproduce", "--variant", "untrained")) == {"train": 1, "embed": 1, "evaluate": 1}
    assert "comparison on synthetic, validation classes" in project.run("dml", "compare", "synthetic")
    project.change(evaluation={"role": "test"})
    assert project.run("dml", "compare", "synthetic") == of_test
