"""Which settings are tried next, and when a trial is given up: Optuna's sampler and pruner, asked so that they always answer the same.

Trials come in rounds of a fixed size. What a round tries follows from the rounds before it, in order of their numbers, and from the seed;
who ran them, how many at a time and in which order they ended is not in it. Whether a trial is given up follows from its own scores and
from the rounds before, too. So a search that was killed, or shared by several shells, tries what an undisturbed one does.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from dml_core.search import Search
from tasks.tuning.space import Params, Space

ROUND_SIZE = 4  # fixed: another one is another search
STARTUP_TRIALS = 2 * ROUND_SIZE  # drawn at random, before the sampler has enough to go by
SAMPLER = f"Optuna {optuna.__version__}: TPE, multivariate, in rounds of {ROUND_SIZE}; median pruner"
State = Literal["waiting", "running", "finished", "pruned", "failed"]

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class TrialRecord:
    """One trial as it is known.

    Attributes:
        scores: of the folds that are done, in order.
        reason: why it failed.
    """

    number: int
    params: Params
    state: State
    scores: tuple[float, ...] = ()
    reason: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state in ("finished", "pruned", "failed")

    @property
    def mean(self) -> float:
        """Of the folds that are done."""
        return sum(self.scores) / len(self.scores)

    @property
    def round(self) -> int:
        """The round that it belongs to."""
        return self.number // ROUND_SIZE


def propose(space: Space, own: Params, past: Iterable[TrialRecord], seed: int, round_number: int) -> list[Params]:
    """The settings of a round's trials, in order; the first of all is the row's own.

    Args:
        space: what is searched.
        own: the row's own values of it.
        past: every trial of the rounds before.
        seed: of the search.
        round_number: from 0.
    """
    distributions = {path: distribution(search) for path, search in space.items()}
    drawn = int.from_bytes(hashlib.sha256(f"{seed} {round_number}".encode()).digest()[:4], "big")
    sampler = optuna.samplers.TPESampler(seed=drawn, n_startup_trials=STARTUP_TRIALS, multivariate=True)
    study = _study(past, distributions, sampler)
    first = [own] if round_number == 0 else []
    asked = (study.ask(distributions).params for _ in range(ROUND_SIZE - len(first)))
    return [*first, *({path: _rounded(params[path], space[path]) for path in space} for params in asked)]


def is_hopeless(scores: Sequence[float], past: Iterable[TrialRecord]) -> bool:
    """Whether a trial with these scores of its first folds is to be given up, by the trials of the rounds before it.

    It is where the best mean that it has had is below the median of theirs over as many folds.
    """
    pruner = optuna.pruners.MedianPruner(n_startup_trials=ROUND_SIZE)
    trial = create_trial(state=TrialState.RUNNING, intermediate_values=running_means(scores))
    return pruner.prune(_study(past, {}, None), trial)


def running_means(scores: Sequence[float]) -> dict[int, float]:
    """Fold -> mean of the scores up to it."""
    return {fold: sum(scores[: fold + 1]) / (fold + 1) for fold in range(len(scores))}


def distribution(search: Search) -> BaseDistribution:
    """A range as Optuna has it."""
    if search.choices is not None:
        return CategoricalDistribution(search.choices)
    assert search.low is not None
    assert search.high is not None
    if search.integer:
        return IntDistribution(int(search.low), int(search.high), log=search.log)
    return FloatDistribution(search.low, search.high, log=search.log)


def _study(
    past: Iterable[TrialRecord], distributions: dict[str, BaseDistribution], sampler: optuna.samplers.BaseSampler | None
) -> optuna.Study:
    """A study in memory of what is over; what failed tells nothing and is left out."""
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for trial in sorted(past, key=lambda trial: trial.number):
        if trial.state in ("finished", "pruned"):
            study.add_trial(_frozen(trial, distributions))
    return study


def _frozen(trial: TrialRecord, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
    return create_trial(
        state=TrialState.COMPLETE if trial.state == "finished" else TrialState.PRUNED,
        value=trial.mean,
        params={path: trial.params[path] for path in distributions},
        distributions=distributions,
        intermediate_values=running_means(trial.scores),
    )


def _rounded(value: Any, search: Search) -> Any:
    """Four digits are enough to try and to read; within the range."""
    if not isinstance(value, float) or search.low is None or search.high is None:
        return value
    return min(max(float(f"{value:.4g}"), search.low), search.high)
