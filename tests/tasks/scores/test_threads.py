"""Two runs scored at the same time keep their share of the cores until both have ended, and afterwards."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import OpenBLASController, threadpool_info, threadpool_limits

import tasks.scores.evaluation
from flows import chain
from tasks.runs.costs import Meter
from tasks.runs.records import CheckpointRecord, DatasetRecord, EmbeddingRecord
from tasks.storage import Store
from tests.conftest import small_training

NUM_CORES = 8  # of a simulated machine


def threads() -> dict[str, int]:
    """Return the number of threads of each numerical library in the calling thread."""
    np.ones((2, 2)) @ np.ones((2, 2))
    return {info["filepath"]: info["num_threads"] for info in threadpool_info()} | {"torch": torch.get_num_threads()}


@pytest.fixture
def _threads_as_before() -> Any:
    num_threads = torch.get_num_threads()
    with threadpool_limits():
        yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("_threads_as_before")
def test_the_first_of_two_scorings_to_end_leaves_the_other_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(NUM_CORES)
    threadpool_limits(NUM_CORES)
    monkeypatch.setattr(OpenBLASController._SHARED_STATE, "controlling_thread", None)  # set by the first thread that scores, as in a flow
    both_score, first_ended = threading.Barrier(2, timeout=20), threading.Event()
    seen: dict[str, dict[str, int]] = {}

    def scoring(config: Any, seed: int, history: Any, embeddings: Any, folder: Path, *_: Any) -> None:
        title = folder.name
        both_score.wait()
        if title == "second":
            assert first_ended.wait(20)
        seen[title] = threads()
        folder.mkdir(parents=True)
        (folder / "metrics.json").touch()

    def score(title: str) -> None:
        spec: Any = SimpleNamespace(
            title=title,
            training=small_training(),
            evaluation=SimpleNamespace(epoch="last"),
            seed=0,
            subject=title,
            measurements=(),
            trial="t",
        )
        checkpoint = CheckpointRecord(step="train", identity=title, key=f"train/{title}", files=())
        embeddings = EmbeddingRecord(step="embed", identity=title, key=f"embed/{title}", files=())
        dataset = DatasetRecord(name="d", folder=str(tmp_path), digest="0", counts={}, source="synthetic")
        services: Any = SimpleNamespace(store=Store(str(tmp_path), tmp_path / "cache"), meter=Meter(tmp_path))
        services.check_going_on, services.display = lambda: None, SimpleNamespace(step=lambda *_: None)
        lock: Any = SimpleNamespace(is_forced=False, run_once=lambda work, *_: work(True))
        chain.evaluate.fn(title, spec, dataset, checkpoint, embeddings, services, lock)
        if title == "first":
            first_ended.set()
        seen[f"after {title}"] = threads()

    monkeypatch.setattr(chain, "num_cores", lambda: NUM_CORES)
    monkeypatch.setattr(chain, "read_history", lambda folder: [])
    monkeypatch.setattr("tasks.runs.replaced_data.check_unchanged", lambda dataset: None)
    monkeypatch.setattr(tasks.scores.evaluation, "evaluate_run", scoring)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(score, ("first", "second")))
    assert seen.keys() == {"first", "second", "after first", "after second"}
    for when, numbers in seen.items():
        assert len(numbers) > 1
        assert set(numbers.values()) == {NUM_CORES // chain.SCORED_AT_ONCE}, when
