"""The steps of a run that decodes on its device: on the CPU, the results of decoding in loader processes."""

from pathlib import Path

import pytest
import torch

from dml_core.data.views import device_decoding
from dml_core.evaluation.config import EvaluationConfig
from dml_core.training.history import read_history
from tasks.runs.embeddings import load_embeddings
from tasks.runs.specs import RunSpec
from tasks.workers import work
from tasks.workers.jobs import Job
from tests.conftest import small_training

CPU = torch.device("cpu")


def test_training_validation_and_embedding_decode_alike(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image that a step of the run shows the network is decoded on the device, and each step has the same numbers."""
    for module in ("dml_core.training.loop", "tasks.workers.embedding"):
        monkeypatch.setattr(f"{module}.check_decoder", lambda transform, device: None)  # it refuses the CPU
    decode, counts, results = device_decoding.decode_jpeg, [], []
    monkeypatch.setattr(device_decoding, "decode_jpeg", lambda jpegs, **more: counts.append(len(jpegs)) or decode(jpegs, **more))
    for decoder in ("cpu", "nvjpeg"):
        training = small_training(validation={"share": 0.5, "seed": 1}, num_epochs=2, transform={"decoder": decoder})
        spec = RunSpec(dataset="d", variant="v", seed=0, training=training, evaluation=EvaluationConfig())
        job = Job("", spec, "", str(packed), "train/x", "embed/x", str(tmp_path / decoder), str(tmp_path / "cache"), 0)
        work.train(job, CPU, lambda message: None)
        assert sum(counts) == (0 if decoder == "cpu" else 2 * (18 + 18))  # each epoch trains on half of the classes and scores the others
        work.embed(job, CPU, lambda message: None)
        results.append((load_embeddings(tmp_path / decoder / "embed/x", "test")[0], read_history(tmp_path / decoder / "train/x")))
    assert sum(counts) == 4 * 18 + 36
    assert (results[0][0] == results[1][0]).all()
    assert results[0][1] == results[1][1]
