"""The training loop in one process: repeatable, resumable bit for bit, and clear about what it cannot do."""

import json
import math
from pathlib import Path

import pytest
import torch

from dml_core.data.store.packed import PackedDataset
from dml_core.errors import ConfigError, StoreError, TrainingError
from dml_core.training.checkpoint import CHECKPOINT_FILE, load_checkpoint
from dml_core.training.config import TrainingConfig
from dml_core.training.history import HISTORY_FILE, Progress, read_history
from dml_core.training.loop import fit
from tests.conftest import small_training

CPU = torch.device("cpu")


def train(config: TrainingConfig, packed: Path, folder: Path, seed: int = 0, report=lambda progress: None) -> dict[str, torch.Tensor]:
    return fit(config, PackedDataset(packed, "train"), seed, folder, CPU, report=report).state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_same_seed_gives_the_same_weights_and_another_does_not(packed: Path, tmp_path: Path) -> None:
    first = train(small_training(), packed, tmp_path / "a")
    assert same(first, train(small_training(), packed, tmp_path / "b"))
    assert (tmp_path / "a" / HISTORY_FILE).read_bytes() == (tmp_path / "b" / HISTORY_FILE).read_bytes()
    assert not same(first, train(small_training(), packed, tmp_path / "c", seed=1))


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(packed: Path, tmp_path: Path, epoch: int) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.epoch_ended and progress.epoch == epoch:
            raise StoppedError

    undisturbed = train(small_training(), packed, tmp_path / "undisturbed")
    with pytest.raises(StoppedError):
        train(small_training(), packed, tmp_path / "resumed", report=interrupt)
    # A crash may also leave steps of an epoch without its checkpoint, the last line of them cut short.
    with (tmp_path / "resumed" / HISTORY_FILE).open("a") as file:
        file.write(json.dumps({"epoch": epoch + 1, "step": 99, "loss": 0.0}) + '\n{"epoch": 1, "st')
    assert same(undisturbed, train(small_training(), packed, tmp_path / "resumed"))
    assert read_history(tmp_path / "resumed") == read_history(tmp_path / "undisturbed")


def test_a_finished_run_is_not_trained_further(packed: Path, tmp_path: Path) -> None:
    finished = train(small_training(), packed, tmp_path)
    assert same(finished, train(small_training(), packed, tmp_path, report=lambda progress: pytest.fail("trained again")))


def test_history_has_every_step_with_the_rate_of_its_schedule(packed: Path, tmp_path: Path) -> None:
    train(small_training(), packed, tmp_path)
    history = read_history(tmp_path)
    assert [row["step"] for row in history] == list(range(15))  # 36 images in batches of 8: 5 steps, 3 epochs
    assert history[0]["learning_rate_factor"] == 0.0  # warm-up over the first epoch
    halfway = history[7]["learning_rate_factor"]  # 1.4 of 3 epochs done
    assert halfway == pytest.approx(0.5 * (1 + math.cos(math.pi * 1.4 / 3)))


def test_training_lowers_the_loss(packed: Path, tmp_path: Path) -> None:
    train(small_training(num_epochs=12), packed, tmp_path)
    losses = [row["loss"] for row in read_history(tmp_path)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_no_epochs_keeps_the_initial_weights_and_still_leaves_a_checkpoint(packed: Path, tmp_path: Path) -> None:
    untrained = train(small_training(num_epochs=0), packed, tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint is not None
    assert same(untrained, checkpoint["system"])
    assert read_history(tmp_path) == []


def test_a_loss_that_is_not_finite_stops_with_one_line_and_keeps_the_last_checkpoint(packed: Path, tmp_path: Path) -> None:
    config = small_training("softmax", optimiser={"learning_rate": 1e30})
    with pytest.raises(TrainingError, match=r"loss 'softmax' is not finite at epoch \d, step \d .*lower the learning rate"):
        train(config, packed, tmp_path)


def test_a_loss_that_needs_classes_in_batches_refuses_a_shuffled_sampler(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"k_by_n"):
        train(small_training("tuplet_margin"), packed, tmp_path)
    assert not (tmp_path / CHECKPOINT_FILE).exists()


def test_a_folder_that_cannot_be_written_is_named(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a folder should be")
    with pytest.raises(StoreError, match=r"run"):
        train(small_training(), packed, tmp_path / "run")


def test_bfloat16_trains(packed: Path, tmp_path: Path) -> None:
    train(small_training(precision="bfloat16", num_epochs=8), packed, tmp_path)
    losses = [row["loss"] for row in read_history(tmp_path)]
    assert sum(losses[-5:]) < sum(losses[:5])
