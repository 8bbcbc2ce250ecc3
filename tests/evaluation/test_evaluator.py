"""The whole evaluator: its keys, its rules, what it refuses, and what must not change its numbers."""

import numpy as np
import pytest

from dml_core.errors import EvaluationError
from dml_core.evaluation import evaluate
from dml_core.evaluation.config import EvaluationConfig

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


def test_keys_and_fractions() -> None:
    generator = np.random.default_rng(0)
    labels_N = np.repeat(np.arange(6), 5)
    values = evaluate(generator.standard_normal((30, 4)).astype(np.float32), labels_N, EvaluationConfig())
    assert set(values) >= KEYS
    assert values["num_queries"] == 30
    assert all(0 <= values[key] <= 1 for key in KEYS if "num" not in key and key not in {"csc", "ami"})


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_values_that_cannot_be_compared_are_refused_with_their_rows(bad: float) -> None:
    embeddings_ND = np.ones((10, 3), dtype=np.float32)
    embeddings_ND[[3, 7], 1] = bad
    with pytest.raises(EvaluationError, match=r"2 of 10 rows \(3, 7\)"):
        evaluate(embeddings_ND, np.arange(10) % 2, EvaluationConfig())
