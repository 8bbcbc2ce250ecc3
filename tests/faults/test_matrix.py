"""Every cell of the matrix ends like an undisturbed run. `python -m tests.faults.record` runs the same cells and writes their page."""

from pathlib import Path

import pytest

from tests.faults.cells import MATRIX, Cell, Ground

pytestmark = [pytest.mark.slow, pytest.mark.proof]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    folder: Path = tmp_path_factory.mktemp("faults")
    (folder / "project").mkdir()
    return Ground(folder)


@pytest.mark.parametrize("cell", MATRIX, ids=lambda cell: cell.name)
def test_a_run_that_is_struck_ends_as_one_that_is_not(ground: Ground, cell: Cell) -> None:
    assert ground.run(cell).falls_short == []
