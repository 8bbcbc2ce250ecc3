"""The rule that selects the best run, compared with sorting by hand."""

from hypothesis import given
from hypothesis import strategies as st

from tasks.runs.best import NO_BEST, RULE, best_run, best_seed, said_best

SCORES = st.dictionaries(st.sampled_from("abcd"), st.dictionaries(st.integers(0, 5), st.integers(0, 4).map(lambda part: part / 4)))


@given(SCORES)
def test_the_highest_mean_and_of_its_seeds_the_highest(scores: dict[str, dict[int, float]]) -> None:
    found = best_run(scores)
    least = 3 if any(len(seeds) >= 3 for seeds in scores.values()) else 1
    ordered = sorted((-sum(seeds.values()) / len(seeds), variant) for variant, seeds in scores.items() if len(seeds) >= least)
    if not ordered:
        assert found is None
        assert said_best(scores) == NO_BEST
        return
    assert found is not None
    assert (round(-found.mean, 9), found.variant) == min((round(mean, 9), variant) for mean, variant in ordered)
    assert found.score == max(scores[found.variant].values())
    assert found.seed == min(seed for seed, score in scores[found.variant].items() if score == found.score)
    assert found.seed == best_seed(scores[found.variant], scores[found.variant])
    assert said_best(scores).startswith(f"best run: {found.variant}, seed {found.seed}: {RULE}")


def test_one_lucky_seed_does_not_make_a_variant_the_best() -> None:
    found = best_run({"steady": {0: 0.5, 1: 0.6}, "lucky": {0: 0.9, 1: 0.1}})
    assert found is not None
    assert (found.variant, found.seed) == ("steady", 1)
    assert str(found).endswith("(validation Recall@1 by cosine: mean 55.0, this seed 60.0)")


def test_a_variant_with_a_single_seed_is_left_out_where_others_have_three() -> None:
    found = best_run({"single": {7: 0.9}, "steady": {0: 0.5, 1: 0.6, 2: 0.4}, "pair": {0: 0.8, 1: 0.8}})
    assert found is not None
    assert (found.variant, found.seed) == ("steady", 1)
    assert str(found).endswith("this seed 60.0; left out, with fewer than 3 seeds: pair, single)")


def test_without_scores_a_variant_means_its_lowest_seed() -> None:
    assert best_seed([3, 1, 2], {}) == 1
    assert best_seed([3, 1, 2], {2: 0.0}) == 2
