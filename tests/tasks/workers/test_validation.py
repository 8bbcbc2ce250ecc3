"""A run that holds classes out: the workers' steps without Ray, and the recorded results."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.splits import open_role
from dml_core.data.views.batches import Loader, TestView
from dml_core.evaluation.config import EvaluationConfig
from dml_core.training import pulse, validation
from dml_core.training.checkpoints.file import load_checkpoint
from dml_core.training.history import read_history
from dml_core.training.loop import build_system
from dml_core.training.validation import METRIC, HeldOutRecall
from tasks.runs.embeddings import load_embeddings
from tasks.runs.specs import RunSpec
from tasks.scores.drawing import Drawing
from tasks.scores.evaluation import evaluate_run
from tasks.workers import work
from tasks.workers.jobs import Job
from tests.conftest import small_training

CPU = torch.device("cpu")


def job_for(packed: Path, state: Path, role: str) -> Job:
    training = small_training(validation={"share": 0.5, "seed": 1}, num_epochs=1)
    spec = RunSpec.model_validate(
        {"dataset": "d", "variant": "v", "seed": 0, "training": training, "evaluation": EvaluationConfig.model_validate({"role": role})}
    )
    return Job("", spec, "", str(packed), "train/x", f"embed/{role}", str(state / "store"), str(state / "cache"), 0)


@pytest.fixture(scope="module")
def state(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State of a run trained with two of the four training classes held out."""
    state = tmp_path_factory.mktemp("state")
    work.train(job_for(packed, state, "test"), CPU, lambda message: None)
    return state


@pytest.mark.parametrize("role", ["validation", "test"])
def test_the_held_out_classes_are_scored_or_the_test_classes(packed: Path, state: Path, role: str) -> None:
    job = job_for(packed, state, role)
    work.embed(job, CPU, lambda message: None)
    store = state / "store"
    split = json.loads((store / "train/x/validation_split.json").read_text())
    assert sorted(split["train"] + split["validation"]) == PackedDataset(packed, "train").class_names
    assert list(json.loads((store / job.embed_key / "manifest.json").read_text())) == [role]
    expected = PackedDataset(packed, "train", tuple(split["validation"])) if role == "validation" else PackedDataset(packed, "test")
    embeddings_ND, labels_N = load_embeddings(store / job.embed_key, role)
    assert labels_N.tolist() == expected.labels.tolist()
    checkpoint = load_checkpoint(store / "train/x")
    assert checkpoint is not None
    system = build_system(job.spec.training, 2, 0, CPU)  # its classifier has the two remaining classes
    system.load_state_dict(checkpoint["system"])
    ((images, _),) = Loader(expected).batches([np.arange(len(expected))], TestView(job.spec.training.transform))
    with torch.no_grad():
        assert torch.equal(system.eval().model.embed(images), torch.from_numpy(embeddings_ND))
    history, validation = read_history(store / "train/x"), job.spec.training.validation
    metrics = evaluate_run(job.spec.evaluation, 0, history, store / job.embed_key, state / role)
    Drawing("t", "cosine", 0, history, packed, store / job.embed_key, validation).draw(state / role)
    assert metrics["num_queries"] == len(expected)
    assert (state / role / "figures/gallery.png").stat().st_size > 1000


def test_no_step_of_training_sees_a_held_out_image(packed: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the scoring after each epoch sees held-out images, and it sees no others."""
    seen: dict[bool, set[str]] = {False: set(), True: set()}
    scoring: list[bool] = []
    image, score = PackedDataset.image, HeldOutRecall.__call__

    def scored(self: HeldOutRecall, model: nn.Module) -> dict[str, float]:
        scoring.append(True)
        found = score(self, model)
        scoring.clear()
        return found

    monkeypatch.setattr(
        PackedDataset, "image", lambda dataset, index: seen[bool(scoring)].add(dataset.paths[index]) or image(dataset, index)
    )
    monkeypatch.setattr(HeldOutRecall, "__call__", scored)
    job = job_for(packed, state / "again", "test")
    work.train(job, CPU, lambda message: None)
    validation = job.spec.training.validation
    assert seen == {scored: set(open_role(packed, role, validation).paths) for scored, role in ((False, "train"), (True, "validation"))}
    assert len(seen[False]) == len(seen[True]) == 18
    history = read_history(Path(job.cache).parent / "store/train/x")
    assert [METRIC in row for row in history] == [False] * (len(history) - 1) + [True]


def test_scoring_an_epoch_beats_with_each_batch(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All images of a large test set take longer than workers may be silent."""
    beats = Counter[int]()
    job = job_for(packed, tmp_path, "test")
    spec = job.spec.model_copy(update={"training": small_training(num_epochs=1, recall_every_epochs=1)})
    for batch_size in (100, 4):
        monkeypatch.setattr(validation, "BATCH_SIZE", batch_size)
        monkeypatch.setattr(pulse, "_listeners", [lambda patience, of=batch_size: beats.update({of: patience})])
        work.train(replace(job, spec=spec, train_key=f"train/{batch_size}"), CPU, lambda message: None)
    assert beats[4] >= beats[100] + 12, "72 images"
