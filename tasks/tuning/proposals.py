"""Propose the settings of a search: the row's own, the published ones of its loss, then those of Optuna's sampler.

Proposals come in rounds of a fixed size. A round depends only on the trials before it and on the search's name and seed, so that a resumed
search, or one with more parallel trials, proposes the same settings.
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

from dml_core.search_space import Search
from tasks.tuning.space import Params, Space

ROUND_SIZE = 4
STARTUP_TRIALS = 2 * ROUND_SIZE  # drawn at random until the sampler has enough scores
SAMPLER = f"Optuna {optuna.__version__} TPE, multivariate, in rounds of {ROUND_SIZE}"
MOST_DRAWS = 100  # draws to find one proposal that fits
NEAR_END = 0.1  # share of a range's width

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class Trial:
    """Settings and their scores.

    Attributes:
        number: 0 has the row's own settings.
        params: dotted path -> value, for every searched path.
        scores: on pairs 0, 1, ... of fold and seed.
        reason: why the settings cannot be trained; None if they can.
    """

    number: int
    params: Params
    scores: tuple[float, ...] = ()
    reason: str | None = None

    @property
    def mean(self) -> float:
        """Mean over the scored pairs."""
        return fmean(self.scores)


def propose(
    space: Space, past: Sequence[Trial], draw: str, round_number: int, fits: Callable[[Params], bool], count: int = ROUND_SIZE
) -> list[Params]:
    """Propose settings for the next trials, different from those of all earlier trials.

    Args:
        past: all earlier trials, scored on the same pairs.
        draw: name and seed of the search, which seed the random draws.
        round_number: the round, from 0.
        fits: returns whether settings can be run; those that cannot are drawn again.
        count: number of settings.
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
    """Return the space with every range extended by half its width at an end near the best settings, if the settings at the new end fit."""
    wider = dict(space)
    for path, search in space.items():
        extended = _extended(search, best[path])
        new_ends = {extended.low, extended.high} - {search.low, search.high}
        if new_ends and all(fits(best | {path: rounded(end, extended)}) for end in new_ends):
            wider[path] = extended
    return wider


def distribution(search: Search) -> BaseDistribution:
    """Return a range as an Optuna distribution."""
    if search.choices is not None:
        return CategoricalDistribution(search.choices)
    assert search.low is not None
    assert search.high is not None
    if search.integer:
        return IntDistribution(int(search.low), int(search.high), log=search.log)
    return FloatDistribution(search.low, search.high, log=search.log)


def rounded(value: Any, search: Search) -> Any:
    """Round a number to four significant digits within its range; return other values unchanged."""
    if search.low is None or search.high is None:
        return value
    within = min(max(float(f"{value:.4g}"), search.low), search.high)
    return round(within) if search.integer else within


def _extended(search: Search, value: Any) -> Search:
    """Return the range with the end that the value is near moved outwards; unchanged if it is near neither, or the end cannot move."""
    if search.low is None or search.high is None:
        return search
    scale, back = (math.log, math.exp) if search.log else (float, float)
    low, high, at = scale(search.low), scale(search.high), scale(value)
    near, half = NEAR_END * (high - low), (high - low) / 2
    if at - low <= near:
        return search.holding(_rounded_end(back(low - half), search))
    if high - at <= near:
        return search.holding(_rounded_end(back(high + half), search))
    return search


def _rounded_end(end: float, search: Search) -> float:
    """Return a new end of a range: a whole number of integers, in a logarithmic range of them at least 1; else four significant digits."""
    if not search.integer:
        return float(f"{end:.4g}")
    return float(max(1, round(end)) if search.log else round(end))
