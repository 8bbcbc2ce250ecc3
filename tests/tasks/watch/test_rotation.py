"""Every row has its turn within a budget, although predicted times are wrong, and runs fail or are longer than it."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from dml_core.errors import ConfigError
from tasks.data import read_dataset
from tasks.environment import Project
from tasks.runs.costs import Cost, Meter
from tasks.runs.identity import train_step
from tasks.runs.params.file import load_params
from tasks.runs.specs import RunSpec
from tasks.tables.alarms import open_alarms
from tasks.watch import verifying
from tasks.watch.evidence import settings_hash
from tasks.watch.fresh_runs import Workspace
from tasks.watch.records import RowVerdict, Verdict, Verification
from tasks.watch.rotation import RUN_SECONDS, START_SECONDS, Turn, correction_of, drawn_turns, plan_night, turns_of
from tasks.watch.storage import read_reference, read_verifications, rows_today, write_reference
from tasks.watch.summary import first_sentence
from tasks.watch.verifying import VerifyRequest, verify
from tasks.wording import Say
from tests.tasks.watch.conftest import evidence, say, train_here

BUDGET, ACCEPTED, FAILS = 1800.0, 100.0, "row 5"


def night(past: list[Verification], durations: dict[str, float]) -> Verification:
    """Verify one run after the other with these actual durations, by the plan of the rotation."""
    turns = turns_of({"own": {row: {0: ACCEPTED, 1: ACCEPTED} for row in durations}}, past)
    plan = plan_night(turns, 1.0, BUDGET, 1, correction_of(past, 1))
    spent, rows, late = START_SECONDS, [], []
    for turn in plan.turns:
        if spent + durations[turn.row] > BUDGET:
            late.append(turn.row)
            spent = BUDGET
            continue
        spent += durations[turn.row]
        verdict = Verdict.FAILED if turn.row == FAILS else Verdict.IDENTICAL
        trained = None if turn.row == FAILS else evidence(turn.row, turn.seed, seconds=durations[turn.row])
        rows.append(RowVerdict(row=turn.row, seed=turn.seed, verdict=verdict, reason="", evidence=trained))
    started = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=len(past))
    too_long = tuple(row for row in late if row == plan.turns[0].row)
    return Verification(name="own", started_at=started, seconds=spent, commit="", rows=tuple(rows), too_long=too_long)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_has_its_turn_although_predictions_are_wrong(seed: int) -> None:
    """Rows last up to 40 times as long as accepted; one fails each time after most of the budget."""
    factors = np.random.default_rng(seed).uniform(0.5, 40, size=8)
    durations = {f"row {number}": ACCEPTED * factor for number, factor in enumerate(factors)} | {FAILS: 0.9 * BUDGET}
    past: list[Verification] = []
    for _ in range(48):
        past.append(night(past, durations))
    verified = Counter(row.row for one in past for row in one.rows)
    too_long = Counter(row for one in past for row in one.too_long)
    for row, seconds in durations.items():
        if START_SECONDS + seconds <= BUDGET:
            assert verified[row] >= 4, "in 48 nights, of 8 rows"
        else:
            assert verified[row] == 0
            assert too_long[row] >= 4


def test_rows_and_seeds_of_a_receipt_are_drawn_and_rows_with_the_same_seeds_start_together() -> None:
    accepted = {"own": {"a": dict.fromkeys(range(5), ACCEPTED), "b": dict.fromkeys(range(5), ACCEPTED), "c": {7: ACCEPTED}}}
    drawn = [[(turn.row, turn.seed) for turn in drawn_turns(accepted, [])] for _ in range(300)]
    seeds = [dict(turns) for turns in drawn]
    assert {of["a"] for of in seeds} == set(range(5))
    assert all((of["b"], of["c"]) == (of["a"], 7) for of in seeds)
    assert {turns[0][0] for turns in drawn} == {"a", "b", "c"}, "first of a share or a budget"


def test_a_night_of_several_names_is_as_slow_as_it_was() -> None:
    """Two nights of four names, of one run each, that took twice as long as predicted: 2 * 4 * (60 + 100 + 8) seconds."""
    past = [
        Verification(
            name=f"name {number}",
            started_at=datetime(2026, 1, day, tzinfo=UTC),
            seconds=336.0,
            commit="",
            rows=(RowVerdict(row="a", seed=0, verdict=Verdict.IDENTICAL, reason="", evidence=evidence("a", seconds=100.0)),),
        )
        for day in (1, 2)
        for number in range(4)
    ]
    assert correction_of(past, 1) == pytest.approx(2.0)


def test_a_night_has_as_many_groups_as_fit_one_after_the_other() -> None:
    """Each command trains the rows of one table and dataset with one seed; sixteen GPUs do not make two rows faster."""
    turns = [Turn(f"table {number // 2}", f"row {number}", 0, 7200.0) for number in range(64)]
    night = plan_night(turns, 1.0, 8 * 3600.0, 16)
    assert (len(night.turns), night.num_nights) == (6, 11)
    assert night.seconds == 3 * (START_SECONDS + 7200 + RUN_SECONDS)


def test_a_group_begins_only_if_it_fits_into_what_is_left(accepted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, trained = [0.0], list[int]()

    def train_slowly(space: Workspace, specs: Sequence[RunSpec], until: float, say: Say) -> dict[tuple[str, int], str]:
        trained.append(specs[0].seed)
        clock[0] += 25 * 60
        return train_here(space, specs, until, say)

    monkeypatch.setattr(verifying, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(verifying, "train", train_slowly)
    monkeypatch.setattr(verifying, "predicted_seconds", lambda *_: 600.0)
    (verification,) = verify(accepted, VerifyRequest(("own",), seeds=(0, 1), budget_minutes=30), say).verifications
    assert trained == [0], "the second would have been stopped before its end, again each night"
    assert ([row.seed for row in verification.rows], verification.too_long) == ([0], ())


def test_a_row_that_the_budget_never_fits_is_named_and_keeps_its_turn_for_a_longer_budget(accepted: Project) -> None:
    params = yaml.safe_load(accepted.params_file.read_text())
    params["comparison"]["variants"]["long"] = {"loss": {"name": "softmax"}}
    accepted.params_file.write_text(yaml.safe_dump(params))
    settings = settings_hash(rows_today(load_params(accepted.params_file), "own")["own/long"])
    reference = read_reference(accepted, "own")
    assert reference is not None
    runs = (*reference.evidence, evidence("own/long", settings=settings, seconds=90_000.0))
    write_reference(accepted, reference.model_copy(update={"evidence": runs}))
    (verification,) = verify(accepted, VerifyRequest(("own",), budget_minutes=30), say).verifications
    assert [(row.row, row.verdict) for row in verification.rows] == [("own/good", Verdict.IDENTICAL)]
    assert first_sentence(verification, None) == "own: reproduced: 1 identical; longer than the budget: own/long."
    turns = turns_of({"own": {row: {0: ACCEPTED} for row in ("own/good", "own/long")}}, [verification])
    assert [turn.row for turn in turns] == ["own/long", "own/good"]


def test_a_row_that_vanished_raises_its_alarm_although_no_other_fits_the_budget(
    accepted: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    short = VerifyRequest(("own",), budget_minutes=0.01)
    with pytest.raises(ConfigError, match=r"--budget 0\.01m: no row fits; the shortest needs about 2 minutes"):
        verify(accepted, short, say)
    reference = read_reference(accepted, "own")
    assert reference is not None
    write_reference(accepted, reference.model_copy(update={"evidence": (*reference.evidence, evidence("own/gone"))}))
    (verification,) = verify(accepted, short, say).verifications
    assert [(row.row, row.verdict) for row in verification.rows] == [("own/gone", Verdict.VANISHED)]
    assert verification.too_long == ("own/good",)
    assert "--budget 0.01m: no row fits" in capsys.readouterr().out
    assert [alarm.row for alarm in open_alarms(accepted.state)] == ["own/gone"]


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_run_that_is_longer_than_the_budget_is_named_and_one_that_waited_for_room_keeps_its_turn(
    has_begun: bool, accepted: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def train_too_long(space: Workspace, specs: Sequence[RunSpec], until: float, say: Say) -> dict[tuple[str, int], str]:
        identity = train_step(specs[0], read_dataset(accepted, "own")).identity
        with suppress(KeyboardInterrupt), Meter(space.project.state).step("train", identity, waits=True) as meter:
            meter.workers(1, Cost(work_seconds=9.0 if has_begun else None))
            raise KeyboardInterrupt
        clock[0] = until
        return {}

    monkeypatch.setattr(verifying, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(verifying, "train", train_too_long)
    (verification,) = verify(accepted, VerifyRequest(("own",), budget_minutes=30), say).verifications
    assert read_verifications(accepted.state)[-1] == verification
    expected = ((), ("own/good",), "longer than the budget: own/good.") if has_begun else (("own/good",), (), "1 left for another time.")
    assert (verification.rows, verification.skipped, verification.too_long) == ((), *expected[:2])
    assert first_sentence(verification, None).endswith(f"no run; {expected[2]}")
