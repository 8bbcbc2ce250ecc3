"""A run that holds classes out: what the workers do in each step, here without Ray, and what is recorded of it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dml_core.data.batches import TestView, iterate_batches
from dml_core.data.splits import open_role
from dml_core.data.store import PackedDataset
from dml_core.evaluation.config import EvaluationConfig
from dml_core.training.checkpoint import load_checkpoint
from dml_core.training.history import read_history
from dml_core.training.loop import build_system
from tasks import ray_worker
from tasks.embedding import load_embeddings
from tasks.evaluation import evaluate_run
from tasks.jobs import Job
from tasks.specs import RunSpec
from tests.conftest import small_training

CPU = torch.device("cpu")
BOARD: Any = SimpleNamespace(progress=SimpleNamespace(remote=lambda *_: None))


def job_for(packed: Path, state: Path, role: str) -> Job:
    training = small_training(validation={"share": 0.5, "seed": 1}, num_epochs=1)
    spec = RunSpec.model_validate(
        {"dataset": "d", "variant": "v", "seed": 0, "training": training, "evaluation": EvaluationConfig.model_validate({"role": role})}
    )
    return Job("1", "", spec, "", str(packed), "train/x", f"embed/{role}", str(state / "store"), str(state / "cache"), 0)


@pytest.fixture(scope="module")
def state(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run with two of the four training classes held out has been trained."""
    state = tmp_path_factory.mktemp("state")
    ray_worker._train(job_for(packed, state, "test"), CPU, BOARD)
    return state


@pytest.mark.parametrize("role", ["validation", "test"])
def test_the_held_out_classes_are_scored_or_the_test_classes(packed: Path, state: Path, role: str) -> None:
    job = job_for(packed, state, role)
    ray_worker._embed(job, CPU, BOARD)
    store = state / "store"
    split = json.loads((store / "train/x/validation_split.json").read_text())
    assert sorted(split["train"] + split["validation"]) == PackedDataset(packed, "train").class_names
    assert list(json.loads((store / job.embed_key / "manifest.json").read_text())) == [role]
    expected = PackedDataset(packed, "train", tuple(split["validation"])) if role == "validation" else PackedDataset(packed, "test")
    embeddings_ND, labels_N = load_embeddings(store / job.embed_key, role)
    assert labels_N.tolist() == expected.labels.tolist()
    checkpoint = load_checkpoint(store / "train/x")
    assert checkpoint is not None
    system = build_system(job.spec.training, 2, 0, CPU)  # its classifier has the two classes that are left
    system.load_state_dict(checkpoint["system"])
    ((images, _),) = iterate_batches(expected, [np.arange(len(expected))], TestView(job.spec.training.transform), 0)
    with torch.no_grad():
        assert torch.equal(system.eval().model.embed(images), torch.from_numpy(embeddings_ND))
    history, validation = read_history(store / "train/x"), job.spec.training.validation
    metrics = evaluate_run(job.spec.evaluation, 0, "t", history, packed, store / job.embed_key, state / role, validation)
    assert metrics["num_queries"] == len(expected)
    assert (state / role / "figures/gallery.png").stat().st_size > 1000


def test_no_step_of_training_sees_a_held_out_image(packed: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    image = PackedDataset.image
    monkeypatch.setattr(PackedDataset, "image", lambda dataset, index: seen.add(dataset.paths[index]) or image(dataset, index))
    job = job_for(packed, state / "again", "test")
    ray_worker._train(job, CPU, BOARD)
    assert seen == set(open_role(packed, "train", job.spec.training.validation).paths)
    assert len(seen) == 18
