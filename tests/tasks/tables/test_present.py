"""A table's runs today equal the recorded ones as long as nothing has changed."""

import shutil
from pathlib import Path

import pytest

from dml_core.data.store.info import read_info
from tasks.environment import Project
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import MetricRecord
from tasks.runs.specs import DatasetSpec, RunSpec
from tasks.tables.choice import Choice
from tasks.tables.file import load_table, standing_table
from tasks.tables.present import table_today
from tasks.tables.result import MeasuredRun, TableResult
from tasks.tables.runs import runs_of
from tasks.tables.view import comparable
from tests.conftest import ROOT

PARAMS = load_params(ROOT / "params.yaml")
STANDING = "project/standing"


def measured(spec: RunSpec, digest: str | None) -> MeasuredRun:
    scores = MetricRecord(step="evaluate", identity="i", key="f", files=(), metrics={"recall@1": 0.5})
    return MeasuredRun.of(spec, scores, digest)


@pytest.fixture
def project(tmp_path: Path, packed: Path) -> Project:
    """A project in which only the dataset `synthetic` is prepared."""
    shutil.copytree(packed, tmp_path / "data/packed/synthetic")
    return Project(tmp_path, tmp_path / "state", "", "")


def test_the_standing_comparison_is_held_to_params_yaml_and_to_the_prepared_data(project: Project) -> None:
    digest = read_info(project.packed("synthetic")).fingerprint
    specs = {name: comparison_runs(PARAMS, name, ["softmax"], [0])[0] for name in ("synthetic", "fashion-mnist")}
    now, elsewhere = (
        measured(specs["synthetic"], digest),
        measured(specs["fashion-mnist"], "x"),
    )
    gone = now.model_copy(update={"row": "gone"})
    shorter = {**now.training, "num_epochs": 1}
    old = [now.model_copy(update=change | {"seed": 1}) for change in ({"digest": "old"}, {"digest": None}, {"training": shorter})]
    for stale in old:
        result = TableResult(name=STANDING, runs=(now, elsewhere, gone, stale))
        today = table_today(project, PARAMS, STANDING, standing_table(PARAMS), result)
        assert today.digests == {"synthetic": digest}, "the other dataset is not prepared"
        assert today.settings["synthetic", now.label] == now.facts.settings
        assert ("synthetic", gone.label) not in today.settings
        kept, left_out = comparable(result, today)
        assert kept.runs == (now, elsewhere), "a row that left params.yaml is under no protocol of today"
        assert len(left_out) == 2
    alone = TableResult(name=STANDING, runs=(old[2],))
    assert comparable(alone, table_today(project, PARAMS, STANDING, standing_table(PARAMS), alone))[0].runs == ()


def test_a_table_s_dataset_is_the_project_s_that_is_read_by_its_reader(project: Project) -> None:
    """The dataset may have any name in the project."""
    project.packed("synthetic").rename(project.packed("birds"))
    table = load_table("softtriple/table1")
    spec = runs_of("softtriple/table1", table)["cub200"][0]
    result = TableResult(name="softtriple/table1", runs=(measured(spec, "old"),))
    birds = PARAMS.model_copy(update={"datasets": {"birds": DatasetSpec(reader="cub200", raw="raw")}})
    digest = read_info(project.packed("birds")).fingerprint
    assert table_today(project, birds, "softtriple/table1", table, result).digests == {"cub200": digest}
    assert table_today(project, PARAMS, "softtriple/table1", table, result).digests == {}


@pytest.mark.parametrize("name", ["softtriple/table1", "tuplet_margin/table3", "sgsl/table4", "project/claims"])
@pytest.mark.parametrize("choice", [Choice(), Choice(track="common"), Choice(epochs=("last",))])
def test_every_run_of_a_table_is_today_s_as_long_as_its_file_stays(project: Project, name: str, choice: Choice) -> None:
    table = load_table(name)
    runs = [measured(spec, "1") for specs in runs_of(name, table, choice).values() for spec in specs]
    result = TableResult(name=name, runs=tuple(runs))
    today = table_today(project, PARAMS, name, table, result)
    if not any(dataset == "synthetic" for dataset, _ in today.settings):
        assert today.settings == {(run.dataset, run.label): run.facts.settings for run in runs}
    assert not today.is_one_protocol
    moved = [run.model_copy(update={"seed": seed, "digest": "2"}) for run in runs for seed in (1, 2)]
    mixed = TableResult(name=name, runs=(*moved, *runs))  # not prepared: the content of most runs is used
    assert not any(line.startswith("shown") for line in comparable(mixed, table_today(project, PARAMS, name, table, mixed))[1])
    longer = [run.model_copy(update={"seed": seed, "training": {**run.training, "num_epochs": 99}}) for run in runs for seed in (1, 2)]
    kept, left_out = comparable(TableResult(name=name, runs=(*runs, *longer)), today)
    assert kept.runs == tuple(runs), "one run of today's settings goes before two of others"
    assert len(left_out) == len({(run.dataset, run.label) for run in runs})
