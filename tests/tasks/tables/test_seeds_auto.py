"""`--seeds auto`: when the seeds suffice, by hand and in a flow whose runs are drawn instead of trained."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

from dml_core.errors import ConfigError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.statistics.comparing import differences
from dml_core.evaluation.statistics.paired import MIN_SEEDS
from flows.outcomes import Failure
from flows.reproduce import _compared
from flows.resolving import run_until_resolved
from tasks.runs.params.file import load_params
from tasks.runs.specs import RunSpec
from tasks.tables.choice import Choice
from tasks.tables.file import load_table
from tasks.tables.runs import runs_of
from tasks.tables.seeds_auto import DEFAULT_POINTS, FIRST_SEEDS, MOST_SEEDS, Resolve, next_seeds, widest
from tests.conftest import ROOT, small_training

SCORES = {"a": {0: 50.0, 1: 52.0, 2: 54.0}, "b": {0: 49.0, 1: 50.0, 2: 51.0}, "c": {0: 40.0, 1: 41.0, 2: 48.0}}


def test_it_begins_with_the_fewest_seeds_that_are_compared() -> None:
    assert FIRST_SEEDS == MIN_SEEDS


def test_the_widest_interval_by_hand() -> None:
    # a - c: 10, 11, 6, standard deviation 2.6458; simultaneous intervals of three pairs: t(2) at 0.05 / 6 is 7.649, over sqrt 3
    found = widest(SCORES, 1.0)
    assert found is not None
    assert (found.system, found.reference, found.half_width) == ("c", "a", pytest.approx(11.684, abs=1e-3))
    # the smallest n with t(n - 1) 2.6458 / sqrt n <= 1
    needed = next(n for n in range(3, 100) if student.ppf(1 - 0.05 / 6, n - 1) * 2.6458 / n**0.5 <= 1)
    assert found.num_seeds == needed == 44
    other = widest(SCORES, 1.0, reference="b")
    assert other is not None
    # b - c: 9, 9, 3, standard deviation 3.4641; a named reference has two intervals: t(2) at 0.05 / 4 is 6.205
    assert (other.system, other.reference, other.half_width) == ("c", "b", pytest.approx(12.411, abs=1e-3))
    same = {"a": dict.fromkeys(range(3), 55.0), "b": dict.fromkeys(range(3), 50.0)}
    half_widths = [found.half_width for num_queries in (None, 20) if (found := widest(same, 1.0, "b", num_queries)) is not None]
    assert half_widths == [0.0, pytest.approx(4.303 * 5 / 3**0.5, abs=0.01)], "one of 20 queries at least"
    assert widest({"a": {0: 1.0}, "b": {0: 2.0}}, 1.0) is None
    assert widest({}, 1.0) is None


@pytest.mark.parametrize("points", [0.4, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0])
def test_the_seeds_needed_are_the_fewest_whose_interval_is_narrow_enough(points: float) -> None:
    """The differences to a are 10, 11 and 6, with standard deviation 2.6458."""
    needed = next(n for n in range(2, 1000) if student.ppf(0.975, n - 1) * np.std([10, 11, 6], ddof=1) / n**0.5 <= points)
    found = widest({name: SCORES[name] for name in "ac"}, points)
    assert found is not None
    assert found.num_seeds == needed


def test_seeds_are_added_at_most_twofold_and_never_beyond_the_cap() -> None:
    found = widest(SCORES, 1.0)
    assert next_seeds(found, 3, Resolve(1.0, 20)) == 6, "not 30 at once"
    assert next_seeds(found, 3, Resolve(1.0, 5)) == 5
    assert next_seeds(found, 20, Resolve(1.0, 20)) == 20
    assert next_seeds(found, 3, Resolve(12.0, 20)) == 3, "it is narrow enough"
    assert next_seeds(widest(SCORES, 11.5), 3, Resolve(11.5, 20)) == 4
    assert next_seeds(None, 3, Resolve(1.0, 20)) == 3


@pytest.mark.parametrize(
    ("points", "most", "said"),
    [(0.0, MOST_SEEDS, "--resolve 0"), (float("nan"), MOST_SEEDS, "--resolve"), (DEFAULT_POINTS, 2, "--max-seeds 2")],
)
def test_what_cannot_be_is_refused(points: float, most: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Resolve(points, most)


def test_what_is_not_given_is_one_point_and_twenty_seeds() -> None:
    assert Resolve() == Resolve(1.0, 20)


class Drawn:
    """Runs with drawn scores in points: a part per seed that all systems share, and one per run; some runs fail."""

    def __init__(self, deviation: float, fails: Sequence[tuple[str, int]] = ()) -> None:
        self.deviation, self.fails = deviation, set(fails)
        self.rounds: list[list[RunSpec]] = []

    def __call__(self, specs: Sequence[RunSpec]) -> tuple[list[Any], list[Failure]]:
        self.rounds.append(list(specs))
        outcomes, failures = [], []
        for spec in specs:
            if (spec.variant, spec.seed) in self.fails:
                failures.append(Failure(spec, "it fails"))
                continue
            own = np.random.default_rng([spec.seed, ord(spec.variant[0])]).normal(ord(spec.variant[0]), self.deviation)
            score = (own + np.random.default_rng(spec.seed).normal(0, 30)) / 100
            outcomes.append(SimpleNamespace(spec=spec, scores=SimpleNamespace(metrics={"recall@1": score})))
        return outcomes, failures


def specs(*variants: str, dataset: str = "d") -> list[RunSpec]:
    return [RunSpec(dataset=dataset, variant=name, seed=0, training=small_training(), evaluation=EvaluationConfig()) for name in variants]


def looked_at(spec: RunSpec) -> tuple[str, str | None]:
    return "recall@1", None


def resolved(runs: list[RunSpec], drawn: Drawn, resolve: Resolve) -> tuple[dict[str, list[int]], list[Failure], list[str]]:
    said: list[str] = []
    outcomes, failures = run_until_resolved(runs, resolve, looked_at, drawn, said.append)
    seeds: dict[str, list[int]] = {}
    for outcome in outcomes:
        seeds.setdefault(f"{outcome.spec.dataset} {outcome.spec.variant}", []).append(outcome.spec.seed)
    return seeds, failures, said


def test_seeds_are_added_until_every_difference_is_sure_enough() -> None:
    drawn = Drawn(deviation=1.5)
    seeds, _, said = resolved(specs("a", "b", "c"), drawn, Resolve(1.5, 60))
    (count,) = {len(found) for found in seeds.values()}
    assert all(found == list(range(count)) for found in seeds.values())
    assert 3 < count < 60
    assert len(drawn.rounds[0]) == 9
    assert sum(map(len, drawn.rounds)) == 3 * count, "no run is asked for twice"
    assert said[0].startswith("comparison on d: 3 seeds; the least precise difference is ")
    assert "continuing with " in said[0]
    assert said[-1].endswith("points, within 1.5 among the requested systems")
    before = Drawn(deviation=1.5)
    resolved(specs("a", "b", "c"), before, Resolve(1.5, count - 1))
    assert len({spec.seed for batch in before.rounds for spec in batch}) == count - 1


def test_it_stops_at_the_cap_and_says_so() -> None:
    seeds, _, said = resolved(specs("a", "b"), Drawn(deviation=50.0), Resolve(0.1, 7))
    assert {len(found) for found in seeds.values()} == {7}
    assert said[-1].endswith("more than 0.1, but --max-seeds is reached")
    *_, last = resolved(specs("a", "b"), Drawn(deviation=0.5), Resolve(0.5, 3))[2]
    assert last.endswith("± 0.503 points; more than 0.5, but --max-seeds is reached"), "± 0.5 would not be more"


def test_it_never_looks_at_whether_a_difference_is_shown() -> None:
    """Distant and close scores with the same noise get the same number of seeds."""
    far, near = Drawn(deviation=2.0), Drawn(deviation=2.0)
    shift = {"a": 0.0, "b": 25.0, "c": 50.0}

    def moved(batch: Sequence[RunSpec]) -> tuple[list[Any], list[Failure]]:
        outcomes, failures = far(batch)
        for outcome in outcomes:
            outcome.scores.metrics["recall@1"] += shift[outcome.spec.variant] / 100
        return outcomes, failures

    run_until_resolved(specs("a", "b", "c"), Resolve(2.0, 40), lambda spec: ("recall@1", "c"), moved, lambda text: None)
    run_until_resolved(specs("a", "b", "c"), Resolve(2.0, 40), lambda spec: ("recall@1", "c"), near, lambda text: None)
    assert [len(batch) for batch in far.rounds] == [len(batch) for batch in near.rounds]
    assert len(far.rounds) > 1


def test_each_comparison_gets_the_seeds_that_it_needs() -> None:
    class Mixed(Drawn):
        def __call__(self, batch: Sequence[RunSpec]) -> tuple[list[Any], list[Failure]]:
            self.rounds.append(list(batch))
            outcomes: list[Any] = []
            for name, deviation in (("quiet", 0.1), ("loud", 9.0)):
                outcomes += Drawn(deviation)([spec for spec in batch if spec.dataset == name])[0]
            return outcomes, []

    seeds, _, said = resolved(specs("a", "b", dataset="quiet") + specs("a", "b", dataset="loud"), Mixed(0.0), Resolve(1.0, 12))
    assert sum("quiet" in line for line in said) == 1, "a comparison is judged again only if it got seeds"
    assert {name: len(found) for name, found in seeds.items()} == {"quiet a": 3, "quiet b": 3, "loud a": 12, "loud b": 12}


def test_a_system_that_fails_gets_no_more_seeds_and_is_not_waited_for() -> None:
    seeds, failures, _ = resolved(specs("a", "b", "c"), Drawn(3.0, fails=[("b", 1)]), Resolve(0.5, 8))
    assert len(failures) == 1
    assert seeds["d b"] == [0, 2]
    assert len(seeds["d a"]) == len(seeds["d c"]) == 8
    drawn = Drawn(3.0, fails=[("b", 1)])
    run_until_resolved(specs("a", "b", "c"), Resolve(0.5, 8), looked_at, drawn, lambda text: None, fail_fast=True)
    assert len(drawn.rounds) == 1


def test_one_system_has_nothing_to_be_compared_with() -> None:
    seeds, _, said = resolved(specs("a"), Drawn(3.0), Resolve(0.5, 8))
    assert seeds == {"d a": [0, 1, 2]}
    assert said == ["comparison on d: 3 seeds; fewer than two systems to compare"]


@pytest.mark.parametrize("choice", [Choice(), Choice(variant="tuned")])
def test_a_table_s_reference_is_run_in_the_chosen_variant(choice: Choice) -> None:
    runs = runs_of("project/glyphs", load_table("project/glyphs"), replace(choice, datasets=("glyphs-2000",)))["glyphs-2000"]
    (softmax,) = [run.label for run in runs if run.row == "softmax"]
    params = load_params(ROOT / "params.yaml")
    assert {_compared(params, runs, run) for run in runs} == {("recall@1", softmax)}
    others = [run for run in runs if run.row != "softmax"]
    assert {_compared(params, others, run) for run in others} == {("recall@1", None)}


def share_sure(num_systems: int, is_named: bool, num_tables: int, first: int = 3) -> tuple[float, float]:
    """Return the share of tables whose final intervals all contain the truth, and the mean number of seeds, for equally good systems."""
    rng, held, seeds = np.random.default_rng([num_systems, is_named]), 0, 0
    for _ in range(num_tables):
        runs = rng.normal(50, 2, (60, num_systems)) + rng.normal(0, 3, (60, 1))
        reference, num_seeds = ("s0" if is_named else None), first

        def table(num_seeds: int, runs: np.ndarray = runs) -> dict[str, dict[int, float]]:
            return {f"s{k}": dict(enumerate(runs[:num_seeds, k].tolist())) for k in range(num_systems)}

        while (wanted := next_seeds(widest(table(num_seeds), 3.0, reference), num_seeds, Resolve(3.0, 60))) != num_seeds:
            num_seeds = wanted
        held += all(abs(pair.difference or 0.0) <= (pair.half_width or 0.0) for pair in differences(table(num_seeds), reference))
        seeds += num_seeds
    return held / num_tables, seeds / num_tables


@pytest.mark.parametrize("is_named", [True, False])
def test_all_intervals_hold_at_once_although_the_number_of_seeds_follows_from_their_width(is_named: bool) -> None:
    assert share_sure(5, is_named, 150)[0] > 0.9


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("num_systems", [2, 5, 12])
def test_seeds_auto_is_sure_as_often_as_the_page_says(num_systems: int, is_named: bool) -> None:
    assert share_sure(num_systems, is_named, 1000)[0] > (0.93 if num_systems > 2 else 0.9)
