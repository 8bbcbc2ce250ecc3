"""The whole evaluator: its keys, its rules, what it refuses, and what must not change its numbers."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dml_core.evaluation
from dml_core.config import parse
from dml_core.errors import ConfigError, EvaluationError
from dml_core.evaluation import evaluate, evaluator
from dml_core.evaluation.config import BootstrapConfig, EvaluationConfig
from dml_core.evaluation.evaluator import EmbeddingShard, evaluate_shards, recall_by_class
from tests.conftest import ROOT
from tests.evaluation.cases import KINDS, make_inputs

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
}
RETRIEVAL = EvaluationConfig(clustering=False)


def test_keys_and_fractions() -> None:
    values = evaluate(*make_inputs("random"), EvaluationConfig())
    assert set(values) >= KEYS | {"recall@2", "recall@4", "recall@8", "precision@1"}
    assert values["num_queries"] == 60
    assert all(0 <= values[key] <= 1 for key in KEYS - {"csc", "ami", "num_queries", "num_queries_without_positive"})
    assert json.loads(json.dumps(values)) == values


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_has_finite_numbers(kind: str) -> None:
    values = evaluate(*make_inputs(kind), EvaluationConfig(bootstrap=BootstrapConfig(num_replicates=5)))
    assert np.isfinite(list(values.values())).all()
    assert all(0 <= values[key] <= 1 for key in ("recall@8", "map@r", "mrr", "nmi", "nmi_geometric", "f1"))


def test_intervals_have_two_ends_over_queries_and_two_over_classes() -> None:
    """Half of the classes always find, half never: a query stands for its whole class, so that classes spread the mean far wider."""
    labels = np.repeat(np.arange(20), 10)
    embeddings = np.eye(20, dtype=np.float32)[np.where(labels < 10, labels, np.arange(200) % 10)]
    config = EvaluationConfig(recall_at=(1, 5), clustering=False, bootstrap=BootstrapConfig(num_replicates=500))
    plain, values = (evaluate(embeddings, labels, c) for c in (config.model_copy(update={"bootstrap": None}), config))
    metrics = {"recall@1", "recall@5", "precision@1", "map@r", "r_precision", "mrr"}
    assert set(values) - set(plain) == {f"{metric}_{end}" for metric in metrics for end in ("low", "high", "class_low", "class_high")}
    for metric in metrics:
        ends = [values[f"{metric}_{end}"] for end in ("class_low", "low", "high", "class_high")]
        assert ends == sorted(ends)
        assert ends[1] < values[metric] < ends[2]
        assert ends[3] - ends[0] > 2 * (ends[2] - ends[1])


def test_labels_of_any_type_give_the_same_numbers() -> None:
    embeddings, labels = make_inputs("random")
    expected = evaluate(embeddings, labels, EvaluationConfig())
    words = np.array(["zebra", "ant", "yak", "bee", "wolf", "cat", "emu"])[labels]
    for same in (labels.astype(np.uint8), labels - 2**40, words.tolist(), words.astype(object), words.astype("S")):
        assert evaluate(embeddings, same, EvaluationConfig()) == pytest.approx(expected, abs=1e-9)


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
    config = EvaluationConfig(clustering=False, bootstrap=BootstrapConfig(num_replicates=50))
    whole = evaluate(embeddings, labels, config)
    assert evaluate_shards(shards, config).items() <= whole.items()
    queries = evaluate(embeddings, labels, config, embeddings[:9], labels[:9])
    assert evaluate_shards(shards, config, [EmbeddingShard(lambda: embeddings[:9], labels[:9])]).items() <= queries.items()


def test_recall_of_each_class_averages_to_the_macro_average() -> None:
    embeddings, labels = make_inputs("random")
    by_class = recall_by_class(EmbeddingShard(lambda: embeddings, [f"class {label}" for label in labels]), RETRIEVAL)
    values = evaluate(embeddings, labels, RETRIEVAL)
    assert sorted(by_class) == [f"class {label}" for label in range(7)]
    assert np.mean(list(by_class.values())) == pytest.approx(values["recall@1_class_mean"])
    assert sum(by_class[f"class {label}"] for label in labels) / 60 == pytest.approx(values["recall@1"])


def test_recall_of_each_class_is_that_of_its_queries_where_queries_are_given() -> None:
    gallery = EmbeddingShard(lambda: np.eye(3, dtype=np.float32), ["a", "b", "c"])
    asked = np.array([[1, 0.1, 0], [1, 0.1, 0], [0, 1, 0.1], [0, 0.1, 1]], dtype=np.float32)
    assert recall_by_class(gallery, RETRIEVAL, EmbeddingShard(lambda: asked, ["a", "b", "b", "d"])) == {"a": 1, "b": 1 / 2}


def test_the_evaluator_is_found_in_its_package_and_nothing_else() -> None:
    assert dml_core.evaluation.evaluate is evaluator.evaluate
    with pytest.raises(AttributeError, match=r"^module 'dml_core\.evaluation' has no attribute 'evalute'$"):
        _ = dml_core.evaluation.evalute


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_values_that_cannot_be_compared_are_refused_with_their_rows(bad: float) -> None:
    embeddings = np.ones((10, 3), dtype=np.float32)
    embeddings[[3, 7], 1] = bad
    with pytest.raises(EvaluationError, match=r"2 of 10 rows \(3, 7\)"):
        evaluate(embeddings, np.arange(10) % 2, RETRIEVAL)


GOOD, LABELS = np.eye(4, dtype=np.float32), np.array([0, 0, 1, 1])
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "zero row": (lambda: evaluate(np.zeros((4, 2), np.float32), LABELS, RETRIEVAL), "zero embeddings.*4 of 4 rows"),
    "integers": (lambda: evaluate(np.eye(4, dtype=int), LABELS, RETRIEVAL), "floating-point"),
    "one dimension": (lambda: evaluate(GOOD[0], LABELS, RETRIEVAL), r"shape \(4,\)"),
    "nothing": (lambda: evaluate(GOOD[:0], LABELS[:0], RETRIEVAL), r"shape \(0, 4\)"),
    "too few labels": (lambda: evaluate(GOOD, LABELS[:3], RETRIEVAL), "3 labels for 4 embeddings"),
    "float labels": (lambda: evaluate(GOOD, LABELS / 2, RETRIEVAL), "integer or string"),
    "label types": (lambda: evaluate(GOOD, LABELS, RETRIEVAL, GOOD, ["a", "b", "c", "d"]), "integers and others strings"),
    "dimensions": (lambda: evaluate(GOOD, LABELS, RETRIEVAL, np.eye(3, dtype=np.float32), LABELS[:3]), "3 and 4 dimensions"),
    "half a query set": (lambda: evaluate(GOOD, LABELS, RETRIEVAL, query_labels=LABELS), "go together"),
    "no positive": (lambda: evaluate(GOOD, np.arange(4), RETRIEVAL), "nothing can be found"),
    "unknown classes": (lambda: evaluate(GOOD, LABELS, RETRIEVAL, GOOD, LABELS + 7), "nothing can be found"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_scored_is_refused_in_one_line(case: str) -> None:
    call, pattern = REFUSALS[case]
    with pytest.raises(EvaluationError, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_an_absent_gpu_is_an_error_and_no_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EvaluationError, match="no usable GPU"):
        evaluate(GOOD, LABELS, EvaluationConfig(device="cuda"))


@pytest.mark.parametrize("values", [{"recall_at": []}, {"recall_at": [4, 1]}, {"recall_at": [0]}, {"metric": "l1"}, {"recal_at": [1]}])
def test_settings_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"recall_at|metric"):
        parse(EvaluationConfig, values, "evaluation")


def test_settings_can_be_read_without_faiss_or_scikit_learn() -> None:
    code = "import sys, dml_core.evaluation.config; sys.exit(bool({'faiss', 'sklearn', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
