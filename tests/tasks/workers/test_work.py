"""A worker's steps without Ray: what they leave in the folder of a run."""

import os
import pickle
import signal
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from dml_core.errors import ConfigError, DataError, StoreError, TrainingError
from dml_core.evaluation.config import EvaluationConfig
from tasks.runs.identity import STEP_MODULES, source_digests
from tasks.runs.specs import RunSpec
from tasks.runs.surroundings import surroundings, versions
from tasks.workers import jobs, work, worker
from tasks.workers.jobs import InfrastructureError, Job, LostWorkersError
from tests.conftest import small_training
from tests.forked import forked

CPU = torch.device("cpu")


def job_for(packed: Path, tmp_path: Path) -> Job:
    spec = RunSpec(dataset="d", variant="v", seed=0, training=small_training(num_epochs=2), evaluation=EvaluationConfig())
    return Job("", spec, "", str(packed), "train/x", "embed/x", str(tmp_path / "store"), str(tmp_path / "cache"), 0)


def test_a_run_whose_checkpoint_was_rejected_is_not_counted_as_resumed(packed: Path, tmp_path: Path) -> None:
    job, checkpoint = job_for(packed, tmp_path), tmp_path / "store/train/x/checkpoint.pt"
    assert not work.train(job, CPU, lambda message: None)["taken_up"]
    assert work.train(job, CPU, lambda message: None)["taken_up"]
    checkpoint.write_bytes(b"damaged")
    notes: list[str | None] = []
    assert not work.train(job, CPU, lambda message: notes.append(message.note))["taken_up"]
    assert "training begins from the initial weights" in str(notes[0])


@pytest.mark.parametrize(
    ("error", "said", "kind"),
    [
        (
            RuntimeError("Connection closed by peer\nException raised from read at pair.cc:534\nframe #0: ..."),
            "RuntimeError: Connection closed by peer",
            LostWorkersError,
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.; "
            "lower sampler.batch_size or scale.runs_per_gpu, or set embed_at_once",
            TrainingError,
        ),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), "RuntimeError: CUBLAS_STATUS_ALLOC_FAILED", TrainingError),
        (ValueError("the margin is too large"), "ValueError: the margin is too large", TrainingError),
        (PermissionError(13, "Permission denied"), "PermissionError: [Errno 13] Permission denied", LostWorkersError),
        (RuntimeError("worker 1: OSError: [Errno 5] x"), "RuntimeError: worker 1: OSError: [Errno 5] x", LostWorkersError),
    ],
)
def test_a_fault_of_a_worker_is_one_line(
    error: Exception, said: str, kind: type[TrainingError], packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow prints it; errors of torch.distributed and CUDA have dozens."""

    def fail(*_: object) -> dict[str, object]:
        raise error

    board = MagicMock()
    monkeypatch.setattr(worker, "ray", MagicMock())
    monkeypatch.setitem(worker.WORK, "train", fail)
    with pytest.raises(type(error)):
        worker._do(replace(job_for(packed, tmp_path), step="train"), CPU, board, MagicMock())
    told = pickle.loads(pickle.dumps(board.end.remote.call_args.kwargs["fault"]))
    assert (str(told), type(told)) == (said, kind)


def test_a_worker_with_other_code_or_libraries_than_the_flow_names_machine_and_difference_and_does_not_train(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node without the last `git pull`, or `make .venv/.done` after it: its network would be stored as one of the flow's."""
    board, done = MagicMock(), MagicMock(return_value={})
    monkeypatch.setattr(worker, "ray", MagicMock())
    monkeypatch.setattr(jobs.socket, "gethostname", lambda: "node-2")
    monkeypatch.setitem(worker.WORK, "train", done)
    sources = source_digests((*STEP_MODULES["train"], "tasks.remote_images"))
    packages = versions() | {"torch": f"{torch.__version__.partition('+')[0]}+cu999", "faiss-cpu": "0.1"}
    job = replace(job_for(packed, tmp_path), step="train", sources=sources, packages=packages)
    worker._do(job, CPU, MagicMock(), MagicMock())
    assert done.call_count == 1

    other = sources | {"dml_core/training/loop.py": "edited", "dml_core/losses/new.py": "missing here"}
    with pytest.raises(InfrastructureError):
        worker._do(replace(job, sources=other), CPU, board, MagicMock())
    reason = "this machine (node-2) has other code than the flow, or was edited since (dml_core/training/loop.py, dml_core/losses/new.py)"
    error = board.end.remote.call_args.kwargs["error"]
    assert isinstance(error, InfrastructureError)
    assert str(error) == f"d / v / seed 0: {reason}: rerun with the same code everywhere"

    with pytest.raises(InfrastructureError):
        worker._do(replace(job, packages=packages | {"numpy": "0.1"}), CPU, board, MagicMock())
    remedy = "install the same on every machine (make .venv/.done, or its image built again)"
    reason = f"this machine (node-2) has numpy {np.__version__}, the flow 0.1: {remedy}"
    assert str(board.end.remote.call_args.kwargs["error"]) == f"d / v / seed 0: {reason}"
    assert done.call_count == 1

    of_before = replace(job, sources=other)  # pickled by a flow that started before an update
    del of_before.__dict__["packages"]
    with pytest.raises(InfrastructureError, match="has other code than the flow"):
        worker._do(pickle.loads(pickle.dumps(of_before)), CPU, board, MagicMock())


def test_on_a_cluster_a_training_reports_its_machine(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = MagicMock()
    monkeypatch.setattr(worker, "ray", MagicMock())
    job = job_for(packed, tmp_path)

    def facts_of(step: str, is_cluster: bool) -> dict[str, Any]:
        worker._do(replace(job, step=step), CPU, board, MagicMock(on_a_cluster=is_cluster, stop_wanted=lambda: False))
        return dict(board.end.remote.call_args.kwargs["facts"])

    assert facts_of("train", True)["surroundings"] == surroundings("cpu", torch.get_num_threads())
    assert not any("surroundings" in facts for facts in (facts_of("train", False), facts_of("embed", True)))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TrainingError("the loss is not finite"), TrainingError),
        (ConfigError("a batch of 1 image"), TrainingError),
        (StoreError("x: No space left on device"), StoreError),
        (DataError("x: its images cannot be read"), DataError),
    ],
)
def test_an_error_of_a_worker_tells_whether_the_settings_of_the_run_may_be_the_reason(
    error: Exception, kind: type[Exception], packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search leaves out settings that cannot be trained; it did so after a full disk, too."""
    board = MagicMock()
    monkeypatch.setattr(worker, "ray", MagicMock())
    monkeypatch.setitem(worker.WORK, "train", MagicMock(side_effect=error))
    with pytest.raises(type(error)):
        worker._do(replace(job_for(packed, tmp_path), step="train"), CPU, board, MagicMock())
    told = pickle.loads(pickle.dumps(board.end.remote.call_args.kwargs["error"]))
    assert type(told) is kind
    assert str(told) == f"d / v / seed 0: {error}"


def killed_while_it_saves(job: Job) -> None:
    save = torch.save

    def save_and_die(state: Any, file: IO[bytes]) -> None:
        save(state, file)
        file.flush()
        if state["num_epochs_done"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save_and_die
    work.train(job, CPU, lambda message: None)


def test_what_a_killed_worker_was_writing_is_removed_and_what_was_set_aside_stays(packed: Path, tmp_path: Path) -> None:
    job, folder = job_for(packed, tmp_path), tmp_path / "store/train/x"
    for _ in range(2):
        assert forked(killed_while_it_saves, job) == -signal.SIGKILL
        assert len(list(folder.glob(".checkpoint.pt.*"))) == 1, "of the last one killed only"
    (folder / ".checkpoint.pt.damaged-1").write_bytes(b"to be looked at")
    work.train(job, CPU, lambda message: None)
    assert sorted(path.name for path in folder.iterdir()) == [".checkpoint.pt.damaged-1", "checkpoint.pt", "history.jsonl"]
