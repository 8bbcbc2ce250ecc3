"""Prices turn costs into money; a price file with a mistake is refused with its key."""

from pathlib import Path

import pytest

from dml_core.errors import ConfigError
from tasks.plans.prices import Prices, read_prices
from tasks.plans.times import note_rate, read_rates, step_estimate
from tasks.runs.costs import Cost
from tasks.runs.records import DatasetRecord
from tasks.tables.file import load_table
from tasks.tables.runs import runs_of
from tasks.workers.placement import Placement


def test_money_is_hours_and_kilowatt_hours_times_their_prices(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("currency: EUR\ncpu_hour: 0.02\ngpu_hour: 2.5\nkilowatt_hour: 0.3\n")
    cost = Cost(cpu_seconds=36_000, gpu_seconds=7_200, energy_joules=3.6e6)  # 10 CPU hours, 2 GPU hours, 1 kWh
    assert read_prices(path).money(cost) == pytest.approx(0.2 + 5.0 + 0.3)
    assert read_prices(path).text(cost) == "EUR 5.50"
    assert Prices(currency="EUR", cpu_hour=0.02).text(Cost(cpu_seconds=360)) == "less than EUR 0.01"


@pytest.mark.parametrize(("text", "named"), [("cpu_hour: 1", "currency"), ("currency: EUR\ncpu_hours: 1", "cpu_hour"),
                                            ("currency: EUR\ngpu_hour: -1", "gpu_hour")])  # fmt: skip
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_prices(tmp_path / "prices.yaml")


def test_a_plan_predicts_what_the_measured_step_used(tmp_path: Path) -> None:
    """Twice the images of a measured step cost twice its processor time and energy; what a kill lost (here a sixth) is not predicted."""
    spec = runs_of("softtriple/table1", load_table("softtriple/table1"))["cub200"][1]
    record = DatasetRecord(name="cub200", folder="", digest="", counts={"train": 1000, "test": 1000}, source="cub200")
    cost = Cost(wall_seconds=120, lost_seconds=20, cpu_seconds=180, energy_joules=6000)  # 1.5 processors, 50 W
    note_rate(tmp_path, "embed", spec, record, {"device": "cpu", "num_workers": 2, "cost": cost.model_dump()})
    estimate = step_estimate("embed", spec, {"train": 1000, "test": 2000}, read_rates(tmp_path), Placement("cpu", 2, 1))
    assert estimate.cost is not None
    assert (estimate.seconds, estimate.cost.cpu_seconds, estimate.cost.energy_joules) == (200, 300, 10_000)
