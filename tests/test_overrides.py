"""The rule by which settings override others: by hand, and as properties of drawn settings."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dml_core.config import Config, flatten, merge
from dml_core.errors import ConfigError
from dml_core.overrides import override, parse_overridden

SMALL = {"backbone": {"name": "small_cnn", "width": 16, "weights": "none"}, "num_epochs": 48}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([{"num_epochs": 2}], {**SMALL, "num_epochs": 2}),
        ([{"backbone": {"width": 8}}], {**SMALL, "backbone": {"name": "small_cnn", "width": 8, "weights": "none"}}),
        ([{"backbone": {"name": "small_cnn", "width": 8}}], {**SMALL, "backbone": {"name": "small_cnn", "width": 8, "weights": "none"}}),
        ([{"backbone": {"name": "resnet18"}}], {**SMALL, "backbone": {"name": "resnet18"}}),
        ([{"backbone": {"name": "resnet18", "weights": "imagenet"}}], {**SMALL, "backbone": {"name": "resnet18", "weights": "imagenet"}}),
        ([{"backbone": {"name": "resnet18"}}, {"backbone": {"name": "small_cnn"}}], {**SMALL, "backbone": {"name": "small_cnn"}}),
        ([{"backbone": {"width": 8}}, {"backbone": {"name": "resnet18"}}], {**SMALL, "backbone": {"name": "resnet18"}}),
        ([{"backbone": {"width": None}}], {**SMALL, "backbone": {"name": "small_cnn", "width": None, "weights": "none"}}),
        ([{"backbone": None}, {"backbone": {"name": "lenet"}}], {**SMALL, "backbone": {"name": "lenet"}}),
        ([{"backbone": None}, {"backbone": {"width": 8}}], {**SMALL, "backbone": {"width": 8}}),
        ([{"num_epochs": [1]}, {"num_epochs": {"a": 1}}], {**SMALL, "num_epochs": {"a": 1}}),
        ([{"name": {"width": 1}}, {"name": {"height": 2}}], {**SMALL, "name": {"width": 1, "height": 2}}),  # a dataset may be called so
        ([], SMALL),
    ],
)
def test_by_hand(layers: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    before = repr((SMALL, layers))
    assert override(SMALL, *layers) == expected
    assert repr((SMALL, layers)) == before


class Part(Config):
    name: str = "a"
    width: int = 32
    dim: int | None = 64


class Whole(Config):
    part: Part = Part()
    groups: dict[str, Part] = {}
    free: dict[str, Any] = {}
    rate: float = 0.5
    held_out: Part | None = None


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ({"part": {"width": None}}, Whole(part=Part(dim=3))),
        ({"part": {"dim": None}}, Whole(part=Part(width=8, dim=None))),
        ({"part": None}, Whole()),
        ({"part": {"name": "b"}}, Whole(part=Part(name="b"))),
        ({"rate": None}, Whole(part=Part(width=8, dim=3))),
        ({"held_out": None}, Whole(part=Part(width=8, dim=3))),
        ({"groups": {"x": None}}, Whole(part=Part(width=8, dim=3))),
        ({"groups": {"x": {"width": None, "dim": None}}}, Whole(part=Part(width=8, dim=3), groups={"x": Part(dim=None)})),
        ({"free": {"x": None}}, Whole(part=Part(width=8, dim=3), free={"x": None})),
    ],
)
def test_null_gives_the_default_or_no_value(layer: dict[str, Any], expected: Whole) -> None:
    base = {"part": {"name": "a", "width": 8, "dim": 3}}
    assert parse_overridden(Whole, "test", base, layer) == expected


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"part": {"widht": None}}, "did you mean 'width'"),
        ({"part": {"width": "wide"}}, "part.width"),
        ({"part": [1]}, "part"),
    ],
)
def test_a_mistake_is_still_found(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_overridden(Whole, "test", {}, layer)


KEYS = st.sampled_from(["a", "b", "name", "kind"])
LEAVES = st.one_of(st.integers(0, 2), st.sampled_from(["x", "y"]), st.none())
SETTINGS = st.recursive(LEAVES, lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=8)
LAYERS = st.dictionaries(KEYS, SETTINGS, max_size=4)


@given(LAYERS, st.lists(LAYERS, max_size=3))
def test_layers_apply_one_after_another(base: dict[str, Any], layers: list[dict[str, Any]]) -> None:
    values = base
    for layer in layers:
        values = override(values, layer)
    assert override(base, *layers) == values


@given(LAYERS, LAYERS)
def test_a_layer_applied_twice_is_applied_once(base: dict[str, Any], layer: dict[str, Any]) -> None:
    assert override(base, layer, layer) == override(base, layer)


@given(LAYERS, LAYERS)
def test_every_setting_of_the_last_layer_holds(base: dict[str, Any], layer: dict[str, Any]) -> None:
    settings = flatten(override(base, layer))
    assert all(settings[path] == value for path, value in flatten(layer).items())


@given(LAYERS)
def test_no_change_changes_nothing(base: dict[str, Any]) -> None:
    assert override(base) == override(base, {}) == override(base, base) == override({}, base) == base


LEVEL = st.fixed_dictionaries({}, optional={"a": LEAVES, "b": LEAVES})
NAMELESS = st.fixed_dictionaries({}, optional={"a": LEAVES, "c": LEVEL, "d": st.fixed_dictionaries({}, optional={"b": LEAVES, "c": LEVEL})})


@given(NAMELESS, NAMELESS, NAMELESS)
def test_without_names_it_is_an_associative_merge(first: dict[str, Any], second: dict[str, Any], third: dict[str, Any]) -> None:
    assert override(first, second, third) == merge(merge(first, second), third) == override(first, override(second, third))
