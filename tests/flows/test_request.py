"""Requests for runs: names of their flow runs on Prefect's pages, and the parameters that deployments may set."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dml_core.errors import ConfigError
from flows import reproduce, verify
from flows.cli.options import request_of
from flows.reproduce import flow_run_name
from flows.request import Request, requested_runs
from tasks.environment import Project
from tasks.runs.replaced_data import use_packed
from tasks.runs.specs import Params, RunSpec
from tasks.tables.choice import Choice
from tasks.tables.file import table_names
from tasks.tables.runs import Chosen
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (Request(tables=("softtriple/table1",)), "softtriple/table1"),
        (
            Request(tables=("softtriple/table1",), rows=("softtriple",), seeds=(0, 1), smoke=True),
            "softtriple/table1: softtriple, seeds 0, 1, smoke",
        ),
        (Request(tables=("sgsl/table1", "sgsl/table2"), track="common"), "2 tables (sgsl/table1 ...): common track"),
        (Request(tables=("*",), prepared_only=True, variant="as_released"), "all tables: as_released, on what is prepared"),
        (Request(datasets=("a", "b"), whole=True), "comparison on a and b, all variants and seeds"),
        (Request(datasets=("a",), variants=("v", "w"), overrides=("x=1",), seeds=(2,)), "comparison on a, v, w, x=1, seeds 2"),
        (Request(datasets=("a",), changed_only=True, whole=True), "changed datasets among a"),
    ],
)
def test_a_flow_run_is_called_by_what_it_runs(request_: Request, name: str) -> None:
    assert flow_run_name(request_) == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smoke": True}, "require a table"),
        ({"tables": ("*",), "variants": ("softmax",)}, "variants and changed_only apply only to the standing comparison"),
        ({"tables": ("*",), "changed_only": True}, "variants and changed_only apply only to the standing comparison"),
        ({"max_seeds": 4}, "require --seeds auto"),
        ({"tables": ("*",), "track": "common", "epochs": ("last", "oracle")}, "epochs cannot be combined with track common"),
        ({"resolve": 1.0, "seeds": (1,)}, "--seed cannot be combined with --seeds auto"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Request(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "many", "1001", "9" * 5000])
def test_a_number_of_seeds_that_no_command_can_run_is_refused(number: str) -> None:
    with pytest.raises(ConfigError, match=rf"--seeds {number}: expected a number from 1 to 1000, or auto"):
        request_of(["softtriple/table1"], None, number, None)


def test_a_number_of_seeds_means_the_first_ones() -> None:
    assert request_of(["softtriple/table1"], None, "1000", None).seeds == tuple(range(1000))


def test_the_form_offers_names_with_descriptions_and_the_deployments_fit_it() -> None:
    form = reproduce.reproduce.parameters.definitions["Request"]["properties"]
    assert {"*", *table_names()} == set(form["tables"]["items"]["enum"])
    assert "softtriple" in form["variants"]["items"]["enum"]
    assert {"synthetic", "fashion-mnist", "cub200"} <= set(form["datasets"]["items"]["enum"])
    assert all(field["description"].endswith(".") for field in form.values())
    deployments = {entry["name"]: entry for entry in yaml.safe_load((ROOT / "infra/prefect.yaml").read_text())["deployments"]}
    for deployment in deployments.values():
        module, _, name = deployment["entrypoint"].partition(":")
        flows = {"flows/reproduce.py": reproduce, "flows/verify.py": verify}
        given = {"dataset": "synthetic", "variant": "softtriple"} if deployment["name"] == "single-run" else {}  # by whoever starts it
        getattr(flows[module], name).validate_parameters(deployment.get("parameters", given))
    assert deployments["weekly"]["parameters"]["request"]["prepared_only"]
    assert deployments["weekly"]["schedules"]


def test_what_a_setting_drops_and_does_not_reach_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.request.check_before", lambda *_: None)
    monkeypatch.setattr("flows.request.check_parts", lambda *_: None)
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    settings = ("comparison.protocol.model.head.kind=linear", "comparison.protocol.model.backbone.name=resnet18")
    request = Request(datasets=("synthetic",), variants=("softmax", "discriminative"), overrides=settings)
    lines: list[str] = []
    requested_runs(Project(tmp_path, tmp_path / "state", store="s", tracking_uri="sqlite:///x.db"), request, lines.append)
    kind, name = settings
    assert [line for line in lines if line.startswith("note: ")] == [
        f"note: --set {name} drops comparison.protocol.model.backbone.width: 16",
        f"note: --set {kind} does not apply to discriminative on synthetic: comparison.variants.discriminative overrides it",
    ]


@pytest.mark.parametrize("split", ["classes", "images"])
def test_variants_that_are_not_searched_are_named_also_if_all_are_trained(
    split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first training their own settings stood in the report as tuned ones. `dml tune` refuses datasets split by image."""
    monkeypatch.setattr("flows.request.check_before", lambda *_: None)
    monkeypatch.setattr("flows.request.check_parts", lambda *_: None)
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["datasets"]["fashion-mnist"]["options"] = {"split": split}
    params["comparison"]["datasets"]["fashion-mnist"]["tuned"] = True
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    lines: list[str] = []
    request = Request(datasets=("fashion-mnist",), variants=("softmax", "untrained"))
    requested_runs(Project(tmp_path, tmp_path / "state", store="s", tracking_uri="sqlite:///x.db"), request, lines.append)
    (line,) = (line for line in lines if line.startswith("note: "))
    command = "; to search: dml tune project/standing/softmax --dataset fashion-mnist" if split == "classes" else ""
    own = "comparison.datasets.fashion-mnist.tuned: not searched there, so with their own settings: softmax"
    assert line == f"note: {own}{command}"


def test_a_schedule_skips_a_changed_dataset_whose_former_images_a_flow_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.request.changed_datasets", lambda *_: {"synthetic": False})
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    project = Project(tmp_path, tmp_path / "state", store="s", tracking_uri="sqlite:///x.db")
    lines: list[str] = []
    flow = use_packed(project, "synthetic")
    assert requested_runs(project, Request(datasets=("synthetic",), changed_only=True), lines.append)[1] == []
    assert lines[1] == f"synthetic: skipped: its former images are in use by process {os.getpid()}"
    flow.release(remove=True)


def test_settings_of_a_table_without_effect_are_named_before_runs_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose loss is never heated gives a share of the epochs after which it would be."""

    def lines(*tables: str, **options: Any) -> list[str]:
        printed: list[str] = []
        project = Project(tmp_path, tmp_path / "state", store="s", tracking_uri="sqlite:///x.db")
        requested_runs(project, Request(tables=tables, force=True, **options), printed.append)
        return [line for line in printed if line.startswith("note: ")]

    def checked(project: Project, params: Params, chosen: Chosen, choice: Choice, before_first: Callable[[], None]) -> list[RunSpec]:
        if is_new:
            before_first()
        return [run for runs in chosen.runs for run in runs]

    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    monkeypatch.setattr("tasks.plans.needs.check_tables", checked)
    is_new = True
    (line,) = lines("project/claims")
    assert line.startswith("note: project/claims: rows.cold.loss.options.heat_from has no effect on fashion-mnist-200: ")
    assert lines("project/glyphs", rows=("softtriple-1",), smoke=True) == []
    is_new = False
    assert lines("project/claims") == []
