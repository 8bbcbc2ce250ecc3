"""Search ranges of an option: valid ranges, and those of every loss."""

from typing import Any

import pytest

from dml_core.config import parse
from dml_core.errors import ConfigError
from dml_core.losses.registry import LOSSES, loss_class, parse_loss_options
from dml_core.search_space import Search, declared_searches


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"low": 1.0}, "a range has low and high"),
        ({"low": 2.0, "high": 1.0}, "low 2 is not below high 1"),
        ({"low": 0.0, "high": 1.0, "log": True}, "a logarithmic range begins above 0"),
        ({"low": 0.5, "high": 2.0, "integer": True}, "are whole"),
        ({"low": 0.0, "high": 1.0, "choices": [1, 2]}, "not both"),
        ({"choices": [1]}, "choices"),
        ({"low": 0.0, "hihg": 1.0}, "did you mean 'high'"),
    ],
)
def test_what_is_no_range_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(Search, values, "search")


def test_a_range_is_widened_to_where_a_search_begins() -> None:
    search = Search(low=1.0, high=2.0, log=True)
    assert search.holding(1.5) == search
    assert search.holding(4) == Search(low=1.0, high=4.0, log=True)
    assert search.holding(0.5) == Search(low=0.5, high=2.0, log=True)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "combined"])
def test_the_ranges_of_every_loss_are_of_values_that_it_takes(name: str) -> None:
    defaults = parse_loss_options(name, {})
    for option, search in declared_searches(defaults).items():
        for value in (search.low, search.high, getattr(defaults, option)):
            parse_loss_options(name, {option: value})
            assert search.low <= value <= search.high
    tuned = {"margin", "scale", "gamma", "alpha", "radius"} & set(loss_class(name).Config.model_fields)
    assert not tuned or declared_searches(parse_loss_options(name, {"margin": 0.5} if name == "triplet_batch_hard" else {}))


def test_what_is_off_is_not_searched() -> None:
    assert "regulariser_weight" in declared_searches(parse_loss_options("softtriple", {}))
    assert "regulariser_weight" not in declared_searches(parse_loss_options("softtriple", {"regulariser_weight": 0.0}))
    assert "heated_alpha" not in declared_searches(parse_loss_options("heated_up_softmax", {"heated_alpha": None}))
    assert "gate" not in declared_searches(parse_loss_options("sgsl", {"gate": float("inf")}))
