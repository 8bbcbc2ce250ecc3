"""What a message or the shell's completion says is so: advised commands make what was missing, and unknown names are called unknown."""

import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dml_core.config import read_yaml
from flows.cli import session
from flows.cli.app import app
from flows.cli.plan import _cost_entry, _resources_entry
from tasks.environment import Project
from tasks.plans.prices import Prices
from tasks.plans.resources import Resources
from tasks.plans.times import Estimate
from tasks.wording import reproduce_command
from tests.flows.test_cli import dml, project, refused

__all__ = ["project"]


@pytest.mark.parametrize("words", [["compare", "syntetic"], ["models", "syntetic"]], ids=lambda words: words[0])
def test_an_unknown_dataset_is_called_unknown(words: list[str], project: Path) -> None:
    """`dml compare syntetic` advised `dml reproduce --dataset syntetic`, which was then refused."""
    refused(dml(*words, cwd=project), "unknown dataset of the comparison 'syntetic'; did you mean 'synthetic'?")


def test_an_empty_name_is_not_the_default(project: Path) -> None:
    refused(dml("compare", "", cwd=project), "dataset '' is not a name")


def test_a_misspelt_name_to_verify_may_be_a_dataset_or_a_table(project: Path) -> None:
    refused(dml("verify", "syntetic", cwd=project), "unknown dataset of the comparison or table 'syntetic'; did you mean 'synthetic'?")


def test_the_advised_command_has_the_settings_of_the_one_that_failed(project: Path) -> None:
    setting = "comparison.variants.softmax.loss.options={scale: 2}"
    command = f"run dml reproduce --dataset synthetic --set {shlex.quote(setting)}"
    refused(dml("compare", "--set", setting, cwd=project), command)
    assert reproduce_command("d", ["a=b"], "v", 0) == "dml reproduce --dataset d --variant v --seed 0 --set a=b"


def test_an_option_without_its_argument_names_no_other_help(project: Path) -> None:
    """It said `See dml --help`, which does not have the option."""
    refused(dml("run", "synthetic", "softmax", "--set", cwd=project), "error: Option '--set' requires an argument")
    assert "--help" not in dml("search", "-k", cwd=project).stderr


def test_a_local_stack_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(session.environment, "find_project", lambda: Project(tmp_path, tmp_path / "state", "", ""))
    monkeypatch.setattr(session.environment, "set_environment", lambda project: None)
    monkeypatch.setattr(session, "stack_environment", lambda state: {"MLFLOW_TRACKING_URI": "http://stack"})
    for _ in range(2):  # as `dml serve`, for itself and for the network
        session.open_project()
    assert capsys.readouterr().err.count("note: using the local stack") == 1


def test_a_blank_reason_does_not_force_a_promotion(project: Path) -> None:
    refused(dml("models", "promote", "a/b", "--force", "--reason", " ", cwd=project), "--force and --reason require each other")


def test_weights_that_must_be_made_by_hand_are_missed_before_anything_starts(project: Path, tmp_path: Path) -> None:
    """Prefect was started, and a download announced that there is none of."""
    params = read_yaml(project / "params.yaml")
    params["comparison"]["protocol"]["model"]["backbone"] = {"name": "timm:tf_efficientnet_lite0", "weights": "imagenet"}
    params["comparison"]["datasets"]["synthetic"]["tuned"] = False
    (project / "params.yaml").write_text(yaml.safe_dump(params))
    shown = dml("run", "synthetic", "softmax", cwd=project, TORCH_HOME=str(tmp_path / "hub"))
    assert shown.returncode == 2
    assert "nobody offers the file" in shown.stderr
    assert not {"starting Prefect", "downloading"} & {line[:16].strip() for line in shown.stderr.splitlines()}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("models ", {"list", "promote", "export"}),
        ("models e", {"export"}),
        ("tables ", {"list", "show", "export", "import"}),
        ("index --app", {"--approximate"}),
        ("models --", {"--all", "--help"}),
    ],
)
def test_completion_offers_the_verbs_of_a_group_with_a_default(words: str, offered: set[str]) -> None:
    environment = {"_DML_COMPLETE": "complete_bash", "COMP_WORDS": f"dml {words}", "COMP_CWORD": "2"}
    assert set(CliRunner().invoke(app, [], env=environment, prog_name="dml").stdout.split()) == offered


def test_unknown_values_of_a_plan_are_null() -> None:
    unknown = Estimate(None, "not measured")
    assert _cost_entry(unknown, Prices(currency="EUR")) == {"cost": None, "money": None, "currency": "EUR"}
    assert _resources_entry(Resources((), 1, None, "", None, "cpu"))["memory_of"] is None
