"""A result counted twice is not independent: it is refused on input, and by every mean of runs."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dml_core.errors import ConfigError, DmlError
from dml_core.evaluation.config import EvaluationConfig
from flows.cli.options import request_of
from tasks.environment import Project
from tasks.reports.compare import compare_runs, summarise_runs, write_report
from tasks.runs.comparable import UNKNOWN
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.params.requested import standing_runs
from tasks.runs.records import MetricRecord
from tasks.runs.specs import RunSpec
from tasks.tables.choice import Choice
from tasks.tables.file import TableFile, chosen_tables
from tasks.tables.judging import judge_claims
from tasks.tables.result import MeasuredRun, TableResult
from tasks.tables.runs import runs_of_tables
from tasks.tables.view import shown_table
from tasks.tracking.child_run import PublishedRun
from tasks.tracking.published import comparable_runs, compare_published, summarise_published
from tasks.tracking.tags import Tag
from tasks.tuning.search import checked_searches
from tests.conftest import ROOT, small_training
from tests.tasks.tables.test_claims import run as measured_run
from tests.tasks.tables.test_claims import table

PARAMS = load_params(ROOT / "params.yaml")
TABLE = "softtriple/table1"
# Input with several values -> a call with one of them twice.
ENTRIES: dict[str, Callable[[], Any]] = {
    "dml reproduce -s": lambda: comparison_runs(PARAMS, "synthetic", seeds=[1, 2, 1]),
    "dml reproduce -v": lambda: comparison_runs(PARAMS, "synthetic", ["softmax", "softmax"]),
    "dml reproduce -d": lambda: standing_runs(PARAMS, ["synthetic", "synthetic"]),
    "dml reproduce TABLE TABLE": lambda: chosen_tables([TABLE, TABLE]),
    "dml reproduce PATTERN TABLE": lambda: chosen_tables(["softtriple/*", TABLE]),
    "the flow of tables": lambda: runs_of_tables([TABLE, TABLE], Choice()),
    "dml reproduce TABLE --row": lambda: request_of([TABLE], None, None, None, rows=["a", "a"]),
    "dml reproduce TABLE -d": lambda: request_of([TABLE], None, None, None, datasets=["a", "a"]),
    "dml reproduce TABLE -s": lambda: request_of([TABLE], [3, 3], None, None),
    "dml tune ROW ROW": lambda: checked_searches(Project(ROOT, ROOT, "", ""), ["a/b/c", "a/b/c"], (), 2, 0, "recall@1", None),
    "dml tune -d": lambda: checked_searches(Project(ROOT, ROOT, "", ""), ["a/b/c"], ("x", "x"), 2, 0, "recall@1", None),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_value_given_twice_is_refused_in_one_line(entry: str) -> None:
    with pytest.raises(ConfigError, match="is given twice") as caught:
        ENTRIES[entry]()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["seeds", "default_datasets"])
def test_a_value_written_twice_in_params_yaml_is_refused(tmp_path: Path, name: str) -> None:
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    values["comparison"][name] *= 2
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=rf"^params.yaml: comparison.{name}: .*given twice"):
        load_params(tmp_path / "params.yaml")


SCORE = {0: 0.31, 1: 0.42, 2: 0.37, 3: 0.45}


def _scored(variant: str, seed: int, changed: float = 0.0) -> tuple[RunSpec, MetricRecord]:
    spec = RunSpec(dataset="d", variant=variant, seed=seed, training=small_training(), evaluation=EvaluationConfig())
    return spec, MetricRecord(step="evaluate", identity="i", key="k", files=(), metrics={"recall@1": SCORE[seed] + changed})


def _metrics(variant: str, seed: int, changed: float = 0.0) -> tuple[RunSpec, dict[str, float]]:
    spec, record = _scored(variant, seed, changed)
    return spec, record.metrics


def _published(variant: str, seed: int, changed: float = 0.0) -> PublishedRun:
    return PublishedRun(f"{variant}{seed}", {"recall_at_1": SCORE[seed] + changed}, {Tag.VARIANT: variant, Tag.SEED: str(seed)})


def _measured(row: str, seed: int, changed: float = 0.0) -> MeasuredRun:
    return measured_run(row, seed, recall_at_1=SCORE[seed] + changed)


def _both(make: Callable[..., Any], seeds: Sequence[int]) -> list[Any]:
    """Return runs of system a with these seeds, and of b with each distinct one."""
    return [make("a", seed) for seed in seeds] + [make("b", seed, 0.1 * (seed + 1)) for seed in dict.fromkeys(seeds)]


def _shown(seeds: Sequence[int], file: TableFile) -> list[str]:
    found = shown_table("project/table1", file, TableResult(name="project/table1", runs=tuple(_both(_measured, seeds))))
    return [str(found.rows[0].lines[0].cells[0]), *found.conclusions]


# Computation of means or differences -> its result for runs with these seeds.
MEANS: dict[str, Callable[[Sequence[int]], Any]] = {
    "a report's means": lambda seeds: str(summarise_runs(_both(_metrics, seeds))["a"]["recall@1"]),
    "a report's differences": lambda seeds: compare_runs(_both(_metrics, seeds)),
    "MLflow's means": lambda seeds: str(summarise_published(_both(_published, seeds))["a"]["recall_at_1"]),
    "dml compare": lambda seeds: compare_published("d", _both(_published, seeds)),
    "what MLflow has": lambda seeds: comparable_runs("d", _both(_published, seeds), UNKNOWN),
    "a table's cells": lambda seeds: _shown(seeds, table()),
    "a table's claims": lambda seeds: judge_claims(table(), TableResult(name="project/table1", runs=tuple(_both(_measured, seeds)))),
}


@pytest.mark.parametrize("what", MEANS)
@settings(max_examples=30)
@given(seeds=st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_distinct_seeds_have_a_mean_and_repeated_ones_are_one_line(what: str, seeds: list[int]) -> None:
    if len(set(seeds)) == len(seeds):
        MEANS[what](seeds)
        return
    with pytest.raises(DmlError, match=r"two (results for|runs of) ") as caught:
        MEANS[what](seeds)
    assert "\n" not in str(caught.value)


def test_a_report_of_repeated_seeds_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(DmlError, match="a has two results for seed 1"):
        write_report("title", [_scored("a", 0), _scored("a", 1), _scored("a", 1)], tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_a_report_of_unlike_runs_writes_nothing(tmp_path: Path) -> None:
    spec, record = _scored("a", 1)
    longer = spec.model_copy(update={"training": small_training(num_epochs=4)})
    with pytest.raises(DmlError, match="a: seeds 0 and 1 ran with different settings"):
        write_report("title", [_scored("a", 0), (longer, record)], tmp_path / "report")
    with pytest.raises(DmlError, match="on one dataset"):
        write_report("title", [_scored("a", 0), (spec.model_copy(update={"dataset": "e"}), record)], tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_the_command_line_s_line_names_the_option_and_the_value() -> None:
    with pytest.raises(ConfigError, match=re.escape("--seed: 1 is given twice; give each value once")):
        comparison_runs(PARAMS, "synthetic", seeds=[1, 2, 1])
    with pytest.raises(ConfigError, match=re.escape(f"{TABLE} is given twice, by 'softtriple/*' and by '{TABLE}'; give each table once")):
        chosen_tables(["softtriple/*", TABLE])
