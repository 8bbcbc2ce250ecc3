"""Settings that override others: the one rule for datasets, variants, tables' rows, tuned settings and `--set`.

Layers are applied one after another, later ones over earlier ones:

- A mapping is merged key by key; any other value replaces the earlier one.
- A part is a mapping with a `name` (backbone, loss, optimiser). A new name drops the earlier part's options.
- null unsets: the default holds, or the setting has no value where it may have none (`validation`, `embedding_dim`).
"""

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from dml_core.config import Config, parse

ConfigT = TypeVar("ConfigT", bound=Config)
PART = "name"  # key that makes a mapping a part


def override(base: Mapping[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` overridden by each layer in turn; a null stays in the result, so that a layer can be stored and applied later.

    Override a base by all layers, never a layer by a layer: a layer does not show whether its name is a new one.

    >>> small = {"backbone": {"name": "small_cnn", "width": 16}, "num_epochs": 48}
    >>> override(small, {"backbone": {"width": 8}})
    {'backbone': {'name': 'small_cnn', 'width': 8}, 'num_epochs': 48}
    >>> override(small, {"backbone": {"name": "resnet18"}})
    {'backbone': {'name': 'resnet18'}, 'num_epochs': 48}
    """
    values = dict(base)
    for layer in layers:
        for key, value in layer.items():
            values[key] = _overridden(values.get(key), value)
    return values


def parse_overridden(config_type: type[ConfigT], where: str, base: Mapping[str, Any], *layers: Mapping[str, Any]) -> ConfigT:
    """Build `config_type` from `base` overridden by each layer; a null gives the default where the setting cannot be null.

    Args:
        config_type: the configuration.
        where: place of the settings, with which errors begin.
        base: plain YAML values.
        layers: changes, in the order in which they apply.

    Raises:
        ConfigError: one line with the first problem and its key path.
    """
    return parse(config_type, _without_unset(config_type, override(base, *layers)), where)


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted path as nested mappings, as in a file: the reverse of `dml_core.config.flatten`."""
    values: dict[str, Any] = {}
    for path, value in settings.items():
        for key in reversed(path.split(".")):
            value = {key: value}
        values = override(values, value)
    return values


def _overridden(earlier: Any, later: Any) -> Any:
    if not isinstance(earlier, Mapping) or not isinstance(later, Mapping):
        return later
    names = earlier.get(PART), later.get(PART)
    is_another = all(isinstance(name, str) for name in names) and names[0] != names[1]
    return override({} if is_another else earlier, later)


def _without_unset(annotation: Any, value: Any) -> Any:
    """Return a value without the nulls in it that its type does not allow; keys that the type does not know stay for the parser."""
    if not isinstance(value, Mapping):
        return value
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, Config):
            types = {name: field.annotation for name, field in member.model_fields.items()}
            return _items(value, {key: types.get(key, Any) for key in value})
        if get_origin(member) is dict:
            return _items(value, dict.fromkeys(value, get_args(member)[1]))
    return value


def _items(values: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _without_unset(types[key], value) for key, value in values.items() if value is not None or _may_be_null(types[key])}


def _may_be_null(annotation: Any) -> bool:
    members = _members(annotation)
    return Any in members or NoneType in members


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union, without their constraints; of another type itself."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(member for part in get_args(annotation) for member in _members(part))
    return (annotation,)
