"""The whole evaluator: its keys and rules, the inputs that it rejects, and changes that must not affect its numbers."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dml_core.config import parse
from dml_core.errors import ConfigError, EvaluationError
from dml_core.evaluation.config import EvaluationConfig, IntervalConfig, Metric
from dml_core.evaluation.evaluator import EmbeddingShard, evaluate, evaluate_shards, recall_by_class
from tests.conftest import ROOT
from tests.evaluation.cases import KINDS, make_inputs
from tests.evaluation.oracles import slow_scores

KEYS = {
    "recall@1",
    "map@r",
    "r_precision",
    "mrr",
    "nmi",
    "nmi_geometric",
    "ami",
    "f1",
    "csc",
    "num_queries",
    "num_queries_without_positive",
    "num_query_classes",
}
RETRIEVAL = EvaluationConfig(clustering=False)


def test_keys_and_fractions() -> None:
    values = evaluate(*make_inputs("random"), EvaluationConfig())
    assert set(values) >= KEYS | {"recall@2", "recall@4", "recall@8", "precision@1"}
    assert values["num_queries"] == 60
    assert all(0 <= values[key] <= 1 for key in KEYS - {"csc", "ami", "num_queries", "num_queries_without_positive", "num_query_classes"})
    assert json.loads(json.dumps(values)) == values


TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "needs a gradient": lambda plain_ND: plain_ND.clone().requires_grad_(),
    "of a network": lambda plain_ND: torch.nn.Linear(plain_ND.shape[1], 8)(plain_ND),
    "made in inference": lambda plain_ND: torch.inference_mode()(torch.clone)(plain_ND),
    "float64": torch.Tensor.double,
    "float16": torch.Tensor.half,
    "bfloat16": torch.Tensor.bfloat16,
    "strided": lambda plain_ND: plain_ND.repeat_interleave(2, 0)[::2],
    "transposed": lambda plain_ND: plain_ND.T.contiguous().T,
    "negated view": lambda plain_ND: torch._neg_view(-plain_ND),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_of_any_kind_has_the_scores_of_its_values(kind: str) -> None:
    values, labels = make_inputs("random")
    tensor_ND = TENSORS[kind](torch.tensor(values, dtype=torch.float32))
    array_ND = tensor_ND.detach().double().numpy().astype(np.float64 if kind == "float64" else np.float32)
    expected = evaluate(array_ND, labels, EvaluationConfig())
    for of_labels in (torch.tensor(labels), torch.tensor(labels, dtype=torch.int32)):
        assert evaluate(tensor_ND, of_labels) == expected


def test_a_tensor_without_values_is_refused_in_one_line() -> None:
    with pytest.raises(EvaluationError, match=r"^embeddings: no array of numbers or strings \(") as refusal:
        evaluate(torch.empty(4, 3, device="meta"), [0, 0, 1, 1])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_has_finite_numbers(kind: str) -> None:
    values = evaluate(*make_inputs(kind), EvaluationConfig(intervals=IntervalConfig()))
    assert np.isfinite(list(values.values())).all()
    assert all(0 <= values[key] <= 1 for key in ("recall@8", "map@r", "mrr", "nmi", "nmi_geometric", "f1"))


def test_intervals_have_two_ends_over_queries_and_two_over_classes() -> None:
    """Half of the classes are separate and half are mixed: drawing whole classes gives a far larger spread than drawing queries."""
    labels = np.repeat(np.arange(20), 10)
    embeddings = np.eye(20, dtype=np.float32)[np.where(labels < 10, labels, 10 + np.arange(200) % 10)]
    config = EvaluationConfig(recall_at=(1, 5), clustering=False, intervals=IntervalConfig())
    plain, values = (evaluate(embeddings, labels, c) for c in (config.model_copy(update={"intervals": None}), config))
    metrics = {"recall@1", "recall@5", "precision@1", "map@r", "r_precision", "mrr"}
    assert set(values) - set(plain) == {f"{metric}_{end}" for metric in metrics for end in ("low", "high", "class_low", "class_high")}
    for metric in metrics:
        ends = [values[f"{metric}_{end}"] for end in ("class_low", "low", "high", "class_high")]
        assert ends == sorted(ends)
        assert ends[1] < values[metric] < ends[2]
        assert ends[3] - ends[0] > 2 * (ends[2] - ends[1])
    wider = evaluate(embeddings, labels, config.model_copy(update={"intervals": IntervalConfig(confidence=0.99)}))
    assert wider["map@r_class_low"] < values["map@r_class_low"] < values["map@r_class_high"] < wider["map@r_class_high"]


def test_there_is_no_interval_where_nothing_tells_how_classes_vary() -> None:
    """Positives in only one class, of 20 images, show no variation between classes; perfect embeddings have none."""
    config = EvaluationConfig(clustering=False, intervals=IntervalConfig())
    singletons = np.r_[np.zeros(20, int), np.arange(1, 21)]
    one = evaluate(np.random.default_rng(0).normal(size=(40, 8)), singletons, config)
    assert "map@r_low" in one
    assert not [name for name in one if "class_low" in name or "class_high" in name]
    perfect = evaluate(np.eye(5)[np.arange(20) % 5], np.arange(20) % 5, config)
    assert not [name for name in perfect if name.endswith(("low", "high"))]


def test_labels_of_any_type_give_the_same_numbers() -> None:
    embeddings, labels = make_inputs("random")
    expected = evaluate(embeddings, labels, EvaluationConfig())
    words = np.array(["zebra", "ant", "yak", "bee", "wolf", "cat", "emu"])[labels]
    for same in (labels.astype(np.uint8), labels - 2**40, words.tolist(), words.astype(object), words.astype("S")):
        assert evaluate(embeddings, same, EvaluationConfig()) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_separability_is_of_the_embeddings_as_they_are_and_class_distances_as_the_metric_sees_them(metric: Metric) -> None:
    embeddings, labels = make_inputs("random")
    one, twice = (evaluate(factor * embeddings, labels, EvaluationConfig(metric=metric, clustering=False)) for factor in (1, 2))
    factors = {key: twice[key] / one[key] for key in ("csc", "csc_trace_between", "inter_class_distance", "intra_class_distance")}
    assert list(factors.values()) == pytest.approx([1, 4, 1, 1] if metric == "cosine" else [1, 4, 2, 2])


def test_queries_without_a_positive_are_counted_and_left_out() -> None:
    embeddings = np.array([[1, 0], [1, 0.1], [0, 1], [-1, 0]], dtype=np.float32)
    values = evaluate(embeddings, ["a", "a", "b", "c"], RETRIEVAL)
    assert (values["num_queries"], values["num_queries_without_positive"], values["recall@1"]) == (4, 2, 1)


def test_a_query_from_the_gallery_is_its_own_hit_only_in_the_query_and_gallery_protocol() -> None:
    embeddings = np.array([[1, 0], [0, 1], [0.9, 0.1], [0.1, 0.9]], dtype=np.float32)
    labels = np.array([0, 0, 1, 1])
    assert evaluate(embeddings, labels, RETRIEVAL)["recall@1"] == 0
    assert evaluate(embeddings, labels, RETRIEVAL, embeddings, labels)["recall@1"] == 1


def test_shards_and_memory_give_the_same_numbers_to_the_last_bit() -> None:
    embeddings, labels = make_inputs("duplicated")
    shards = [EmbeddingShard(lambda rows=rows: embeddings[rows], labels[rows]) for rows in (slice(0, 25), slice(25, 26), slice(26, 60))]
    config = EvaluationConfig(clustering=False, intervals=IntervalConfig())
    whole = evaluate(embeddings, labels, config, seed=3)
    assert evaluate_shards(shards, config).items() <= whole.items()
    queries = evaluate(embeddings, labels, config, embeddings[:9], labels[:9], seed=3)
    assert evaluate_shards(shards, config, [EmbeddingShard(lambda: embeddings[:9], labels[:9])]).items() <= queries.items()


def test_the_seed_is_k_means_alone() -> None:
    embeddings, labels = make_inputs("random")
    config = EvaluationConfig(intervals=IntervalConfig())
    for queries in ((), (embeddings[:30], labels[:30])):
        default, one, other = (evaluate(embeddings, labels, config, *queries, **seed) for seed in ({}, {"seed": 0}, {"seed": 1}))
        assert default == one
        assert {key for key in one if one[key] != other[key]} <= {"nmi", "nmi_geometric", "ami", "f1"}
        assert one != other


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_averages_are_those_of_sorted_lists(metric: Metric) -> None:
    embeddings, labels = make_inputs("random")
    config = EvaluationConfig(metric=metric, clustering=False)
    for queries in ((), (embeddings[:9] + 0.1, labels[:9])):
        expected = np.array(slow_scores(embeddings, labels, *queries, metric=metric))
        values = evaluate(embeddings, labels, config, *queries)
        assert [values["map@r"], values["r_precision"]] == pytest.approx(expected[:, 2:].mean(axis=0).tolist())
        assert [values["recall@4"], values["mrr"]] == pytest.approx([(expected[:, 1] <= 4).mean(), (1 / expected[:, 1]).mean()])


def test_recall_of_each_class_averages_to_the_macro_average() -> None:
    embeddings, labels = make_inputs("random")
    by_class = recall_by_class(EmbeddingShard(lambda: embeddings, [f"class {label}" for label in labels]), RETRIEVAL)
    values = evaluate(embeddings, labels, RETRIEVAL)
    assert sorted(by_class) == [f"class {label}" for label in range(7)]
    assert sum(found.num_queries for found in by_class.values()) == 60
    assert np.mean([found.recall for found in by_class.values()]) == pytest.approx(values["recall@1_class_mean"])
    assert sum(by_class[f"class {label}"].recall for label in labels) / 60 == pytest.approx(values["recall@1"])


def test_recall_of_each_class_is_that_of_its_queries_where_queries_are_given() -> None:
    gallery = EmbeddingShard(lambda: np.eye(3, dtype=np.float32), ["a", "b", "c"])
    asked = np.array([[1, 0.1, 0], [1, 0.1, 0], [0, 1, 0.1], [0, 0.1, 1]], dtype=np.float32)
    assert recall_by_class(gallery, RETRIEVAL, EmbeddingShard(lambda: asked, ["a", "b", "b", "d"])) == {"a": (1, 1), "b": (1 / 2, 2)}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_values_that_cannot_be_compared_are_refused_with_their_rows(bad: float) -> None:
    embeddings = np.ones((10, 3), dtype=np.float32)
    embeddings[[3, 7], 1] = bad
    problem = r"^embeddings: NaN, infinite or huge values in 2 of 10 rows \(3, 7\); find out what the network did there$"
    with warnings.catch_warnings(action="error"), pytest.raises(EvaluationError, match=problem):
        evaluate(embeddings, np.arange(10) % 2, RETRIEVAL)


def test_of_many_bad_rows_the_first_five_are_named() -> None:
    with pytest.raises(EvaluationError, match=r"in 5 of 5 rows \(0, 1, 2, 3, 4\); "):
        evaluate(np.full((5, 2), np.nan), LABELS[[0, 0, 0, 0, 0]], RETRIEVAL)
    with pytest.raises(EvaluationError, match=r"in 6 of 6 rows \(0, 1, 2, 3, 4, \.\.\.\); "):
        evaluate(np.full((6, 2), np.nan), LABELS[[0, 0, 0, 0, 0, 0]], RETRIEVAL)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_embeddings_of_any_float_type_give_the_numbers_of_what_they_hold(dtype: type[np.floating[Any]]) -> None:
    """Integers, which all types represent exactly; their squares exceed float16's range."""
    embeddings = (100 * make_inputs("random")[0]).round()
    labels = make_inputs("random")[1]
    assert evaluate(embeddings.astype(dtype), labels, RETRIEVAL) == pytest.approx(evaluate(embeddings, labels, RETRIEVAL), rel=1e-5)


GOOD, LABELS = np.eye(4, dtype=np.float32), np.array([0, 0, 1, 1])
ZERO_ROWS = r"^zero embeddings, which have no cosine, in 4 of 4 rows \(0, 1, 2, 3\); use metric euclidean, or repair the network$"
MIXED_LABELS = r"^some labels are integers and others strings \(gallery and queries\?\); give all the same type$"
NOTHING_FOUND = "^no query has another sample of its class in the gallery, so nothing can be found; check the labels$"
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "zero row": (lambda: evaluate(np.zeros((4, 2), np.float32), LABELS, RETRIEVAL), ZERO_ROWS),
    "integers": (lambda: evaluate(np.eye(4, dtype=int), LABELS, RETRIEVAL), "^embeddings: expected floating-point numbers, found int64$"),
    "one dimension": (
        lambda: evaluate(GOOD[0], LABELS, RETRIEVAL),
        r"^embeddings: expected an array of shape \(samples, dimensions\), found shape \(4,\)$",
    ),
    "nothing": (lambda: evaluate(GOOD[:0], LABELS[:0], RETRIEVAL), r"shape \(0, 4\)"),
    "too few labels": (
        lambda: evaluate(GOOD, LABELS[:3], RETRIEVAL),
        "^labels: 3 labels for 4 embeddings; one is needed for each$",
    ),
    "too many labels": (lambda: evaluate(GOOD[:3], LABELS, RETRIEVAL), "^labels: 4 labels for 3 embeddings"),
    "float labels": (
        lambda: evaluate(GOOD, LABELS / 2, RETRIEVAL),
        r"^labels: expected one integer or string per sample, found float64 of shape \(4,\)$",
    ),
    "too few query labels": (lambda: evaluate(GOOD, LABELS, RETRIEVAL, GOOD, LABELS[:3]), "^query labels: 3 labels for 4 embeddings"),
    "one query": (lambda: evaluate(GOOD, LABELS, RETRIEVAL, GOOD[0], LABELS), r"^query embeddings: .*found shape \(4,\)$"),
    "other embeddings than labels": (lambda: evaluate(GOOD, LABELS[:3], RETRIEVAL, GOOD, LABELS), "^labels: 3 labels for 4 embeddings"),
    "label types": (lambda: evaluate(GOOD, LABELS, RETRIEVAL, GOOD, ["a", "b", "c", "d"]), MIXED_LABELS),
    "dimensions": (
        lambda: evaluate(GOOD, LABELS, RETRIEVAL, np.eye(3, dtype=np.float32), LABELS[:3]),
        "^embeddings of 3 and 4 dimensions cannot be compared$",
    ),
    "empty shard": (
        lambda: evaluate_shards([EmbeddingShard(lambda: GOOD, LABELS), EmbeddingShard(lambda: GOOD[:0], LABELS[:0])], RETRIEVAL),
        "^a shard of the gallery or of the queries has no sample; leave it out$",
    ),
    "half a query set": (
        lambda: evaluate(GOOD, LABELS, RETRIEVAL, query_labels=LABELS),
        "^query embeddings and query labels go together; give both or neither$",
    ),
    "no positive": (lambda: evaluate(GOOD, np.arange(4), RETRIEVAL), NOTHING_FOUND),
    "unknown classes": (lambda: evaluate(GOOD, LABELS, RETRIEVAL, GOOD, LABELS + 7), NOTHING_FOUND),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_scored_is_refused_in_one_line(case: str) -> None:
    call, pattern = REFUSALS[case]
    with pytest.raises(EvaluationError, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_an_absent_gpu_is_an_error_and_no_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EvaluationError, match=r"^device 'cuda' was asked for but there is no usable GPU here; use device: cpu$"):
        evaluate(GOOD, LABELS, EvaluationConfig(device="cuda"))


@pytest.mark.parametrize("values", [{"recall_at": []}, {"recall_at": [4, 1]}, {"recall_at": [0]}, {"metric": "l1"}, {"recal_at": [1]}])
def test_settings_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"recall_at|metric"):
        parse(EvaluationConfig, values, "evaluation")


def test_settings_can_be_read_without_faiss_or_scikit_learn() -> None:
    code = "import sys, dml_core.evaluation.config; sys.exit(bool({'faiss', 'sklearn', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
