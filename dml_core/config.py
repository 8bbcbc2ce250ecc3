"""Frozen, typed configuration: an unknown key is an error that names the nearest known one.

Every part of the project owns a small subclass of `Config`. YAML is read by `read_yaml`, which reads numbers as YAML 1.2 does
(`1e-4` is a number, not a string) and refuses a key that is written twice. `parse` turns a mapping into a `Config` and pydantic's
report into one `ConfigError` line.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from dml_core.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound="Config")


class Config(BaseModel):
    """Base of all configuration: immutable, strict about types (an int is taken for a float, a string is not), no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def parse(config_type: type[ConfigT], values: Any, where: str) -> ConfigT:
    """Build `config_type` from plain YAML values; `where` is what the error calls the place (a file, a key path).

    Raises:
        ConfigError: one line with the first problem, its key path, and the nearest known key where a key is unknown.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: expected a mapping of settings, found {type(values).__name__}")
    try:
        return config_type.model_validate(_tuples_for_lists(values))
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_problem(config_type, error)}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one YAML mapping.

    Raises:
        ConfigError: the file is missing, is not YAML, is not a mapping, or writes a key twice.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping at the top, found {type(values).__name__}")
    return values


def read_value(text: str, where: str) -> Any:
    """One YAML value, its numbers read as `read_yaml` does.

    Raises:
        ConfigError: not YAML.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not readable as YAML: {' '.join(str(error).split())}") from None


@contextmanager
def located(where: str) -> Iterator[None]:
    """Say `where` in front of a ConfigError that is raised inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def unknown_name(kind: str, name: str, known: list[str]) -> ConfigError:
    """The error for a name that a registry does not hold, with the nearest one that it does."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return ConfigError(f"unknown {kind} '{name}'{hint} (known: {', '.join(sorted(known))})")


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `override` laid over it, mapping by mapping; any other value replaces."""
    merged = dict(base)
    for key, value in override.items():
        both_mappings = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = merge(merged[key], value) if both_mappings else value
    return merged


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one flat mapping with dotted keys, in order."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        flat |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that reads floats as YAML 1.2 does and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.YAMLError(f"key '{twice[0]}' is written twice{node.start_mark}")
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*(?:[eE][-+]?[0-9]+)|\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9]+\.[0-9]*)$"),
    list("-+0123456789."),
)


def _tuples_for_lists(value: Any) -> Any:
    """YAML has lists where frozen configuration has tuples; strict pydantic would refuse them."""
    if isinstance(value, Mapping):
        return {key: _tuples_for_lists(item) for key, item in value.items()}
    return tuple(_tuples_for_lists(item) for item in value) if isinstance(value, (list, tuple)) else value


def _first_problem(config_type: type[BaseModel], error: ValidationError) -> str:
    problems = error.errors()
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = _known_keys(config_type, problem["loc"][:-1])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return f"unknown key '{path}'{hint} (known here: {', '.join(known)})"
    if problem["type"] == "missing":
        return f"key '{path}' is missing"
    if problem["type"] == "value_error":
        return f"{path}: {problem['ctx']['error']}" if path else str(problem["ctx"]["error"])
    return f"{path}: {problem['msg']}, found {problem['input']!r}"


def _known_keys(config_type: type[BaseModel], path: tuple[str | int, ...]) -> list[str]:
    """The keys of the configuration found by walking `path`; the walk skips keys of free mappings and tags of unions."""
    found = config_type
    for part in path:
        field = found.model_fields.get(str(part))
        inner = _inner_config(field) if field else None
        found = inner or found
    return sorted(found.model_fields)


def _inner_config(field: FieldInfo) -> type[BaseModel] | None:
    candidates = [field.annotation]
    while candidates:
        annotation = candidates.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
        candidates.extend(get_args(annotation))
    return None
