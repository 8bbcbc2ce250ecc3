"""One training, scored with the weights of its last and of its kept epochs: the workers' steps and the records, without Ray."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.splits import open_role
from dml_core.data.views.batches import Loader, TestView
from dml_core.epochs import EPOCHS, RECALL, Epoch
from dml_core.errors import StoreError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.training.checkpoints.file import CHECKPOINT_FILE, load_checkpoint, weights_of
from dml_core.training.history import read_history
from dml_core.training.loop import build_system
from tasks.runs.embeddings import KEPT_EPOCH, KEPT_EPOCH_FILE, load_embeddings
from tasks.runs.specs import RunSpec
from tasks.scores.evaluation import evaluate_run
from tasks.scores.measuring import load_system
from tasks.workers import work
from tasks.workers.jobs import Job
from tests.damage import DAMAGE
from tests.training.test_kept_epochs import BOTH
from tests.workers import spawn

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def job_for(packed: Path, state: Path, epoch: Epoch) -> Job:
    spec = RunSpec(dataset="d", variant="v", seed=0, training=BOTH, evaluation=EvaluationConfig(epoch=epoch))
    return Job("", spec, "", str(packed), "train/x", f"embed/{epoch}", str(state / "store"), str(state / "cache"), 0)


@pytest.fixture(scope="module")
def state(one_thread: None, packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State of a trained run that keeps both kinds of epoch, with embeddings of each."""
    state = tmp_path_factory.mktemp("state")
    work.train(job_for(packed, state, "last"), CPU, lambda message: None)
    for epoch in EPOCHS:
        work.embed(job_for(packed, state, epoch), CPU, lambda message: None)
    return state


@pytest.mark.parametrize("epoch", EPOCHS)
def test_the_embeddings_are_those_of_the_epoch_s_weights(packed: Path, state: Path, epoch: Epoch) -> None:
    checkpoint = load_checkpoint(state / "store/train/x")
    assert checkpoint is not None
    weights, num_epochs = weights_of(checkpoint, epoch)
    system = build_system(BOTH, len(open_role(packed, "train", BOTH.validation).class_names), 0, CPU)
    system.load_state_dict(weights)
    test = PackedDataset(packed, "test")
    ((images, _),) = Loader(test).batches([np.arange(len(test))], TestView(BOTH.transform))
    embeddings_ND, labels_N = load_embeddings(state / "store/embed" / epoch, "test")
    with torch.no_grad():
        assert torch.equal(system.eval().model.embed(images), torch.from_numpy(embeddings_ND))
    assert labels_N.tolist() == test.labels.tolist()
    of_measurements = load_system(BOTH, 0, packed, state / "store/train/x", epoch)
    assert all(torch.equal(value, of_measurements.state_dict()[name]) for name, value in weights.items())
    kept = state / "store/embed" / epoch / KEPT_EPOCH_FILE
    assert (json.loads(kept.read_text()) if kept.exists() else None) == ({KEPT_EPOCH: num_epochs} if epoch != "last" else None)


def test_the_oracle_s_score_is_the_best_of_its_curve_and_says_its_epoch(packed: Path, state: Path, tmp_path: Path) -> None:
    """The evaluator, on embeddings from files, reproduces the training curve, whose highest score is the oracle's."""
    history = read_history(state / "store/train/x")
    curve = [row[RECALL["oracle"]] for row in history if RECALL["oracle"] in row]
    scores = {
        epoch: evaluate_run(EvaluationConfig(epoch=epoch), 0, history, state / "store/embed" / epoch, tmp_path / epoch) for epoch in EPOCHS
    }
    assert scores["oracle"]["recall@1"] == pytest.approx(max(curve))
    assert scores["oracle"][KEPT_EPOCH] == 1 + int(np.argmax(curve)) < 5
    assert scores["last"]["recall@1"] == pytest.approx(curve[-1]) != scores["oracle"]["recall@1"]
    assert KEPT_EPOCH not in scores["last"]
    assert scores["best_validation"]["recall@1"] == pytest.approx(curve[int(scores["best_validation"][KEPT_EPOCH]) - 1])
    assert json.loads((tmp_path / "oracle/metrics.json").read_text()) == scores["oracle"]


def embed_and_count(rank: int, packed: Path, folder: Path) -> None:
    """Embed as one of two workers, and record how many bytes are pickled for the other."""
    pickled, send = [], dist.broadcast_object_list

    def count(objects: list[Any], src: int) -> None:
        pickled.append(len(pickle.dumps(objects)))
        send(objects, src=src)

    dist.broadcast_object_list = count
    work.embed(job_for(packed, folder, "last"), CPU, lambda message: None)
    (folder / f"{rank}.json").write_text(json.dumps(pickled))


@pytest.mark.slow
def test_two_workers_embed_alike_and_no_weights_are_pickled(packed: Path, state: Path, tmp_path: Path) -> None:
    shutil.copytree(state / "store/train", tmp_path / "store/train")
    spawn(embed_and_count, 2, packed, tmp_path)
    for name in ("manifest.json", *(path.name for path in (state / "store/embed/last").glob("*.npy"))):
        assert (tmp_path / "store/embed/last" / name).read_bytes() == (state / "store/embed/last" / name).read_bytes(), name
    weights = [value for name, value in load_system(BOTH, 0, packed, state / "store/train/x").state_dict().items() if "model." in name]
    assert sum(json.loads((tmp_path / "0.json").read_text())) < sum(value.nbytes for value in weights)


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_of_weights_gives_no_numbers(packed: Path, state: Path, tmp_path: Path, how: str) -> None:
    job = replace(job_for(packed, tmp_path, "oracle"), train_key="train/x")
    folder = tmp_path / "store/train/x"
    folder.mkdir(parents=True)
    (folder / CHECKPOINT_FILE).write_bytes((state / "store/train/x" / CHECKPOINT_FILE).read_bytes())
    DAMAGE[how](folder / CHECKPOINT_FILE)
    with pytest.raises(StoreError, match=r"checkpoint.*(damaged|missing)"):
        work.embed(job, CPU, lambda message: None)
    assert not (tmp_path / "store/embed").exists()


def test_a_run_that_kept_no_such_epoch_says_so(packed: Path, tmp_path: Path) -> None:
    job = job_for(packed, tmp_path, "oracle")
    job = replace(job, spec=job.spec.model_copy(update={"training": BOTH.model_copy(update={"keep_epochs": (), "num_epochs": 1})}))
    work.train(job, CPU, lambda message: None)
    with pytest.raises(StoreError, match=r"has no 'oracle' epoch; train with keep_epochs: \[oracle\]"):
        work.embed(job, CPU, lambda message: None)
