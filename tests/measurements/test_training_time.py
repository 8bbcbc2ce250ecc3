"""Training time: minutes from the run's facts, or no score if they do not cover the whole training."""

from pathlib import Path
from typing import Any

import pytest

from dml_core.config import Config
from dml_core.measurements.training_time import measure
from tests.measurements.conftest import MakeRun


def test_minutes_of_the_whole_and_of_an_epoch(finished: MakeRun, tmp_path: Path) -> None:
    run = finished(facts={"seconds": 90.0, "taken_up": False}, num_epochs=3)
    assert measure(run, Config(), tmp_path) == {"training_minutes": 1.5, "epoch_minutes": 0.5}


@pytest.mark.parametrize(
    ("facts", "num_epochs"), [({"seconds": 90.0, "taken_up": True}, 3), ({"seconds": 90.0, "taken_up": False}, 0), ({}, 3)]
)
def test_a_run_whose_time_is_not_known_has_none(finished: MakeRun, tmp_path: Path, facts: dict[str, Any], num_epochs: int) -> None:
    assert measure(finished(facts=facts, num_epochs=num_epochs), Config(), tmp_path) == {}
