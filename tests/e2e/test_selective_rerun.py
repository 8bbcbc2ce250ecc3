"""Selective reruns through real DVC, Prefect, Ray and MLflow: each test makes a change and counts the steps that run, in order.

Two datasets, two variants (one of them untrained), one seed: a full run is 4 x (train, embed, evaluate).
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import ViewType

from tests.damage import contents
from tests.e2e.conftest import Project, report_of, steps_run
from tests.hidden import hiding

pytestmark = pytest.mark.slow


def stages_run(printed: str) -> list[str]:
    """Return the stages whose command DVC ran."""
    return re.findall(r"Running stage '([^']+)'", printed)


@pytest.fixture(scope="module")
def built(project: Project) -> str:
    """Build everything from nothing in one flow, and return what is printed."""
    return project.run("dml", "reproduce", "--dataset", "synthetic", "--dataset", "fashion-mnist", "--all")


def test_from_nothing_everything_is_built_and_dvc_takes_it_over(project: Project, built: str) -> None:
    assert steps_run(built) == {"train": 4, "embed": 4, "evaluate": 4}
    printed = project.run("dvc", "repro")
    assert sorted(stages_run(printed)) == ["comparison@fashion-mnist", "comparison@synthetic"], "the flow fetched and prepared through DVC"
    assert printed.count("2 of 2 runs reused") == 2
    shown = json.loads(project.run("dvc", "metrics", "show", "--json"))[""]["data"]
    assert {path.removeprefix("results/"): set(entry["data"]) for path, entry in shown.items()} == {
        f"{dataset}/metrics/{variant}.json": {"recall@1", "map@r", "nmi"}
        for dataset in ("synthetic", "fashion-mnist")
        for variant in ("untrained", "softtriple")
    }


def test_an_untouched_tree_reruns_nothing_and_stays_clean_when_a_part_is_reproduced(project: Project, built: str) -> None:
    (project.root / "docs").mkdir()
    (project.root / "docs/page.md").write_text("a file that no step uses")
    assert stages_run(project.run("dvc", "repro")) == []
    project.run("dml", "reproduce", "--variant", "untrained")
    compared = project.run("dml", "compare", "synthetic")
    assert [variant for variant in ("untrained", "softtriple") if variant not in compared] == []
    assert project.run("dvc", "status").strip() == "Data and pipelines are up to date."


def test_reused_runs_load_neither_prefect_nor_ray_nor_torch_and_print_the_same_report(project: Project, built: str, tmp_path: Path) -> None:
    """The first command after DVC's lets DVC look at the dataset once more."""
    command = ("dml", "reproduce", "--dataset", "synthetic")
    project.run(*command)
    database = project.root / "state/mlflow.db"
    before = contents(project.root / "results"), database.read_bytes()
    without = hiding(tmp_path / "hidden", ["prefect", "ray", "torch"], project.root)
    again = project.run(*command, **without)
    assert "starting" not in again
    assert "2 of 2 runs reused" in again
    assert steps_run(again) == {}
    assert report_of(again, "synthetic") == report_of(built, "synthetic")
    assert (contents(project.root / "results"), database.read_bytes()) == before
    assert "train: reused" in project.run("dml", "run", "synthetic", "softtriple", **without)


def test_dvc_shows_what_is_measured_without_failures_although_another_dataset_has_no_results(project: Project) -> None:
    params = (project.root / "params.yaml").read_text()
    project.change(datasets={"birds": {"reader": "folder", "raw": "data/raw/birds"}}, comparison={"datasets": {"birds": {}}})
    metrics, plots = project.run("dvc", "metrics", "show"), project.run("dvc", "plots", "show")
    (project.root / "params.yaml").write_text(params)
    assert "results/synthetic/metrics/softtriple.json" in metrics
    assert "failed" not in metrics + plots


def test_a_changed_raw_image_reruns_its_dataset_only_and_dvc_shows_the_difference(project: Project) -> None:
    project.commit("results")
    images = sorted((project.root / "data/raw/synthetic").rglob("*.jpg"))
    images[0].write_bytes(images[1].read_bytes())
    printed = project.run("dvc", "repro")
    assert "comparison@synthetic" in stages_run(printed)
    assert not [stage for stage in stages_run(printed) if stage.endswith("@fashion-mnist")]
    assert steps_run(printed) == {"train": 2, "embed": 2, "evaluate": 2}
    changed = json.loads(project.run("dvc", "metrics", "diff", "--json"))
    assert list(changed) == ["results/synthetic/metrics/softtriple.json"], "the image trains, and the other variant is untrained"
    client = MlflowClient(f"sqlite:///{project.root / 'state/mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    for dataset, num_contents in (("synthetic", 2), ("fashion-mnist", 1)):
        runs = client.search_runs(experiments, f"params.dataset = '{dataset}' and params.variant = 'softtriple'", ViewType.ALL)
        assert len(runs) == len({run.data.tags["dml.dataset_digest"] for run in runs}) == num_contents
        assert len({run.inputs.dataset_inputs[0].dataset.digest for run in runs}) == num_contents
        assert [run.info.lifecycle_stage for run in runs].count("active") == 1


def test_dvc_s_plots_are_on_a_page_that_loads_nothing_from_a_network(project: Project) -> None:
    project.run("dvc", "plots", "show")
    page = project.root / "dvc_plots/index.html"
    pictures = [(page.parent / picture).read_bytes() for picture in re.findall(r'<img src="([^"]+)"', page.read_text())]
    assert sorted(pictures) == sorted(
        (project.root / f"results/{dataset}/recall.png").read_bytes() for dataset in ("synthetic", "fashion-mnist")
    )
    assert not re.findall(r"<script|https?://", page.read_text())
    git = ["git", "-C", str(project.root), "check-ignore", "--quiet"]
    assert subprocess.run([*git, "dvc_plots/index.html"], check=False).returncode == 0


@pytest.mark.proof
def test_a_new_variant_and_an_edited_loss_are_all_that_trains_and_a_run_that_fails_stops_no_other(project: Project, built: str) -> None:
    """Another evaluation scores every run, and trains none. In MLflow each variant has one current run of the standing comparison."""
    of_test = project.run("dml", "compare", "synthetic")
    assert [word for word in ("untrained", "softtriple") if word not in of_test] == []
    project.change(comparison={"variants": {"softmax": {"loss": {"name": "softmax"}}}})
    standing = (project.root / "results/synthetic/report.md").read_bytes()
    with (project.root / "dml_core/losses/softtriple.py").open("a") as file:
        file.write("\nEDITED = True\n")
    fails = "comparison.variants.fails={loss: {name: softmax}, optimiser: {name: sgd, learning_rate: 1e30}}"
    printed = project.run("dml", "reproduce", "--set", fails, "--set", "evaluation={recall_at: [1, 3], clustering: false}", code=2)
    assert steps_run(printed) == {"train": 2, "embed": 2, "evaluate": 3}
    assert "synthetic / fails / seed 0: FAILED: the loss 'softmax' is not finite" in printed
    assert "error: 1 of 4 runs failed" in printed.splitlines()[-1]
    report = (project.root / printed.split("\nreport: ")[1].splitlines()[0]).read_text()
    assert "| softtriple " in report
    assert "Best mean R@1 on these " in report
    assert "Nothing is compared: fewer than 3 shared seeds." in of_test
    assert "\n- synthetic / fails / seed 0: FAILED: " in report
    assert (project.root / "results/synthetic/report.md").read_bytes() == standing
    assert project.run("dml", "compare", "synthetic") == of_test


def set_held_out(project: Project, validation: dict[str, float] | None, role: str) -> None:
    held_out = {"validation": validation}
    project.change(comparison={"datasets": {"synthetic": held_out, "fashion-mnist": held_out}}, evaluation={"role": role})


@pytest.mark.proof
def test_runs_scored_on_validation_classes_are_a_comparison_of_their_own(project: Project) -> None:
    """Independent of the tests before it."""
    project.run("dml", "reproduce", "--variant", "untrained")
    of_test = project.run("dml", "compare", "synthetic")
    set_held_out(project, {"share": 0.5}, role="validation")
    assert steps_run(project.run("dml", "reproduce", "--variant", "untrained")) == {"train": 1, "embed": 1, "evaluate": 1}
    assert "comparison on synthetic, validation classes" in project.run("dml", "compare", "synthetic")
    set_held_out(project, None, role="test")
    assert project.run("dml", "compare", "synthetic") == of_test
