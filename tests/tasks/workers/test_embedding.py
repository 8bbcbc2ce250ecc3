"""Extraction writes the same bytes in dataset order for any number of workers; scoring reads them back."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import EvaluationError, StoreError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.models.embedder import Embedder
from dml_core.training.loop import build_system
from tasks.runs.embeddings import load_embeddings
from tasks.runs.specs import RunSpec
from tasks.scores.drawing import Drawing
from tasks.scores.evaluation import evaluate_run
from tasks.scores.scoring import load_array
from tasks.storage import Store
from tasks.workers import work
from tasks.workers.embedding import BATCH_SIZE, MAX_SHARD_ROWS, extract, shard_rows
from tasks.workers.jobs import Job
from tests.conftest import small_training
from tests.one_view import plain_view
from tests.workers import spawn

CPU = torch.device("cpu")
CONFIG = small_training()
OPTIONS = {"num_classes": 4, "images_per_class": 150, "image_size": 24, "num_modes": 2}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 test images, which make three shards."""
    folder = tmp_path_factory.mktemp("many")
    materialise("synthetic", OPTIONS, folder / "raw")
    prepare("synthetic", folder / "raw", folder / "packed", OPTIONS)
    return folder / "packed"


def extract_to(rank: int, packed: Path, folder: Path) -> None:
    model = build_system(CONFIG, 4, 0, CPU).model
    assert isinstance(model, Embedder)
    extract(model, CONFIG.transform, {"test": PackedDataset(packed, "test")}, folder, CPU)


def test_rows_are_in_dataset_order_and_each_is_its_own_image_s(packed: Path, tmp_path: Path) -> None:
    extract_to(0, packed, tmp_path)
    embeddings, labels = load_embeddings(tmp_path, "test")
    dataset = PackedDataset(packed, "test")
    assert embeddings.dtype == np.float32
    assert np.array_equal(labels, dataset.labels)
    model = build_system(CONFIG, 4, 0, CPU).model.eval()
    for index in (0, 17, len(dataset) - 1):
        alone = model.embed(plain_view(dataset.image(index), CONFIG.transform)[None])
        np.testing.assert_allclose(embeddings[index], alone.detach().numpy()[0], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1.0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_two_workers_write_the_bytes_of_one(many: Path, tmp_path: Path) -> None:
    extract_to(0, many, tmp_path / "one")
    spawn(extract_to, 2, many, tmp_path / "two")
    manifest = json.loads((tmp_path / "one/manifest.json").read_text())["test"]
    assert (manifest["rows"], manifest["dimensions"], len(manifest["shards"])) == (300, 8, 3)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def embeds_on_its_own_machine(rank: int, job: Job, folder: Path, environment: dict[str, str]) -> None:
    """Embed with a cache of this worker's own; the second worker's machine is slow to send files."""
    os.environ.update(environment)
    push = Store.push
    if rank == 1:
        Store.push = lambda *given, **named: (time.sleep(1), push(*given, **named))
    work.embed(replace(job, cache=str(folder / f"machine-{rank}")), CPU, lambda message: None)
    if rank == 0:  # the flow goes on when rank 0 has ended the job
        embeddings, _ = load_embeddings(Store(job.store, folder / "driver").pull(job.embed_key), "test")
        assert len(embeddings) == 300


@pytest.mark.slow
def test_a_job_is_done_when_the_shards_of_all_machines_are_in_the_bucket(many: Path, tmp_path: Path, s3_bucket: str) -> None:
    address = f"s3://{s3_bucket}/store"
    Store(address, tmp_path / "driver").push("data/x", many)
    spec = RunSpec(dataset="d", variant="v", seed=0, training=small_training(num_epochs=0), evaluation=EvaluationConfig())
    job = Job("embed", spec, "data/x", str(many), "train/x", "embed/x", address, str(tmp_path / "machine-0"))
    work.train(job, CPU, lambda message: None)
    spawn(embeds_on_its_own_machine, 2, job, tmp_path, {name: value for name, value in os.environ.items() if name.startswith("AWS_")})


@pytest.mark.parametrize("num_rows", [1, 127, 300, 5_924, 60_502, 100_000_000])
def test_shards_are_whole_batches_and_bounded(num_rows: int) -> None:
    rows = shard_rows(num_rows)
    assert rows % BATCH_SIZE == 0
    assert rows <= MAX_SHARD_ROWS
    assert -(-num_rows // rows) <= 32 or rows == MAX_SHARD_ROWS


def test_a_folder_that_cannot_be_written_is_named(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StoreError, match="taken"):
        extract_to(0, packed, tmp_path / "taken")


def test_query_and_gallery_are_scored_against_each_other(tmp_path: Path) -> None:
    options = {**OPTIONS, "images_per_class": 10, "layout": "inshop"}
    materialise("synthetic", options, tmp_path / "raw")
    prepare("synthetic", tmp_path / "raw", tmp_path / "packed", options)
    model = build_system(CONFIG, 2, 0, CPU).model
    assert isinstance(model, Embedder)
    roles = {role: PackedDataset(tmp_path / "packed", role) for role in ("query", "gallery")}
    extract(model, CONFIG.transform, roles, tmp_path / "embed", CPU)
    metrics = evaluate_run(EvaluationConfig(recall_at=(1,)), 0, [], tmp_path / "embed", tmp_path / "out")
    Drawing("t", "cosine", 0, [], tmp_path / "packed", tmp_path / "embed").draw(tmp_path / "out")
    queries, query_labels = load_embeddings(tmp_path / "embed", "query")
    gallery, gallery_labels = load_embeddings(tmp_path / "embed", "gallery")
    hits = gallery_labels[(queries @ gallery.T).argmax(axis=1)] == query_labels
    assert metrics["recall@1"] == pytest.approx(hits.mean())
    assert metrics["num_queries"] == len(queries)
    assert json.loads((tmp_path / "out/metrics.json").read_text()) == metrics
    assert {path.name for path in (tmp_path / "out/figures").iterdir()} == {"similarities.png", "gallery.png", "map.png"}


def test_a_file_that_is_no_array_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY and then nonsense")
    with pytest.raises(EvaluationError, match=r"x\.npy: not an array"):
        load_array(tmp_path / "x.npy")
