"""Search space of one setting: a range or choices. Losses declare theirs next to the option, tables in their files."""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, model_validator

from dml_core.config import Config

_KEY = "search"  # in a field's JSON schema


class Search(Config):
    """Values to try for one setting.

    Attributes:
        low, high: both ends, included.
        log: sample evenly in the logarithm, as for learning rates.
        integer: integers only.
        choices: these values instead of a range.
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
        """Return the range, widened to include `value`: a search starts from the current settings, even outside the declared range."""
        if self.low is None or self.high is None or self.low <= value <= self.high:
            return self
        return self.model_copy(update={"low": min(self.low, float(value)), "high": max(self.high, float(value))})


def searched(low: float, high: float, log: bool = False) -> dict[str, Any]:
    """Return the `json_schema_extra` of an option's `Field` that declares its search range."""
    return {_KEY: Search(low=float(low), high=float(high), log=log).model_dump()}


def declared_searches(config: BaseModel) -> Mapping[str, Search]:
    """Return the searches of options that declare a range and have a number now; not of those that are off: None, or 0 in a log range."""
    searches: dict[str, Search] = {}
    for name, field in type(config).model_fields.items():
        extra = field.json_schema_extra
        value = getattr(config, name)
        if not isinstance(extra, dict) or _KEY not in extra or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        search = Search.model_validate(extra[_KEY])
        if math.isfinite(value) and not (search.log and value <= 0):
            searches[name] = search.holding(value)
    return searches
