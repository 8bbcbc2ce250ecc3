"""Successive halving with a function instead of a network: which settings get scores, and when a winner replaces the row's settings."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dml_core.errors import TrainingError
from dml_core.search_space import Search
from tasks.tuning.halving import CONFIRMATION_PAIRS, NUM_SEARCH_PAIRS, Score, SearchResult, measure_gain, search
from tasks.tuning.proposals import Trial, propose, widened
from tasks.tuning.space import Params

SPACE = {"a": Search(low=1e-4, high=1.0, log=True), "b": Search(low=0.0, high=10.0, integer=True), "c": Search(choices=("x", "y"))}
OWN: Params = {"a": 0.01, "b": 3, "c": "x"}
Quality = Callable[[Trial, int], float]


def quality(trial: Trial, pair: int) -> float:
    """Best at a = 0.1 and b = 7; pairs differ and disturb each setting differently, but less than settings differ."""
    return (
        10
        - abs(math.log10(trial.params["a"] / 0.1))
        - abs(trial.params["b"] - 7) / 5
        + pair / 10
        + 0.01 * math.sin(9 * trial.number + pair)
    )


def scoring(measure: Quality = quality, log: Counter[tuple[int, int]] | None = None) -> Score:
    def score(trials: Sequence[Trial], pairs: range) -> list[Trial]:
        for trial in trials:
            for pair in pairs:
                if log is not None:
                    log[trial.number, pair] += 1
        return [replace(trial, scores=trial.scores + tuple(measure(trial, pair) for pair in pairs)) for trial in trials]

    return score


def found(score: Score, num_trials: int = 12, draw: str = "row 0", fits: Callable[[Params], bool] = lambda params: True) -> SearchResult:
    return search(SPACE, [OWN], num_trials, draw, fits, score)


def test_the_scores_go_to_the_best() -> None:
    """12 settings on 1 pair, the best 4 on 2 more, the best 2 of those on 3 more; winner and own settings on 5 fresh pairs."""
    log: Counter[tuple[int, int]] = Counter()
    result = found(scoring(log=log))
    lengths = Counter(len(trial.scores) for trial in result.trials)
    kept = len(result.trials) // 3
    assert lengths == {1: len(result.trials) - kept, 3: kept - 2, 6: 2}
    by_first_score = sorted(result.trials, key=lambda trial: -trial.scores[0])
    assert {trial.number for trial in by_first_score[:kept]} == {trial.number for trial in result.trials if len(trial.scores) > 1}
    finalists = [trial for trial in result.trials if len(trial.scores) == 6]
    assert result.winner == max(finalists, key=lambda trial: fmean(trial.scores))
    fresh = {
        (number, pair) for number in (0, result.winner.number) for pair in range(NUM_SEARCH_PAIRS, NUM_SEARCH_PAIRS + CONFIRMATION_PAIRS)
    }
    assert {key for key in log if key[1] >= NUM_SEARCH_PAIRS} == fresh
    assert set(log.values()) == {1}
    assert result.changes_settings


def test_it_begins_with_the_rows_own_settings_and_tries_none_twice() -> None:
    trials = found(scoring(), num_trials=16).trials
    assert trials[0].params == OWN
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert len({str(trial.params) for trial in trials}) == len(trials)


class Killed(BaseException):
    """End a search with an error that it does not expect."""


@pytest.mark.parametrize("last", [1, 4, 5, 11, 13, 20, 25])
def test_killed_and_started_again_with_the_finished_scores_it_is_the_same_search(last: int) -> None:
    undisturbed, finished = found(scoring()), {}

    def score(trials: Sequence[Trial], pairs: range) -> list[Trial]:
        for trial in trials:
            for pair in pairs:
                if (trial.number, pair) not in finished:
                    if len(finished) == last and not restarted:
                        raise Killed
                    finished[trial.number, pair] = quality(trial, pair)
        return [replace(trial, scores=trial.scores + tuple(finished[trial.number, pair] for pair in pairs)) for trial in trials]

    restarted = False
    with pytest.raises(Killed):
        found(score)
    restarted = True
    assert found(score) == undisturbed


def test_rows_and_seeds_draw_different_settings() -> None:
    drawn = [propose(SPACE, [Trial(0, OWN, (1.0,))], draw, 0, lambda params: True) for draw in ("row 0", "row 0", "row 1", "other 0")]
    assert drawn[0] == drawn[1]
    assert len({str(settings) for settings in drawn}) == 3


def test_settings_that_cannot_be_a_run_are_not_proposed() -> None:
    result = found(scoring(), fits=lambda params: params["c"] == "x" and params["a"] < 0.5)
    assert {trial.params["c"] for trial in result.trials} == {"x"}
    assert max(trial.params["a"] for trial in result.trials) < 0.5


@pytest.mark.parametrize("place", [1, 5, 11])
def test_settings_that_cannot_be_trained_are_left_out(place: int) -> None:
    def score(trials: Sequence[Trial], pairs: range) -> list[Trial]:
        scored = scoring(lambda trial, pair: trial.number + pair)(trials, pairs)
        return [replace(trial, reason="the loss is not finite") if trial.number == place else trial for trial in scored]

    result = found(score)
    assert result.trials[place].reason == "the loss is not finite"
    assert result.winner.number != place


def test_the_rows_own_settings_have_to_train() -> None:
    with pytest.raises(
        TrainingError, match=r"own settings, trial 0, cannot be trained on the first pair .*--seed.*: the loss is not finite"
    ):
        found(lambda trials, pairs: [replace(trial, scores=(0.0,), reason="the loss is not finite") for trial in trials])


def test_a_gain_by_hand() -> None:
    """Gains 1, 2, 3, 4, 5: mean 3, standard deviation 1.5811, t(0.975, 4) = 2.7764, half width 1.9632."""
    gain = measure_gain((0.0,) * 5, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert gain.gain == 3.0
    assert gain.half_width == pytest.approx(1.9632, abs=1e-4)


@pytest.mark.parametrize(
    ("own", "winner", "why"),
    [
        ((0.0,) * 5, (-1.0, 0.0, 1.0, 2.0, 3.0), "1 ± 1.96"),
        ((5.0,) * 5, (1.0, 2.0, 3.0, 4.0, 4.5), "a loss is no gain"),
        ((0.0,) * 5, (1.0,) * 5, "no spread to judge by"),
    ],
)
def test_a_gain_is_not_confirmed(own: tuple[float, ...], winner: tuple[float, ...], why: str) -> None:
    assert not SearchResult((), Trial(1, OWN), measure_gain(own, winner), SPACE).changes_settings, why


@pytest.mark.parametrize("fails", ["winner", "own"])
def test_settings_that_cannot_be_trained_on_the_fresh_pairs_confirm_nothing_and_lose_no_search(fails: str) -> None:
    """If the own settings diverged there, the search ended with an error, again at each rerun."""

    def score(trials: Sequence[Trial], pairs: range) -> list[Trial]:
        scored = scoring()(trials, pairs)
        is_confirmation = pairs.start == NUM_SEARCH_PAIRS
        bad = [trial.number for trial in trials if is_confirmation and bool(trial.number) == (fails == "winner")]
        return [replace(trial, reason="pair 7: not finite") if trial.number in bad else trial for trial in scored]

    result = found(score)
    assert result.winner.number
    assert (result.confirmation, result.changes_settings) == (None, False)
    number = result.winner.number if fails == "winner" else 0
    assert result.failed == f"trial {number} cannot be trained on a fresh pair: pair 7: not finite"


def test_own_settings_that_fail_on_a_pair_of_the_search_are_compared_on_the_fresh_ones() -> None:
    def score(trials: Sequence[Trial], pairs: range) -> list[Trial]:
        scored = scoring(lambda trial, pair: trial.number / 9 + 20 * (trial.number == 0) * (pair == 0) + math.sin(trial.number * pair))(
            trials, pairs
        )
        return [replace(trial, reason="not finite") if trial.number == 0 and pairs.start == 1 else trial for trial in scored]

    result = found(score)
    assert result.trials[0].reason == "not finite"
    assert result.confirmation is not None
    assert result.failed is None


def test_a_range_is_widened_at_the_end_that_the_best_is_near() -> None:
    """On a logarithmic range of 1e-4 to 1, one tenth is 0.4 decades and one half is 2 decades."""
    always = lambda params: True  # noqa: E731
    wider = widened(SPACE, {"a": 0.5, "b": 0, "c": "y"}, always)
    assert (wider["a"].low, wider["a"].high) == (1e-4, 100.0)
    assert (wider["b"].low, wider["b"].high) == (-5.0, 10.0)
    assert wider["c"] == SPACE["c"]
    assert widened(SPACE, {"a": 0.01, "b": 5, "c": "x"}, always) == SPACE
    assert widened(SPACE, {"a": 0.5, "b": 0, "c": "y"}, lambda params: params["b"] >= 0 and params["a"] <= 1) == SPACE


def test_a_logarithmic_range_of_integers_never_grows_below_one() -> None:
    space = {"n": Search(low=2, high=8, log=True, integer=True), "m": Search(low=1, high=8, log=True, integer=True)}
    wider = widened(space, {"n": 2, "m": 1}, lambda params: True)
    assert wider == {"n": Search(low=1, high=8, log=True, integer=True), "m": space["m"]}
    guesses = [{"n": 4, "m": 4}]
    result = search(space, guesses, 8, "draw", lambda params: True, scoring(lambda trial, pair: -trial.params["n"] - trial.params["m"]))
    assert min(trial.params["m"] for trial in result.trials) >= 1


def test_only_the_new_end_of_a_range_has_to_fit() -> None:
    """The best settings may fit no longer with the other end: alpha 4 is below heated_alpha 8, and alpha is best at 60."""
    space = {"alpha": Search(low=4, high=64), "heated_alpha": Search(low=1, high=16)}
    wider = widened(space, {"alpha": 60.0, "heated_alpha": 8.0}, lambda params: params["heated_alpha"] <= params["alpha"])
    assert wider["alpha"] == Search(low=4, high=94)


def test_a_winner_near_the_end_gets_more_trials_beyond_it() -> None:
    result = found(scoring(lambda trial, pair: math.log10(trial.params["a"])))
    assert result.space["a"].high > 1.0
    assert len(result.trials) > 12
    assert result.winner.params["a"] > 1.0


def test_a_space_of_few_values_is_widened_too() -> None:
    """The search ended once all values were tried, although the best one was at the end of the range and most trials were left."""
    space = {"n": Search(low=1, high=4, integer=True), "c": Search(choices=("x", "y"))}
    rising = scoring(lambda trial, pair: float(trial.params["n"]))
    result = search(space, [{"n": 1, "c": "x"}], 30, "draw", lambda params: True, rising)
    assert result.winner.params["n"] > 4
    assert len(result.trials) <= 30
    inside = search(space, [{"n": 1, "c": "x"}], 30, "draw", lambda params: params["n"] <= 4, rising)
    assert sorted((trial.params["n"], trial.params["c"]) for trial in inside.trials) == [(n, c) for n in range(1, 5) for c in "xy"]


@settings(max_examples=25, deadline=None)
@given(num_trials=st.integers(2, 20), seed=st.integers(0, 10**6))
def test_whatever_the_scores_are_the_winner_was_scored_on_most_pairs(num_trials: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    result = found(scoring(lambda trial, pair: float(random.normal())), num_trials, str(seed))
    assert len(result.winner.scores) == NUM_SEARCH_PAIRS
    assert len(result.trials) >= num_trials
    assert result.changes_settings == (result.confirmation is not None and result.confirmation.gain > result.confirmation.half_width)


def confirmed_share(true_gain: float, num_searches: int) -> tuple[float, float]:
    """Return the shares of searches with a confirmed winner and of correct intervals, if every setting has this gain; noise of sd 2.2."""
    random = np.random.default_rng(0)
    confirmed = held = judged = 0
    for number in range(num_searches):
        result = found(scoring(lambda trial, pair: (true_gain if trial.number else 0.0) + 2.2 * float(random.normal())), 8, str(number))
        if result.confirmation is not None:
            judged += 1
            confirmed += result.changes_settings
            held += abs(result.confirmation.gain - true_gain) <= result.confirmation.half_width
    return confirmed / judged, held / judged


@pytest.mark.slow
@pytest.mark.proof
def test_noise_is_not_confirmed_and_the_interval_of_the_gain_keeps_its_promise() -> None:
    """At most 2.5 % false confirmations and at least 95 % coverage, with bounds of three standard errors of 400 searches."""
    false_positives, coverage = confirmed_share(0.0, 400)
    assert false_positives < 0.025 + 3 * (0.025 * 0.975 / 300) ** 0.5
    assert coverage > 0.95 - 3 * (0.95 * 0.05 / 300) ** 0.5
    assert confirmed_share(6.0, 60)[0] > 0.8
