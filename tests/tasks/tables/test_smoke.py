"""Smoke runs: reduced images, classes, steps and weights; otherwise the table's own settings."""

from pathlib import Path

import pytest

from dml_core.data.registry import parse_dataset
from tasks.data import read_packed
from tasks.environment import Project
from tasks.tables.choice import Choice
from tasks.tables.file import load_table
from tasks.tables.runs import runs_of
from tasks.tables.smoke import DIGITS, IMAGES, LAYOUTS, OTHER_LAYOUT, draw_for_smoke, make_small

TABLE = "softtriple/table1"


def test_a_smoke_run_is_small_and_otherwise_the_table_s() -> None:
    (spec,) = runs_of(TABLE, load_table(TABLE), Choice(("softtriple",), ("cub200",)))["cub200"]
    small = make_small(spec)
    assert (small.table, small.row, small.column, small.dataset) == (TABLE, "softtriple", "cub200", "cub200-smoke")
    assert (small.label, small.comparison) == (f"{TABLE} softtriple as_published", "smoke on cub200-smoke")
    assert small.title == f"smoke: cub200-smoke / {TABLE} softtriple as_published / seed 0"
    assert small.short == f"smoke on cub200-smoke: {TABLE} softtriple as_published s0"
    assert small.training.num_epochs == 1
    assert small.training.sampler.batch_size <= 4
    assert small.training.sampler.num_classes_per_batch * small.training.sampler.num_samples_per_class == 4
    assert small.training.model.backbone.weights == "none"
    assert small.evaluation.recall_at == (1, 2)
    assert small.training.loss == spec.training.loss
    assert small.training.model.head == spec.training.model.head
    assert small.training.optimiser == spec.training.optimiser


def test_the_drawn_images_let_every_class_be_sampled_and_searched() -> None:
    """Half of the classes are for training, of which k fill a batch; K of Recall@K is below the number of compared images."""
    for layout in {*LAYOUTS.values(), OTHER_LAYOUT}:
        options = parse_dataset("synthetic", {**IMAGES, **(DIGITS if layout == "idx" else {}), "layout": layout})
        assert options.num_classes // 2 >= 2
        assert options.images_per_class >= 2
        assert options.num_classes // 2 * options.images_per_class - 1 >= 2


@pytest.mark.parametrize("dataset", ["cub200", "food101"])
def test_a_few_images_are_drawn_and_the_same_each_time(dataset: str, tmp_path: Path) -> None:
    """Eight classes of four images, half of them for training, stored in the project's state."""
    folders = [draw_for_smoke(Project(tmp_path, tmp_path / state, "", ""), dataset) for state in ("a", "b", "a")]
    found = [read_packed(folder, dataset) for folder in folders]
    assert [record.counts for record in found] == [{"train": 16, "test": 16}] * 3
    assert len({record.digest for record in found}) == 1
    assert folders[1] == tmp_path / "b" / "smoke" / dataset / "packed"
