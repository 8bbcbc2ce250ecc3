"""Blocks shared out to threads: in order, few ahead, with errors passed on, and equal to the last bit with any number of threads."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dml_core.errors import EvaluationError
from dml_core.evaluation.kmeans_init import first_clusters
from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.evaluation.retrieval.sweep import score_queries
from dml_core.evaluation.threads import BLOCKS_AHEAD, BlockThreads
from tests.evaluation.test_sweep import CPU, as_shards, rows_of


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_items_however_long_each_takes(num_threads: int) -> None:
    taken = []

    def items() -> Iterator[int]:
        for item in range(20):
            taken.append(item)
            yield item

    def work(item: int) -> tuple[int, int]:
        time.sleep(0.01 if item % 3 == 0 else 0)
        return item, torch.get_num_threads()

    with BlockThreads() as threads:
        assert threads.number == num_threads
        for number, (item, inside) in enumerate(threads.map(work, items())):
            assert item == number
            assert inside == 1
            assert len(taken) <= number + 1 + BLOCKS_AHEAD * num_threads
    assert torch.get_num_threads() == num_threads
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("blocks")]


def test_the_error_of_a_block_reaches_the_caller_and_the_threads_end(num_threads: int) -> None:
    del num_threads

    def work(item: int) -> int:
        if item == 3:
            raise EvaluationError("block 3")
        return item

    with pytest.raises(EvaluationError, match="block 3"), BlockThreads() as threads:
        list(threads.map(work, range(100)))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("blocks")]


def test_small_work_stays_in_the_calling_thread() -> None:
    with BlockThreads(is_worth_it=False) as threads:
        assert set(threads.map(lambda _: threading.get_ident(), range(5))) == {threading.get_ident()}


@pytest.mark.parametrize("num_threads", [1], indirect=True)
def test_large_work_is_equal_to_the_last_bit_with_any_number_of_threads(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    del num_threads
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)  # without the instructions it is slower, with the same result
    monkeypatch.setattr("dml_core.evaluation.threads.SMALLEST_WORK", 1)
    monkeypatch.setattr("dml_core.evaluation.kmeans_init.NUM_ROWS_AT_ONCE", 200)
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 120, 1200)
    embeddings = (generator.standard_normal((120, 32))[codes] + 1.5 * generator.standard_normal((1200, 32))).astype(np.float32)

    def results() -> list[np.ndarray]:
        points, gallery = as_points(embeddings, "cosine"), as_shards(embeddings, codes, "cosine", 2)
        scores = [
            score_queries(gallery[:1], points, codes, None, 2**21, CPU),
            score_queries(gallery, points, codes, np.arange(1200), 2**22, CPU),
        ]
        return [*(rows_of(part) for part in scores), *first_clusters(embeddings, 120, seed=0)]

    with_one = results()
    for number in (2, 5):
        torch.set_num_threads(number)
        for actual, expected in zip(results(), with_one, strict=True):
            np.testing.assert_array_equal(actual, expected)
