"""Tolerances within which a mean equals a published value: `flows/tables/tolerances.yaml`, by metric and dataset."""

from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Literal

from pydantic import Field

from dml_core.config import Config, parse, read_yaml
from dml_core.evaluation.metric_info import recall_k
from tasks.runs import protocols


class Tolerance(Config):
    """A tolerance in the column's unit, with its reason.

    Attributes:
        value: t, or the factor that gives t.
        scale: "absolute": t is the value; "relative": t is this share of the published value; "binomial": for a share p in per cent, t is
            value times sqrt(p (100 - p)).
        at_least: the least t.
        reason: reason for this size.
    """

    value: float = Field(gt=0)
    scale: Literal["absolute", "relative", "binomial"] = "absolute"
    at_least: float = Field(default=0.0, ge=0)
    reason: str

    def at(self, published: float) -> float:
        """Return the tolerance t of a published value."""
        scales = {"absolute": 1.0, "relative": abs(published), "binomial": sqrt(max(published * (100.0 - published), 0.0))}
        return max(self.value * scales[self.scale], self.at_least)

    @property
    def says(self) -> str:
        """Size of the tolerance in words."""
        words = {
            "absolute": f"{self.value:g}",
            "relative": f"{100 * self.value:g} per cent of the published value",
            "binomial": f"{self.value:g} sqrt(p (100 - p)) for a published p",
        }
        return words[self.scale] + (f", at least {self.at_least:g}" if self.at_least else "")


class _ByMetric(Config):
    metrics: dict[str, dict[str, Tolerance]]


@lru_cache(maxsize=8)
def _parsed(path: Path, content: bytes) -> dict[str, dict[str, Tolerance]]:
    return parse(_ByMetric, {"metrics": read_yaml(path)}, path.name).metrics


def metric_family(metric: str) -> str:
    """Return `recall` for every Recall@K, else the metric itself."""
    return "recall" if recall_k(metric) is not None else metric


def common_tolerance(metric: str, dataset: str) -> Tolerance | None:
    """Return the tolerance of a metric on a dataset for tables without their own; None if nothing is known."""
    path = protocols.TABLES / "tolerances.yaml"
    return _parsed(path, protocols.content_of(path)).get(metric_family(metric), {}).get(dataset)
