"""Averaged weights: equal to an average by hand, also after interruptions, and without effect on the training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dml_core.config import merge, parse
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import ConfigError
from dml_core.training.checkpoints.file import weights_of
from dml_core.training.config import TrainingConfig
from dml_core.training.history import Progress
from dml_core.training.loop import fit
from dml_core.training.optimisation.config import AverageConfig
from tests.conftest import small_training
from tests.training.stopping import StoppedError, checkpoint_of

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
DECAY = 0.7
ONE_STEP = {  # each epoch is one step, so that the checkpoints contain every step's weights
    "num_epochs": 6,
    "sampler": {"kind": "shuffled", "batch_size": 10_000, "drop_last": False},
    "model": {"head": {"kind": "bn"}},
}


def config_of(**changes: object) -> TrainingConfig:
    return parse(TrainingConfig, merge(small_training("proxy_nca").model_dump(), merge(ONE_STEP, changes)), "test")


def train(config: TrainingConfig, packed: Path, folder: Path, stop_after: int | None = None) -> list[dict[str, Tensor]]:
    """Train, and return the weights in the checkpoint after each epoch."""
    found: list[dict[str, Tensor]] = []

    def look(progress: Progress) -> None:
        if progress.epoch_ended:
            found.append(checkpoint_of(folder)["system"])
            if len(found) == stop_after:
                raise StoppedError

    fit(config, PackedDataset(packed, "train"), 0, folder, CPU, report=look, identity="a run")
    return found


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(("after", "begins"), [(0.0, 0), (0.5, 3), (0.99, 5)])
def test_the_result_is_the_average_by_hand_of_the_steps_from_where_it_begins(
    packed: Path, tmp_path: Path, after: float, begins: int
) -> None:
    steps = train(config_of(average={"decay": DECAY, "after": after}), packed, tmp_path)
    assert len(steps) == 6
    result, num_epochs = weights_of(checkpoint_of(tmp_path), "last")
    assert num_epochs == 6
    moving = {name for name, value in result.items() if value.is_floating_point()}
    assert any("running_mean" in name for name in moving), "BatchNorm's statistics are averaged too"
    for name in moving:
        by_hand = steps[begins][name].double().numpy()
        for step in steps[begins + 1 :]:
            by_hand = DECAY * by_hand + (1 - DECAY) * step[name].double().numpy()
        np.testing.assert_allclose(result[name].numpy(), by_hand, rtol=2e-5, atol=2e-7, err_msg=name)
    if begins < 5:
        assert any(not torch.equal(result[name], steps[-1][name]) for name in moving)


def test_the_training_itself_is_the_same_and_what_is_returned_is_the_average(packed: Path, tmp_path: Path) -> None:
    plain = train(config_of(), packed, tmp_path / "plain")
    averaging = config_of(average={"decay": DECAY})
    for one, other in zip(plain, train(averaging, packed, tmp_path / "averaged"), strict=True):
        assert_equal(one, other)
    system = fit(averaging, PackedDataset(packed, "train"), 0, tmp_path / "averaged", CPU, identity="a run")
    assert_equal(system.state_dict(), weights_of(checkpoint_of(tmp_path / "averaged"), "last")[0])
    assert_equal(weights_of(checkpoint_of(tmp_path / "plain"), "last")[0], plain[-1])


def test_a_run_that_was_interrupted_after_every_epoch_comes_to_the_same_average(packed: Path, tmp_path: Path) -> None:
    config = config_of(average={"decay": DECAY})
    train(config, packed, tmp_path / "whole")
    for _ in range(5):
        with pytest.raises(StoppedError):
            train(config, packed, tmp_path / "cut", stop_after=1)
    assert len(train(config, packed, tmp_path / "cut")) == 1
    for epoch_weights in ("averaged", "system"):
        assert_equal(checkpoint_of(tmp_path / "whole")[epoch_weights], checkpoint_of(tmp_path / "cut")[epoch_weights])


def test_the_best_epoch_is_told_and_kept_of_the_average(packed: Path, tmp_path: Path) -> None:
    seen: list[dict[str, Tensor]] = []

    def score(model: torch.nn.Module) -> dict[str, float]:
        seen.append({f"model.{name}": value.clone() for name, value in model.state_dict().items()})
        return {"oracle_recall_at_1": len(seen) / 10}

    config = config_of(average={"decay": DECAY, "after": 0.0}, keep_epochs=["oracle"])
    fit(config, PackedDataset(packed, "train"), 0, tmp_path, CPU, score_test=score)
    state = checkpoint_of(tmp_path)
    assert_equal(seen[-1], {name: value for name, value in state["averaged"].items() if name.startswith("model.")})
    assert_equal(weights_of(state, "oracle")[0], state["averaged"])
    assert any(not torch.equal(state["averaged"][name], state["system"][name]) for name in seen[-1])


def test_without_a_step_the_result_is_the_initial_weights(packed: Path, tmp_path: Path) -> None:
    train(config_of(num_epochs=0, average={"decay": DECAY}), packed, tmp_path)
    assert checkpoint_of(tmp_path)["averaged"] is None
    assert_equal(weights_of(checkpoint_of(tmp_path), "last")[0], checkpoint_of(tmp_path)["system"])


@pytest.mark.parametrize(("after", "num_epochs", "begins"), [(0.7, 90, 63), (0.35, 180, 63), (0.5, 5, 2), (0.99, 6, 5), (0.0, 6, 0)])
def test_averaging_begins_after_the_whole_epochs_of_its_share(after: float, num_epochs: int, begins: int) -> None:
    assert AverageConfig(decay=0.9, after=after).begins_at(num_epochs) == begins


@pytest.mark.parametrize("wrong", [{"decay": 1.0}, {"decay": 0.0}, {"decay": 0.9, "after": 1.0}, {}])
def test_an_average_of_nothing_or_of_everything_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="average"):
        config_of(average=wrong)
