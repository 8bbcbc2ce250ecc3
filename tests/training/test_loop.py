"""The training loop in one process: repeatable, bit-identical when resumed, with clear errors."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dml_core.config import merge
from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import ConfigError, StoreError, TrainingError
from dml_core.models.backbones.registry import build_backbone
from dml_core.training import loop
from dml_core.training.checkpoints.file import CHECKPOINT_FILE, load_checkpoint
from dml_core.training.checkpoints.writing import AT_EPOCHS_ENDS, Saving
from dml_core.training.config import LossChoice, TrainingConfig
from dml_core.training.history import HISTORY_FILE, Progress, read_history
from dml_core.training.loop import fit
from dml_core.training.optimisation.schedules import learning_rate_factor
from dml_core.training.validation import HeldOutRecall, ScoredImages
from tests.conftest import LAST_BATCHES, SYNTHETIC_OPTIONS, small_training
from tests.training.stopping import StoppedError, checkpoint_of, same, stop_after

CPU = torch.device("cpu")


def train(config: TrainingConfig, packed: Path, folder: Path, seed: int = 0, report=lambda progress: None) -> dict[str, torch.Tensor]:
    return fit(config, PackedDataset(packed, "train"), seed, folder, CPU, report=report).state_dict()


def test_the_same_seed_gives_the_same_weights_and_another_does_not(packed: Path, tmp_path: Path) -> None:
    first = train(small_training(), packed, tmp_path / "a")
    assert same(first, train(small_training(), packed, tmp_path / "b"))
    assert (tmp_path / "a" / HISTORY_FILE).read_bytes() == (tmp_path / "b" / HISTORY_FILE).read_bytes()
    assert not same(first, train(small_training(), packed, tmp_path / "c", seed=1))


@pytest.mark.parametrize(("epoch", "last_batch"), list(zip((0, 1, 0), LAST_BATCHES, strict=True)))
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(
    packed_with: Callable[[str], Path], tmp_path: Path, epoch: int, last_batch: str
) -> None:
    packed = packed_with(last_batch)
    undisturbed = train(small_training(), packed, tmp_path / "undisturbed")
    with pytest.raises(StoppedError):
        train(small_training(), packed, tmp_path / "resumed", report=stop_after(epoch + 1))
    # A crash may also leave steps of an epoch without a checkpoint, the last line of them incomplete.
    with (tmp_path / "resumed" / HISTORY_FILE).open("a") as file:
        file.write(json.dumps({"epoch": epoch + 1, "step": 99, "loss": 0.0}) + '\n{"epoch": 1, "st')
    assert same(undisturbed, train(small_training(), packed, tmp_path / "resumed"))
    assert read_history(tmp_path / "resumed") == read_history(tmp_path / "undisturbed")


def drawn_again(folder: Path) -> PackedDataset:
    """Return the training images of `packed` drawn from another seed: the same classes, labels and names, other pixels."""
    options = SYNTHETIC_OPTIONS | LAST_BATCHES["four"] | {"seed": 9}
    materialise("synthetic", options, folder / "raw")
    prepare("synthetic", folder / "raw", folder / "packed", options)
    return PackedDataset(folder / "packed", "train")


def test_without_an_identity_another_run_s_checkpoint_is_not_resumed(packed: Path, tmp_path: Path) -> None:
    """Another configuration, another seed, and another dataset's classes, role or pixels."""
    config, data = small_training("proxy_nca", num_epochs=2), PackedDataset(packed, "train")
    fit(config, data, 0, tmp_path / "shared", CPU)
    faster = config.model_copy(update={"optimiser": config.optimiser.model_copy(update={"learning_rate": 0.5})})
    fewer, tested = PackedDataset(packed, "train", tuple(data.class_names[:3])), PackedDataset(packed, "test")
    redrawn = drawn_again(tmp_path / "redrawn")
    assert (redrawn.class_names, redrawn.labels.tolist(), redrawn.paths) == (data.class_names, data.labels.tolist(), data.paths)
    others = [(faster, data, 0), (config, data, 1), (config.model_copy(update={"num_epochs": 1}), data, 0)]
    for number, (other, dataset, seed) in enumerate([*others, *((config, dataset, 0) for dataset in (fewer, tested, redrawn))]):
        alone = fit(other, dataset, seed, tmp_path / f"alone {number}", CPU).state_dict()
        notes: list[Progress] = []
        shared = fit(other, dataset, seed, tmp_path / "shared", CPU, report=notes.append).state_dict()
        assert same(alone, shared)
        assert "the checkpoint is another run's" in str(notes[0].note)
        assert (tmp_path / f"shared/.checkpoint.pt.damaged-{number + 1}").exists()
    saving_less = config.model_copy(update={"checkpoint_every_epochs": 2})
    fit(saving_less, redrawn, np.int64(0), tmp_path / "shared", CPU, report=lambda progress: pytest.fail("trained again"))


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
    checkpoint = checkpoint_of(tmp_path)
    assert same(untrained, checkpoint["system"])
    assert checkpoint["num_epochs_done"] == 0
    assert read_history(tmp_path) == []


def test_a_loss_that_is_not_finite_stops_with_one_line_and_keeps_the_last_checkpoint(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_training("softmax")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "learning_rate_factor", lambda schedule, epoch, *step: 1e30 if epoch == 1 else 1.0)
        with pytest.raises(TrainingError, match=r"loss 'softmax' is not finite at epoch 1, step 1 .*lower the learning rate"):
            train(config, packed, tmp_path)
    checkpoint = checkpoint_of(tmp_path)
    assert checkpoint["num_epochs_done"] == 1
    assert all(bool(value.isfinite().all()) for value in checkpoint["system"].values())
    assert len(read_history(tmp_path)) == 5
    train(config, packed, tmp_path)  # training resumes at the schedule's own rate
    assert len(read_history(tmp_path)) == 15


def test_without_an_identity_another_file_of_weights_at_its_path_is_another_run(packed: Path, tmp_path: Path) -> None:
    def trained_from(seed: int, folder: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        torch.save(build_backbone(config.model.backbone).state_dict(), weights)
        return train(started, packed, tmp_path / folder)

    config, weights = small_training(num_epochs=1), tmp_path / "weights.pth"
    model = merge(config.model.model_dump(), {"backbone": {"weights": str(weights)}})
    started = small_training(num_epochs=1, model=model)
    trained_from(1, "shared")
    assert same(trained_from(2, "shared"), trained_from(2, "fresh"))


def test_a_crop_size_of_test_images_alone_is_refused(packed: Path, tmp_path: Path) -> None:
    transform = small_training().transform.model_copy(update={"crop": "none", "padding": 0})
    with pytest.raises(ConfigError, match="crop is 'none', so crop_size would crop only test images"):
        train(small_training(transform=transform), packed, tmp_path)
    train(small_training(transform=transform, num_epochs=0), packed, tmp_path)


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


class Reseeded(torch.nn.Module):
    """A dropout that records its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)
        self.seen: list[torch.Tensor] = []

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append(self.drop(torch.ones_like(features)))
        return self.drop(features)


def test_what_a_network_draws_follows_the_seed_and_leaves_the_process_s_stream(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, dropouts = loop.build_system, []

    def with_dropout(*arguments: object) -> object:
        system = build(*arguments)  # type: ignore[arg-type]
        dropouts.append(Reseeded())
        system.model.pooling = torch.nn.Sequential(system.model.pooling, dropouts[-1])
        return system

    monkeypatch.setattr(loop, "build_system", with_dropout)
    trained = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        before = torch.get_rng_state()
        trained.append(train(small_training(num_epochs=2), packed, tmp_path / name, seed=seed))
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(3)
    assert same(trained[0], trained[1])
    masks = [torch.cat([mask.flatten() for mask in dropout.seen]) for dropout in dropouts]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    steps = dropouts[0].seen
    assert len(steps) == 10
    assert not any(torch.equal(one, other) for place, one in enumerate(steps) for other in steps[place + 1 :] if one.shape == other.shape)


@pytest.mark.parametrize("head", ["bn", "bn_neck"])
def test_batches_of_one_image_are_refused_for_batchnorm_alone(packed: Path, tmp_path: Path, head: str) -> None:
    model = {"backbone": {"name": "small_cnn", "width": 8}, "head": {"kind": head, "embedding_dim": 8}}
    with pytest.raises(
        ConfigError, match=r"^sampler: the BatchNorm 'head\..*' cannot normalise batches of one image: raise sampler.batch_size$"
    ):
        train(small_training(model=model, sampler={"batch_size": 1}), packed, tmp_path)
    assert not list(tmp_path.iterdir())
    train(small_training(sampler={"batch_size": 1}, num_epochs=1), packed, tmp_path)
    assert len(read_history(tmp_path)) == 36


@pytest.mark.parametrize("cause", ["mined negatives", "placed centres", "scored epochs", "nothing"])
def test_every_step_trains_in_training_mode_whatever_looked_at_the_network_before(packed: Path, tmp_path: Path, cause: str) -> None:
    """BatchNorm counts the batches seen in training mode."""
    changes = {"mined negatives": {"sampler": {"kind": "mined_triplets", "batch_size": 9}}}.get(cause, {})
    loss = {"mined negatives": "triplet_global", "placed centres": "heated_up_softmax"}.get(cause, "normalised_softmax")
    model = {"backbone": {"name": "small_cnn", "width": 8}, "head": {"kind": "bn", "embedding_dim": 8}}
    config = small_training(loss, model, **changes)
    if cause == "placed centres":
        config = config.model_copy(update={"loss": LossChoice(name=loss, options={"better_init": True})})
    held_out = HeldOutRecall(ScoredImages(CPU), PackedDataset(packed, "test"), config.transform) if cause == "scored epochs" else None
    system = fit(config, PackedDataset(packed, "train"), 0, tmp_path, CPU, validate=held_out)
    num_steps = len(read_history(tmp_path))
    assert num_steps >= 15
    assert int(system.state_dict()["model.head.norm.num_batches_tracked"]) == num_steps
    assert not system.training


def test_a_loss_s_epochs_and_its_learning_rate_reach_the_optimiser(packed: Path, tmp_path: Path) -> None:
    """Heated-up softmax lowers alpha and the learning rate from a given epoch on."""
    config = small_training("heated_up_softmax", num_epochs=3)
    options = {"heat_from": 0.34, "heated_learning_rate_factor": 0.1}
    train(config.model_copy(update={"loss": LossChoice(name="heated_up_softmax", options=options)}), packed, tmp_path)
    last, state = read_history(tmp_path)[-1], load_checkpoint(tmp_path)
    assert state is not None
    expected = 0.1 * learning_rate_factor(config.schedule, 2, 4, 5, 3)
    assert last["learning_rate_factor"] == pytest.approx(expected)
    for group in state["optimiser"]["param_groups"]:
        assert group["lr"] == pytest.approx(expected * group["base_learning_rate"])


def test_a_part_of_the_loss_that_a_step_has_not_counts_as_zero(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 3 and 4 have the part; with a checkpoint after every second step, they are averaged separately from the others."""
    step_of = loop._train_step

    def with_part(run, images, labels_N, sizes, epoch, step):
        values = step_of(run, images, labels_N, sizes, epoch, step)
        return values | ({"part": torch.tensor(2.0)} if step in (3, 4) else {})

    monkeypatch.setattr(loop, "_train_step", with_part)
    for saving in (AT_EPOCHS_ENDS, Saving(every_steps=2)):
        folder = tmp_path / str(saving.every_steps)
        means: list[float] = []
        report = lambda progress, means=means: means.append(progress.metrics["part"]) if progress.epoch_ended else None  # noqa: E731
        fit(small_training(num_epochs=1), PackedDataset(packed, "train"), 0, folder, CPU, report=report, saving=saving)
        assert [row["part"] for row in read_history(folder)] == [0.0, 0.0, 0.0, 2.0, 2.0]
        assert means == [pytest.approx(0.8)]


def test_progress_is_told_twice_a_second_and_at_the_epoch_s_end(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading advances the clock by 1/8 s; it is read at the start of the epoch, after each step, and for each rate."""
    looks = itertools.count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(looks) / 8))
    told: list[Progress] = []
    train(small_training(num_epochs=1), packed, tmp_path, report=told.append)
    losses = [row["loss"] for row in read_history(tmp_path)]
    assert [(message.epoch, message.step, message.num_steps, message.epoch_ended) for message in told] == [
        (0, 4, 5, False),
        (0, 5, 5, True),
    ]
    assert [message.images_per_second for message in told] == [4 * 8 / (5 / 8), 36 / (7 / 8)], "36 images in batches of 8"
    assert told[0].metrics["loss"] == pytest.approx(losses[3])
    assert told[1].metrics["loss"] == pytest.approx(sum(losses) / 5)


def test_a_checkpoint_that_is_due_at_an_epoch_s_end_is_written_once(packed: Path, tmp_path: Path) -> None:
    saved: list[int] = []
    saving = Saving(every_steps=5, saved=lambda: saved.append(int(load_checkpoint(tmp_path)["num_epochs_done"])))
    fit(small_training(num_epochs=3), PackedDataset(packed, "train"), 0, tmp_path, CPU, saving=saving)
    assert saved == [1, 2, 3], "5 steps an epoch"
