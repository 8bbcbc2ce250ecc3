"""Runs in the places of a table's result with today's settings: `dml models TABLE` lists their networks, and `dml gc` keeps their steps."""

import re
from pathlib import Path

import pytest
import yaml

from dml_core.config import read_yaml
from flows.cli import models
from tasks.data import read_dataset
from tasks.environment import Project
from tasks.gc import find_unused
from tasks.models.listing import list_models
from tasks.plans.progress import table_states
from tasks.plans.results import add_runs
from tasks.runs.identity import network_identity, step_identities
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.specs import RunSpec
from tasks.runs.tuned import STANDING
from tasks.tables.choice import Choice
from tasks.tables.result import FailedRun, MeasuredRun
from tasks.tables.runs import runs_of_tables
from tests.tasks.plans.conftest import look
from tests.tasks.plans.test_rebuilding import TABLE, finish

CHOICES = {
    "default": Choice(seeds=(0, 1)),
    "variant": Choice(seeds=(0,), variant="as_released"),
    "common track": Choice(seeds=(3,), track="common"),
    "epochs": Choice(seeds=(5,), epochs=("last", "oracle")),
}


def specs_of(choice: Choice) -> list[RunSpec]:
    return runs_of_tables([TABLE], choice)[0][TABLE, "cub200"]


def steps_of(project: Project, spec: RunSpec) -> dict[str, Path]:
    """Return the folders of a run's steps in the store."""
    steps = step_identities(spec, read_dataset(project, "cub200"))
    return {step: Path(project.store) / step / identity for step, identity in steps.items()}


def measure(project: Project, spec: RunSpec) -> MeasuredRun:
    """Finish a run in the store."""
    for step, folder in steps_of(project, spec).items():
        if step != "evaluate":
            folder.mkdir(parents=True, exist_ok=True)
    return finish(project, spec, "cub200")


@pytest.mark.parametrize("of", CHOICES)
def test_networks_of_every_variant_epoch_and_seed_are_listed(
    project: Project, of: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a table with no run of its rows' first variants nothing was listed, and `dml models` said that nothing is trained."""
    specs = specs_of(CHOICES[of])
    add_runs(project, TABLE, [measure(project, spec) for spec in specs], [], None)
    listed = {(model.run, model.identity) for model in list_models(project, TABLE, every_seed=True)[0]}
    assert listed == {
        (f"cub200/{spec.label}/{spec.seed}", network_identity(steps_of(project, spec)["train"].name, spec.evaluation.epoch))
        for spec in specs
    }
    assert len({identity for _, identity in listed}) == len(specs) == 2 * len(CHOICES[of].seeds) * max(1, len(CHOICES[of].epochs))
    monkeypatch.setattr(models, "open_project", lambda: project)
    models.list_(TABLE, every_seed=True)
    assert {(cells[1], cells[-2]) for cells in map(re.compile(" *│ *").split, capsys.readouterr().out.splitlines()) if cells[1:]} == listed


def test_networks_are_in_the_order_of_the_rows(project: Project) -> None:
    """A result has its runs by name."""
    name = "discriminative/table4"
    specs = runs_of_tables([name], Choice())[0][name, "cub200"]
    add_runs(project, name, [measure(project, spec) for spec in specs], [], None)
    rows = [model.run.split("/")[1].split()[0] for model in list_models(project, name, every_seed=False)[0]]
    assert rows == ["softmax", "discriminative"]


def test_a_run_that_keeps_more_epochs_than_its_table_is_not_stale(project: Project) -> None:
    add_runs(project, TABLE, [measure(project, spec) for spec in specs_of(CHOICES["epochs"])], [], None)
    (state,) = table_states(look(project), [TABLE])
    assert (state.how, state.own_data.done, state.own_data.stale) == ("done", 2, 0)


@pytest.mark.parametrize("of", CHOICES)
def test_finished_steps_of_failed_runs_are_kept(project: Project, of: str) -> None:
    """Their scoring failed, for example on a full disk; a rerun reuses the training."""
    specs = specs_of(CHOICES[of])
    trained = {folder for spec in specs for step, folder in steps_of(project, spec).items() if step == "train"}
    for folder in (*trained, Path(project.store) / "train" / "unused"):
        folder.mkdir(parents=True)
    add_runs(project, TABLE, [], [FailedRun.of(spec.model_copy(update={"column": "cub200"}), "disk full") for spec in specs], None)
    assert [step.folder.name for step in find_unused(project, -1.0)[0]] == ["unused"]


def test_finished_steps_of_a_failed_seed_of_the_standing_comparison_are_kept(project: Project) -> None:
    values = read_yaml(project.params_file)
    variants = {"softmax": {"loss": {"name": "softmax"}}}
    values["comparison"] |= {"default_datasets": ["cub200"], "datasets": {"cub200": {}}, "variants": variants}
    project.params_file.write_text(yaml.safe_dump(values))
    specs = comparison_runs(load_params(project.params_file), "cub200", seeds=(70, 71))
    folders = [steps_of(project, spec)["train"] for spec in specs]
    for folder in folders:
        folder.mkdir(parents=True)
    add_runs(project, STANDING, [], [FailedRun.of(specs[0], "disk full")], None)
    assert [step.folder for step in find_unused(project, -1.0)[0]] == folders[1:]
