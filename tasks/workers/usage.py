"""Resources of one worker for a job: processor time with its loaders, memory, bytes, time and energy of its GPU; and what it returns."""

import ctypes
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.runs.costs import Cost, moved_bytes, total_cost

RESET_PEAK = "5"  # written to clear_refs (proc(5))
PURGE_ALL_ARENAS = b"arena.4096.purge"  # jemalloc; 4096 is MALLCTL_ARENAS_ALL


class WorkerMeter:
    """Measures a worker's process from now on; made when a job begins.

    Args:
        gpu: UUID of the worker's GPU, as "GPU-..."; None on a CPU.
        gpu_share: the worker's part of that GPU, which others may share: its time and energy are counted by it.
    """

    def __init__(self, gpu: str | None = None, gpu_share: float = 1.0) -> None:
        self._process = psutil.Process()
        self._gpu_share = gpu_share
        self._gpu = None if gpu is None else GpuEnergy(gpu)
        self._began = time.monotonic()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        self._first = self._used()
        self._first_joules = None if self._gpu is None else self._gpu.joules()

    def cost(self) -> Cost:
        """Return what the worker has used since the job began; without the part of the flow's process."""
        seconds = time.monotonic() - self._began
        cpu, moved = (now - first for now, first in zip(self._used(), self._first, strict=True))
        joules = None if self._gpu is None else self._gpu.joules()
        energy = None if joules is None or self._first_joules is None else self._gpu_share * (joules - self._first_joules)
        return Cost(
            cpu_seconds=max(0.0, cpu),
            gpu_seconds=self._gpu_share * seconds if self._gpu is not None else 0.0,
            peak_memory_bytes=peak_memory(self._process),
            moved_bytes=max(0, round(moved)),
            energy_joules=energy,
            work_seconds=seconds,
        )

    def _used(self) -> tuple[float, float]:
        """Return (processor seconds, bytes moved) of the process and its children, those that have ended included."""
        times = self._process.cpu_times()
        cpu, moved = times.user + times.system + times.children_user + times.children_system, moved_bytes(self._process)
        for child in self._process.children(recursive=True):
            with suppress(psutil.Error):
                of_child = child.cpu_times()
                cpu += of_child.user + of_child.system
                moved += moved_bytes(child)
        return cpu, float(moved)


def of_workers(used: dict[int, Cost]) -> Cost:
    """Return the cost of all workers of a job: their work takes place at the same time, and their memory adds up."""
    seconds = [cost.work_seconds for cost in used.values() if cost.work_seconds is not None]
    peak = sum(cost.peak_memory_bytes for cost in used.values())
    return total_cost(used.values()).model_copy(update={"peak_memory_bytes": peak, "work_seconds": max(seconds, default=None)})


def peak_memory(process: psutil.Process) -> int:
    """Return a process's largest resident memory, in bytes, since the last reset of the peak; without Linux's report, the present one."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return int(process.memory_info().rss)


class GpuEnergy:
    """The energy counter of a GPU, named by its UUID, of NVIDIA's management library (NVML)."""

    def __init__(self, uuid: str) -> None:
        self._library, self._handle = None, ctypes.c_void_p()
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            is_open = library.nvmlInit_v2() == 0
            if is_open and library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._handle)) == 0:
                self._library = library

    def joules(self) -> float | None:
        """Return the energy since the driver was loaded, in joules; None if the library or the GPU (before Volta) does not report it."""
        millijoules = ctypes.c_ulonglong()
        if self._library is None or self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules)) != 0:
            return None
        return millijoules.value / 1000


def return_freed_memory() -> None:
    """Return freed memory to the operating system; does nothing in a process without jemalloc.

    Without it a training with 11,318 classes (`python benchmarks/rehearsal.py sop`) grew by 10 MB in each step: jemalloc found no use for
    what it kept.
    """
    mallctl = getattr(ctypes.CDLL(None), "mallctl", None)
    if mallctl is not None:
        mallctl(PURGE_ALL_ARENAS, None, None, None, ctypes.c_size_t(0))
