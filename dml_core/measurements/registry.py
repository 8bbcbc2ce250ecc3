"""Registry of the measurements: names of the modules of this folder with `METRICS`, `measure` and, if it has options, `Options`."""

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from dml_core.config import Config, check_known, parse

MEASUREMENTS = (
    "centroid_distances",
    "drawn_centres",
    "drawn_gradients",
    "embedding_map",
    "gradient_over_alpha",
    "gradient_over_norm",
    "last_softmax",
    "loss_costs",
    "pair_cosines",
    "retrieved_images",
    "training_separability",
    "training_time",
    "unique_centres",
)


def measurement_module(name: str) -> str:
    """Return the name of a measurement's module: a run's scores depend on it and the evaluator. Imports nothing.

    Raises:
        ConfigError: no such measurement; the nearest name is given.
    """
    check_known("measurement", name, MEASUREMENTS)
    return f"dml_core.measurements.{name}"


def measurement(name: str) -> ModuleType:
    """Return a measurement's module, with `METRICS`, the metrics that a table's columns may name, and `measure`.

    Raises:
        ConfigError: no such measurement.
    """
    return import_module(measurement_module(name))


def parse_measurement(name: str, options: Mapping[str, Any]) -> Config:
    """Return a measurement's typed options.

    Raises:
        ConfigError: no such measurement, or an option that it does not have.
    """
    options_class: type[Config] = getattr(measurement(name), "Options", Config)
    return parse(options_class, options, f"measurements '{name}'")
