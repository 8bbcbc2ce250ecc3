"""A worker returns the memory that jemalloc keeps for it, again and again while it trains."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tasks.workers import worker
from tests.conftest import ROOT

FREED = """
import numpy
from tasks.workers.usage import return_freed_memory
def num_megabytes():
    (line,) = [line for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous")]
    return int(line.split()[1]) // 1024
before = num_megabytes()
numpy.ones(50_000_000, numpy.float32)
kept = num_megabytes() - before
return_freed_memory()
print(kept, num_megabytes() - before)
"""


@pytest.mark.parametrize("has_jemalloc", [True, False])
def test_freed_memory_is_kept_until_it_is_returned(has_jemalloc: bool) -> None:
    preloaded = {"LD_PRELOAD": str(Path(ray.__file__).parent / "core" / "libjemalloc.so"), "MALLOC_CONF": "dirty_decay_ms:-1"}
    environment = os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"} | (preloaded if has_jemalloc else {})
    done = subprocess.run([sys.executable, "-c", FREED], env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    kept, left = map(int, done.stdout.split())
    assert (kept > 180) == has_jemalloc
    assert left < 20


def test_a_worker_at_work_returns_it_every_20_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, returned = [0.0], []
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(worker, "ray", SimpleNamespace(wait=lambda answers, timeout: ([], answers)))
    monkeypatch.setattr(worker, "return_freed_memory", lambda: returned.append(now[0]))
    board: Any = SimpleNamespace(beat=SimpleNamespace(remote=lambda *values: object()))
    heart = worker._Heart(board, on_a_cluster=False)
    for step in range(1200):  # ten a second, for two minutes
        now[0] = step / 10
        heart.beat(patience=False)
    assert len(returned) == 5
    assert all(later - earlier == pytest.approx(20, abs=2) for earlier, later in zip([0, *returned], returned, strict=False))
