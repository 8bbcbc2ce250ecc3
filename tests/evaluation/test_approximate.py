"""Approximate indexes: exact where they search everything, honest about what they miss."""

from typing import Literal

import numpy as np
import pytest

from dml_core.errors import EvaluationError
from dml_core.evaluation.approximate import ApproximateConfig, evaluate_approximately
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import EmbeddingShard, evaluate_shards

CONFIG = EvaluationConfig(recall_at=(1, 5, 10), clustering=False)


def shards() -> tuple[EmbeddingShard, EmbeddingShard]:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 100, 3200)
    embeddings = (generator.standard_normal((100, 16))[labels] + generator.standard_normal((3200, 16))).astype(np.float32)
    queries = np.append(labels[:200], 1000)  # the last query's class is not in the gallery
    return EmbeddingShard(lambda: embeddings[200:], labels[200:]), EmbeddingShard(lambda: embeddings[:201], queries)


def approximate(gallery: EmbeddingShard, queries: EmbeddingShard, approximation: ApproximateConfig) -> dict[str, float | int]:
    return evaluate_approximately([gallery], CONFIG, approximation, [queries])


@pytest.mark.parametrize("index", ["ivf_flat", "hnsw"])
def test_searching_everything_is_exact(index: Literal["ivf_flat", "hnsw"]) -> None:
    approximation = ApproximateConfig(index=index, num_lists=8, num_probes=8, num_visited=2000)
    values = approximate(*shards(), approximation)
    gallery, queries = shards()
    exact = evaluate_shards([gallery], CONFIG, [queries])
    shared = {f"recall@{k}" for k in CONFIG.recall_at} | {"num_queries", "num_queries_without_positive"}
    assert {key: values[key] for key in shared} == pytest.approx({key: exact[key] for key in shared})
    assert {key: value for key, value in values.items() if key.startswith("index")} == {f"index_recall@{k}": 1 for k in CONFIG.recall_at}
    assert values["is_approximate"] == 1


@pytest.mark.parametrize("index", ["ivf_flat", "ivf_pq"])
def test_what_an_index_misses_is_measured(index: Literal["ivf_flat", "ivf_pq"]) -> None:
    approximation = ApproximateConfig(index=index, num_lists=40, num_probes=2, num_code_bytes=4, num_sampled_queries=100)
    values = approximate(*shards(), approximation)
    assert 0.02 < values["index_recall@10"] < 0.98
    assert values["num_sampled_queries"] == 100


def test_codes_that_do_not_divide_the_dimensions_are_refused() -> None:
    with pytest.raises(EvaluationError, match="5 does not divide the 16"):
        approximate(*shards(), ApproximateConfig(index="ivf_pq", num_code_bytes=5))


def test_queries_of_unknown_classes_are_refused() -> None:
    gallery, queries = shards()
    strangers = EmbeddingShard(queries.load, np.asarray(queries.labels) + 5000)
    with pytest.raises(EvaluationError, match="nothing can be found"):
        approximate(gallery, strangers, ApproximateConfig(index="ivf_flat"))


def test_self_retrieval_from_shards_leaves_each_item_out_by_index() -> None:
    """Everything is searched, so the numbers are the exact ones; every item has a duplicate, which must stay."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 40, 400)
    embeddings = (generator.standard_normal((40, 8))[labels] + generator.standard_normal((400, 8))).astype(np.float32)
    embeddings[1::2] = embeddings[::2]
    cuts = [slice(0, 150), slice(150, 153), slice(153, 400)]
    gallery = [EmbeddingShard(lambda rows=rows: embeddings[rows], labels[rows]) for rows in cuts]
    values = evaluate_approximately(gallery, CONFIG, ApproximateConfig(index="ivf_flat", num_lists=4, num_probes=4))
    assert [values[f"index_recall@{k}"] for k in CONFIG.recall_at] == [1, 1, 1]
    assert values["num_queries"] == 400
    # The rule on ties concerns the exact evaluator; the index's own order among duplicates may only help a query.
    exact = evaluate_shards(gallery, CONFIG)
    assert all(exact[f"recall@{k}"] <= values[f"recall@{k}"] < exact[f"recall@{k}"] + 0.1 for k in CONFIG.recall_at)
