"""A dataset of the size of Stanford Online Products keeps to the bounds below, and its counts are exact."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dml_core.config import parse
from dml_core.data.store.embedded import EmbeddedImages
from dml_core.data.store.packed import PackedDataset
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import evaluate
from tasks.environment import Project
from tasks.reports import run_pages
from tasks.reports.finished_runs import FinishedRun, SelectedRuns
from tasks.reports.run_pages import write_look
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import RunSpec
from tests.conftest import small_training
from tests.tasks.reports.conftest import quiet
from tests.tasks.reports.test_run_pages import script

NUM_CLASSES = 11_316
CONFIG = parse(EvaluationConfig, {"clustering": False}, "test")


class Photographs(PackedDataset):
    """Any number of images of 250 pixels, as smooth as photographs, generated on access."""

    role = "test"

    def __init__(self, num_images: int) -> None:
        self._num_images = num_images
        self.class_names = [f"class {label}" for label in range(NUM_CLASSES)]
        self.labels = np.arange(num_images) % NUM_CLASSES
        self.paths = [f"some_folder_final/{label:012}_{index}.JPG" for index, label in enumerate(self.labels)]

    def image(self, index: int) -> torch.Tensor:
        coarse = torch.from_numpy(np.random.default_rng(index).integers(0, 256, (1, 3, 12, 12)).astype(np.float32))
        return torch.nn.functional.interpolate(coarse, (250, 250), mode="bicubic").clamp(0, 255)[0].to(torch.uint8)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("num_images", [60_502, 80_000])
def test_a_large_set_keeps_to_its_bounds(num_images: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Photographs(num_images)
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((NUM_CLASSES, 16))
    embeddings = (centres[dataset.labels] + 0.6 * generator.standard_normal((num_images, 16))).astype(np.float32)
    side = EmbeddedImages("test", dataset, embeddings, dataset.labels)
    metrics: dict[str, Any] = evaluate(embeddings, dataset.labels, CONFIG)
    spec = RunSpec(dataset="sop", variant="large", seed=0, training=small_training(), evaluation=CONFIG)
    (tmp_path / "scores").mkdir()
    run = FinishedRun(spec, "0" * 32, True, metrics, tmp_path / "scores", "embed/0")
    record = DatasetRecord(name="sop", folder=str(tmp_path), digest="0", counts={"test": num_images}, source="made up")
    selected = SelectedRuns("comparison on sop", record, False, (run,), 0, ())
    monkeypatch.setattr(run_pages, "open_sides", lambda project, run, dataset: (side, side))
    project = Project(tmp_path, tmp_path, str(tmp_path), "")
    folder = write_look(project, selected, None, tmp_path / "pages", "tsne", quiet).parent
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    print(num_images, {name: size for name, size in sizes.items() if not name.startswith("images-")}, sum(sizes.values()))
    assert sum(size for name, size in sizes.items() if name.startswith("images-")) <= run_pages.ALBUM_BYTES
    assert sizes["run-000.webp"] <= 3_000_000
    assert sizes["run.js"] <= 9_000_000
    assert sizes["index.html"] <= 1_000_000
    assert sum(sizes.values()) <= 75_000_000
    items, data = script(folder / "items.js"), script(folder / "run.js")
    assert len(items["labels"]) <= run_pages.MAX_PICTURES
    assert len(items["queries"]) == (num_images if num_images <= run_pages.MAX_PICTURES else run_pages.MAX_PICTURES // 9)
    lead = (folder / "index.html").read_text().partition('<p class="lead">')[2].partition("</p>")[0]
    found = round(metrics["recall@1"] * num_images)
    assert f"<strong>{found:,}</strong>" in lead
    assert f"<strong>{num_images - found:,}</strong>" in lead
    if num_images == len(items["queries"]):
        assert data["firstRanks"].count(1) == found
    assert len(data["map"]["queries"]) == 2000
