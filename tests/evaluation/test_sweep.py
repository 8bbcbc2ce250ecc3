"""The sweep compared with sorted lists, and changes that must not affect its numbers in the last bit."""

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from dml_core.evaluation.config import Metric
from dml_core.evaluation.retrieval import sweep
from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.evaluation.retrieval.metrics import QueryScores, per_query_metrics
from dml_core.evaluation.retrieval.sweep import Shard, _groups, score_queries, tile_dtype
from dml_core.evaluation.retrieval.tiles import Entries, _compare_on_gpu, as_side, compare
from dml_core.evaluation.threads import BlockThreads, one_thread
from tests.evaluation.cases import KINDS, make_inputs
from tests.evaluation.oracles import slow_scores
from tests.forked import forked

CPU = torch.device("cpu")


def as_shards(gallery: NDArray[np.float32], codes: NDArray[np.int64], metric: Metric, num_shards: int) -> list[Shard]:
    cuts = np.array_split(np.arange(len(codes)), num_shards)
    return [Shard(lambda rows=rows: as_points(gallery[rows], metric), codes[rows]) for rows in cuts if len(rows)]


def self_retrieval(
    embeddings: NDArray[np.float32], codes: NDArray[np.int64], metric: Metric = "cosine", max_block_bytes: int = 2**26, num_shards: int = 1
) -> QueryScores:
    shards = as_shards(embeddings, codes, metric, num_shards)
    return score_queries(shards, as_points(embeddings, metric), codes, np.arange(len(codes)), max_block_bytes, CPU)


def rows_of(scores: QueryScores) -> NDArray[np.float64]:
    """Return (R, first rank, average precision, R-precision) of each query, zeros without a positive."""
    columns = (scores.num_positives, scores.first_rank, scores.average_precision, scores.r_precision)
    return np.stack([np.where(scores.is_scored, column, 0) for column in columns], axis=1).astype(np.float64)


@cache
def sorted_lists(kind: str, metric: Metric) -> NDArray[np.float64]:
    """Return the slow scores of inputs of a kind."""
    return np.array(slow_scores(*make_inputs(kind), metric=metric))


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("max_block_bytes", "num_shards"), [(2**26, 1), (64 * 50, 1), (2**26, 3)], ids=["symmetric", "groups", "shards"])
def test_self_retrieval_is_that_of_sorted_lists(kind: str, metric: Metric, max_block_bytes: int, num_shards: int) -> None:
    embeddings, labels = make_inputs(kind)
    expected = sorted_lists(kind, metric)
    np.testing.assert_allclose(rows_of(self_retrieval(embeddings, labels, metric, max_block_bytes, num_shards)), expected, rtol=1e-12)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("kind", KINDS)
def test_matrix_products_in_float64_change_no_bit(kind: str, metric: Metric, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large classes in several shards or in a far larger gallery use float64 tiles, and products for the distances of positives."""
    embeddings, labels = make_inputs(kind)
    expected = rows_of(self_retrieval(embeddings, labels, metric))
    monkeypatch.setattr("dml_core.evaluation.retrieval.sweep.LARGE_SHARE", 2)
    monkeypatch.setattr("dml_core.evaluation.retrieval.sweep.MANY_POSITIVES", 0)
    monkeypatch.setattr("dml_core.evaluation.retrieval.geometry.SMALLEST_PRODUCT", 1)
    np.testing.assert_array_equal(rows_of(self_retrieval(embeddings, labels, metric)), expected)
    np.testing.assert_array_equal(rows_of(self_retrieval(embeddings, labels, metric, 64 * 50, 3)), expected)


@pytest.mark.parametrize(("spread", "num_copies"), [(1.5, 80), (0.01, 80), (1e-4, 0), (0.0, 0)])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_bfloat16_tiles_change_no_bit(spread: float, num_copies: int, num_shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near ties, differences in the last bit, and copies, in tiles of 90 points and a remainder; tight clusters need the full bound."""
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 90, 400)
    embeddings = (generator.standard_normal((90, 33))[codes] + spread * generator.standard_normal((400, 33))).astype(np.float32)
    embeddings[:num_copies] = embeddings[num_copies : 2 * num_copies]
    embeddings[300:350] = np.nextafter(embeddings[:50], np.float32(np.inf))
    queries, query_codes = embeddings[::3] + np.float32(1e-6), codes[::3]
    gallery = as_shards(embeddings, codes, "cosine", num_shards)

    def scores() -> list[NDArray[np.float64]]:
        of_queries = score_queries(gallery, as_points(queries, "cosine"), query_codes, None, 64 * 90 * 90, CPU)
        return [
            rows_of(of_queries),
            *(rows_of(self_retrieval(embeddings, codes, "cosine", size, num_shards)) for size in (2**26, 64 * 90 * 90)),
        ]

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)  # without the instructions it is slower, with the same result
    monkeypatch.setattr("dml_core.evaluation.retrieval.sweep.MOST_UNDECIDED", 1.0)
    found = []
    for work in (2**62, 1):
        monkeypatch.setattr("dml_core.evaluation.threads.SMALLEST_WORK", work)
        found.append(scores())
    np.testing.assert_array_equal(np.concatenate(found[1]), np.concatenate(found[0]))


@pytest.fixture
def pairs_by_themselves(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the pairs that tiles leave undecided, by the function that computes them; bfloat16 is used for any work."""
    counts = {"_cosines": 0, "squared_distances": 0}

    def count(name: str, compute: Callable[..., Any]) -> None:
        def counting(left: object, left_P: NDArray[np.int64], *rest: object) -> Any:
            counts[name] += len(left_P)
            return compute(left, left_P, *rest)

        monkeypatch.setattr(sweep, name, counting)

    for name in counts:
        count(name, getattr(sweep, name))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr("dml_core.evaluation.threads.SMALLEST_WORK", 1)
    return counts


@pytest.mark.parametrize("noise", [0.1, 1e-2, 1e-4, 1e-6, 0])
def test_directions_that_are_much_alike_are_told_apart_by_tiles(noise: float, pairs_by_themselves: dict[str, int]) -> None:
    """As of an untrained or a collapsed network: computed pair by pair they took up to 50 times as long."""
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 50, 200)
    embeddings = (generator.standard_normal(16) + noise * generator.standard_normal((200, 16))).astype(np.float32)
    found = rows_of(self_retrieval(embeddings, codes))
    assert sum(pairs_by_themselves.values()) < 0.01 * 200**2
    np.testing.assert_allclose(found, np.array(slow_scores(embeddings, codes, metric="cosine")), rtol=1e-12)


def test_tiles_that_fail_leave_their_buffers_to_the_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory every tile may fail; a thread without a buffer would wait for ever, and the process with it."""

    class NeverWaiting(SimpleQueue[torch.Tensor]):
        def get(self, block: bool = True, timeout: float | None = None) -> torch.Tensor:
            return super().get(block=False)

    class Unaware(BlockThreads):
        """Begins the next tile before the error of one is heard of."""

        def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
            for item in items:
                with pytest.raises(MemoryError):
                    work(item)
                yield None

    def full(*_: Any) -> None:
        raise MemoryError

    for name, other in {"SimpleQueue": NeverWaiting, "BlockThreads": Unaware, "_find_useless": lambda *_: None, "tile": full}.items():
        monkeypatch.setattr(sweep, name, other)
    self_retrieval(*make_inputs("random"), num_shards=3)


@pytest.mark.parametrize(("spread", "is_narrow"), [(0.8, True), (4.0, False)])
def test_tiles_are_of_bfloat16_only_if_it_decides_most_pairs(spread: float, is_narrow: bool, pairs_by_themselves: dict[str, int]) -> None:
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 500, 2000)
    embeddings = (generator.standard_normal((500, 64))[codes] + spread * generator.standard_normal((2000, 64))).astype(np.float32)
    self_retrieval(embeddings, codes)
    assert (pairs_by_themselves["_cosines"] > 0) == is_narrow
    assert sum(pairs_by_themselves.values()) < 0.005 * 2000**2


@pytest.mark.parametrize("kind", KINDS)
def test_query_and_gallery_is_that_of_sorted_lists(kind: str) -> None:
    gallery, labels = make_inputs(kind)
    queries, query_labels = make_inputs("duplicated", seed=1)
    queries = np.concatenate([queries[:, : gallery.shape[1]], gallery[:5]])
    query_labels = np.concatenate([query_labels, labels[:5]])[: len(queries)]
    scores = score_queries(as_shards(gallery, labels, "cosine", 2), as_points(queries, "cosine"), query_labels, None, 2**20, CPU)
    np.testing.assert_allclose(rows_of(scores), np.array(slow_scores(gallery, labels, queries, query_labels)), rtol=1e-12)


def test_as_many_queries_as_items_are_not_taken_for_the_items() -> None:
    gallery, labels = make_inputs("random")
    queries, query_labels = make_inputs("random", seed=1)
    scores = score_queries(as_shards(gallery, labels, "cosine", 1), as_points(queries, "cosine"), query_labels, None, 2**26, CPU)
    np.testing.assert_allclose(rows_of(scores), np.array(slow_scores(gallery, labels, queries, query_labels)), rtol=1e-12)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("max_block_bytes", [2**26, 2**13, 2**12])
def test_a_shard_s_queries_find_what_they_find_among_all(max_block_bytes: int, num_shards: int) -> None:
    embeddings, labels = make_inputs("random")
    points, gallery = as_points(embeddings[:30], "cosine"), as_shards(embeddings, labels, "cosine", num_shards)
    scores = score_queries(gallery, points, labels[:30], np.arange(30), max_block_bytes, CPU)
    np.testing.assert_array_equal(rows_of(scores), rows_of(self_retrieval(embeddings, labels))[:30])


def test_queries_go_in_the_order_of_their_classes_as_many_at_a_time_as_memory_holds() -> None:
    """A positive takes 72 bytes, and a query at least 72: in class order, queries 1, 3, 5 take 72 each, and 0, 2, 4 take 144 each."""
    codes, num_positives = np.array([1, 0, 1, 0, 1, 0]), np.array([2, 0, 2, 1, 2, 1])
    expected = {
        72: [[1], [3], [5], [0], [2], [4]],
        143: [[1], [3], [5], [0], [2], [4]],
        144: [[1, 3], [5], [0], [2], [4]],
        216: [[1, 3, 5], [0], [2], [4]],
        288: [[1, 3, 5], [0, 2], [4]],
        648: [[1, 3, 5, 0, 2, 4]],
    }
    assert {size: [group.tolist() for group in _groups(codes, num_positives, size)] for size in expected} == expected


def test_a_case_worked_out_by_hand() -> None:
    angles = np.deg2rad([0, 10, 25, 45, 80])
    embeddings = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    scores = self_retrieval(embeddings, np.array([0, 1, 0, 0, 1]))
    # Neighbours of the first, nearest first: 10 (wrong), 25 (right), 45 (right), 80: R = 2, ranks 2 and 3.
    assert rows_of(scores)[0].tolist() == [2, 2, 1 / 2 / 2, 1 / 2]
    # Neighbours of the last: 45, 25, 10 (right), 0: R = 1, rank 3.
    assert rows_of(scores)[4].tolist() == [1, 3, 0, 0]
    recalls = per_query_metrics(scores, (1, 2, 4))
    assert [recalls[f"recall@{k}"].mean() for k in (1, 2, 4)] == [1 / 5, 3 / 5, 1]
    assert scores.first_rank.dtype == np.int64


def test_all_embeddings_equal_find_nothing() -> None:
    embeddings, labels = make_inputs("identical")
    assert per_query_metrics(self_retrieval(embeddings, labels), (1,))["recall@1"].max() == 0


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_memory_shards_and_threads_change_no_bit(metric: Metric) -> None:
    """With 2**19 bytes there are several symmetric tiles; with less, several groups of queries, each of which sweeps the whole gallery."""
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 90, 400)
    embeddings = (generator.standard_normal((90, 33))[codes] + 1.5 * generator.standard_normal((400, 33))).astype(np.float32)
    embeddings[::5] = embeddings[1::5]
    expected = rows_of(self_retrieval(embeddings, codes, metric))
    for max_block_bytes, num_shards, threads in [(2**15, 1, 1), (2**19, 1, 1), (2**18, 1, 2), (2**17, 3, 1), (2**26, 5, 2), (2**26, 1, 1)]:
        with threadpool_limits(threads):
            actual = rows_of(self_retrieval(embeddings, codes, metric, max_block_bytes, num_shards))
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_side_is_of_the_type_asked_for_and_its_norms_are_of_its_own_vectors(dtype: type[np.float32 | np.float64]) -> None:
    embeddings, index = np.random.default_rng(0).standard_normal((40, 300)), np.array([3, 1, 39])
    side = as_side(as_points(embeddings, "euclidean"), index, np.array([0, 1, 1]), np.zeros(300), CPU, dtype)
    vectors = side.vectors.numpy()
    np.testing.assert_array_equal(vectors, embeddings[index].astype(dtype))
    assert vectors.dtype == dtype
    np.testing.assert_allclose(side.norms, np.linalg.norm(vectors.astype(np.float64), axis=1), rtol=1e-14)


PROOF = [pytest.mark.slow, pytest.mark.proof]
SETTINGS_OF_A_PROCESS = [
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    pytest.param("torch.backends.fp32_precision = 'tf32'", marks=PROOF),
    pytest.param("torch.backends.mkldnn.matmul.fp32_precision = 'bf16'", marks=PROOF),
]


@pytest.mark.parametrize("setting", SETTINGS_OF_A_PROCESS)
def test_settings_of_the_process_change_no_number_and_stay_as_they_are(setting: str, tmp_path: Path) -> None:
    """In a separate process, because torch refuses to read its older setting once a newer one is set."""
    code = f"""
import threading, time, numpy as np, torch
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import evaluate
{setting}
torch.set_num_threads(2)
state = lambda: (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision, torch.get_num_threads())
before, found, elsewhere = state(), [], []
generator = np.random.default_rng(0)
labels = np.arange(300) % 30
embeddings = generator.standard_normal((30, 16))[labels] + generator.standard_normal((300, 16))
config = EvaluationConfig(clustering=False)
threads = [threading.Thread(target=lambda: found.append(evaluate(embeddings, labels, config)["map@r"])) for _ in range(2)]
for thread in threads: thread.start()
while any(thread.is_alive() for thread in threads):
    new = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
    new.start()
    new.join()
    time.sleep(0.02)
assert state() == before, (state(), before)
assert set(elsewhere) <= {{2}}, set(elsewhere)
open({str(tmp_path / "found")!r}, "w").write(f"{{len(set(found))}} {{found[0].hex()}}")
"""
    assert forked(exec, code, {}) == 0
    labels = np.arange(300) % 30
    generator = np.random.default_rng(0)
    embeddings = generator.standard_normal((30, 16))[labels] + generator.standard_normal((300, 16))
    assert (tmp_path / "found").read_text().split() == ["1", float(rows_of(self_retrieval(embeddings, labels))[:, 2].mean()).hex()]


def test_two_threads_may_limit_torch_at_once_and_the_first_to_leave_lifts_its_own_limit_alone() -> None:
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()
    seen: dict[str, int] = {}

    def first() -> None:
        with one_thread():
            first_is_in.set()
            second_is_in.wait(60)
        seen["first, outside"] = torch.get_num_threads()
        first_is_out.set()

    def second() -> None:
        first_is_in.wait(60)
        with one_thread():
            second_is_in.set()
            first_is_out.wait(60)
            seen["second, inside"] = torch.get_num_threads()
        seen["second, outside"] = torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    seen["a new one"] = torch.get_num_threads()
    torch.set_num_threads(before)
    assert seen == {"first, outside": 2, "second, inside": 1, "second, outside": 2, "a new one": 2}


def test_tiles_are_of_float64_where_float32_leaves_too_much_open() -> None:
    """On a GPU, settings of other threads may reduce float32 products to TF32."""
    assert tile_dtype(CPU, 200) == np.float32
    assert tile_dtype(CPU, 201) == np.float64
    assert tile_dtype(torch.device("cuda"), 1) == np.float64


@pytest.mark.parametrize("shape", [(128, 1024), (1024, 128), (130, 100)])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("upper", "lower"), [(3.4, 3.0), (3.4, 3.4), (1.0, -1.0), (9.0, 8.0)], ids=["few", "none between", "many", "none"])
@pytest.mark.parametrize("compared", [compare, _compare_on_gpu])  # the GPU's method also runs on a CPU
def test_a_tile_is_compared_as_its_entries_one_by_one(
    shape: tuple[int, int], axis: int, upper: float, lower: float, compared: Callable[..., Entries]
) -> None:
    generator = np.random.default_rng(0)
    near_IJ = generator.standard_normal(shape).round(1).astype(np.float32)  # many are exactly on a bound
    steps = generator.integers(0, 5, shape[axis]) / 10
    uppers, lowers = (upper + steps).round(1).astype(np.float32), (lower + steps).round(1).astype(np.float32)
    found = compared(torch.from_numpy(near_IJ), uppers, lowers, axis)
    lines, bounds = (near_IJ if axis == 0 else near_IJ.T).tolist(), list(zip(uppers.tolist(), lowers.tolist(), strict=True))
    np.testing.assert_array_equal(
        found.num_above, [sum(value >= bound for value in line) for line, (bound, _) in zip(lines, bounds, strict=True)]
    )
    between = {
        (i, j) if axis == 0 else (j, i): value
        for i, (line, (high, low)) in enumerate(zip(lines, bounds, strict=True))
        for j, value in enumerate(line)
        if low <= value < high
    }
    assert dict(zip(zip(found.rows.tolist(), found.columns.tolist(), strict=True), found.nearness.tolist(), strict=True)) == between
    assert len(found.rows) == len(between)
    assert [part.dtype for part in found] == [np.int64, np.int64, np.int64, np.float32]


inputs = st.builds(make_inputs, st.sampled_from(["random", "tied", "duplicated", "singletons"]), st.integers(0, 2**16))
few = settings(max_examples=25, deadline=None)


@few
@given(inputs, st.integers(0, 2**16))
def test_order_of_samples_and_names_of_classes_do_not_matter(arrays: tuple[NDArray[np.float32], NDArray[np.int64]], seed: int) -> None:
    embeddings, labels = arrays
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(labels))
    names = generator.permutation(labels.max() + 1)
    actual = self_retrieval(embeddings[order], names[labels[order]])
    np.testing.assert_array_equal(rows_of(actual), rows_of(self_retrieval(embeddings, labels))[order])


@few
@given(inputs, st.integers(12, 20), st.integers(1, 7))
def test_memory_and_shards_of_any_size_change_no_bit(
    arrays: tuple[NDArray[np.float32], NDArray[np.int64]], bits: int, num_shards: int
) -> None:
    actual = self_retrieval(*arrays, max_block_bytes=2**bits, num_shards=num_shards)
    np.testing.assert_array_equal(rows_of(actual), rows_of(self_retrieval(*arrays)))


@few
@given(inputs)
def test_recall_grows_with_k_up_to_one(arrays: tuple[NDArray[np.float32], NDArray[np.int64]]) -> None:
    recalls = [v.mean() for name, v in per_query_metrics(self_retrieval(*arrays), (1, 2, 5, 59)).items() if name.startswith("recall")]
    assert recalls == sorted(recalls)
    assert recalls[-1] == 1


@few
@given(inputs, st.floats(10, 1e6))
def test_distant_gallery_items_change_nothing(arrays: tuple[NDArray[np.float32], NDArray[np.int64]], distance: float) -> None:
    embeddings, labels = arrays
    distant = np.full((3, embeddings.shape[1]), distance * np.abs(embeddings).max(), dtype=np.float32)
    gallery, codes = np.concatenate([distant, embeddings]), np.concatenate([np.full(3, 99), labels])
    queries = as_points(embeddings, "euclidean")
    index = np.arange(3, len(gallery))
    actual = score_queries(as_shards(gallery, codes, "euclidean", 1), queries, labels, index, 2**26, CPU)
    np.testing.assert_array_equal(rows_of(actual), rows_of(self_retrieval(embeddings, labels, "euclidean")))


def test_perfect_clusters_score_one() -> None:
    labels = np.repeat(np.arange(6), 4)
    metrics = per_query_metrics(self_retrieval(np.eye(6, dtype=np.float32)[labels], labels), (1,))
    assert all(values.min() == 1 for values in metrics.values())
