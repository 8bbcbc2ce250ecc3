"""A run's entry in a table's result keeps the name of the table's column apart from that of the project's dataset."""

import pytest

from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import MetricRecord
from tasks.runs.specs import RunSpec
from tasks.tables.choice import Choice
from tasks.tables.file import STANDING_VARIANT, load_table
from tasks.tables.result import FailedRun, MeasuredRun, TableRun
from tasks.tables.runs import runs_of
from tests.conftest import ROOT

FIGURE = "heated_up_softmax/figure3"
SCORES = MetricRecord(step="evaluate", identity="i", key="evaluate/i", files=(), metrics={"recall@1": 0.5})


def of_figure() -> RunSpec:
    choice = Choice(("panel-a",), ("fashion_mnist",), seeds=(3,))
    return runs_of(FIGURE, load_table(FIGURE), choice)["fashion_mnist"][0].model_copy(update={"dataset": "fashion-mnist-by-image"})


@pytest.mark.parametrize("entry", [MeasuredRun.of(of_figure(), SCORES, "digest"), FailedRun.of(of_figure(), "no space")])
def test_the_place_of_a_table_s_run_is_its_column(entry: TableRun) -> None:
    assert entry.place == ("panel-a", "as_released", "last", "fashion_mnist", 3)


def test_the_project_s_dataset_is_kept_too() -> None:
    assert MeasuredRun.of(of_figure(), SCORES, "digest").project_dataset == "fashion-mnist-by-image"


def test_the_place_of_a_standing_run_is_its_variant_s_row() -> None:
    spec = comparison_runs(load_params(ROOT / "params.yaml"), "synthetic", ("softtriple",), (2,))[0]
    assert MeasuredRun.of(spec, SCORES, "digest").place == ("softtriple", STANDING_VARIANT, "last", "synthetic", 2)
