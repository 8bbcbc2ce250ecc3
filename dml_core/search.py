"""What a search may try of one setting: a range or a few choices. Losses declare theirs beside the option, tables in their files."""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, model_validator

from dml_core.config import Config

_KEY = "search"  # in a field's JSON schema


class Search(Config):
    """The values that are tried of one setting.

    Attributes:
        low, high: both ends, included.
        log: the range is even in the logarithm, as learning rates are.
        integer: whole numbers only.
        choices: these values, instead of a range.
    """

    low: float | None = None
    high: float | None = None
    log: bool = False
    integer: bool = False
    choices: tuple[float | int | str | bool, ...] | None = Field(default=None, min_length=2)

    @model_validator(mode="after")
    def _one_kind(self) -> "Search":
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.log or self.integer:
                raise ValueError("either choices or a range of low and high, not both")
            return self
        if self.low is None or self.high is None:
            raise ValueError("a range has low and high; or list choices")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic range begins above 0, found {self.low:g}")
        if self.integer and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError(f"ends of a range of whole numbers are whole, found {self.low:g} and {self.high:g}")
        return self

    def holding(self, value: float) -> "Search":
        """The range, made wide enough for a value: a search begins at the settings as they are, wherever those lie."""
        if self.low is None or self.high is None or self.low <= value <= self.high:
            return self
        return self.model_copy(update={"low": min(self.low, float(value)), "high": max(self.high, float(value))})


def searched(low: float, high: float, log: bool = False, integer: bool = False) -> dict[str, Any]:
    """Of an option's `Field`, as `json_schema_extra`: that it is worth searching, and where."""
    return {_KEY: Search(low=float(low), high=float(high), log=log, integer=integer).model_dump()}


def declared_searches(config: BaseModel) -> Mapping[str, Search]:
    """The options of a configuration that declare a range and have a number now; not one that is off: None, or 0 of a logarithmic range."""
    found: dict[str, Search] = {}
    for name, field in type(config).model_fields.items():
        extra = field.json_schema_extra
        value = getattr(config, name)
        if not isinstance(extra, dict) or _KEY not in extra or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        search = Search.model_validate(extra[_KEY])
        if math.isfinite(value) and not (search.log and value <= 0):
            found[name] = search.holding(value)
    return found
