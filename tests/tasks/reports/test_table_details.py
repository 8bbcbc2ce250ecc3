"""The details of a row on a table's page: the marks of settings that have changed, and what the settings are compared with."""

from pathlib import Path

from tasks.environment import Project
from tasks.reports.pictures import PictureCache
from tasks.reports.table_details import line_details
from tasks.reports.table_pages import write_site
from tasks.runs.params.file import load_params
from tasks.runs.params.requested import standing_runs
from tasks.runs.records import MetricRecord
from tasks.runs.tuned import STANDING
from tasks.sealed import read_sealed
from tasks.storage import Store
from tasks.tables.choice import Choice
from tasks.tables.file import load_table
from tasks.tables.result import MeasuredRun, TableResult, save_result
from tasks.tables.runs import runs_of
from tasks.tracking.child_run import current_tags
from tasks.tracking.connection import tag_filter
from tasks.tracking.tags import Tag
from tests.conftest import ROOT
from tests.tasks.reports.conftest import read

SCORES = MetricRecord(step="evaluate", identity="i", key="evaluate/i", files=(), metrics={"recall@1": 0.5})


def test_a_run_s_settings_are_compared_with_those_of_the_run_in_its_place_today(tmp_path: Path) -> None:
    """All that may change its scores: the common track's, the evaluation's; the kept epochs of a table that scores two are no change."""
    store, params = Store(str(tmp_path), tmp_path), load_params(ROOT / "params.yaml")

    def changed(name: str, choice: Choice, **then: dict[str, object]) -> list[str]:
        """Return the settings marked on a line whose run had other training or evaluation settings than today's."""
        file, (dataset,) = load_table(name), choice.datasets
        runs = [MeasuredRun.of(spec, SCORES, "digest") for spec in runs_of(name, file, choice)[dataset]]
        runs = [run.model_copy(update={part: getattr(run, part) | values for part, values in then.items()}) for run in runs]
        details = line_details(params, name, file, TableResult(name=name, runs=tuple(runs)), store, PictureCache()).values()
        return [setting for (detail,) in details for setting, *_ in detail.changed]

    assert changed("tuplet_margin/table2", Choice(("tml",), ("cars196",))) == []
    softtriple = "softtriple/table1", Choice(("softtriple",), ("cub200",))
    assert changed(*softtriple, training={"checkpoint_every_epochs": 7}) == []
    assert changed(*softtriple, training={"num_epochs": 3}) == ["num_epochs"]
    kmeans = {"kmeans": {"num_iterations": 25, "num_runs": 1}}
    assert changed(*softtriple, evaluation=kmeans) == ["evaluation.kmeans.num_iterations", "evaluation.kmeans.num_runs"]
    common = softtriple[0], Choice(("softtriple",), ("cub200",), track="common")
    assert changed(*common) == []
    assert changed(*common, training={"num_epochs": 3}) == ["num_epochs"]


def test_tuned_settings_are_compared_with_the_variant_that_they_change(tmp_path: Path) -> None:
    name, params = "project/glyphs", load_params(ROOT / "params.yaml")
    measured = read_sealed(ROOT / f"results/tables/{name}.json", TableResult)
    assert measured is not None
    runs = [run for run in measured.runs if (run.row, run.variant) == ("contrastive", "tuned")]
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path / 'mlflow.db'}")
    save_result(project, TableResult(name=name, runs=tuple(runs)))
    text = read(write_site(project, params, [name])[0].html.read_text()).text
    assert "Training settings that differ from the protocol's ours: " in text
    assert "the protocol's tuned" not in text


def test_a_line_that_repeats_another_s_settings_is_marked_so(tmp_path: Path) -> None:
    name, params = "project/glyphs", load_params(ROOT / "params.yaml")
    measured = read_sealed(ROOT / f"results/tables/{name}.json", TableResult)
    assert measured is not None
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path / 'mlflow.db'}")
    save_result(project, TableResult(name=name, runs=tuple(run for run in measured.runs if run.row == "triplet-batch-hard")))
    page = write_site(project, params, [name])[0]
    (mark,) = [mark.text for mark in read(page.html.read_text()).all("span", "mark") if "not compared" in mark.text]
    assert mark == "settings of ours: not compared"
    assert f", {mark} |" in page.markdown


def test_seeds_whose_scores_were_computed_on_another_device_have_no_mark(tmp_path: Path) -> None:
    """They have one mean, as settings that change no score are no difference."""
    name, params = "softtriple/table1", load_params(ROOT / "params.yaml")
    specs = runs_of(name, load_table(name), Choice(("softtriple",), ("cub200",), seeds=(0, 1)))["cub200"]
    runs = [MeasuredRun.of(spec, SCORES, "digest") for spec in specs]
    runs[1] = runs[1].model_copy(update={"evaluation": runs[1].evaluation | {"device": "cuda"}})
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path / 'mlflow.db'}")
    save_result(project, TableResult(name=name, runs=tuple(runs)))
    html = read(write_site(project, params, [name])[0].html.read_text())
    assert [line.all("th")[0].text for line in html.all("tr", "line")] == ["as_published 2 seeds"]


def test_the_search_of_a_line_finds_its_runs_in_mlflow(tmp_path: Path) -> None:
    """By the tags with which runs are published, of a table's epoch that is not the last and of the standing comparison's variant."""
    store, params = Store(str(tmp_path), tmp_path), load_params(ROOT / "params.yaml")
    runs = {
        "tuplet_margin/table2": runs_of("tuplet_margin/table2", load_table("tuplet_margin/table2"), Choice(("tml",), ("cars196",)))[
            "cars196"
        ],
        STANDING: standing_runs(params, ["synthetic"], ["softtriple"], [0])["synthetic"],
    }
    for name, specs in runs.items():
        measured = [MeasuredRun.of(spec, SCORES, "digest") for spec in specs]
        lines = line_details(params, name, load_table(name), TableResult(name=name, runs=tuple(measured)), store, PictureCache()).values()
        tags = [current_tags(spec.comparison) | {Tag.VARIANT: spec.label} for spec in specs]
        assert [detail.search for (detail,) in lines] == [tag_filter(expected) for expected in tags]
    assert tag_filter(tags[0]).startswith("tags.`dml.part_of` = 'comparison on synthetic' and ")
