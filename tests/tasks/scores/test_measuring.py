"""The model and loss with which finished runs are measured: the loss is as hot as it was when the weights were reached."""

from pathlib import Path

import pytest
import torch

from dml_core.data.store.packed import PackedDataset
from dml_core.epochs import RECALL, Epoch
from dml_core.losses.heated_up_softmax import HeatedUpSoftmax
from dml_core.training.loop import fit
from tasks.scores.measuring import load_system
from tests.conftest import small_training

CPU = torch.device("cpu")
COLD, HEATED, NUM_EPOCHS = 16.0, 4.0, 4


def alpha_of(packed: Path, folder: Path, num_epochs: int, epoch: Epoch, best: int = 0) -> float:
    """Train with heating over all epochs; return the alpha of the loss that is loaded with the weights of `epoch`."""
    training = small_training("heated_up_softmax", num_epochs=num_epochs, keep_epochs=["oracle"])
    options = {"alpha": COLD, "heated_alpha": HEATED, "heat_from": 0.0, "schedule": "gentle"}
    training = training.model_copy(update={"loss": training.loss.model_copy(update={"options": options})})
    scores = iter([float(number == best) for number in range(max(1, num_epochs))])
    fit(training, PackedDataset(packed, "train"), 0, folder, CPU, score_test=lambda _: {RECALL["oracle"]: next(scores)})
    loss = load_system(training, 0, packed, folder, epoch).loss
    assert isinstance(loss, HeatedUpSoftmax)
    return float(loss.alpha)


@pytest.mark.parametrize(("best", "alpha"), [(0, 8 * 2**0.5), (1, 8.0), (2, 4 * 2**0.5), (3, HEATED)])
def test_a_kept_epoch_has_its_own_alpha(packed: Path, tmp_path: Path, best: int, alpha: float) -> None:
    """By hand: four equal factors lead from 16 to 4, so each is the root of 1/2."""
    assert alpha_of(packed, tmp_path, NUM_EPOCHS, "oracle", best) == pytest.approx(alpha)


def test_the_last_epoch_is_heated_and_an_untrained_network_is_not(packed: Path, tmp_path: Path) -> None:
    assert alpha_of(packed, tmp_path / "trained", NUM_EPOCHS, "last") == pytest.approx(HEATED)
    assert alpha_of(packed, tmp_path / "untrained", 0, "last") == pytest.approx(COLD)
