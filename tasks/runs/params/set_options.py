"""`--set` settings of a command: their syntax, and those that can change a result."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dml_core.config import check_known, located, read_value, tuples_for_lists
from dml_core.errors import ConfigError
from dml_core.overrides import PART, nested

WITHOUT_RESULTS = ("scale.", "promotion.", "comparison.default_datasets.")  # settings that change no result


def result_settings(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the `--set` settings that can change a result, sorted, each value spelt in one way: 0.001 for 1e-3, [1, 2] for [1,2]."""
    values = {path_of(setting): value_of(setting) for setting in overrides if not f"{path_of(setting)}.".startswith(WITHOUT_RESULTS)}
    spelt = {path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for path, value in values.items()}
    return tuple(sorted(f"{path}={value}" for path, value in spelt.items()))


def path_of(setting: str) -> str:
    """Return the dotted path of a `--set`."""
    return setting.partition("=")[0].strip()


def rank_of(setting: str) -> list[tuple[bool, str]]:
    """Return the key that sorts settings so that mappings apply before keys in them, and names of parts before their options."""
    return [(key != PART, key) for key in path_of(setting).split(".")]


def parsed(values: dict[str, Any], setting: str) -> dict[str, Any]:
    """Return a `--set` as nested settings; an unknown name on its path is refused here, an unknown last key by the parser."""
    keys = path_of(setting).split(".")
    if "=" not in setting or not all(keys):
        raise ConfigError(f"--set {setting}: write it as key=value, for example --set comparison.protocol.num_epochs=3")
    if keys[0] == "datasets":
        raise ConfigError(f"--set {setting}: DVC prepares datasets from params.yaml; change it there")
    for kind, at in (("dataset of the comparison", ["comparison", "datasets"]), ("variant", ["comparison", "variants"])):
        known = list(mapping_at(values, at))
        if keys[:2] == at and len(keys) > 3:
            with located(f"--set {setting}"):
                check_known(kind, keys[2], known)
    return nested_setting(setting)


def nested_setting(setting: str) -> dict[str, Any]:
    """Return a `--set` that has a path and a value as nested settings."""
    return nested({path_of(setting): tuples_for_lists(value_of(setting))})


def value_of(setting: str) -> Any:
    """Return the value of a `--set`, read as YAML."""
    return read_value(setting.partition("=")[2], f"--set {path_of(setting)}")


def mapping_at(values: Any, keys: Sequence[str]) -> dict[str, Any]:
    """Return the mapping at a path of keys; empty if there is none, which the parser refuses."""
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}
