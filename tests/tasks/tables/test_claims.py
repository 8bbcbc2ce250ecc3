"""Claims against scipy's paired t interval, by hand, and where runs are missing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from dml_core.config import parse
from dml_core.errors import ConfigError
from tasks.tables.claims import JudgedClaim, judge_claims, judge_pairs
from tasks.tables.file import TableFile
from tasks.tables.report import claim_line
from tasks.tables.result import MeasuredRun, TableResult

PAIRS = st.lists(st.tuples(*[st.floats(0, 1).map(lambda value: round(value, 3))] * 2), min_size=2, max_size=8)


@given(PAIRS, st.sampled_from(["above", "below", "either"]))
def test_it_is_the_paired_t_test(pairs, side):
    values, references = zip(*pairs, strict=True)
    if np.std(np.subtract(values, references)) < 1e-9:
        return
    test = ttest_rel(values, references)
    if abs(test.pvalue - 0.05) < 1e-6:
        return
    low, high = test.confidence_interval(0.95)
    expected = "not shown"
    if test.pvalue < 0.05:
        holds = side == "either" or (low > 0 if side == "above" else high < 0)
        expected = "holds" if holds else "refuted"
    judgement, difference, half_width = judge_pairs(values, references, side)
    assert judgement == expected
    assert (difference - half_width, difference + half_width) == pytest.approx((low, high))


def test_by_hand():
    """Differences 1, 2, 3: mean 2, standard deviation 1, half of the interval 4.303 / sqrt(3) = 2.484, so nothing is shown; 4, 5, 6 is."""
    assert judge_pairs([1, 2, 3], [0, 0, 0], "above")[0] == "not shown"
    assert judge_pairs([4, 5, 6], [0, 0, 0], "above")[0] == "holds"
    assert judge_pairs([4, 5, 6], [0, 0, 0], "below")[0] == "refuted"
    assert judge_pairs([4, 5, 6], [0, 0, 0], "above")[2] == pytest.approx(2.484, abs=1e-3)
    assert judge_pairs([0.1, 0.15, 0.2], [0.6, 0.65, 0.71], "below")[0] == "holds", "fractions too"
    assert judge_pairs([4], [0], "above") == ("not decided", 4, None)
    assert judge_pairs([], [], "above") == ("not decided", None, None)
    assert judge_pairs([3, 3], [3, 3], "above")[0] == "not shown"


def table(**claim) -> TableFile:
    rows = {name: {"label": name, "kind": "own", "published": [None, None], "variants": ["plain", "other"]} for name in ("a", "b")}
    columns = [{"dataset": "cub200", "metrics": ["recall@1"]}, {"dataset": "sop", "metrics": ["csc"], "unit": "share"}]
    claims = [{"says": "a is better", "row": "a", "metric": "recall@1", "reference": "b", "side": "above"} | claim]
    shared = {"title": "t", "page": 1, "states": "s", "tolerance": {"value": 1.0, "reason": "one run"}}
    return parse(TableFile, {**shared, "columns": columns, "rows": rows, "claims": claims}, "table")


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({"row": "c"}, "no row is called 'c'"),
        ({"reference": "c"}, "no row is called 'c'"),
        ({"variant": "third"}, "row 'a' has no variant 'third'"),
        ({"dataset": "cars196"}, "no column is of dataset 'cars196'"),
    ],
)
def test_a_claim_about_what_the_table_has_not_is_refused(claim, message):
    with pytest.raises(ConfigError, match=f"claim 'a is better': {message}"):
        table(**claim)
    assert table(variant="other", dataset="sop").claims[0].variant == "other"


def judged(file: TableFile, *runs: MeasuredRun) -> JudgedClaim:
    (found,) = judge_claims(file, TableResult(name="x/table1", runs=runs))
    return found


def run(row: str, seed: int, dataset: str = "cub200", variant: str = "plain", epoch: str = "last", **scores: float) -> MeasuredRun:
    place = {"row": row, "variant": variant, "dataset": dataset, "project_dataset": dataset, "seed": seed, "epoch": epoch}
    scores = {name.replace("_at_", "@"): value for name, value in scores.items()}
    return MeasuredRun(**place, identity="i", scores=scores, figures="f", training={}, evaluation={})


def test_rows_are_paired_by_seed_in_their_first_variant_after_the_last_epoch():
    runs = [run("a", seed, recall_at_1=0.60 + seed / 100) for seed in range(4)] + [run("b", seed, recall_at_1=0.5) for seed in (1, 2, 3, 9)]
    strays = [
        run("b", 0, variant="other", recall_at_1=1.0),
        run("b", 0, epoch="oracle", recall_at_1=1.0),
        run("b", 0, "sop", recall_at_1=1.0),
    ]
    found = judged(table(), *runs, *strays)
    assert found.seeds == (1, 2, 3)
    assert found.values == pytest.approx((61, 62, 63)), "in the column's unit, per cent"
    assert found.references == pytest.approx((50, 50, 50))
    assert (found.judgement, found.difference) == ("holds", pytest.approx(12))


def test_a_number_is_in_the_metric_s_own_unit_and_another_metric_may_be_the_reference():
    runs = [run("a", seed, recall_at_1=0.60 + seed / 100, hidden=0.9) for seed in range(3)]
    assert judged(table(reference=0.5), *runs).references == pytest.approx((50, 50, 50))
    found = judged(table(reference="a", reference_metric="hidden"), *runs)
    assert found.references == pytest.approx((0.9, 0.9, 0.9)), "no column shows it: as it is"
    assert judged(table(dataset="sop", metric="csc", reference=2.0), *[run("a", seed, "sop", csc=3.0) for seed in range(2)]).values == (
        3.0,
        3.0,
    )


def test_times_are_compared_by_their_ratio_too_and_nothing_else_is():
    runs = [
        run(row, seed, recall_at_1=0.6, epoch_minutes=minutes + seed / 10) for row, minutes in (("a", 2.9), ("b", 0.4)) for seed in range(3)
    ]
    found = judged(table(metric="epoch_minutes"), *runs)
    assert found.ratio == pytest.approx(3.0 / 0.5)
    assert "ratio 6, over 3 seeds" in claim_line(found)
    assert judged(table(), *runs).ratio is None
    assert judged(table(metric="epoch_minutes", reference=0.0), *runs).ratio is None


def test_what_a_claim_waits_for_is_said():
    a, b = [run("a", seed, recall_at_1=0.6) for seed in (0, 1)], [run("b", seed, recall_at_1=0.5) for seed in (0, 1, 5)]
    assert judged(table()).why == "no runs yet of 'a' and 'b'"
    assert judged(table(), *a).why == "no runs yet of 'b'"
    assert judged(table(), *a[:1], b[0]).why == "one seed only"
    assert judged(table(), *a, b[2]).why == "the two rows have no seed in common"
    assert {judged(table(), *a[:1], b[0]).judgement, judged(table()).judgement} == {"not decided"}
    assert judged(table(), *a, *b).why is None
