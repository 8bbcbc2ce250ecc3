"""Means and intervals by hand, and a report that depends on nothing but the scores."""

import json
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from dml_core.evaluation.config import EvaluationConfig
from tasks.records import MetricRecord
from tasks.reporting import comparison_table, recall_by_k, summarise, write_report
from tasks.specs import RunSpec
from tests.conftest import small_training


def run(variant: str, seed: int, recall: float) -> tuple[RunSpec, MetricRecord]:
    spec = RunSpec(dataset="d", variant=variant, seed=seed, training=small_training(), evaluation=EvaluationConfig())
    metrics = {"recall@1": recall, "recall@1_class_mean": 0.0, "recall@10": 0.9, "nmi": 0.5, "num_queries": 4.0}
    return spec, MetricRecord(step="evaluate", identity=f"{variant}{seed}", key="k", files=(), metrics=metrics)


def test_interval_of_three_seeds_by_hand() -> None:
    # mean 0.5, standard deviation 0.1; t(0.975, 2 degrees of freedom) = 4.303, divided by sqrt(3)
    summary = summarise([0.4, 0.5, 0.6])
    assert summary.mean == pytest.approx(0.5)
    assert summary.half_width == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    assert str(summary) == "50.0 ± 24.8"


def test_one_seed_has_no_interval() -> None:
    assert str(summarise([0.123])) == "12.3"


def test_only_plain_recalls_are_on_the_curve_in_order() -> None:
    assert recall_by_k({"recall@10": 0.9, "recall@2": 0.4, "recall@1_class_mean": 0.1, "nmi": 0.3}) == {2: 0.4, 10: 0.9}


def test_a_report_twice_is_the_same_bytes(tmp_path: Path) -> None:
    runs = [run("a", 0, 0.25), run("a", 1, 0.75), run("b", 0, 0.1), run("b", 1, 0.1)]
    text = write_report("title", runs, tmp_path / "one")
    write_report("title", runs, tmp_path / "other")
    for path in sorted((tmp_path / "one").iterdir()):
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes(), path.name
    assert json.loads((tmp_path / "one" / "metrics.json").read_text())["a"]["recall@1"] == 0.5
    assert (tmp_path / "one" / "recall.csv").read_text().splitlines()[:3] == ["variant,k,recall", "a,1,0.500000", "a,10,0.900000"]
    # t(0.975, 1) = 12.706, standard deviation 0.3536, over sqrt(2): 317.7 points
    assert "50.0 ± 317.7" in text


def test_the_terminal_s_table_has_a_row_for_each_variant() -> None:
    metrics = {"recall_at_10": [0.5, 0.5, None], "recall_at_1": [0.1, 0.1, 0.2], "recall_at_1_class_mean": [0.0, 0.0, 0.0]}
    runs = pd.DataFrame({"variant": ["a", "a", "b"], "seed": [0, 1, 0], **metrics})
    console = Console(width=100, record=True)
    console.print(comparison_table("title", runs))
    lines = [line for line in console.export_text().splitlines() if "│" in line or "┃" in line]
    assert len(lines) == 3
    assert lines[0].index("recall@1 ") < lines[0].index("recall@10")
    assert "class_mean" not in lines[0]
    assert "10.0 ± 0.0" in lines[1]
    assert lines[2].rstrip(" │").endswith("-")  # never measured at that K


def test_a_narrow_terminal_still_tells_the_variants_apart() -> None:
    metrics = {f"recall_at_{k}": [0.5, 0.4] for k in (1, 2, 4, 8, 16, 32)}
    runs = pd.DataFrame({"variant": ["triplet-semi-hard", "triplet-batch-hard"], "seed": [0, 0], **metrics})
    console = Console(width=60, record=True)
    console.print(comparison_table("title", runs))
    printed = console.export_text()
    assert "triplet-semi-hard" in printed
    assert "triplet-batch-hard" in printed
