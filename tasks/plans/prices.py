"""Prices of a project's machines, from a small YAML file, and the money that a cost amounts to.

    currency: EUR
    cpu_hour: 0.02          # of one processor core, busy
    gpu_hour: 2.50          # of one GPU, reserved
    kilowatt_hour: 0.30     # of the energy that the machine reports

A price that is left out is 0.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from dml_core.config import Config, parse, read_yaml
from tasks.runs.costs import Cost

HOUR, KILOWATT_HOUR = 3600.0, 3.6e6  # in seconds, in joules
Price = Annotated[float, Field(ge=0)]


class Prices(Config):
    """Prices per hour and per kilowatt-hour, in one currency."""

    currency: Annotated[str, Field(min_length=1, max_length=8)]
    cpu_hour: Price = 0.0
    gpu_hour: Price = 0.0
    kilowatt_hour: Price = 0.0

    def money(self, cost: Cost) -> float:
        """Return what a cost amounts to; energy that is not known counts nothing."""
        energy = (cost.energy_joules or 0.0) / KILOWATT_HOUR
        return cost.cpu_seconds / HOUR * self.cpu_hour + cost.gpu_seconds / HOUR * self.gpu_hour + energy * self.kilowatt_hour

    def text(self, cost: Cost) -> str:
        """Return the money as text, as "EUR 1.25"."""
        money = self.money(cost)
        return f"less than {self.currency} 0.01" if 0 < money < 0.01 else f"{self.currency} {money:.2f}"


def read_prices(path: Path) -> Prices:
    """Read a price file.

    Raises:
        ConfigError: it cannot be read, or has an unknown key or a negative price.
    """
    return parse(Prices, read_yaml(path), str(path))
