"""Approximate indexes: exact if they search everything; otherwise their misses are measured."""

from functools import partial
from typing import Literal

import numpy as np
import pytest

from dml_core.errors import EvaluationError
from dml_core.evaluation.config import EvaluationConfig, Metric
from dml_core.evaluation.evaluator import EmbeddingShard, evaluate_shards
from dml_core.evaluation.retrieval import approximate as module
from dml_core.evaluation.retrieval.approximate import ApproximateConfig, evaluate_approximately
from dml_core.evaluation.retrieval.geometry import as_points

CONFIG = EvaluationConfig(recall_at=(1, 5, 10), clustering=False)


def shards() -> tuple[EmbeddingShard, EmbeddingShard]:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 100, 3200)
    embeddings = (generator.standard_normal((100, 16))[labels] + generator.standard_normal((3200, 16))).astype(np.float32)
    queries = np.append(labels[:200], 1000)  # the last query's class is not in the gallery
    return EmbeddingShard(lambda: embeddings[200:], labels[200:]), EmbeddingShard(lambda: embeddings[:201], queries)


def approximate(gallery: EmbeddingShard, queries: EmbeddingShard, approximation: ApproximateConfig) -> dict[str, float | int]:
    return evaluate_approximately([gallery], CONFIG, approximation, [queries])


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("index", ["ivf_flat", "hnsw"])
def test_searching_everything_is_exact(index: Literal["ivf_flat", "hnsw"], metric: Metric) -> None:
    approximation = ApproximateConfig(index=index, num_lists=8, num_probes=8, num_visited=2000)
    gallery, queries = shards()
    config = CONFIG.model_copy(update={"metric": metric})
    values = evaluate_approximately([gallery], config, approximation, [queries])
    exact = evaluate_shards([gallery], config, [queries])
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


def test_the_first_found_is_the_nearest_as_often_as_index_recall_says() -> None:
    """Each item is its own class, and each query has the class of its nearest item, so that only the nearest item is a hit."""
    generator = np.random.default_rng(0)
    items = generator.standard_normal((400, 16)).astype(np.float32)
    items /= np.linalg.norm(items, axis=1, keepdims=True)
    queries = items + 0.2 * generator.standard_normal((400, 16)).astype(np.float32)
    gallery = EmbeddingShard(lambda: items, np.arange(400))
    asked = EmbeddingShard(lambda: queries, (queries @ items.T).argmax(axis=1))
    values = approximate(gallery, asked, ApproximateConfig(index="ivf_flat", num_probes=1))
    assert 0.1 < values["recall@1"] == values["index_recall@1"] < 0.9


def test_index_recall_worked_out_by_hand() -> None:
    """Points on a line, in two shards: 0 has neighbours 1 and -1 at distance 1; 10 has 3 at 7 and 2 at 8, of which only 3 was found."""
    parts = [np.array([[0.0], [1], [2], [-1]]), np.array([[3.0], [10]])]
    gallery = [EmbeddingShard(lambda part=part: part, np.zeros(len(part), dtype=int)) for part in parts]
    asked = as_points(np.array([[0.0], [10]]), "euclidean")
    found = np.array([[3, 4], [4, -1]])
    recalls = module.index_recall(gallery, asked, np.array([0, 5]), {n: found[:, :n] for n in (1, 2, 3)})
    assert recalls == {"index_recall@1": 1, "index_recall@2": 1 / 2, "index_recall@3": 1 / 2}
    # As queries outside the gallery, both points are their own nearest neighbours, and neither was found.
    assert module.index_recall(gallery, asked, None, {n: found[:, :n] for n in (1, 2)}) == {"index_recall@1": 0, "index_recall@2": 1 / 2}


def test_an_index_is_trained_on_an_evenly_spaced_part_and_filled_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is trained on 0, 2, ..., 126, every second of 127 points, with mean 63; shards and blocks of 7 make no difference."""
    monkeypatch.setattr(module, "NUM_ROWS_AT_ONCE", 7)
    points = (np.arange(127) + 1000 * (np.arange(127) % 2)).astype(np.float32)[:, None]
    gallery = [EmbeddingShard(lambda part=part: part, np.zeros(len(part), dtype=int)) for part in np.split(points, [50])]
    index = module.build(gallery, 127, np.zeros(1), "euclidean", ApproximateConfig(index="ivf_flat"))
    assert index.quantizer.reconstruct(0).tolist() == [63]
    assert index.search(points, 1)[1][:, 0].tolist() == list(range(127))
    assert index.ntotal == 127


def test_a_small_gallery_is_one_list_and_nothing_is_missed() -> None:
    generator = np.random.default_rng(0)
    embeddings, labels = generator.standard_normal((100, 4)).astype(np.float32), np.arange(100) % 9
    gallery = [EmbeddingShard(lambda: embeddings, labels)]
    values = evaluate_approximately(gallery, CONFIG, ApproximateConfig(index="ivf_flat", num_probes=1))
    exact = evaluate_shards(gallery, CONFIG)
    for k in CONFIG.recall_at:
        assert (values[f"recall@{k}"], values[f"index_recall@{k}"]) == (exact[f"recall@{k}"], 1)


def test_fewer_items_than_k_are_all_found() -> None:
    embeddings = np.array([[1, 0], [0.9, 0.1], [0, 1], [-0.1, 1]], dtype=np.float32)
    values = evaluate_approximately([EmbeddingShard(lambda: embeddings, ["a", "a", "b", "c"])], CONFIG, ApproximateConfig(index="hnsw"))
    assert [values[f"recall@{k}"] for k in (1, 5, 10)] == [1, 1, 1]
    assert [values[f"index_recall@{k}"] for k in (1, 5, 10)] == [1, 1, 1]
    assert (values["num_queries"], values["num_queries_without_positive"]) == (4, 2)


def test_compressed_vectors_have_as_many_bytes_as_asked_for() -> None:
    assert module._inverted_lists(16, 3000, ApproximateConfig(index="ivf_pq", num_code_bytes=4)).code_size == 4


def test_the_same_queries_are_sampled_on_every_run() -> None:
    approximation = ApproximateConfig(index="ivf_flat", num_lists=40, num_probes=2, num_sampled_queries=20)
    assert approximate(*shards(), approximation) == approximate(*shards(), approximation)


def test_queries_of_other_dimensions_are_refused() -> None:
    gallery, queries = shards()
    narrow = EmbeddingShard(lambda: np.asarray(queries.load())[:, :7], queries.labels)
    with pytest.raises(EvaluationError, match=r"^embeddings of 7 and 16 dimensions cannot be compared$"):
        approximate(gallery, narrow, ApproximateConfig(index="ivf_flat"))


def test_codes_that_do_not_divide_the_dimensions_are_refused() -> None:
    with pytest.raises(EvaluationError, match="5 does not divide the 16"):
        approximate(*shards(), ApproximateConfig(index="ivf_pq", num_code_bytes=5))


def test_another_device_than_the_cpu_is_refused() -> None:
    gallery, queries = shards()
    with pytest.raises(EvaluationError, match=r"^device 'cuda' was asked for but an approximate index is searched on the CPU; use "):
        evaluate_approximately([gallery], EvaluationConfig(device="cuda"), ApproximateConfig(index="ivf_flat"), [queries])


def test_queries_of_unknown_classes_are_refused() -> None:
    gallery, queries = shards()
    strangers = EmbeddingShard(queries.load, np.asarray(queries.labels) + 5000)
    with pytest.raises(
        EvaluationError, match=r"^no query has a sample of its class in the gallery, so nothing can be found; check the labels$"
    ):
        approximate(gallery, strangers, ApproximateConfig(index="ivf_flat"))


def test_what_is_found_stays_in_order_when_a_query_itself_is_left_out() -> None:
    """For each point on a line, the search returns the 60 nearest others; the index has one list, so that it finds all of them."""
    points = np.cumsum(np.random.default_rng(0).random(80))[:, None].astype(np.float32)
    index = module.build(
        [EmbeddingShard(lambda: points, np.zeros(80, int))], 80, np.zeros(1), "euclidean", ApproximateConfig(index="ivf_flat")
    )
    order = np.argsort(np.abs(points - points.T), axis=1)[:, 1:61]
    np.testing.assert_array_equal(module.search_others(index.search, points, np.arange(80), 60), order)


def test_self_retrieval_from_shards_leaves_each_item_out_by_index() -> None:
    """Everything is searched, so the numbers are exact; every item has a duplicate, which must not be excluded."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 40, 400)
    embeddings = (generator.standard_normal((40, 8))[labels] + generator.standard_normal((400, 8))).astype(np.float32)
    embeddings[1::2] = embeddings[::2]
    cuts = [slice(0, 150), slice(150, 153), slice(153, 400)]
    gallery = [EmbeddingShard(lambda rows=rows: embeddings[rows], labels[rows]) for rows in cuts]
    values = evaluate_approximately(gallery, CONFIG, ApproximateConfig(index="ivf_flat", num_lists=4, num_probes=4))
    assert [values[f"index_recall@{k}"] for k in CONFIG.recall_at] == [1, 1, 1]
    assert values["num_queries"] == 400
    # The exact evaluator has a rule for ties; the index's own order of duplicates can only help a query.
    exact = evaluate_shards(gallery, CONFIG)
    assert all(exact[f"recall@{k}"] <= values[f"recall@{k}"] < exact[f"recall@{k}"] + 0.1 for k in CONFIG.recall_at)


@pytest.mark.parametrize("num_items", [2, 255, 256, 300])
@pytest.mark.parametrize("num_lists", [1, 3, 1024])
@pytest.mark.parametrize("index", ["ivf_flat", "ivf_pq", "hnsw"])
def test_a_gallery_of_any_size_is_searched_or_refused_in_one_line(
    index: Literal["ivf_flat", "ivf_pq", "hnsw"], num_lists: int, num_items: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """FAISS trains 256 codes for each byte of a compressed vector, and fails with fewer items."""
    embeddings, labels = (
        np.random.default_rng(0).standard_normal((num_items, 8)).astype(np.float32),
        np.arange(num_items) % (num_items // 2),
    )
    approximation = ApproximateConfig(index=index, num_lists=num_lists, num_code_bytes=2)
    call = partial(evaluate_approximately, [EmbeddingShard(lambda: embeddings, labels)], EvaluationConfig(recall_at=(1,)), approximation)
    if index == "ivf_pq" and num_items < 256:
        with pytest.raises(EvaluationError, match=rf"^index 'ivf_pq' needs 256 gallery items to train its codes, found {num_items}; "):
            call()
    else:
        assert call()["num_queries"] == num_items
    assert capfd.readouterr() == ("", "")
