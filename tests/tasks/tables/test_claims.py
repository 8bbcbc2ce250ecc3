"""Claims compared with scipy's paired t interval, by hand, and with missing runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from dml_core.config import parse
from dml_core.errors import ConfigError
from tasks.reports.table_text import claim_line
from tasks.tables.file import TableFile
from tasks.tables.judging import judge_claims
from tasks.tables.result import MeasuredRun, TableResult
from tasks.tables.shown import JudgedClaim

DIFFERENCES = st.lists(st.floats(-0.4, 0.4).map(lambda value: round(value, 3)), min_size=3, max_size=8)


@given(DIFFERENCES, st.sampled_from(["above", "below", "either"]))
def test_one_claim_is_the_paired_t_test(differences, side):
    if np.std(differences) < 0.01:
        return
    values, references = [0.5 + difference for difference in differences], [0.5] * len(differences)
    test = ttest_rel(values, references)
    if abs(test.pvalue - 0.05) < 1e-6:
        return
    low, high = test.confidence_interval(0.95)
    expected = "not shown"
    if test.pvalue < 0.05:
        holds = side == "either" or (low > 0 if side == "above" else high < 0)
        expected = "holds" if holds else "refuted"
    found = of_pairs(values, references, side)
    assert found.judgement == expected
    assert (found.difference - found.half_width, found.difference + found.half_width) == pytest.approx((100 * low, 100 * high))


def of_pairs(values, references, side="above", **scores) -> JudgedClaim:
    """Judge a claim on Recall@1 with these scores by seed."""
    runs = [run("a", seed, recall_at_1=value, **scores) for seed, value in enumerate(values)]
    return judged(table(side=side), *runs, *[run("b", seed, recall_at_1=value) for seed, value in enumerate(references)])


def test_by_hand():
    """Differences 1, 2, 3: mean 2, standard deviation 1, half width 4.303 / sqrt(3) = 2.484, so not significant; 4, 5, 6 are."""
    none = [0.0, 0.0, 0.0]
    assert of_pairs([0.01, 0.02, 0.03], none).judgement == "not shown"
    assert of_pairs([0.04, 0.05, 0.06], none).judgement == "holds"
    assert of_pairs([0.04, 0.05, 0.06], none, "below").judgement == "refuted"
    assert of_pairs([0.04, 0.05, 0.06], none).half_width == pytest.approx(2.484, abs=1e-3)
    assert (of_pairs([0.04], none).judgement, of_pairs([0.04], none).difference) == ("not decided", pytest.approx(4))
    assert of_pairs([0.3] * 3, [0.3] * 3).judgement == "not shown"


def test_differences_that_are_the_same_by_accident_show_nothing():
    two = of_pairs([0.5, 0.5], [0.4, 0.4])
    assert (two.judgement, two.why, two.half_width) == ("not decided", "2 seeds; at least 3 needed", None)
    assert of_pairs([0.5] * 3, [0.4] * 3).judgement == "not shown", "the sign test: 2 / 2^3"
    # one of 20 queries more in each of five seeds: standard deviation 1 / 20, t = 2.24 with 4 degrees of freedom, p = 0.089
    five = of_pairs([0.55] * 5, [0.50] * 5, num_queries=20.0)
    assert (five.judgement, five.p_value) == ("not shown", pytest.approx(0.0890, abs=1e-4))
    assert of_pairs([0.55, 0.55, 0.55, 0.6, 0.55], [0.50] * 5, num_queries=20.0).judgement == "not shown", "t = 6 without the floor"


def test_claims_are_corrected_by_holm_over_the_table():
    """The lowest of three p values is tripled, the second doubled, the last kept; uncorrected, the second claim would hold."""
    claims = [claim("a", "b"), claim("a", "c"), claim("c", "d"), claim("a", "none")]
    file = table_of(claims)
    scores = {"a": (0.60, 0.61, 0.62), "b": (0.50, 0.50, 0.50), "c": (0.55, 0.58, 0.555), "d": (0.50, 0.62, 0.51)}
    runs = [run(row, seed, recall_at_1=value) for row, values in scores.items() for seed, value in enumerate(values)]
    found = judge_claims(file, TableResult(name="x/table1", runs=tuple(runs)))
    p_values = [ttest_rel(scores[one], scores[other]).pvalue for one, other in (("a", "b"), ("a", "c"), ("c", "d"))]
    assert [one.p_value for one in found[:3]] == pytest.approx(p_values)
    expected = [min(1, 3 * p_values[0]), max(3 * p_values[0], 2 * p_values[1]), p_values[2]]
    assert [one.p_holm for one in found[:3]] == pytest.approx(expected)
    assert p_values[1] < 0.05 < expected[1]
    assert [one.judgement for one in found] == ["holds", "not shown", "not shown", "not decided"]


def share_with_a_false_claim(num_claims: int, num_seeds: int, num_tables: int) -> float:
    """Return the share of tables in which a claim holds or is refuted although all rows are equal; the rows share their reference."""
    rng = np.random.default_rng([num_claims, num_seeds])
    file = table_of([claim(f"r{number}", "b") for number in range(num_claims)])
    wrong = 0
    for _ in range(num_tables):
        scores = rng.normal(0.5, 0.02, (num_claims + 1, num_seeds))
        rows = ["b", *(f"r{number}" for number in range(num_claims))]
        runs = [run(row, seed, recall_at_1=value) for row, own in zip(rows, scores, strict=True) for seed, value in enumerate(own.tolist())]
        found = judge_claims(file, TableResult(name="x/table1", runs=tuple(runs)))
        wrong += any(one.judgement in ("holds", "refuted") for one in found)
    return wrong / num_tables


def test_a_table_of_false_claims_has_one_that_is_judged_in_5_of_100_at_most():
    assert share_with_a_false_claim(8, 4, 400) < 0.085


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize(("num_claims", "num_seeds"), [(2, 3), (5, 3), (19, 3), (19, 10)])
def test_tables_of_false_claims_are_judged_as_seldom_as_the_page_says(num_claims, num_seeds):
    assert share_with_a_false_claim(num_claims, num_seeds, 3000) < 0.062


def test_an_exploratory_claim_is_marked_and_has_a_history():
    runs = [run("a", seed, recall_at_1=0.6 + seed / 100) for seed in range(3)] + [run("b", seed, recall_at_1=0.5) for seed in range(3)]
    found = judged(table(exploratory=True, history="K was 4 at first"), *runs)
    assert claim_line(found).startswith("holds (exploratory): a is better (")
    with pytest.raises(ConfigError, match="an exploratory claim needs a history"):
        table(exploratory=True)


def claim(row: str, reference: str) -> dict:
    return {"says": f"{row} above {reference}", "row": row, "metric": "recall@1", "reference": reference, "side": "above"}


def table_of(claims: list[dict]) -> TableFile:
    names = dict.fromkeys(name for one in claims for name in (one["row"], one["reference"]))
    rows = {name: {"label": name, "kind": "own", "published": [None], "variants": ["plain"]} for name in names}
    shared = {"title": "t", "page": 1, "states": "s", "tolerance": {"value": 1.0, "reason": "one run"}}
    return parse(
        TableFile, {**shared, "columns": [{"dataset": "cub200", "metrics": ["recall@1"]}], "rows": rows, "claims": claims}, "table"
    )


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
        ({"reference": 60.0}, "reference is 60, but scores are from 0 to 1"),
        ({"reference": 60, "metric": "recall@8"}, "reference is 60, but scores are from 0 to 1"),
    ],
)
def test_a_claim_about_an_unknown_row_or_variant_or_an_impossible_score_is_refused(claim, message):
    with pytest.raises(ConfigError, match=f"claim 'a is better': {message}"):
        table(**claim)
    assert table(variant="other", dataset="sop").claims[0].variant == "other"


def judged(file: TableFile, *runs: MeasuredRun) -> JudgedClaim:
    (found,) = judge_claims(file, TableResult(name="x/table1", runs=runs))
    return found


def run(row: str, seed: int, dataset: str = "cub200", variant: str = "plain", epoch: str = "last", **scores: float) -> MeasuredRun:
    place = {"row": row, "variant": variant, "dataset": dataset, "project_dataset": dataset, "seed": seed, "epoch": epoch}
    scores = {name.replace("_at_", "@"): value for name, value in scores.items()}
    return MeasuredRun(**place, identity="i", scores=scores, figures="f", training={"of": f"{row} {variant}"}, evaluation={"epoch": epoch})


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
    assert found.references == pytest.approx((90, 90, 90)), "no column shows it: in the unit of what it is compared with"
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
    assert "ratio 6, 3 seeds" in claim_line(found)
    hours = [one.model_copy(update={"scores": {"epoch_minutes": 5000 * one.scores["epoch_minutes"]}}) for one in runs]
    assert "15,000 vs 2500, difference +12,500 ± 0, ratio 6, 3 seeds" in claim_line(judged(table(metric="epoch_minutes"), *hours))
    assert judged(table(), *runs).ratio is None
    assert judged(table(metric="epoch_minutes", reference=0.0), *runs).ratio is None


def test_an_undecided_claim_has_a_reason():
    a, b = [run("a", seed, recall_at_1=0.6) for seed in (0, 1, 2)], [run("b", seed, recall_at_1=0.5) for seed in (0, 1, 2, 5)]
    assert judged(table()).why == "no runs of 'a' and 'b'"
    assert judged(table(), *a).why == "no runs of 'b'"
    assert judged(table(), *a[:2], *b[:2]).why == "2 seeds; at least 3 needed"
    assert judged(table(), *a, b[3]).why == "the two rows share no seed"
    assert judged(table(metric="recal@1"), *a, *b).why == "the runs of 'a' in this variant have no recal@1"
    assert judged(table(reference_metric="recall@3"), *a, *b).why == "the runs of 'b' in this variant have no recall@3"
    assert {judged(table(), *a[:2], *b[:2]).judgement, judged(table()).judgement} == {"not decided"}
    assert judged(table(), *a, *b).why is None


@pytest.mark.parametrize(("metric", "reference_metric"), [("recall@1", "precision@1"), ("precision@1", "recall@1")])
def test_a_metric_without_a_column_has_the_unit_of_the_one_it_is_compared_with(metric: str, reference_metric: str) -> None:
    scores = {"recall_at_1": 0.52, "precision_at_1": 0.52}
    runs = [run(row, seed, **{name: value + seed / 100 for name, value in scores.items()}) for row in ("a", "b") for seed in range(3)]
    found = judged(table(metric=metric, reference_metric=reference_metric), *runs)
    assert found.values == found.references == pytest.approx((52, 53, 54))
    assert found.judgement == "not shown"
