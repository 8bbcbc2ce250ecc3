"""Scoring by sorted rows, compared with tiles and sorted lists: the same distances to the last bit, the same scores up to rounded sums."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dml_core.errors import EvaluationError
from dml_core.evaluation.config import Metric
from dml_core.evaluation.retrieval import sweep
from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.evaluation.retrieval.metrics import QueryScores
from dml_core.evaluation.retrieval.sorted_rows import score_rows
from dml_core.evaluation.retrieval.sweep import score_queries
from tests.evaluation.cases import KINDS, make_inputs
from tests.evaluation.oracles import slow_scores
from tests.evaluation.test_sweep import CPU, as_shards, rows_of, self_retrieval, sorted_lists


def by_rows(embeddings: NDArray[np.float32], codes: NDArray[np.int64], metric: Metric, max_bytes: int = 2**26) -> QueryScores:
    points = as_points(embeddings, metric)
    return score_rows(points, codes, points, codes, np.arange(len(codes)), max_bytes)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_bytes", [2**26, 16 * 60 * 7, 1])
def test_self_retrieval_is_that_of_sorted_lists_and_of_tiles(kind: str, metric: Metric, max_bytes: int) -> None:
    embeddings, labels = make_inputs(kind)
    actual = rows_of(by_rows(embeddings, labels, metric, max_bytes))
    np.testing.assert_allclose(actual, sorted_lists(kind, metric), rtol=1e-12)
    np.testing.assert_allclose(actual, rows_of(self_retrieval(embeddings, labels, metric)), rtol=1e-14)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("kind", KINDS)
def test_query_and_gallery_is_that_of_sorted_lists(kind: str, metric: Metric) -> None:
    gallery, labels = make_inputs(kind)
    queries, query_labels = make_inputs("duplicated", seed=1)
    queries = np.concatenate([queries[:, : gallery.shape[1]], gallery[:5]])
    query_labels = np.concatenate([query_labels, labels[:5]])[: len(queries)]
    scores = score_rows(as_points(gallery, metric), labels, as_points(queries, metric), query_labels, None, 2**20)
    np.testing.assert_allclose(rows_of(scores), np.array(slow_scores(gallery, labels, queries, query_labels, metric)), rtol=1e-12)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("spread", [1.0, 1e-4, 1e-7])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_large_classes_with_near_ties_score_as_in_tiles(metric: Metric, spread: float, seed: int) -> None:
    """Rows around one point that are equal or differ in the last bit: of 300 in 3 classes, a third are another row's next float32."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 3, 300)
    embeddings = (1 + spread * generator.standard_normal((300, 17))).astype(np.float32)
    embeddings[100:200] = np.nextafter(embeddings[:100], np.float32(np.inf))
    embeddings[250:] = embeddings[:50]
    np.testing.assert_allclose(rows_of(by_rows(embeddings, codes, metric)), rows_of(self_retrieval(embeddings, codes, metric)), rtol=1e-13)


def test_the_sweep_leaves_large_classes_to_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three classes of 240 on average in one shard are scored by rows; in two shards, or below `LARGE_SHARE`, they are not."""
    codes = np.random.default_rng(0).integers(0, 3, 720)
    embeddings = np.random.default_rng(1).standard_normal((720, 8)).astype(np.float32)
    expected = rows_of(self_retrieval(embeddings, codes, num_shards=2))
    calls = []

    def noted(*arguments: Any) -> QueryScores:
        calls.append(len(arguments))
        return score_rows(*arguments)

    monkeypatch.setattr(sweep, "score_rows", noted)
    np.testing.assert_allclose(rows_of(self_retrieval(embeddings, codes)), expected, rtol=1e-14)
    assert len(calls) == 1
    self_retrieval(embeddings, codes, num_shards=2)
    monkeypatch.setattr(sweep, "LARGE_SHARE", 1 / 2)
    self_retrieval(embeddings, codes)
    assert len(calls) == 1


def test_embeddings_of_other_dimensions_are_refused() -> None:
    codes = np.zeros(720, dtype=np.int64)
    gallery = as_shards(np.ones((720, 8), dtype=np.float32), codes, "cosine", 1)
    with pytest.raises(EvaluationError, match="embeddings of 7 and 8 dimensions cannot be compared"):
        score_queries(gallery, as_points(np.ones((720, 7), dtype=np.float32), "cosine"), codes, None, 2**26, CPU)
