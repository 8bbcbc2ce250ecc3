"""The runs of a night: rows verified longest ago, each with the seed verified longest ago, within a share and a budget of time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from random import SystemRandom
from statistics import fmean

from tasks.plans.times import START_SECONDS
from tasks.watch.records import Verification
from tasks.wording import counted

RUN_SECONDS = 8.0  # scoring, figures, publishing of a run
Accepted = Mapping[str, Mapping[int, float]]  # row -> seed -> seconds of its training
NEVER = datetime.min.replace(tzinfo=UTC)
RECENT = 3  # nights whose measured times correct the prediction


@dataclass(frozen=True)
class Turn:
    """A run to verify: its reference's name, its row, a seed, the predicted duration in seconds, and its dataset."""

    name: str
    row: str
    seed: int
    seconds: float
    dataset: str = ""


@dataclass(frozen=True)
class Night:
    """The runs of a night.

    Attributes:
        turns: runs to verify, those verified longest ago first.
        too_long: rows whose predicted duration exceeds the budget; they never have a turn.
        seconds: predicted duration of the night.
        num_nights: nights after which every row had its turn, too long ones excepted.
        least: predicted duration of a night with only the shortest row, in seconds.
    """

    turns: tuple[Turn, ...]
    too_long: tuple[str, ...]
    seconds: float
    num_nights: int
    least: float

    def line(self, num_seeds: int | None) -> str:
        """Return the plan in a line: what follows, how long it takes, and when every row, each with `num_seeds`, has had its turn.

        `num_seeds` is None for a receipt (`drawn_turns`): the next verification of it draws again.
        """
        runs = f"{counted(len(self.turns), 'run')} to verify, about {math.ceil(self.seconds / 60)} min"
        every = "each verification covers every row" if self.num_nights == 1 else f"{self.num_nights} verifications cover every row"
        seeds = f", {self.num_nights * num_seeds} cover every accepted seed" if num_seeds is not None and num_seeds > 1 else ""
        course = f"; {every}{seeds}" if num_seeds is not None else ""  # the next verification of a receipt draws again
        too_long = f"; longer than the budget, never verified: {', '.join(self.too_long)}" if self.too_long else ""
        return f"{runs}{course}{too_long}"


def turns_of(accepted: Mapping[str, Accepted], past: Sequence[Verification]) -> list[Turn]:
    """Return one run for each row, the rows and seeds first that had their turn longest ago.

    A run that failed, or was not finished when the budget ended, has had its turn: otherwise it would be the first of each night, and
    others would wait. `past` are the earlier verifications, oldest first.
    """
    last: dict[tuple[str, int | None], datetime] = {}
    for verification in past:
        for run in verification.trained:
            last[run.row, run.seed] = verification.started_at
        for row in {verdict.row for verdict in verification.rows} | (set(verification.too_long) - set(verification.skipped)):
            last[row, None] = verification.started_at
    measured = {run.row: run.seconds for verification in past for run in verification.trained}
    turns = []
    for name, rows in accepted.items():
        for row, seconds in rows.items():
            seed = min(seconds, key=lambda seed: (last.get((row, seed), NEVER), seed))
            turns.append(Turn(name, row, seed, measured.get(row) or fmean(seconds.values())))
    return sorted(turns, key=lambda turn: last.get((turn.row, None), NEVER))


def drawn_turns(accepted: Mapping[str, Accepted], past: Sequence[Verification]) -> list[Turn]:
    """Return one run for each row of a receipt, at random, since its author must not know which runs are trained.

    Rows with the same seeds have the same one: runs of one seed start together.
    """
    random, turns = SystemRandom(), turns_of(accepted, past)
    seeds = list({seed for rows in accepted.values() for seconds in rows.values() for seed in seconds})
    random.shuffle(seeds)
    random.shuffle(turns)
    return [replace(turn, seed=min(accepted[turn.name][turn.row], key=seeds.index)) for turn in turns]


def plan_night(turns: Sequence[Turn], share: float, budget_seconds: float | None, num_parallel: int, correction: float = 1.0) -> Night:
    """Choose the runs of a night from all rows, in the order of `turns_of`, one run for each row.

    The share of the rows is rounded up; a budget of None is no limit. `correction` is the factor between measured and predicted durations
    (`correction_of`).
    """
    most = math.ceil(share * len(turns) - 1e-9)

    budget = math.inf if budget_seconds is None else budget_seconds
    nights: list[list[Turn]] = []
    too_long: list[Turn] = []
    for turn in turns:  # as the rotation will pass through them
        longer = [*nights[-1], turn] if nights else [turn]
        if predicted_seconds([turn], num_parallel) > budget:
            too_long.append(turn)
        elif nights and len(longer) <= most and predicted_seconds(longer, num_parallel, correction) <= budget:
            nights[-1] = longer
        else:
            nights.append([turn])
    tonight = nights[0] if nights else []
    least = min((predicted_seconds([turn], num_parallel) for turn in turns), default=0.0)
    long_rows = tuple(dict.fromkeys(turn.row for turn in too_long))
    return Night(tuple(tonight), long_rows, predicted_seconds(tonight, num_parallel, correction), len(nights), least)


def groups_of(turns: Iterable[Turn]) -> list[list[Turn]]:
    """Return the turns that one command can train together, of one name and dataset with one seed."""
    groups: dict[tuple[str, str, int], list[Turn]] = {}
    for turn in turns:
        groups.setdefault((turn.name, turn.dataset, turn.seed), []).append(turn)
    return [*groups.values()]


def predicted_seconds(turns: Iterable[Turn], num_parallel: int, correction: float = 1.0) -> float:
    """Return the predicted duration of turns: one group after the other, of each `num_parallel` at a time."""
    groups = [[turn.seconds + RUN_SECONDS for turn in group] for group in groups_of(turns)]
    return correction * sum(START_SECONDS + max(sum(runs) / num_parallel, *runs) for runs in groups)


def correction_of(past: Sequence[Verification], num_parallel: int) -> float:
    """Return how many times as long as predicted the slowest of the last nights took; at least 1.

    A night has a verification for each name, with its part of the seconds.
    """
    nights = [[*night] for _, night in groupby(past, attrgetter("started_at"))]
    factors = [1.0]
    for night in nights[-RECENT:]:
        trained = [Turn(one.name, run.row, run.seed, run.seconds, run.dataset) for one in night for run in one.trained]
        if trained:
            factors.append(sum(verification.seconds for verification in night) / predicted_seconds(trained, num_parallel))
    return max(factors)
