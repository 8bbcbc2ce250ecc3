"""Frozen, typed configuration; the error for an unknown key suggests the nearest known one.

Each part of the project defines a small subclass of `Config`. `read_yaml` reads numbers as YAML 1.2 does (`1e-4` is a number, `1:30`
text), rejects duplicate keys and keys that are not text, and limits size, depth and integers, so that no file can take long or much
memory. `parse` turns a mapping into a `Config` and pydantic's report into a `ConfigError` of one line. Names become parts of paths, of
DVC's stages and of MLflow's filters: a setting that is a name has the type `Name`.
"""

import difflib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from yaml.composer import Composer

from dml_core.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound="Config")
MAX_FILE_BYTES = 1_000_000
MAX_VALUES = 10_000  # in a file; an alias counts each time it is used
MAX_DEPTH = 50
MAX_TEXT = 200  # characters of a value shown in an error
_INT64 = range(-(2**63), 2**63)


def check_name(name: str) -> str:
    """Return the name if it is valid: letters, digits, - and _, a letter or digit first, at most 100 characters.

    Raises:
        ValueError: the name is not valid.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", name):
        raise ValueError(f"{name[:MAX_TEXT]!r} is not a name; use letters, digits, - and _, a letter or digit first, at most 100")
    return name


Name = Annotated[str, AfterValidator(check_name)]


class Config(BaseModel):
    """Base of all configuration: immutable, without unknown keys, strict about types (an int is accepted as a float, a string is not)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def parse(config_type: type[ConfigT], values: Any, where: str) -> ConfigT:
    """Build `config_type` from plain YAML values; errors begin with `where` (a file, a key path).

    Raises:
        ConfigError: one line with the first problem, its key path and, for an unknown key, the nearest known one.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: expected a mapping of settings, found {type(values).__name__}")
    try:
        return config_type.model_validate(tuples_for_lists(values))
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_problem(config_type, error)}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one YAML mapping.

    Raises:
        ConfigError: the file is missing, not YAML or not a mapping, or has a duplicate key or one that is not text.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not a file; write a YAML file there")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES:,} bytes, more than settings can be")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None
    values = read_value(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping at the top, found {type(values).__name__}")
    return values


def read_value(text: str, where: str) -> Any:
    """Read one YAML value by the rules of `read_yaml`.

    Raises:
        ConfigError: the text is not YAML, or exceeds the limits on size and depth.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, UnicodeEncodeError) as error:  # the latter: half of a pair of surrogates
        raise ConfigError(f"{where}: not readable as YAML: {' '.join(str(error).split())}") from None


@contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix a ConfigError raised inside with `where`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def unknown_name(kind: str, name: str, known: list[str]) -> ConfigError:
    """Return the error for a name missing from a registry, with the nearest known name."""
    return ConfigError(f"unknown {kind} '{name}'{nearest_hint(name, known)} (known: {', '.join(sorted(known))})")


def check_known(kind: str, name: str, known: Collection[str]) -> None:
    """Raise the error of `unknown_name` if a name is not among the known ones."""
    if name not in known:
        raise unknown_name(kind, name, list(known))


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """Return the part of a message that suggests the nearest known name; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def refuse_repeats(what: str, values: Iterable[object]) -> None:
    """Reject duplicate values: results counted twice would look independent.

    Raises:
        ConfigError: a value is repeated; the message names the first.
    """
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"{what}: {value} is given twice; give each value once")
        seen.add(value)


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` overridden by `override`, mapping by mapping; any other value replaces the one in `base`."""
    merged = dict(base)
    for key, value in override.items():
        both_mappings = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = merge(merged[key], value) if both_mappings else value
    return merged


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one flat mapping with dotted keys, in order."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        flat |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


class _StrictLoader(Composer, yaml.CSafeLoader):
    """SafeLoader that reads numbers as YAML 1.2 does, rejects keys that are duplicate or no text, and limits number and depth of values.

    Its parser is libyaml's (a fifth of the time); its composer is Python's: libyaml's ends the process at 100,000 nested lists.
    """

    num_composed = depth = 0

    def __init__(self, stream: str) -> None:
        yaml.CSafeLoader.__init__(self, stream)
        Composer.__init__(self)

    def compose_document(self) -> yaml.Node | None:
        root: yaml.Node | None = super().compose_document()
        if root is not None and _num_values(root, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values, each alias counted as what it stands for")
        return root

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} deep")
        if self.num_composed > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values")
        self.num_composed += 1
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=deep)
        except (ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError):  # raised by PyYAML for 2026-13-45 or !!bool x
            raise yaml.YAMLError(f"'{str(node.value)[:MAX_TEXT]}' is not a {node.tag.rpartition(':')[2]}{node.start_mark}") from None
        if isinstance(value, int) and value not in _INT64:
            raise yaml.YAMLError(f"an integer of more than 64 bits{node.start_mark}")
        return value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key that is not text{key.start_mark}")
            if key.tag not in (_TEXT, _MERGE):  # 1 and 0x1, or no and off, would be one key
                raise yaml.YAMLError(f"key '{key.value[:MAX_TEXT]}' is not text; write it in quotes{key.start_mark}")
        for name, count in Counter(key.value for key, _ in node.value).items():
            if count > 1:
                raise yaml.YAMLError(f"key '{name}' is written twice{node.start_mark}")
        return node


def _num_values(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values in a node, counting an alias each time it is used; infinite if the node contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_num_values(part, known) for part in parts)
    return known[id(node)]


_TEXT, _MERGE, _INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "merge", "int", "float"))
_NUMBERS = {  # of YAML 1.2's core schema, in this order; in YAML 1.1, 010 is 8, 1:30 is 90, and 1e3 is text
    _INT: r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$",
    _FLOAT: r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
}


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_StrictLoader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _StrictLoader.add_implicit_resolver(_tag, re.compile(_pattern), list("-+0123456789."))
_StrictLoader.add_constructor(_INT, _construct_int)


def tuples_for_lists(value: Any) -> Any:
    """Replace lists by tuples: frozen configuration has tuples, and strict pydantic rejects YAML's lists."""
    if isinstance(value, Mapping):
        return {key: tuples_for_lists(item) for key, item in value.items()}
    return tuple(tuples_for_lists(item) for item in value) if isinstance(value, (list, tuple)) else value


def _first_problem(config_type: type[BaseModel], error: ValidationError) -> str:
    problems = error.errors()
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    if problem["type"] == "extra_forbidden":
        known = _known_keys(config_type, problem["loc"][:-1])
        return f"unknown key '{path}'{nearest_hint(str(problem['loc'][-1]), known)} (known here: {', '.join(known)})"
    if problem["type"] == "missing":
        return f"key '{path}' is missing"
    if problem["type"] == "value_error":
        return f"{path}: {problem['ctx']['error']}" if path else str(problem["ctx"]["error"])
    return f"{path}: {problem['msg']}, found {repr(problem['input'])[:MAX_TEXT]}"


def _known_keys(config_type: type[BaseModel], path: tuple[str | int, ...]) -> list[str]:
    """Return the keys of the configuration at `path`, skipping keys of free mappings and tags of unions."""
    innermost = config_type
    for part in path:
        field = innermost.model_fields.get(str(part))
        innermost = (_inner_config(field) if field else None) or innermost
    return sorted(innermost.model_fields)


def _inner_config(field: FieldInfo) -> type[BaseModel] | None:
    candidates = [field.annotation]
    while candidates:
        annotation = candidates.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
        candidates.extend(get_args(annotation))
    return None
