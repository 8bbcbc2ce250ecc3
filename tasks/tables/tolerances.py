"""By how much a mean may differ from a printed figure and be equal to it: `flows/tables/tolerances.yaml`, by metric and dataset."""

from functools import cache
from math import sqrt
from pathlib import Path
from typing import Literal

from pydantic import Field

from dml_core.config import Config, parse, read_yaml
from dml_core.evaluation.columns import recall_k
from tasks.runs import protocols


class Tolerance(Config):
    """A tolerance in the column's unit, and why.

    Attributes:
        value: t, or what t is made of.
        scale: "absolute", t itself; "relative", t is this share of the printed figure; "binomial", of a share p in per cent t is value
            times sqrt(p (100 - p)).
        at_least: the least t.
        reason: why so much.
    """

    value: float = Field(gt=0)
    scale: Literal["absolute", "relative", "binomial"] = "absolute"
    at_least: float = Field(default=0.0, ge=0)
    reason: str

    def at(self, printed: float) -> float:
        """The tolerance t of a printed figure."""
        scales = {"absolute": 1.0, "relative": abs(printed), "binomial": sqrt(max(printed * (100.0 - printed), 0.0))}
        return max(self.value * scales[self.scale], self.at_least)

    @property
    def says(self) -> str:
        """How much, in words."""
        words = {"absolute": f"{self.value:g}", "relative": f"{100 * self.value:g} per cent of the printed figure",
                 "binomial": f"{self.value:g} sqrt(p (100 - p)) of a printed p"}  # fmt: skip
        return words[self.scale] + (f", {self.at_least:g} at least" if self.at_least else "")


class _ByMetric(Config):
    metrics: dict[str, dict[str, Tolerance]]


@cache
def _read(tables: Path) -> dict[str, dict[str, Tolerance]]:
    path = tables / "tolerances.yaml"
    return parse(_ByMetric, {"metrics": read_yaml(path)}, path.name).metrics


def metric_family(metric: str) -> str:
    """`recall` of every Recall@K, else the metric itself."""
    return "recall" if recall_k(metric) is not None else metric


def common_tolerance(metric: str, dataset: str) -> Tolerance | None:
    """What holds of a metric on a dataset in every table that has no tolerance of its own; None where nothing is known."""
    return _read(protocols.TABLES).get(metric_family(metric), {}).get(dataset)
