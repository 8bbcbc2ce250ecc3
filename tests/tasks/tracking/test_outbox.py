"""Reading records that wait for MLflow from the outbox."""

from pathlib import Path

import pytest

from tasks.sealed import DamagedError
from tasks.tracking.outbox import read_report


def test_a_record_that_another_process_delivered_meanwhile_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"run\.json: missing$"):
        read_report(tmp_path / "run.json")
