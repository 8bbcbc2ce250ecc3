"""Cost of a run's steps: time, processor time, memory, energy and bytes, and the seconds lost to kills and retries.

A flow's `Meter` measures its steps. What steps share (processor time and bytes of the flow's process, energy of the machine, the flow's
wall clock) is divided evenly among those that are active, so that sums over steps add up. Costs are facts of a step's record: they belong
to no identity and to no score.

A step's cost so far is in `state/costs/` until the step has finished. If its process is killed, the next one adds it to its own, unless
the step has a newer record: then it is the cost of a finished step.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from dml_core.errors import StoreError
from tasks.environment import finished_records
from tasks.runs.records import Record, StepRecord
from tasks.sealed import read_or_set_aside, read_sealed, write_sealed

COSTS, FACT = "costs", "cost"
TICK_SECONDS = 1.0
SPACING = 0.005  # of the time so far, between recorded positions: each tick writes all, and a training of a day reaches 170,000
POWERCAP = Path("/sys/class/powercap")
START, OTHER = "start", "between steps"


class Cost(Record):
    """The cost of a step, or of several.

    Attributes:
        wall_seconds: from the step's begin to its end, all attempts included; not the time for which it waited for free workers.
        cpu_seconds: processor time of its workers with their loaders, and its share of the flow's process.
        gpu_seconds: seconds for which GPUs were reserved, summed over GPUs.
        lost_seconds: part of `wall_seconds` that produced nothing: work that was repeated after a kill, and restarts.
        peak_memory_bytes: largest resident memory of its workers, summed over them, or of the flow's process.
        moved_bytes: bytes read and written by system calls; memory-mapped reads do not count.
        energy_joules: of the machine's processors (RAPL) and of the workers' GPUs (NVML); None if neither can be read.
        predicted_seconds: working time as estimated before the step began; None if it could not be estimated.
        work_seconds: time of the last attempt in the workers; what `predicted_seconds` estimates.
    """

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    gpu_seconds: float = 0.0
    lost_seconds: float = 0.0
    peak_memory_bytes: int = 0
    moved_bytes: int = 0
    energy_joules: float | None = None
    predicted_seconds: float | None = None
    work_seconds: float | None = None


def costs_of(records: Iterable[StepRecord]) -> dict[str, Cost]:
    """Return step -> the cost that it recorded, without steps that were made before costs were recorded."""
    return {record.step: Cost.model_validate(record.facts[FACT]) for record in records if FACT in record.facts}


def total_cost(costs: Iterable[Cost]) -> Cost:
    """Return the sum of the costs of steps; a value that none of them has is None, and the peak is the largest."""
    costs = list(costs)
    known = {name: [value for cost in costs if (value := getattr(cost, name)) is not None] for name in Cost.model_fields}
    return Cost(**{name: (max if name == "peak_memory_bytes" else sum)(values) for name, values in known.items() if values})


class _Journal(Record):
    """A step's cost so far, and (position, seconds) of its training: the time at which each position was first reached for good."""

    cost: Cost
    positions: tuple[tuple[int, float], ...] = ()


class StepMeter:
    """Measures one step; thread-safe.

    Args:
        before: cost and positions of attempts whose process was killed or failed.
        predicted_seconds: estimate of the working time.
        waits: the step begins with its workers' first message, and waits for free ones until then.

    Attributes:
        is_waiting: whether the step waits for workers.
    """

    def __init__(self, kind: str, before: "_Journal | None", predicted_seconds: float | None, waits: bool = False) -> None:
        self.kind = kind
        self._before = before or _Journal(cost=Cost())
        self._predicted = predicted_seconds
        self.is_waiting = waits
        self._began = time.monotonic()
        self._workers: dict[int, Cost] = {}
        self._shared = Cost()
        self._positions = list(self._before.positions) or [(0, 0.0)]
        self._lost = self._before.cost.lost_seconds
        self._retried_at = self._before.cost.wall_seconds if before is not None else None
        self._lock = threading.Lock()

    @property
    def elapsed(self) -> float:
        """Wall-clock seconds of the step so far, killed processes included."""
        return self._before.cost.wall_seconds + (0.0 if self.is_waiting else time.monotonic() - self._began)

    def workers(self, attempt: int, cost: Cost) -> None:
        """Record what the workers of an attempt have used so far; a new attempt's number means that the earlier one was lost."""
        with self._lock:
            if self.is_waiting:
                self._began, self.is_waiting = time.monotonic(), False
            if self._workers and attempt not in self._workers:
                self._retried_at = self.elapsed
            self._workers[attempt] = cost

    def reached(self, position: int) -> None:
        """Record that the training has reached a position, in steps; the first one after a retry shows how much was repeated."""
        with self._lock:
            now = self.elapsed
            if self._retried_at is not None:
                before = [place for place in self._positions if place[0] <= position] or [(0, 0.0)]
                self._lost += now - before[-1][1]
                self._positions, self._retried_at = before, None
            if now - self._positions[-1][1] >= SPACING * now:
                self._positions.append((position, now))

    def share(self, cost: Cost) -> None:
        """Add the step's share of what the flow's process and the machine used."""
        with self._lock:
            self._shared = total_cost([self._shared, cost])

    def journal(self) -> _Journal:
        """Return the cost so far, with the positions."""
        with self._lock:
            cost = total_cost([self._before.cost, self._shared, *self._workers.values()])
            fields = {
                "wall_seconds": self.elapsed,
                "lost_seconds": self._lost + (0.0 if self._retried_at is None else self._retried_at - self._positions[-1][1]),
                "predicted_seconds": self._predicted,
                "work_seconds": [*self._workers.values()][-1].work_seconds if self._workers else self.elapsed,
            }
            cost = cost.model_copy(update=fields)
            rounded = {name: round(value, 3) for name, value in cost if isinstance(value, float)}
            return _Journal(cost=cost.model_copy(update=rounded), positions=tuple(self._positions))


def journal_file(state: Path, step: str, identity: str) -> Path:
    """Return the file of a step's cost so far."""
    return state / COSTS / f"{step}-{identity}.json"


def has_begun(state: Path, step: str, identity: str) -> bool:
    """Return whether workers have begun a step without finishing it, by its cost so far; not if it only waited for them."""
    with suppress(StoreError):
        journal = read_sealed(journal_file(state, step, identity), _Journal)
        return journal is not None and bool(journal.cost.work_seconds)
    return False


def _has_ended(journal: Path) -> bool:
    """Return whether a step's record is as new as its cost so far: it has finished, and no later attempt has begun."""
    record = finished_records() / journal.stem.partition("-")[2]
    try:
        return record.stat().st_mtime_ns >= journal.stat().st_mtime_ns
    except OSError:
        return False


class Meter:
    """Measures the steps of a flow, and divides what they share; costs so far are in the project's state folder."""

    def __init__(self, state: Path, powercap: Path = POWERCAP) -> None:
        self._state = state
        self._process = psutil.Process()
        self._energy = EnergyCounter(powercap)
        self._active: dict[Path, StepMeter] = {}  # file of a step's cost so far -> its meter
        self._phases: Counter[str] = Counter()  # kind -> number in progress: publications mostly wait for each other
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._began = time.monotonic()
        self._last = self._reading()
        self._before_seconds = time.time() - self._process.create_time()
        self.shares: dict[str, float] = defaultdict(float, {START: self._before_seconds})
        self._ticking: threading.Thread | None = None  # from the first step on

    @contextmanager
    def step(
        self, kind: str, identity: str, predicted_seconds: float | None = None, is_forced: bool = False, waits: bool = False
    ) -> Iterator[StepMeter]:
        """Measure a step; its cost so far stays in the journal until its record is stored.

        Args:
            predicted_seconds: estimate of its working time.
            is_forced: drop the cost of earlier attempts, because their work is not used.
            waits: the step waits for free workers first.
        """
        path = journal_file(self._state, kind, identity)
        before = None
        with suppress(StoreError, OSError):  # costs are optional: without one the step runs all the same
            if is_forced or _has_ended(path):
                path.unlink(missing_ok=True)
            before = read_or_set_aside(path, _Journal)
        meter = StepMeter(kind, before, predicted_seconds, waits)
        self._share_out()
        with self._lock:
            self._active[path] = meter
            if self._ticking is None:
                self._ticking = threading.Thread(target=self._tick, name="costs", daemon=True)
                self._ticking.start()
        try:
            yield meter
        except BaseException:
            self._share_out()
            _write_journal(path, meter)
            raise
        finally:
            self._share_out()
            with self._lock:
                self._active.pop(path, None)

    @contextmanager
    def phase(self, kind: str) -> Iterator[None]:
        """Count time of the flow that belongs to no step, such as publications; of those at the same time each kind counts as one step."""
        self._share_out()
        with self._lock:
            self._phases[kind] += 1
        try:
            yield
        finally:
            self._share_out()
            with self._lock:
                self._phases[kind] -= 1

    def facts(self, meter: StepMeter) -> dict[str, Any]:
        """Return the cost of a step up to now, as a fact for its record."""
        self._share_out()
        return {FACT: meter.journal().cost.model_dump(mode="json")}

    def line(self) -> str:
        """Return where the wall-clock time of this process went, as one line; steps that ran at the same time share it."""
        self._share_out()
        total = self._before_seconds + time.monotonic() - self._began
        parts = dict(self.shares) | {OTHER: max(0.0, total - sum(self.shares.values()))}
        return f"time: {total:.1f} s: " + ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in parts.items())

    def close(self) -> None:
        """Stop measuring, and remove the costs so far of steps that have a record."""
        self._ended.set()
        for path in (self._state / COSTS).glob("*.json"):
            if _has_ended(path):
                path.unlink(missing_ok=True)

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self._share_out()
            with self._lock:
                for path, meter in self._active.items():
                    _write_journal(path, meter)

    def _share_out(self) -> None:
        """Divide what was used since the last call among the active steps."""
        with self._lock:
            reading = self._reading()
            wall, cpu, moved = (new - old for new, old in zip(reading, self._last, strict=True))
            self._last = reading
            memory, joules = self._process.memory_info().rss, self._energy.joules()
            phases = [kind for kind, number in self._phases.items() if number]
            working = [meter for meter in self._active.values() if not meter.is_waiting]
            steps = working or ([] if phases else list(self._active.values()))  # all wait while the first workers start
            part = 1 / max(1, len(steps) + len(phases))
            for kind in (*phases, *(meter.kind for meter in steps)):
                self.shares[kind] += wall * part
            energy = None if joules is None else part * joules
            for meter in steps:
                meter.share(Cost(cpu_seconds=part * cpu, moved_bytes=round(part * moved), peak_memory_bytes=memory, energy_joules=energy))

    def _reading(self) -> tuple[float, float, int]:
        """Return the wall clock and the processor time of this process, both in seconds, and the bytes that it moved."""
        times = self._process.cpu_times()
        return time.monotonic(), times.user + times.system, moved_bytes(self._process)


def _write_journal(path: Path, meter: StepMeter) -> None:
    with suppress(StoreError):
        write_sealed(path, meter.journal())


class EnergyCounter:
    """The energy counters of a machine's processors (RAPL), in the kernel's folder `powercap`."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        # Another zone at their level, `psys`, is the whole machine: it includes them.
        self._packages = sorted(path for path in powercap.glob("intel-rapl:*") if _text(path / "name").startswith("package"))
        self._last = self._readings()

    def joules(self) -> float | None:
        """Return the energy since the last call, in joules; None if no counter can be read, which needs root on most machines."""
        before, self._last = self._last, self._readings()
        total = 0
        for package, new, old in zip(self._packages, self._last, before, strict=True):
            if new is None or old is None:
                return None
            total += new - old
            if new < old:  # the counter has wrapped
                total += _number(package / "max_energy_range_uj") or 0
        return total / 1e6 if self._packages else None

    def _readings(self) -> list[int | None]:
        return [_number(package / "energy_uj") for package in self._packages]


def moved_bytes(process: psutil.Process) -> int:
    """Return the bytes that a process has read and written by system calls; 0 where the system does not tell."""
    try:
        counters = process.io_counters()
        return int(counters.read_chars + counters.write_chars)
    except (psutil.Error, AttributeError, OSError):
        return 0


def _number(path: Path) -> int | None:
    with suppress(ValueError):
        return int(_text(path))
    return None


def _text(path: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    with suppress(OSError):
        return path.read_text()
    return ""
