"""Successive halving with a confirmation.

Every setting is scored on one pair of fold and seed, the best third on two more, the best eighth on three more: the variation between seeds
is as large as most differences between settings, so close candidates get more scores. The winner is then compared with the row's own
settings on pairs that the search has not used; it replaces them only if the 95 % interval of the gain is above 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from dml_core.errors import TrainingError
from dml_core.evaluation.statistics.paired import half_width_of
from tasks.runs.tuned import ConfirmedGain
from tasks.tuning.proposals import ROUND_SIZE, SAMPLER, Trial, propose, widened
from tasks.tuning.space import Params, Space

RUNGS = ((3, 2), (8, 3))  # (k, p): one setting in k is scored on p more pairs
FEWEST_KEPT = 2
MOST_EXTENSIONS = 2  # rounds in a widened space
CONFIRMATION_PAIRS = 5
NUM_SEARCH_PAIRS = 1 + sum(pairs for _, pairs in RUNGS)
METHOD = f"{SAMPLER}; successive halving {RUNGS}; confirmed on {CONFIRMATION_PAIRS} fresh pairs of fold and seed"

Score = Callable[[Sequence[Trial], range], list[Trial]]


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        trials: all, by number.
        winner: best of the trials that were scored on most pairs.
        confirmation: winner and own settings on fresh pairs; None if the own settings are the winner, or one cannot be trained there.
        space: final search space, with its ranges extended.
        failed: which of the two cannot be trained on the fresh pairs, and why; None if both can.
    """

    trials: tuple[Trial, ...]
    winner: Trial
    confirmation: ConfirmedGain | None
    space: Space
    failed: str | None = None

    @property
    def changes_settings(self) -> bool:
        """True if the interval of the winner's gain is above 0. Equal gains on all pairs have no spread and confirm nothing."""
        return self.confirmation is not None and 0 < self.confirmation.half_width < self.confirmation.gain


def search(
    space: Space, guesses: Sequence[Params], num_trials: int, draw: str, fits: Callable[[Params], bool], score: Score
) -> SearchResult:
    """Search a space.

    Args:
        guesses: settings to try first, beginning with the row's own.
        num_trials: number of settings to try, including guesses but not extensions of ranges.
        draw: name and seed of the search.
        fits: returns whether settings can be run.
        score: scores trials on a range of pairs and returns them with these scores added, or with the reason for their failure.

    Raises:
        TrainingError: the row's own settings cannot be trained on the first pair, or no remaining trial on a later one.
    """
    trials, space = _first_rung(space, guesses, num_trials, draw, fits, score)
    num_pairs, best = 1, _best(trials)
    for one_in, more in RUNGS:
        kept = best[: max(FEWEST_KEPT, len(trials) // one_in)]
        for trial in score(kept, range(num_pairs, num_pairs + more)):
            trials[trial.number] = trial
        best, num_pairs = _best([trials[trial.number] for trial in kept]), num_pairs + more
        if not best:
            raise TrainingError(f"every remaining trial failed on a later pair of fold and seed; the best: {trials[kept[0].number].reason}")
    winner = best[0]
    confirmation, failed = _confirm(trials[0], winner, score) if winner.number else (None, None)
    return SearchResult(tuple(trials), winner, confirmation, space, failed)


def _first_rung(
    space: Space, guesses: Sequence[Params], num_trials: int, draw: str, fits: Callable[[Params], bool], score: Score
) -> tuple[list[Trial], Space]:
    """Score every setting on the first pair; while the best is near the end of a range, add a round in a wider one."""
    trials: list[Trial] = []
    most, is_exhausted = num_trials, False
    for round_number in range(-(-num_trials // ROUND_SIZE) + MOST_EXTENSIONS):
        if is_exhausted or len(trials) >= most:
            wider = widened(space, _best(trials)[0].params, fits)
            if wider == space:
                break
            space, most = wider, max(most, len(trials) + ROUND_SIZE)
        count = min(ROUND_SIZE, most - len(trials))
        first = list(guesses[:count]) if round_number == 0 else []
        known = [*trials, *(Trial(number, params) for number, params in enumerate(first))]
        settings = [*first, *propose(space, known, draw, round_number, fits, count - len(first))]
        is_exhausted = not settings  # every value of a space of integers and choices was tried
        if is_exhausted:
            continue
        trials += score([Trial(len(trials) + place, params) for place, params in enumerate(settings)], range(1))
        if trials[0].reason is not None:
            where = "the first pair of fold and seed (another --seed has another)"
            raise TrainingError(f"the row's own settings, trial 0, cannot be trained on {where}: {trials[0].reason}")
    return trials, space


def _best(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that can be trained, best first, ties by number."""
    return sorted((trial for trial in trials if trial.reason is None), key=lambda trial: (-trial.mean, trial.number))


def _confirm(own: Trial, winner: Trial, score: Score) -> tuple[ConfirmedGain | None, str | None]:
    """Return the winner's gain on fresh pairs, or which of the two cannot be trained there and why; None for the other."""
    pairs = range(NUM_SEARCH_PAIRS, NUM_SEARCH_PAIRS + CONFIRMATION_PAIRS)
    own, winner = score([replace(trial, scores=(), reason=None) for trial in (own, winner)], pairs)
    for trial in (own, winner):
        if trial.reason is not None:
            return None, f"trial {trial.number} cannot be trained on a fresh pair: {trial.reason}"
    return measure_gain(own.scores, winner.scores), None


def measure_gain(own: tuple[float, ...], winner: tuple[float, ...]) -> ConfirmedGain:
    """Return the mean gain of the winner, pair by pair, and half of its 95 % interval (t)."""
    gains = [w - o for w, o in zip(winner, own, strict=True)]
    return ConfirmedGain(own=own, winner=winner, gain=fmean(gains), half_width=half_width_of(stdev(gains), len(gains)))
