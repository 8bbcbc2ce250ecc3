"""Runs with every kind of last batch, stop, precision, head and loss end, stay finite, and agree on 1, 2 and 3 workers."""

import itertools
import math
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dml_core.config import merge, parse
from dml_core.training import loop
from dml_core.training.checkpoints import writing
from dml_core.training.checkpoints.writing import InterruptedRunError, Saving
from dml_core.training.config import TrainingConfig
from dml_core.training.history import read_history
from tests.conftest import SETTINGS
from tests.workers import load_float64, spawn

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
BATCH_SIZE, NUM_FULL, STOP_AFTER = 4, 3, 3  # a run that stops does so before the last batch
LAST_BATCHES = (0, 1, 2)  # images after the full batches; two are fewer than three workers
SHUFFLED = {"sampler": {"kind": "shuffled", "batch_size": BATCH_SIZE}}
TRIPLETS = {"sampler": {"kind": "mined_triplets", "batch_size": 3 * BATCH_SIZE}}
PAIRS = {"sampler": {"kind": "k_by_n", "num_classes_per_batch": 2, "num_samples_per_class": 2}}
FAMILIES: dict[str, dict[str, Any]] = {
    "classifier": SHUFFLED | {"loss": {"name": "softmax"}},
    "centres": SHUFFLED | {"loss": {"name": "softtriple", "options": {"num_centres": 2}}},
    "centres spread over workers": SHUFFLED | {"loss": {"name": "softtriple", "options": {"num_centres": 2}}, "shard_classes": True},
    "moving centres": SHUFFLED | {"loss": {"name": "center_loss"}},
    "gathered": SHUFFLED | {"loss": {"name": "sgsl", "options": {"dropout": 0.3}}},
    "the library's proxies": SHUFFLED | {"loss": {"name": "pml:ProxyAnchorLoss"}},
    "pairs": PAIRS | {"loss": {"name": "contrastive"}},
    "tuplets": PAIRS | {"loss": {"name": "tuplet_margin"}},
    "mined triplets": TRIPLETS | {"loss": {"name": "triplet_global"}},
    "a sum with parts": SHUFFLED
    | {"loss": {"name": "combined", "options": {"terms": [{"name": "normalised_softmax"}, {"name": "ring_loss", "weight": 0.1}]}}},
}


class Cell(NamedTuple):
    last_batch: int
    stops: bool
    precision: str
    head: str
    family: str


WHOLE = [
    Cell(*values) for values in itertools.product(LAST_BATCHES, (False, True), ("float32", "bfloat16"), ("linear", "bn_neck"), FAMILIES)
]


def pairs_of(cell: Cell) -> set[tuple[Any, ...]]:
    """Return all pairs of the cell's values."""
    return set(itertools.combinations(enumerate(cell), 2))


def covering(cells: list[Cell]) -> list[Cell]:
    """Choose few cells that cover every pair of values: always the one with the most new pairs."""
    chosen: list[Cell] = []
    missing = set().union(*map(pairs_of, cells))
    while missing:
        chosen.append(max(cells, key=lambda cell: len(pairs_of(cell) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen


class Drawn:
    """A dataset of drawn images in memory, of four classes."""

    class_names = ("a", "b", "c", "d")

    def __init__(self, num_images: int) -> None:
        self.labels = np.arange(num_images) % 4

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Tensor:
        return torch.from_numpy(np.random.default_rng(int(index)).integers(0, 256, (3, 8, 8), dtype=np.uint8))

    def box(self, index: int) -> None:
        return None

    def expect(self, indices: np.ndarray) -> None:
        pass


PART = covering(WHOLE)


def config_of(cell: Cell) -> TrainingConfig:
    settings = {
        "model": {"backbone": {"name": "small_cnn", "width": 8}, "head": {"kind": cell.head, "embedding_dim": 4}},
        "transform": {"crop_size": 8, "padding": 1},
        "optimiser": {"name": "sgd", "learning_rate": 1e-3, "groups": {"loss": {"learning_rate": 1e-2}}},
        "num_epochs": 2,
        "precision": cell.precision,
    }
    return parse(TrainingConfig, merge(merge(SETTINGS, settings), FAMILIES[cell.family]), str(cell))


def fit(cell: Cell, rank: int, num_workers: int, folder: Path) -> dict[str, Any]:
    """Train one cell and return this worker's weights, and on rank 0 the history."""
    asked = itertools.count(1)
    stop = (lambda: next(asked) == STOP_AFTER and rank == num_workers - 1) if cell.stops else None  # one worker is asked to stop
    arguments = (config_of(cell), Drawn(BATCH_SIZE * NUM_FULL + cell.last_batch), 0, folder, CPU)
    how = Saving(every_steps=2, stop_wanted=stop)
    try:
        system = loop.fit(*arguments, saving=how, identity=str(cell))
        assert not cell.stops
    except InterruptedRunError:
        system = loop.fit(*arguments, saving=how, identity=str(cell))
    return {"weights": system.state_dict(), "history": read_history(folder)}


def fit_all(rank: int, cells: list[Cell], num_workers: int, folder: Path) -> None:
    """Train bfloat16 cells with float32 weights, and the others in float64, where numbers of workers differ only by rounding."""
    writing.LOOK_SECONDS = 0.0
    ended = {}
    for precision in ("bfloat16", "float32"):
        if precision == "float32":
            load_float64()
        for cell in [cell for cell in cells if cell.precision == precision]:
            ended[cell] = fit(cell, rank, num_workers, folder / str(cells.index(cell)))
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(list(ended.items())))


@pytest.fixture(scope="module", params=[(PART, (1, 3)), pytest.param((WHOLE, (1, 2, 3)), marks=pytest.mark.proof)], ids=["part", "whole"])
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[Cell, dict[str, Any]]]]:
    """Number of workers -> for each worker, the result of each cell."""
    cells, numbers = request.param
    found = {}
    for num_workers in numbers:
        folder = tmp_path_factory.mktemp(f"workers{num_workers}")
        spawn(fit_all, num_workers, cells, num_workers, folder)
        results = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(num_workers)]
        found[num_workers] = [{Cell(*cell): result for cell, result in by_cell} for by_cell in results]
    return found


def test_the_part_has_every_pair_of_values() -> None:
    assert set().union(*map(pairs_of, PART)) == set().union(*map(pairs_of, WHOLE))


def num_steps(cell: Cell) -> int:
    """Return the steps of an epoch: a last batch of one image is skipped, one of a single triplet is not; pairs have no last batch."""
    if cell.family in ("pairs", "tuplets"):
        return round((BATCH_SIZE * NUM_FULL + cell.last_batch) / 4)
    return NUM_FULL + (cell.last_batch > (0 if cell.family == "mined triplets" else 1))


def test_every_run_ends_finite_with_every_step(ended: dict[int, list[dict[Cell, dict[str, Any]]]]) -> None:
    for by_rank in ended.values():
        for cell, result in by_rank[0].items():
            assert len(result["history"]) == 2 * num_steps(cell), cell
            assert all(math.isfinite(value) for row in result["history"] for value in row.values()), cell
            assert all(bool(value.isfinite().all()) for value in result["weights"].values()), cell


def test_in_float_any_number_of_workers_ends_in_the_weights_and_the_curves_of_one(
    ended: dict[int, list[dict[Cell, dict[str, Any]]]],
) -> None:
    cells = [cell for cell in ended[1][0] if cell.precision == "float32"]
    for num_workers, cell in itertools.product(list(ended)[1:], cells):
        alone = ended[1][0][cell]
        for rank in range(num_workers):
            together = ended[num_workers][rank][cell]["weights"]
            assert together.keys() == alone["weights"].keys()
            for name, value in alone["weights"].items():
                where = f"{num_workers} workers, {cell}: {name}"
                torch.testing.assert_close(together[name], value, rtol=1e-6, atol=1e-8, msg=lambda m, where=where: f"{where}: {m}")
        for one, other in zip(alone["history"], ended[num_workers][0][cell]["history"], strict=True):
            assert other == pytest.approx(one, rel=1e-6, abs=1e-9), (num_workers, cell)


def test_in_bfloat16_any_number_of_workers_begins_near_one(ended: dict[int, list[dict[Cell, dict[str, Any]]]]) -> None:
    """Only the first step is compared: with BatchNorm over four images, later ones multiply a rounding of 2^-8."""
    for num_workers, cell in itertools.product(list(ended)[1:], [cell for cell in ended[1][0] if cell.precision == "bfloat16"]):
        one, other = (ended[number][0][cell]["history"][0] for number in (1, num_workers))
        assert other == pytest.approx(one, rel=0.05, abs=0.05), (num_workers, cell)
