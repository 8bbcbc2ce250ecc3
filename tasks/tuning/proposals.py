"""Which settings a search tries: the row's own, its loss's published ones, then those that Optuna's sampler proposes.

Proposals come in rounds of a fixed size. A round follows from the trials before it and from the search's name and seed, so that a search
that was killed, or runs more trials at a time, proposes the same settings.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from dml_core.search import Search
from tasks.tuning.space import Params, Space

ROUND_SIZE = 4
STARTUP_TRIALS = 2 * ROUND_SIZE  # drawn at random before the sampler has enough scores to use
SAMPLER = f"Optuna {optuna.__version__} TPE, multivariate, in rounds of {ROUND_SIZE}"
MOST_DRAWS = 100  # for one proposal that fits
NEAR_END = 0.1  # of a range's width

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class Trial:
    """Settings and their scores.

    Attributes:
        number: 0 has the row's own settings.
        params: dotted path -> value, for every path that is searched.
        scores: on pairs 0, 1, ... of fold and seed, in order.
        reason: why the settings cannot be trained; None where they can.
    """

    number: int
    params: Params
    scores: tuple[float, ...] = ()
    reason: str | None = None

    @property
    def mean(self) -> float:
        """Mean over the pairs that were scored."""
        return fmean(self.scores)


def propose(
    space: Space, past: Sequence[Trial], draw: str, round_number: int, fits: Callable[[Params], bool], count: int = ROUND_SIZE
) -> list[Params]:
    """Settings for the next trials, each different from those of all trials before.

    Args:
        space: what is searched.
        past: every trial so far, with the same pairs scored.
        draw: the search's name and seed, from which the random draws derive.
        round_number: of the round.
        fits: whether the settings can be a run; others are drawn again.
        count: how many settings.
    """
    drawn = int.from_bytes(hashlib.sha256(f"{draw} {round_number}".encode()).digest()[:4], "big")
    sampler = optuna.samplers.TPESampler(seed=drawn, n_startup_trials=STARTUP_TRIALS, multivariate=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions = {path: distribution(search) for path, search in space.items()}
    for trial in past:
        if trial.scores:
            frozen = create_trial(state=TrialState.COMPLETE, value=trial.mean, params=trial.params, distributions=distributions)
            study.add_trial(frozen)
    known = [trial.params for trial in past]
    proposed: list[Params] = []
    for _ in range(MOST_DRAWS * count):
        if len(proposed) == count:
            break
        asked = study.ask(distributions).params
        params = {path: rounded(asked[path], search) for path, search in space.items()}
        if params not in known and fits(params):
            proposed.append(params)
            known.append(params)
    return proposed


def widened(space: Space, best: Params, fits: Callable[[Params], bool]) -> Space:
    """The space with every range extended by half of its width at an end that the best settings are near; as far as settings there fit."""
    wider = dict(space)
    for path, search in space.items():
        for candidate in _extended(search, best[path]):
            ends = (best | {path: rounded(end, candidate)} for end in (candidate.low, candidate.high))
            if all(fits(params) for params in ends):
                wider[path] = candidate
    return wider


def distribution(search: Search) -> BaseDistribution:
    """A range as Optuna has it."""
    if search.choices is not None:
        return CategoricalDistribution(search.choices)
    assert search.low is not None
    assert search.high is not None
    if search.integer:
        return IntDistribution(int(search.low), int(search.high), log=search.log)
    return FloatDistribution(search.low, search.high, log=search.log)


def rounded(value: Any, search: Search) -> Any:
    """A number with four digits, which are enough to try and to read, within its range; any other value unchanged."""
    if search.choices is not None or search.low is None or search.high is None:
        return value
    within = min(max(float(f"{value:.4g}"), search.low), search.high)
    return round(within) if search.integer else within


def _extended(search: Search, value: Any) -> list[Search]:
    """The range with one end moved outwards, if the value is near that end."""
    if search.choices is not None or search.low is None or search.high is None:
        return []
    scale, back = (math.log, math.exp) if search.log else (float, float)
    low, high, at = scale(search.low), scale(search.high), scale(value)
    near, half = NEAR_END * (high - low), (high - low) / 2
    moved = []
    if at - low <= near:
        moved.append({"low": back(low - half)})
    if high - at <= near:
        moved.append({"high": back(high + half)})
    whole = [{name: float(round(end)) if search.integer else float(f"{end:.4g}") for name, end in ends.items()} for ends in moved]
    return [search.model_copy(update=ends) for ends in whole]
