"""A run that is stopped or killed in the middle of an epoch ends in the same bytes as an undisturbed one, whatever its state."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dml_core.config import merge, parse
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import StoreError
from dml_core.training import loop, validation
from dml_core.training.checkpoints import writing
from dml_core.training.checkpoints.file import CHECKPOINT_FILE
from dml_core.training.checkpoints.writing import InterruptedRunError, Saving
from dml_core.training.config import TrainingConfig
from dml_core.training.history import HISTORY_FILE
from dml_core.training.loop import build_system, fit
from dml_core.training.parallel.workers import TrainingSystem
from dml_core.training.pulse import listen
from tests.conftest import small_training
from tests.training.stopping import checkpoint_of
from tests.workers import spawn

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
HEATED = {"loss": {"name": "heated_up_softmax", "options": {"heat_from": 0.34, "schedule": "gentle"}}}
RUNS: dict[str, TrainingConfig] = {
    "momentum": small_training(),
    "average, kept epochs": small_training(average={"decay": 0.8, "after": 0.34}, keep_epochs=("oracle",)),
    "heated alpha": parse(TrainingConfig, merge(small_training("heated_up_softmax").model_dump(), HEATED), "test"),
    "mined negatives": small_training("triplet_global", sampler={"kind": "mined_triplets", "batch_size": 9}),
    "cross-batch memory": small_training(
        "contrastive",
        cross_batch_memory={"size": 12, "after_epochs": 1},
        sampler={"kind": "k_by_n", "num_classes_per_batch": 4, "num_samples_per_class": 2},
    ),
    "dropout of the loss": parse(
        TrainingConfig,
        merge(small_training("sgsl").model_dump(), {"loss": {"options": {"dropout": 0.3}}, "model": {"head": {"kind": "bn_neck"}}}),
        "test",
    ),
    "dropout of the network": small_training(num_epochs=2, warm_up_batchnorm=True),
    "dropout of the network in chunks": small_training(num_epochs=2, embed_at_once=3),
    "average of a cross-batch memory": small_training(
        "contrastive",
        cross_batch_memory={"size": 12, "after_epochs": 1},
        sampler={"kind": "k_by_n", "num_classes_per_batch": 4, "num_samples_per_class": 2},
        average={"decay": 0.8, "after": 0.34},
    ),
    "drawn negatives, BatchNorm": small_training(
        "tuplet_margin",
        {"backbone": {"name": "small_cnn", "width": 8}, "head": {"kind": "bn", "embedding_dim": 8}},
        sampler={"kind": "k_by_n", "num_classes_per_batch": 4, "num_samples_per_class": 2},
    ),
}


def with_dropout(*arguments: Any) -> TrainingSystem:
    system = build_system(*arguments)
    system.model.pooling = torch.nn.Sequential(system.model.pooling, torch.nn.Dropout(0.3))
    return system


def train(config: TrainingConfig, packed: Path, folder: Path, stop_after: int | None = None, every: int | None = None) -> None:
    """Train to the end, or until `stop_after` steps of this call are done."""
    asked = [0]

    def stop_wanted() -> bool:
        asked[0] += 1
        return asked[0] == stop_after

    _, tested, _ = validation.scorers(packed, config, validation.ScoredImages(CPU))
    how = Saving(every_steps=every, in_background=True, stop_wanted=stop_wanted)
    fit(config, PackedDataset(packed, "train"), 0, folder, CPU, identity="a run", score_test=tested, saving=how)


def left_by(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in (CHECKPOINT_FILE, HISTORY_FILE)]


@pytest.fixture(autouse=True)
def _look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LOOK_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("name", "last_batch"),
    [*((name, "four") for name in RUNS), ("momentum", "one"), ("momentum", "eight"), ("average, kept epochs", "one")],
)
def test_stopped_again_and_again_a_run_ends_in_the_bytes_of_one_that_was_not(
    packed_with: Callable[[str], Path], tmp_path: Path, name: str, last_batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, packed = RUNS[name], packed_with(last_batch)
    if name.startswith("dropout of the network"):
        monkeypatch.setattr(loop, "build_system", with_dropout)
    train(config, packed, tmp_path / "undisturbed")
    num_stops = 0
    while True:
        try:
            train(config, packed, tmp_path / "stopped", stop_after=1 + num_stops % 3)
            break
        except InterruptedRunError:
            num_stops += 1
            state = checkpoint_of(tmp_path / "stopped")
            assert len(state["under_way"]["rows"]) > 0
    assert num_stops >= 5
    assert left_by(tmp_path / "stopped") == left_by(tmp_path / "undisturbed")


def test_checkpoints_by_steps_are_there_and_change_nothing(packed: Path, tmp_path: Path) -> None:
    config = small_training()
    train(config, packed, tmp_path / "undisturbed")
    seen: list[tuple[int, int]] = []

    def look() -> None:
        state = checkpoint_of(tmp_path / "by steps")
        seen.append((state["num_epochs_done"], len(state.get("under_way", {"rows": []})["rows"])))

    fit(config, PackedDataset(packed, "train"), 0, tmp_path / "by steps", CPU, identity="a run", saving=Saving(every_steps=2, saved=look))
    assert seen == [(0, 2), (0, 4), (1, 0), (1, 1), (1, 3), (2, 0), (2, 2), (2, 4), (3, 0)]  # 5 steps an epoch, one checkpoint at each end
    assert left_by(tmp_path / "by steps") == left_by(tmp_path / "undisturbed")


@pytest.mark.parametrize("every", [5, 1])
def test_a_checkpoint_due_at_the_end_of_an_epoch_that_saves_none_is_written_and_resumed(packed: Path, tmp_path: Path, every: int) -> None:
    """5 steps an epoch, whose ends save nothing before the third."""
    config, data = small_training(checkpoint_every_epochs=3), PackedDataset(packed, "train")
    train(config, packed, tmp_path / "undisturbed")
    seen: list[tuple[int, int]] = []

    def look_and_fail() -> None:
        state = checkpoint_of(tmp_path / "killed")
        seen.append((state["num_epochs_done"], len(state.get("under_way", {"rows": []})["rows"])))
        if seen[-1] == (1, 5):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fit(config, data, 0, tmp_path / "killed", CPU, identity="a run", saving=Saving(every_steps=every, saved=look_and_fail))
    assert [step for step in seen if step[1] == 5] == [(0, 5), (1, 5)]
    train(config, packed, tmp_path / "killed")
    assert left_by(tmp_path / "killed") == left_by(tmp_path / "undisturbed")


def test_checkpoints_by_time(packed: Path, tmp_path: Path) -> None:
    written: list[int] = []
    fit(
        small_training(),
        PackedDataset(packed, "train"),
        0,
        tmp_path,
        CPU,
        saving=Saving(every_minutes=1e-9, saved=lambda: written.append(1)),
    )
    assert len(written) == 3 * 5  # every step: four within an epoch, and its end


def test_a_checkpoint_that_cannot_be_written_in_the_background_ends_the_run(packed: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise StoreError("the store is away")

    with pytest.raises(StoreError, match="the store is away"):
        fit(small_training(), PackedDataset(packed, "train"), 0, tmp_path, CPU, saving=Saving(in_background=True, saved=fail))


def test_a_checkpoint_that_failed_in_the_background_ends_the_run_within_the_next_steps(packed: Path, tmp_path: Path) -> None:
    beats: list[bool] = []
    failed_after: list[int] = []

    def fail() -> None:
        failed_after.append(len(beats))
        raise StoreError("the store is away")

    listen(beats.append)
    try:
        with pytest.raises(StoreError):
            fit(small_training(), PackedDataset(packed, "train"), 0, tmp_path, CPU, saving=Saving(in_background=True, saved=fail))
    finally:
        listen(lambda patience: None)
    assert len(beats) - failed_after[0] < 5, "an epoch has five steps"


def test_every_step_and_every_embedded_batch_beats(packed: Path, tmp_path: Path) -> None:
    beats: list[bool] = []
    listen(beats.append)
    try:
        fit(RUNS["mined negatives"], PackedDataset(packed, "train"), 0, tmp_path, CPU)
    finally:
        listen(lambda patience: None)
    num_steps = len((tmp_path / HISTORY_FILE).read_text().splitlines())
    assert beats.count(False) >= num_steps + 3  # plus the embedded batches at the start of each epoch


def test_what_may_take_long_without_a_beat_is_marked(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download of weights, reading a checkpoint, and waiting for one that is being uploaded."""
    last = [False]
    marked: dict[str, bool] = {}

    def noting(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            marked[name] = last[0]
            return work(*args, **kwargs)

        return noted

    def upload() -> None:
        uploads.append(None)
        time.sleep(0.5)  # more than the steps of an epoch take
        marked[f"upload {len(uploads)} ends"] = last[0]

    uploads: list[None] = []
    for name in ("build_system", "resumable_checkpoint", "_resume"):
        monkeypatch.setattr(loop, name, noting(name, getattr(loop, name)))
    data, config = PackedDataset(packed, "train"), small_training(num_epochs=2)
    listen(lambda patience: last.__setitem__(0, patience))
    try:
        fit(config, data, 0, tmp_path, CPU, saving=Saving(in_background=True, saved=upload))
        fit(config, data, 0, tmp_path, CPU)
    finally:
        listen(lambda patience: None)
    assert marked == dict.fromkeys(("build_system", "resumable_checkpoint", "_resume", "upload 1 ends", "upload 2 ends"), True)


# ---------------------------------------------------------------- three workers: sums of two do not depend on their order


NUM_WORKERS, NUM_STEPS = 3, 4


def fit_on_several(rank: int, packed: Path, folder: Path, kill_after: int | None, stop_after: int | None) -> None:
    writing.LOOK_SECONDS = 0.0
    steps = [0]

    def stop_wanted() -> bool:
        steps[0] += 1
        if steps[0] == kill_after and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank == 1 and steps[0] == stop_after  # one worker is told to stop, all stop

    config = small_training(average={"decay": 0.8, "after": 0.34}, keep_epochs=("oracle",), sampler={"batch_size": 9})
    _, tested, _ = validation.scorers(packed, config, validation.ScoredImages(CPU))
    how = Saving(every_steps=3, in_background=True, stop_wanted=stop_wanted)
    try:
        fit(config, PackedDataset(packed, "train"), 0, folder, CPU, identity="a run", score_test=tested, saving=how)
    except InterruptedRunError:
        (folder / f"stopped-{rank}").touch()


@pytest.fixture(scope="module")
def undisturbed(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of several workers' undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    spawn(fit_on_several, NUM_WORKERS, packed, folder, None, None)
    return folder


@pytest.mark.slow
def test_several_workers_go_on_in_the_middle_of_an_epoch(packed: Path, undisturbed: Path, tmp_path: Path) -> None:
    for name, kill, stop in (("killed", 7, None), ("stopped", None, 9)):
        folder = tmp_path / name
        if kill:
            with pytest.raises(Exception, match="SIGKILL"):
                spawn(fit_on_several, NUM_WORKERS, packed, folder, kill, stop)
        else:
            spawn(fit_on_several, NUM_WORKERS, packed, folder, kill, stop)
            assert len(list(folder.glob("stopped-*"))) == NUM_WORKERS
        state = checkpoint_of(folder)
        rows = state.get("under_way", {"rows": []})["rows"]
        assert NUM_STEPS * state["num_epochs_done"] + len(rows) == {"killed": 6, "stopped": 9}[name]
        spawn(fit_on_several, NUM_WORKERS, packed, folder, None, None)
        assert left_by(folder) == left_by(undisturbed)


@pytest.mark.slow
def test_another_number_of_workers_goes_on_and_ends_near(packed: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Batches are drawn globally, so that another number of workers changes only the order of sums."""
    spawn(fit_on_several, NUM_WORKERS, packed, tmp_path / "fewer", None, 7)
    spawn(fit_on_several, 1, packed, tmp_path / "fewer", None, None)
    several, one = checkpoint_of(undisturbed), checkpoint_of(tmp_path / "fewer")
    for name, value in several["system"].items():
        torch.testing.assert_close(one["system"][name], value, rtol=1e-4, atol=1e-5)
