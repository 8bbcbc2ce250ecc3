"""Registry of the measurements. Each name refers to a module with `Options`, `METRICS` and `measure`, imported only on use."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dml_core.config import Config, parse, unknown_name

if TYPE_CHECKING:
    from dml_core.measurements.contract import Measure

MEASUREMENTS: dict[str, str] = {
    "centroid_distances": "dml_core.measurements.centroid_distances:measure",
    "drawn_centres": "dml_core.measurements.drawn_centres:measure",
    "drawn_gradients": "dml_core.measurements.drawn_gradients:measure",
    "embedding_map": "dml_core.measurements.embedding_map:measure",
    "gradient_over_alpha": "dml_core.measurements.gradient_over_alpha:measure",
    "gradient_over_norm": "dml_core.measurements.gradient_over_norm:measure",
    "last_softmax": "dml_core.measurements.last_softmax:measure",
    "loss_costs": "dml_core.measurements.loss_costs:measure",
    "pair_cosines": "dml_core.measurements.pair_cosines:measure",
    "retrieved_images": "dml_core.measurements.retrieved_images:measure",
    "training_separability": "dml_core.measurements.training_separability:measure",
    "training_time": "dml_core.measurements.training_time:measure",
    "unique_centres": "dml_core.measurements.unique_centres:measure",
}


def measurement_module(name: str) -> str:
    """Return the module of a measurement: a run's scores depend on it and the evaluator.

    Raises:
        ConfigError: no such measurement; the nearest name is given.
    """
    if name not in MEASUREMENTS:
        raise unknown_name("measurement", name, list(MEASUREMENTS))
    return MEASUREMENTS[name].partition(":")[0]


def parse_measurement(name: str, options: Mapping[str, Any], where: str = "measurements") -> Config:
    """Return a measurement's typed options.

    Raises:
        ConfigError: no such measurement, or an option that it does not have.
    """
    options_class: type[Config] = import_module(measurement_module(name)).Options
    return parse(options_class, options, f"{where} '{name}'")


def measure_function(name: str) -> "Measure":
    """Return a measurement's function.

    Raises:
        ConfigError: no such measurement.
    """
    found: Measure = import_module(measurement_module(name)).measure
    return found


def measured_by(name: str) -> tuple[str, ...]:
    """Return the metrics of a measurement, which a table's columns may name.

    Raises:
        ConfigError: no such measurement.
    """
    found: tuple[str, ...] = import_module(measurement_module(name)).METRICS
    return found
