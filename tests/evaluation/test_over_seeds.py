"""Mean and interval over seeds: from three seeds on, and in words."""

import pytest

from dml_core.evaluation.statistics.over_seeds import Summary, says_seeds, summarise_seeds


@pytest.mark.parametrize("values", [[0.867], [0.85, 0.884]])
def test_fewer_than_three_seeds_have_a_mean_and_no_interval(values: list[float]) -> None:
    assert summarise_seeds(values) == Summary(pytest.approx(0.867), None, len(values))
    assert str(summarise_seeds(values)) == "86.7"


def test_three_seeds_have_students_interval() -> None:
    """0.2, 0.3, 0.4: standard deviation 0.1; t(0.975, 2) = 4.303 in any table."""
    found = summarise_seeds([0.2, 0.3, 0.4])
    assert found == (pytest.approx(0.3), pytest.approx(4.303 * 0.1 / 3**0.5, abs=1e-4), 3)
    assert str(found) == "30.0 ± 24.8"


def test_a_legend_says_when_seeds_are_too_few() -> None:
    assert says_seeds([1, 1]) == "one seed"
    assert says_seeds([2]) == "mean over 2 seeds (too few to decide, at least 3 are needed)"
    assert says_seeds([5, 5]) == "mean ± half of the 95 % interval over 5 seeds"
    assert says_seeds([5, 1, 3]) == "mean ± half of the 95 % interval over 1 to 5 seeds"
