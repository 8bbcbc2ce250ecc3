"""The standing comparison of a project: deployments on a Prefect server, a scheduled run that builds everything, alarms, selective reruns.

The tests run in order. Two datasets, two variants (one of them untrained), one seed: a full run is 4 x (train, embed, evaluate). After the
scheduled run, tests make changes and count the steps that run through real DVC, Prefect, Ray and MLflow.
"""

import json
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
import requests
from mlflow import MlflowClient
from mlflow.entities import ViewType

from flows.request import Request
from tasks import environment
from tasks.stack.automations import replace_automations
from tasks.watch.alarms import notify
from tasks.watch.records import Verdict
from tasks.watch.storage import write_reference
from tests.damage import contents
from tests.e2e.conftest import HANGS_SECONDS, ROOT, Project, report_of, steps_run
from tests.e2e.server import Server, running_server
from tests.hidden import hiding
from tests.tasks.watch.conftest import reference
from tests.tasks.watch.test_alarms import night
from tests.webhook import webhook_receiver

pytestmark = pytest.mark.slow


def stages_run(printed: str) -> list[str]:
    """Return the stages whose command DVC ran."""
    return re.findall(r"Running stage '([^']+)'", printed)


@pytest.fixture(scope="module")
def server(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    shutil.copytree(ROOT / "infra", project.root / "infra")
    with running_server(project, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def built(server: Server) -> dict:
    """Let the schedule of `nightly` start a run that builds everything from nothing, and return the run."""
    in_five_seconds = {"interval": 86400, "anchor_date": (datetime.now(UTC) + timedelta(seconds=5)).isoformat()}
    changes = {
        "schedules": [{"active": True, "schedule": in_five_seconds}],
        "parameters": {"request": {"whole": True, "datasets": ["synthetic", "fashion-mnist"]}},
    }
    server.ask(f"deployments/{server.deployment('nightly')['id']}", method="PATCH", **changes)
    run = server.finished("nightly")
    assert server.worker is not None
    psutil.wait_procs(server.worker.children(), timeout=HANGS_SECONDS)  # the run's process, which ends a moment later
    server.stop_worker()
    return run


def test_the_forms_have_the_project_s_datasets_and_variants_as_choices(server: Server) -> None:
    deployments = {entry["name"]: entry for entry in server.ask("deployments/filter")}
    assert set(deployments) == {"nightly", "dataset-change", "nightly-share", "on-demand", "single-run", "table", "weekly", "weekly-all"}
    assert [entry["schedule"]["cron"] for entry in deployments["nightly"]["schedules"]] == ["0 2 * * *"]
    for name in ("on-demand", "nightly", "dataset-change", "table", "weekly"):
        form = deployments[name]["parameter_openapi_schema"]["definitions"]["Request"]["properties"]
        assert set(form) == {field.name for field in fields(Request)}
        assert form["force"]["type"] == "boolean"
        assert form["variants"]["items"]["enum"] == ["untrained", "softtriple"]
        assert {"synthetic", "fashion-mnist", "cub200"} <= set(form["datasets"]["items"]["enum"])
        assert {"*", "sgsl/figure3"} <= set(form["tables"]["items"]["enum"])
    single = deployments["single-run"]["parameter_openapi_schema"]["properties"]
    assert single["dataset"]["enum"] == ["synthetic", "fashion-mnist"]
    assert [entry["schedule"]["cron"] for entry in deployments["weekly"]["schedules"]] == ["0 3 * * 6"]
    assert deployments["weekly"]["parameters"]["request"]["prepared_only"]
    for name, misspelt in (
        ("single-run", {"dataset": "synthetic", "variant": "softriple"}),
        ("on-demand", {"request": {"variants": ["softriple"]}}),
    ):
        with pytest.raises(requests.HTTPError) as refused:
            server.ask(f"deployments/{deployments[name]['id']}/create_flow_run", parameters=misspelt)
        assert "softriple" in refused.value.response.text


@pytest.mark.proof
def test_a_worker_runs_a_deployed_flow(server: Server) -> None:
    parameters = {"dataset": "synthetic", "variant": "untrained", "seed": 1, "overrides": ["evaluation.recall_at=[1]"]}
    (single,) = (entry for entry in server.ask("deployments/filter") if entry["name"] == "single-run")
    server.ask(f"deployments/{single['id']}/create_flow_run", parameters=parameters)
    run = server.finished("single-run")
    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    assert run["name"] == "synthetic / untrained / seed 1"
    assert list((server.project.root / "state/store/evaluate").glob("*/metrics.json"))
    names = {task["name"] for task in server.ask("task_runs/filter", flow_runs={"id": {"any_": [run["id"]]}})}
    assert names == {"prepare synthetic", *(f"{step} untrained s1" for step in ("train", "embed", "evaluate", "publish"))}


@pytest.mark.proof
def test_a_run_s_page_has_its_log_lines_its_scores_and_where_things_are(server: Server) -> None:
    run = server.finished("single-run")
    logged = server.logged(run)
    assert "synthetic / untrained / seed 1: recall@1 0." in logged
    assert "state/store/train/" in logged
    (page,) = server.ask("artifacts/filter", artifacts={"flow_run_id": {"any_": [run["id"]]}})
    assert "| recall@1 | 0." in page["data"]
    assert "state/store/evaluate/" in page["data"]


def test_a_scheduled_run_comes_and_builds_everything_from_nothing_and_mlflow_has_it(server: Server, project: Project, built: dict) -> None:
    assert built["auto_scheduled"], "the scheduler made this run, nobody else"
    assert built["state"]["type"] == "COMPLETED", built["state"]["message"]
    assert built["name"] == "comparison on synthetic and fashion-mnist, all variants and seeds"
    tasks = server.ask("task_runs/filter", flow_runs={"id": {"any_": [built["id"]]}})
    assert Counter(task["name"].split()[0] for task in tasks) == {"prepare": 2, "train": 4, "embed": 4, "evaluate": 4, "publish": 4}
    client = MlflowClient(f"sqlite:///{project.root / 'state/mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, "params.variant = 'untrained' and params.seed = '0'")
    assert [entry for entry in found if "recall_at_8" in entry.data.metrics], "the scheduled run's scores"
    state = project.root / "state"
    steps = {step.name for name in ("train", "embed", "evaluate") for step in (state / "store" / name).iterdir()}
    assert {record.name for record in (state / "prefect/storage").iterdir()} == steps, "the next flow finds them finished"
    limits = {entry["name"]: entry["limit"] for entry in server.ask("v2/concurrency_limits/filter")}
    assert limits["dml-workers"] == 1, "the run found or made the limit, which it cannot pass over"


@pytest.mark.proof
def test_a_limit_below_what_a_run_takes_is_said_at_once(server: Server) -> None:
    command = ("dml", "run", "synthetic", "untrained", "--set", "scale.num_workers=2")
    printed = server.project.run(*command, code=2, **server.environment)
    assert "Prefect's limit 'dml-workers' is 1, but a run needs 2 workers" in printed


def test_the_webhook_gets_one_alarm_one_recovery_and_one_message_of_a_missed_night(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project = environment.Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path}/none.db")
    write_reference(project, reference("synthetic", "a"))
    monkeypatch.setenv("PREFECT_API_URL", server.url)
    committed, automations = (ROOT / "infra/automations.yaml").read_text(), tmp_path / "automations.yaml"
    assert committed.count("within: 93600 ") == 1
    automations.write_text(committed.replace("within: 93600 ", "within: 20 "))  # seconds; a night and two hours otherwise
    with webhook_receiver() as (address, posted):

        def wait_for_posts(number: int) -> None:
            until = time.monotonic() + 120
            while len(posted) < number and time.monotonic() < until:
                time.sleep(0.2)

        monkeypatch.setenv("DML_WEBHOOK", address)
        for _ in range(2):  # twice, as `dml stack up` does after a restart
            replace_automations(server.url, automations)
        for number, verdict in enumerate((Verdict.IDENTICAL, Verdict.DRIFTED, Verdict.DRIFTED)):
            notify(project, night(number, a=verdict))
        wait_for_posts(1)
        notify(project, night(3, a=Verdict.IDENTICAL))
        wait_for_posts(3)
        time.sleep(3)  # for a message that must not come
    assert [entry["event"] for entry in posted] == ["dml.alarm", "dml.recovered", "dml.missed"]
    assert posted[2]["text"] == "no verification of synthetic for 26 hours"
    assert "recall@1 0.30 is below its band" in posted[0]["text"]
    assert "dml accept synthetic" in posted[0]["remedy"]


def test_dvc_takes_it_over_and_shows_what_is_measured_although_another_dataset_has_no_results(
    server: Server, project: Project, built: dict
) -> None:
    server.stop()  # no later test needs it
    printed = project.run("dvc", "repro")
    assert sorted(stages_run(printed)) == ["comparison@fashion-mnist", "comparison@synthetic"], "the flow fetched and prepared through DVC"
    assert printed.count("2 of 2 runs reused") == 2
    params = (project.root / "params.yaml").read_text()
    project.change(datasets={"birds": {"reader": "folder", "raw": "data/raw/birds"}}, comparison={"datasets": {"birds": {}}})
    metrics, plots = project.run("dvc", "metrics", "show", "--json"), project.run("dvc", "plots", "show")
    (project.root / "params.yaml").write_text(params)
    assert "failed" not in metrics + plots
    shown = json.loads(metrics)[""]["data"]
    assert {path.removeprefix("results/"): set(entry["data"]) for path, entry in shown.items()} == {
        f"{dataset}/metrics/{variant}.json": {"recall@1", "map@r", "nmi"}
        for dataset in ("synthetic", "fashion-mnist")
        for variant in ("untrained", "softtriple")
    }
    page = project.root / "dvc_plots/index.html"
    pictures = [(page.parent / picture).read_bytes() for picture in re.findall(r'<img src="([^"]+)"', page.read_text())]
    assert sorted(pictures) == sorted(
        (project.root / f"results/{dataset}/recall.png").read_bytes() for dataset in ("synthetic", "fashion-mnist")
    )
    assert not re.findall(r"<script|https?://", page.read_text()), "a page that loads nothing from a network"
    git = ["git", "-C", str(project.root), "check-ignore", "--quiet"]
    assert subprocess.run([*git, "dvc_plots/index.html"], check=False).returncode == 0


def test_an_untouched_tree_reruns_nothing_and_reused_runs_load_neither_prefect_nor_ray_nor_torch(
    project: Project, built: dict, tmp_path: Path
) -> None:
    """The first command after DVC's lets DVC look at the dataset once more. A part that is reproduced changes nothing, either."""
    (project.root / "docs").mkdir()
    (project.root / "docs/page.md").write_text("a file that no step uses")
    command = ("dml", "reproduce", "--dataset", "synthetic")
    project.run(*command)
    report, database = (project.root / "results/synthetic/report.md").read_text(), project.root / "state/mlflow.db"
    before = contents(project.root / "results"), database.read_bytes()
    without = hiding(tmp_path / "hidden", ["prefect", "ray", "torch"], project.root)
    again = project.run(*command, **without)
    assert "starting" not in again
    assert "2 of 2 runs reused" in again
    assert steps_run(again) == {}
    assert report_of(again, "synthetic").split() == re.sub(r"^!?\[.*\]\(.*\)$", "", report, flags=re.MULTILINE).split()
    assert (contents(project.root / "results"), database.read_bytes()) == before
    assert "train: reused" in project.run("dml", "run", "synthetic", "softtriple", **without)
    project.run(*command, "--variant", "untrained")
    compared = project.run("dml", "compare", "synthetic")
    assert [variant for variant in ("untrained", "softtriple") if variant not in compared] == []
    assert stages_run(project.run("dvc", "repro")) == []


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


@pytest.mark.proof
def test_a_new_variant_and_an_edited_loss_are_all_that_trains_and_a_run_that_fails_stops_no_other(project: Project, built: dict) -> None:
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
