"""What a worker reports that it has used of a GPU that others share."""

import time

import pytest

from tasks.workers.usage import WorkerMeter


@pytest.mark.parametrize(("gpu", "share", "part"), [("GPU-0", 1.0, 1.0), ("GPU-0", 0.25, 0.25), (None, 0.0, 0.0)])
def test_time_of_a_shared_gpu_is_counted_by_the_workers_part(gpu: str | None, share: float, part: float) -> None:
    meter = WorkerMeter(gpu, share)
    time.sleep(0.05)
    cost = meter.cost()
    assert cost.work_seconds is not None
    assert cost.work_seconds >= 0.05
    assert cost.gpu_seconds == pytest.approx(part * cost.work_seconds)


def test_energy_of_a_shared_gpu_is_counted_by_the_workers_part(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([100.0, 180.0])
    monkeypatch.setattr("tasks.workers.usage.GpuEnergy.joules", lambda self: next(readings))
    assert WorkerMeter("GPU-0", 0.25).cost().energy_joules == 20.0
