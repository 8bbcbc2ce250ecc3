"""Text of MLflow's pages for runs and comparisons, compared with hand calculations."""

import json
import os
import socket
import sys

import pytest

from dml_core.evaluation.statistics.confidence import summarise
from tasks.tracking import pages
from tasks.tracking.names import SEED_TAG, VARIANT_TAG, PublishedRun
from tasks.tracking.summaries import compare_published, summarise_published
from tests.conftest import small_training

SCORES = {"a": (0.625, 0.65, 0.6), "b": (0.375, 0.35, 0.4)}  # mean 0.625, standard deviation 0.025: 4.303 * 0.025 / sqrt(3) = 0.062
RUNS = [
    PublishedRun(f"{variant}{seed}", {"recall_at_1": value}, {VARIANT_TAG: variant, SEED_TAG: str(seed)})
    for variant, values in SCORES.items()
    for seed, value in enumerate(values)
]
SUMMARIES = summarise_published(RUNS)


def test_a_history_becomes_points_of_steps_and_means_of_epochs() -> None:
    history = [
        {"epoch": 0, "step": 0, "loss": 4.0, "learning_rate_factor": 1.0},
        {"epoch": 0, "step": 1, "loss": 2.0, "learning_rate_factor": 0.5, "part": 1.0},
        {"epoch": 1, "step": 2, "loss": 1.0, "learning_rate_factor": 0.25},
    ]
    assert sorted(pages.curve_points(history)) == sorted(
        [
            *(("train/loss", 4.0, 0), ("train/loss", 2.0, 1), ("train/loss", 1.0, 2), ("train/part", 1.0, 1)),
            *(("train/learning_rate_factor", 1.0, 0), ("train/learning_rate_factor", 0.5, 1), ("train/learning_rate_factor", 0.25, 2)),
            *(("epoch/loss", 3.0, 0), ("epoch/loss", 1.0, 1), ("epoch/part", 1.0, 0)),
        ]
    )


def test_scores_are_parted_into_answers_and_what_explains_them() -> None:
    main, detail = pages.score_metrics({"recall@1": 0.5, "nmi": 0.25, "recall@1_class_mean": 0.75})
    assert main == {"recall_at_1": 0.5, "nmi": 0.25}
    assert detail == {"detail/recall_at_1_class_mean": 0.75}
    assert pages.summary_metrics({"a": {"nmi": summarise([0.25, 0.75])}}) == {"nmi/a": 0.5}


def test_settings_are_parted_into_changed_ones_and_defaults() -> None:
    training = small_training().model_dump(mode="json")
    changed, defaults = pages.split_parameters({"training": training, "evaluation": {"recall_at": [1, 3]}})
    assert changed["num_epochs"] == "3"
    assert changed["evaluation.recall_at"] == "[1, 3]"
    assert defaults["evaluation.role"] == "test"
    assert not changed.keys() & defaults.keys()
    assert pages.one_line({"a.b": "1", "c": "x"}) == "a.b=1; c=x;"


@pytest.mark.parametrize(
    ("program", "called"),
    [("/x/flows/cli/run.py", "dml"), ("/x/cli/__main__.py", "dml"), ("/x/bin/dml", "dml"), ("/x/flows/other/run.py", "run.py")],
)
def test_the_command_is_named_as_a_person_types_it(program: str, called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, "reproduce", "a b"])
    monkeypatch.setenv("LOGNAME", "ann")
    assert pages.source_tags() == {"command": f"{called} reproduce 'a b'", "user": "ann"}


def test_a_process_has_ended_only_where_it_was_of_this_machine_and_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    host = socket.gethostname()
    assert pages.process_tag() == f"{host}:{os.getpid()}"
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert pages.has_ended(f"{host}:{child}")
    for running in (pages.process_tag(), f"other{host}:{child}", f"{host}:", ""):
        assert not pages.has_ended(running)

    def of_another_user(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", of_another_user)
    assert not pages.has_ended(f"{host}:{child}")


def test_a_run_says_what_it_is_and_an_oracle_what_that_means() -> None:
    text = pages.describe_run("d", "a", 2, "link")
    assert text.startswith("**a** trained on *d* with seed 2; part of the [d comparison](link).")
    assert pages.describe_run("d", "a", 2, "link", "oracle") == pages.ORACLE_NOTE + text


def test_a_comparison_is_a_table_with_a_link_to_the_best_run_of_each_variant() -> None:
    found = compare_published("d", RUNS)
    assert found is not None
    validation = {"a": {0: 0.1, 1: 0.3, 2: 0.2}}
    text = pages.describe_comparison(
        "title", "test", "1", "parent", SUMMARIES, RUNS, "Model: none", found=found, validation=validation, left_out=["c: old"]
    )
    assert text.splitlines() == [
        found.sentence,
        "",
        "**title**: per cent on test images; mean ± half of the 95 % interval over the seeds, best first.",
        "",
        "| variant | recall@1 | seeds | run |",
        "|---|---|---|---|",
        "| **a** | 62.5 ± 6.2 | 3 | [seed 1](#/experiments/1/runs/a1) |",
        "| b | 37.5 ± 6.2 | 3 | [seed 0](#/experiments/1/runs/b0) |",
        "",
        "- c: old",
        f"- [Variants side by side]({pages.view_link('1')}): a row a variant, mean over its seeds",
        "- Report: `report.md` and its figure among this run's [artifacts](#/experiments/1/runs/parent/artifacts)",
        "- Model: none",
    ]


def test_a_table_s_page_begins_with_what_it_is() -> None:
    runs = [*RUNS, PublishedRun("c0", {"nmi": 0.5}, {VARIANT_TAG: "c", SEED_TAG: "0"})]
    lines = pages.describe_comparison("t", "test", "1", "p", summarise_published(runs), runs, "Model", about="A table.").splitlines()
    assert lines[:3] == ["A table.", "", "**t**: per cent on test images; mean ± half of the 95 % interval over the seeds, best first."]
    assert "| c | - | 50.0 | 1 | [seed 0](#/experiments/1/runs/c0) |" in lines
    assert not any("**a**" in line or "side by side" in line for line in lines)
    assert "- Report: the table's page, Markdown and JSON among this run's [artifacts](#/experiments/1/runs/p/artifacts)" in lines


def test_an_experiment_s_line_answers_which_loss() -> None:
    found = compare_published("d", RUNS)
    assert found is not None
    links = "[Side by side](view) · [table and report](run)"
    assert pages.describe_experiment("run", "view", SUMMARIES, "best run: a", found) == (
        f"Highest mean Recall@1 on the test classes: **a**, 62.5 ± 6.2 per cent over 3 seeds, of 2 variants. "
        f"{found.sentence} Best run: a. {links}"
    )
    one = {"a": {"recall_at_1": summarise([0.5])}}
    assert pages.describe_experiment("run", "view", one, "none") == (
        f"Highest mean Recall@1 on the test classes: **a**, 50.0 per cent over 1 seed, of 1 variants. None. {links}"
    )
    assert pages.describe_experiment("run", "view", {}, "none") == f"No run has the present data and settings. {links}"


def test_the_saved_view_shows_the_means_highest_first() -> None:
    tags = pages.experiment_tags("comparison on d")
    state = json.loads(json.loads(tags[pages.VIEW_TAG + pages.VIEW])["state"])
    assert state["searchFilter"] == "tags.`dml.summary_of` = 'comparison on d'"
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`recall_at_1`", False)
    assert "metrics.`num_seeds`" in state["selectedColumns"]
    assert [section["display"] for section in state["compareRunSections"]] == [True]
    charts = state["compareRunCharts"]
    assert {chart["metricSectionId"] for chart in charts} == {section["uuid"] for section in state["compareRunSections"]}
    assert not any(part["deleted"] for part in (*state["compareRunSections"], *charts))


def test_a_model_has_the_command_that_made_it() -> None:
    assert pages.model_tags({"command": "dml reproduce"})[pages.SOURCE_TAG] == "dml reproduce"
    assert pages.SOURCE_TAG not in pages.model_tags({})
