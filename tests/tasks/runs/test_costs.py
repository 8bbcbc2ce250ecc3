"""Costs of steps: shares add up to what was used, kills and retries are counted as lost, and energy counters may wrap."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks.runs import costs
from tasks.runs.costs import OTHER, START, Cost, EnergyCounter, Meter, StepMeter


class Clock:
    """A clock that tests set; it replaces `time` of the module."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(costs, "time", made)
    monkeypatch.setattr(costs, "TICK_SECONDS", 1e6)  # the tests share out by hand
    return made


def lost(meter: StepMeter) -> float:
    return meter.journal().cost.lost_seconds


def test_a_kill_loses_the_work_since_the_checkpoint_and_the_restart(clock: Clock) -> None:
    meter = StepMeter("train", None, None)
    meter.workers(1, Cost())
    for position in range(1, 11):  # one step per second
        clock.now += 1
        meter.reached(position)
    assert lost(meter) == 0
    clock.now += 7  # killed after step 10; 7 s until others have started
    meter.workers(2, Cost())
    clock.now += 1
    meter.reached(9)  # from the checkpoint of step 8: steps 9 and 10 are repeated
    assert lost(meter) == pytest.approx(9)  # 10 s of work are 8 of progress; 7 s of restart; step 9 was done before
    clock.now += 11
    meter.reached(20)
    assert meter.elapsed - lost(meter) == pytest.approx(20), "what is not lost is the time of 20 steps"


def test_the_positions_of_a_training_of_a_day_stay_few_and_what_a_kill_loses_is_known(clock: Clock) -> None:
    """Each second's tick writes all positions: 170,000 of them took a core and 5 MB a second."""
    meter = StepMeter("train", None, None)
    meter.workers(1, Cost())
    for position in range(1, 24 * 3600 + 1):
        clock.now += 1
        meter.reached(position)
    assert len(meter.journal().positions) < 2000
    meter.workers(2, Cost())
    clock.now += 1
    meter.reached(24 * 3600 - 3600)  # from the checkpoint of an hour ago
    assert lost(meter) == pytest.approx(3600, abs=0.005 * 24 * 3600)


def test_a_step_without_positions_loses_everything_before_its_last_attempt(clock: Clock) -> None:
    meter = StepMeter("train", None, None)
    for attempt, seconds in ((1, 5), (2, 7), (3, 3)):
        meter.workers(attempt, Cost())
        clock.now += seconds
        meter.workers(attempt, Cost(cpu_seconds=seconds))
    cost = meter.journal().cost
    assert (cost.wall_seconds, cost.lost_seconds, cost.cpu_seconds) == (15, 12, 15)


def test_waiting_for_workers_is_no_cost_of_a_step(clock: Clock, tmp_path: Path) -> None:
    """One run trains for 10 s while another waits, which then trains for 5; before, both wait for 3 s."""
    meter = Meter(tmp_path, tmp_path)
    with meter.step("train", "one", waits=True) as one, meter.step("embed", "two", waits=True) as two:
        clock.now += 3
        meter.line()  # as each second's tick does, it divides the time until now
        one.workers(1, Cost())
        clock.now += 10
        meter.line()
        assert two.elapsed == 0
        two.workers(1, Cost())
        clock.now += 5
        assert (one.elapsed, two.elapsed) == (15, 5)
    assert meter.shares["train"] == pytest.approx(1.5 + 10 + 2.5)
    assert meter.shares["embed"] == pytest.approx(1.5 + 2.5)


def test_phases_of_a_kind_count_as_one_until_the_last_of_them_ends(clock: Clock, tmp_path: Path) -> None:
    meter = Meter(tmp_path, tmp_path)
    publications = [meter.phase("publish") for _ in range(3)]
    with meter.step("evaluate", "one"):
        for publication in publications:
            publication.__enter__()
        clock.now += 4
        publications[0].__exit__(None, None, None)
        clock.now += 4
    clock.now += 4
    publications[2].__exit__(None, None, None)
    clock.now += 4
    publications[1].__exit__(None, None, None)
    clock.now += 4
    meter.line()
    assert {kind: meter.shares[kind] for kind in ("evaluate", "publish")} == {"evaluate": 4, "publish": 12}


def test_the_next_process_adds_what_a_killed_one_used(clock: Clock, tmp_path: Path) -> None:
    def interrupted() -> None:
        with Meter(tmp_path, tmp_path).step("train", "abc") as meter:
            meter.workers(1, Cost(cpu_seconds=4))
            clock.now += 10
            meter.reached(5)
            clock.now += 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    second = Meter(tmp_path, tmp_path)
    with second.step("train", "abc", predicted_seconds=9.0) as meter:
        clock.now += 3
        meter.reached(5)
        cost = Cost.model_validate(second.facts(meter)["cost"])
    assert (cost.wall_seconds, cost.lost_seconds, cost.predicted_seconds) == (15, 5, 9)
    assert cost.cpu_seconds >= 4
    with second.step("train", "abc", is_forced=True) as meter:
        assert meter.elapsed == 0


def test_the_cost_of_a_finished_step_is_added_to_no_later_one(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is killed after a step's record was stored, and the step runs again; or a forced attempt is interrupted and resumed."""
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(tmp_path / "records"))
    record = tmp_path / "records/abc"
    record.parent.mkdir()

    def interrupted() -> None:
        with Meter(tmp_path, tmp_path).step("embed", "abc"):
            clock.now += 30
            raise KeyboardInterrupt

    for is_finished, before in ((True, 0), (False, 30)):
        record.touch()
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        if is_finished:
            record.touch()
        journal = costs.journal_file(tmp_path, "embed", "abc")
        assert journal.is_file()
        with Meter(tmp_path, tmp_path).step("embed", "abc") as meter:
            assert meter.elapsed == before
        Meter(tmp_path, tmp_path).close()
        assert journal.is_file() == (not is_finished)


def test_a_killed_process_leaves_its_cost_so_far(tmp_path: Path) -> None:
    """The real clock and the real tick, ended by SIGKILL."""
    program = (
        "import sys, time; from pathlib import Path; from tasks.runs.costs import Meter\n"
        "with Meter(Path(sys.argv[1])).step('train', 'abc') as meter:\n"
        "    print('began', flush=True); time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        until = began + 120
        while time.monotonic() < until and not (tmp_path / "costs/train-abc.json").exists():
            time.sleep(0.1)
        time.sleep(1.5)
        seconds = time.monotonic() - began
        process.kill()
    with Meter(tmp_path).step("train", "abc") as meter:
        assert seconds / 3 < meter.elapsed < seconds + 60


def test_steps_at_the_same_time_share_and_the_shares_add_up(tmp_path: Path) -> None:
    used = psutil.Process().cpu_times()
    meter = Meter(tmp_path)
    with meter.step("train", "one") as one:
        _busy(0.1)
        with meter.step("train", "two") as two, meter.phase("reports"):
            _busy(0.1)
            both = [one, two]
        _busy(0.1)
        cpu = [Cost.model_validate(meter.facts(step)["cost"]).cpu_seconds for step in both]
    now = psutil.Process().cpu_times()
    total = now.user + now.system - used.user - used.system
    assert sum(cpu) < total
    assert cpu[0] > cpu[1] > 0
    assert set(meter.shares) == {START, "train", "reports"}
    line = meter.line()
    seconds = dict(part.rsplit(" ", 1) for part in line.partition(" s: ")[2].split(", "))
    assert sum(map(float, seconds.values())) == pytest.approx(float(line.split()[1]), abs=0.3)
    assert OTHER in seconds


def _busy(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_energy_counters_are_summed_over_processors_and_may_wrap(tmp_path: Path) -> None:
    """A core is a part of its processor, and the platform (psys) has the processors as parts."""
    zones = [("0", "package-0", 5_000_000), ("1", "package-1", 9_000_000), ("0:0", "core", 77), ("2", "psys", 20_000_000)]
    for number, kind, now in zones:
        name = f"intel-rapl:{number}"
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(f"{kind}\n")
        (tmp_path / name / "energy_uj").write_text(str(now))
        (tmp_path / name / "max_energy_range_uj").write_text("10000000")
    counter = EnergyCounter(tmp_path)
    assert counter.joules() == 0
    (tmp_path / "intel-rapl:0/energy_uj").write_text("6500000")
    (tmp_path / "intel-rapl:1/energy_uj").write_text("500000")  # 1.5 J after it wrapped at 10 J
    (tmp_path / "intel-rapl:2/energy_uj").write_text("25000000")
    assert counter.joules() == 3.0
    (tmp_path / "intel-rapl:1/energy_uj").unlink()
    assert counter.joules() is None
    assert EnergyCounter(tmp_path / "none").joules() is None
    (tmp_path / "unreadable" / "intel-rapl:0" / "name").mkdir(parents=True)
    assert EnergyCounter(tmp_path / "unreadable").joules() is None


def test_a_cost_that_cannot_be_kept_stops_no_step(tmp_path: Path) -> None:
    (tmp_path / "costs").write_text("a file where the folder should be")
    meter = Meter(tmp_path)
    with meter.step("train", "abc") as step:
        pass
    assert meter.facts(step)["cost"]["wall_seconds"] >= 0
