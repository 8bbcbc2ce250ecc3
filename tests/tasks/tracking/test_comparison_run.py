"""What MLflow shows of a comparison, compared with hand calculations."""

import json
from dataclasses import replace

from dml_core.evaluation.statistics.over_seeds import summarise_seeds
from tasks.runs.records import ComparisonReport
from tasks.tracking import comparison_run
from tasks.tracking.child_run import PublishedRun, view_link
from tasks.tracking.published import compare_published, older_code_lines, summarise_published
from tasks.tracking.tags import Tag

SCORES = {"a": (0.625, 0.65, 0.6), "b": (0.375, 0.35, 0.4)}  # mean 0.625, standard deviation 0.025: 4.303 * 0.025 / sqrt(3) = 0.062
RUNS = [
    PublishedRun(f"{variant}{seed}", {"recall_at_1": value}, {Tag.VARIANT: variant, Tag.SEED: str(seed)})
    for variant, values in SCORES.items()
    for seed, value in enumerate(values)
]
SUMMARIES = summarise_published(RUNS)
REPORT = ComparisonReport(comparison="title", dataset="d", role="test", folder=None, tags={})


def test_a_comparison_begins_with_the_best_and_a_table_with_a_link_to_the_best_run_of_each_variant() -> None:
    found = compare_published("d", RUNS)
    assert found is not None
    validation = {"a": {0: 0.1, 1: 0.3, 2: 0.2}}
    text = comparison_run.describe_comparison(REPORT, "1", "p", RUNS, SUMMARIES, found, validation, "Model: none", ["c: old"])
    best, _, others = found.sentence.partition("62.5. ")
    assert others.startswith("a is the best (95 % confidence). ")
    assert text.splitlines() == [
        f"{best}62.5.",
        "",
        "| variant | recall@1 | seeds | run |",
        "|---|---|---|---|",
        "| **a** | 62.5 ± 6.2 | 3 | [seed 1](#/experiments/1/runs/a1?workflowType=machine_learning) |",
        "| b | 37.5 ± 6.2 | 3 | [seed 0](#/experiments/1/runs/b0?workflowType=machine_learning) |",
        "",
        others,
        "",
        "title: per cent on test images, mean over the seeds ± half of the 95 % interval (from 3 seeds on). "
        "Bold: the 95 % confidence set of the best.",
        "",
        f"- [Variants side by side]({view_link('1')}): means over seeds, best first",
        "- Report: `report.md` and its figure, of the runs of the last command, among this run's "
        "[artifacts](#/experiments/1/runs/p/artifacts?workflowType=machine_learning)",
        "- Model: none",
        "- c: old",
    ]


def test_runs_of_older_code_are_named_with_the_files_that_differ() -> None:
    files = {("a", 0): "x.py, y.py", ("a", 2): "x.py, z.py", ("b", 1): "x.py"}
    runs = [
        replace(run, tags=run.tags | ({Tag.OLDER_CODE: files[place]} if (place := (run.variant, run.seed)) in files else {}))
        for run in RUNS
    ]
    assert older_code_lines("d", RUNS) == []
    assert older_code_lines("d", runs) == [
        "a on d, seeds 0, 2: made by other code: x.py, y.py, z.py",
        "b on d, seed 1: made by other code: x.py",
    ]


def test_of_many_variants_the_best_are_listed_and_what_follows_is_whole() -> None:
    runs = [
        PublishedRun("0" * 32, {"recall_at_1": 0.9 - seed / 100 - variant / 1000}, {Tag.VARIANT: f"v{variant}", Tag.SEED: str(seed)})
        for variant in range(100)
        for seed in range(3)
    ]
    found = compare_published("d", runs)
    text = comparison_run.describe_comparison(REPORT, "1" * 18, "p", runs, summarise_published(runs), found, {}, "Model: none", [])
    assert 6500 < len(text) < 7000, "MLflow cuts off what follows the first 8000 letters, and an alarm may come before"
    *shown, last = [line.split(" | ")[0].strip("|* ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert shown == [f"v{variant}" for variant in range(len(shown))]
    assert last == f"{100 - len(shown)} more, see the report"
    assert text.endswith("- Model: none")


def test_a_table_s_page_begins_with_its_description_and_has_its_runs() -> None:
    runs = [*RUNS, PublishedRun("c0", {"nmi": 0.5}, {Tag.VARIANT: "c", Tag.SEED: "0"})]
    table = REPORT.model_copy(update={"comparison": "t", "about": "A table."})
    lines = comparison_run.describe_comparison(table, "1", "p", runs, summarise_published(runs), None, {}, "Model", []).splitlines()
    assert lines[:3] == ["A table.", "", "| variant | recall@1 | nmi | seeds | run |"]
    assert "t: per cent on test images, mean over the seeds ± half of the 95 % interval (from 3 seeds on)." in lines
    assert "| c | - | 50.0 | 1 | [seed 0](#/experiments/1/runs/c0?workflowType=machine_learning) |" in lines
    assert not any("**a**" in line or "side by side" in line for line in lines)
    artifacts = "#/experiments/1/runs/p/artifacts?workflowType=machine_learning"
    assert f"- Report: the table's page, Markdown and JSON among this run's [artifacts]({artifacts})" in lines


def test_an_experiment_s_line_answers_which_loss_without_marks_that_lists_show() -> None:
    found = compare_published("d", RUNS)
    assert found is not None
    links = "[Side by side](view) · [table and report](run)"
    line = comparison_run.describe_experiment("run", "view", SUMMARIES, "best run: a", found)
    assert line == f"{found.sentence} Best run: a. {links}"
    assert "*" not in line
    one = {"a": {"recall_at_1": summarise_seeds([0.5])}}
    assert comparison_run.describe_experiment("run", "view", one, "none", None) == (
        f"The only variant is a: recall@1 50.0 per cent on the test classes. None. {links}"
    )
    assert comparison_run.describe_experiment("run", "view", {}, "none", None) == f"No run has the present data and settings. {links}"


def test_the_saved_view_shows_the_means_highest_first() -> None:
    tags = comparison_run.experiment_tags("comparison on d")
    state = json.loads(json.loads(tags["mlflow.sharedViewState.variants"])["state"])
    assert state["searchFilter"] == "tags.`dml.summary_of` = 'comparison on d'"
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`recall_at_1`", False)
    assert "metrics.`num_seeds`" in state["selectedColumns"]
    assert state["columnOrder"][:2] == ["attributes.`Run Name`", "metrics.`recall_at_1`"]
    assert set(state["columnOrder"][1:]) == set(state["selectedColumns"]), "MLflow shows selected columns alone"
    assert [section["display"] for section in state["compareRunSections"]] == [True]
    charts = state["compareRunCharts"]
    assert {chart["metricSectionId"] for chart in charts} == {section["uuid"] for section in state["compareRunSections"]}
    assert not any(part["deleted"] for part in (*state["compareRunSections"], *charts))
