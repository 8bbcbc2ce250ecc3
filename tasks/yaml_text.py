"""Write YAML that `dml_core.config.read_yaml` reads back: PyYAML writes text such as 1e5 or 08 without quotes, a number in YAML 1.2."""

from typing import Any

import yaml

from dml_core.config import read_value
from dml_core.errors import ConfigError


def yaml_text(values: dict[str, Any], **layout: Any) -> str:
    """Return plain values as YAML, in their order; `layout` has options of `yaml.dump`."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **layout)


class _Dumper(yaml.SafeDumper):
    """Writes text that would be read as another value in quotes."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        is_read_back = read_value(text, text) == text
    except ConfigError:
        is_read_back = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, None if is_read_back else "'")


_Dumper.add_representer(str, _text)
