"""Files that a stopped worker leaves in a store, and the effect of SIGTERM on its process, without Ray."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dml_core.evaluation.config import EvaluationConfig
from dml_core.training.checkpoints import writing
from dml_core.training.checkpoints.file import CHECKPOINT_FILE, load_checkpoint
from dml_core.training.checkpoints.writing import InterruptedRunError
from dml_core.training.history import HISTORY_FILE
from tasks.runs.specs import RunSpec
from tasks.storage import Store
from tasks.workers import work
from tasks.workers.jobs import Job
from tests.conftest import small_training

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
# A small worker: the main thread is free and another works; it prints when SIGTERM is handled, and ends when it has arrived.
PROCESS = """
import sys, threading, time
from tasks.workers import stopping

stopping.heed_sigterm()

def work():
    with stopping.training():
        print("training", flush=True)
        while not stopping.has_come():
            time.sleep(0.01)
        print("has come", flush=True)
        time.sleep(float(sys.argv[2]))

if sys.argv[1] == "training":
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        time.sleep(0.01)
else:
    print("idle", flush=True)
    while True:
        time.sleep(0.01)  # one long sleep would miss a signal that comes just before it
"""


def test_a_stopped_run_is_gone_on_from_on_another_machine(
    packed: Path, tmp_path: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint, from the middle of an epoch, is in the bucket before the workers end."""
    monkeypatch.setattr(writing, "LOOK_SECONDS", 0.0)
    spec = RunSpec(dataset="d", variant="v", seed=0, training=small_training(), evaluation=EvaluationConfig())
    there = f"s3://{s3_bucket}/store"
    job = Job("train", spec, "data/x", str(packed), "train/x", "embed/x", there, str(tmp_path / "one"), 0)
    Store(there, tmp_path / "driver").push(job.dataset_key, packed)
    asked: list[int] = []

    def stop_wanted() -> bool:
        asked.append(1)
        return len(asked) == 8

    with pytest.raises(InterruptedRunError):
        work.train(job, CPU, lambda message: None, stop_wanted=stop_wanted)
    found = load_checkpoint(Store(there, tmp_path / "driver").pull("train/x"))
    assert found is not None
    assert (found["num_epochs_done"], len(found["under_way"]["rows"])) == (1, 3)  # 5 steps an epoch
    facts = work.train(replace(job, cache=str(tmp_path / "two")), CPU, lambda message: None)
    assert facts["taken_up"]
    work.train(replace(job, store=str(tmp_path / "undisturbed")), CPU, lambda message: None)
    ended = Store(there, tmp_path / "driver").pull("train/x")
    for name in (CHECKPOINT_FILE, HISTORY_FILE):
        assert (ended / name).read_bytes() == (tmp_path / "undisturbed/train/x" / name).read_bytes()


@pytest.mark.parametrize(
    ("doing", "lines", "code"),
    [
        (("training", "0"), ["training", "has come"], 0),  # it ends by itself after writing its checkpoint
        (("idle", "0"), ["idle"], 143),
    ],
)
def test_sigterm_waits_for_training_alone(doing: tuple[str, str], lines: list[str], code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROCESS, *doing], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == lines[0]
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0].split("\n")[:-1] == lines[1:]
    assert process.returncode == code


def test_a_second_sigterm_ends_a_worker_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROCESS, "training", "60"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in ("training", "has come"):
        assert process.stdout.readline().strip() == line
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
