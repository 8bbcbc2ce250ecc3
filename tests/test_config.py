"""Strict configuration: unknown keys, types, YAML's numbers, duplicate keys."""

import math
from pathlib import Path

import pytest

from dml_core.config import Config, flatten, merge, parse, read_value, read_yaml
from dml_core.errors import ConfigError


class Inner(Config):
    learning_rate: float
    names: tuple[str, ...] = ()


class Outer(Config):
    inner: Inner
    by_name: dict[str, Inner] = {}
    count: int = 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {"learning_rat": 1.0}}, "unknown key 'inner.learning_rat'; did you mean 'learning_rate'?"),
        ({"inner": {"learning_rate": 1.0}, "inr": {}}, "unknown key 'inr'; did you mean 'inner'?"),
        ({"inner": {"learning_rate": 1.0}, "by_name": {"x": {"learning": 1.0}}}, "did you mean 'learning_rate'?"),
        ({"inner": {"learning_rate": "1e-4"}}, "inner.learning_rate: Input should be a valid number, found '1e-4'"),
        ({"inner": {"learning_rate": 1.0}, "count": 1.5}, "count: Input should be a valid integer, found 1.5"),
        ({"inner": {"learning_rate": 1.0}, "count": True}, "count: Input should be a valid integer, found True"),
        ({}, "key 'inner' is missing"),
        ([1], "expected a mapping of settings, found list"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(values: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Outer, values, "x.yaml")
    assert str(caught.value).startswith("x.yaml: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lists_become_tuples_and_nothing_can_be_changed() -> None:
    parsed = parse(Outer, {"inner": {"learning_rate": 1, "names": ["a", "b"]}}, "x")
    assert parsed.inner.names == ("a", "b")
    with pytest.raises(ValueError, match="frozen"):
        parsed.count = 2  # type: ignore[misc]


def test_yaml_reads_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "numbers.yaml"
    path.write_text("a: 1e-4\nb: 1.0e-4\nc: .5\nd: 12\ne: -3\nf: 1e5\ng: '1e-4'\nh: 1.\n")
    assert read_yaml(path) == {"a": 1e-4, "b": 1e-4, "c": 0.5, "d": 12, "e": -3, "f": 1e5, "g": "1e-4", "h": 1.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10), ("-010", -10), ("+7", 7), ("0o17", 15), ("0x1F", 31), ("08", 8), ("1:30", "1:30"), ("190:20:30.5", "190:20:30.5"),
        ("1_000", "1_000"), ("1_0.5", "1_0.5"), ("0b11", "0b11"), ("-.inf", -math.inf), ("+.5e-1", 0.05), ("1.2.3", "1.2.3"),
    ],
)  # fmt: skip
def test_numbers_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = read_value(text, "x")
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "key 'a' is written twice"),
        ("a: {1: x, 0x1: y}\n", "key '1' is not text; write it in quotes"),  # one of two equal keys would be lost
        ("no: x\noff: y\n", "key 'no' is not text; write it in quotes"),
        ("~: x\n", "key '~' is not text; write it in quotes"),
        ("? !!str [a]\n: x\n", "a key that is not text"),
        ("a: [1\n", "not readable as YAML"),
        ("- 1\n", "expected a mapping"),
        ("a: " + "[" * 100_000, "nested more than 50 deep"),  # ends the process in libyaml's composer
        (
            "a: &a [1, 1]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcde", "bcdef", strict=True)),
            "each alias",
        ),
        ("a: &a [*a]\n", "each alias"),
        (None, "no such file"),
    ],
)
def test_yaml_that_cannot_be_meant_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_yaml(path)


def test_a_mark_of_byte_order_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\n", encoding="utf-8-sig")
    assert read_yaml(path) == {"a": 1}


def test_merge_keys_take_another_mappings_settings() -> None:
    text = "small: &s {x: 1, y: 2}\na: {deep: &d {<<: *s, y: 3}}\nb: {<<: *d, z: 4}\nc: {<<: [*s, *d]}\n"
    deep = {"x": 1, "y": 3}
    assert read_value(text, "x") == {"small": {"x": 1, "y": 2}, "a": {"deep": deep}, "b": deep | {"z": 4}, "c": {"x": 1, "y": 2}}


def test_half_a_character_of_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="not readable as YAML"):
        read_value(b"a\xff".decode(errors="surrogateescape"), "--set x")


def test_merge_goes_into_mappings_and_replaces_the_rest() -> None:
    base = {"a": {"x": 1, "y": [1, 2]}, "b": 1}
    assert merge(base, {"a": {"y": [3]}, "c": {"z": 1}}) == {"a": {"x": 1, "y": [3]}, "b": 1, "c": {"z": 1}}
    assert base == {"a": {"x": 1, "y": [1, 2]}, "b": 1}


def test_flatten_dots_the_keys() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": 3}) == {"a.b": 1, "a.c.d": [2], "e": 3}
