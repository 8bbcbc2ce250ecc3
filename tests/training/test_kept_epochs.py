"""The best epochs that a run keeps besides its last: the right ones, also after interruptions, without effect on the last."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dml_core.config import merge, parse
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.splits import open_role
from dml_core.epochs import RECALL
from dml_core.errors import ConfigError, StoreError, TrainingError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.training.checkpoints.file import CHECKPOINT_FILE, load_checkpoint, weights_of
from dml_core.training.config import TrainingConfig
from dml_core.training.history import Progress, read_history
from dml_core.training.loop import fit
from dml_core.training.validation import HeldOutRecall, ScoredImages, scorers
from tests.conftest import small_training
from tests.damage import contents
from tests.one_view import plain_view
from tests.training.stopping import StoppedError, checkpoint_of, same, stop_after

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
ORACLE = RECALL["oracle"]
ADAM = {"name": "adam", "momentum": 0.0, "learning_rate": 0.002, "groups": {"loss": {"learning_rate": 0.02}}}  # no collapsed embeddings
MANY = {"num_epochs": 5, "schedule": {"kind": "constant", "warmup_epochs": 0.0}, "optimiser": ADAM}
PLAIN = small_training("proxy_nca", **MANY)
KEEPING = small_training("proxy_nca", **MANY, keep_epochs=["oracle"])
BOTH = small_training("proxy_nca", **MANY, validation={"share": 0.5}, keep_epochs=["best_validation", "oracle"])


def train(config: TrainingConfig, packed: Path, folder: Path, report=lambda progress: None) -> None:
    held_out, tested, _ = scorers(packed, config, ScoredImages(CPU))
    dataset = open_role(packed, "train", config.validation)
    fit(config, dataset, 0, folder, CPU, report=report, identity="a run", validate=held_out, score_test=tested)


def recall_by_hand(model: nn.Module, dataset: PackedDataset, config: TrainingConfig) -> float:
    with torch.no_grad():
        points = model.embed(torch.stack([plain_view(dataset.image(index), config.transform) for index in range(len(dataset))])).double()
    nearest = (points @ points.T).fill_diagonal_(-2).argmax(dim=1)
    return float((dataset.labels[nearest] == dataset.labels).mean())


class Scripted:
    """Scorer that returns given scores and records the scored weights."""

    def __init__(self, *scores: float | None) -> None:
        self.scores = list(scores)
        self.seen: list[dict[str, Tensor]] = []

    def __call__(self, model: nn.Module) -> dict[str, float]:
        self.seen.append({f"model.{name}": value.clone() for name, value in model.state_dict().items()})
        score = self.scores[len(self.seen) - 1]
        return {} if score is None else {ORACLE: score}


def kept_by(scored: Scripted, packed: Path, folder: Path, **changes: Any) -> tuple[dict[str, Tensor], int]:
    config = parse(TrainingConfig, merge(KEEPING.model_dump(), changes), "test")
    fit(config, PackedDataset(packed, "train"), 0, folder, CPU, score_test=scored)
    return weights_of(checkpoint_of(folder), "oracle")


@pytest.fixture(scope="module")
def undisturbed(one_thread: None, packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(KEEPING, packed, folder)
    return folder


# ---------------------------------------------------------------- choice of the epoch


def test_the_oracle_is_the_epoch_that_is_best_by_hand_and_not_the_last(packed: Path, tmp_path: Path) -> None:
    """The test reads each epoch's weights from its checkpoint and scores them image by image."""
    test, weights, recalls = PackedDataset(packed, "test"), [], []

    def look(progress: Progress) -> None:
        if progress.epoch_ended:
            weights.append(checkpoint_of(tmp_path)["system"])
            model = fit(PLAIN.model_copy(update={"num_epochs": 0}), PackedDataset(packed, "train"), 0, tmp_path / "other", CPU)
            model.load_state_dict(weights[-1])
            recalls.append(recall_by_hand(model.model, test, KEEPING))

    train(KEEPING, packed, tmp_path, look)
    kept, num_epochs = weights_of(checkpoint_of(tmp_path), "oracle")
    assert num_epochs == 1 + int(np.argmax(recalls)) < 5
    assert same(kept, weights[num_epochs - 1])
    assert not same(kept, weights[-1])
    assert [row[ORACLE] for row in read_history(tmp_path) if ORACLE in row] == pytest.approx(recalls)


@pytest.mark.parametrize(
    ("scores", "every", "expected"),
    [
        ((0.1, 0.4, 0.4, 0.2, 0.4), 1, (2, 1)),  # the first of three equal ones
        ((0.1, 0.2, 0.3, 0.4, 0.5), 1, (5, 4)),
        ((0.1, 0.3, 0.2), 2, (4, 1)),  # after epochs 2 and 4, and the last
        ((0.1, 0.3, 0.4), 2, (5, 2)),
        ((0.3,), 25, (5, 0)),
        ((None, 0.0, 0.0, 0.0, 0.0), 1, (2, 1)),  # an epoch without a score is never the best
    ],
)
def test_it_is_the_first_of_the_best_that_were_looked_at(
    packed: Path, tmp_path: Path, scores: tuple[float | None, ...], every: int, expected: tuple[int, int]
) -> None:
    scored = Scripted(*scores)
    kept, num_epochs = kept_by(scored, packed, tmp_path, keep_every_epochs=every)
    assert len(scored.seen) == len(scores)
    assert num_epochs == expected[0]
    assert same({name: value for name, value in kept.items() if name.startswith("model.")}, scored.seen[expected[1]])


def test_both_kinds_are_kept_each_by_its_own_classes(packed: Path, tmp_path: Path) -> None:
    train(BOTH, packed, tmp_path)
    checkpoint, history = checkpoint_of(tmp_path), read_history(tmp_path)
    for kind, metric in RECALL.items():
        scores = [row[metric] for row in history if metric in row]
        assert len(scores) == 5
        kept = checkpoint["kept"][kind]
        assert (kept["num_epochs_done"], kept["score"]) == (1 + int(np.argmax(scores)), max(scores))


def test_an_untrained_network_is_its_own_best_epoch(packed: Path, tmp_path: Path) -> None:
    untrained = KEEPING.model_copy(update={"num_epochs": 0})
    train(untrained, packed, tmp_path)
    kept, num_epochs = weights_of(checkpoint_of(tmp_path), "oracle")
    assert num_epochs == 0
    assert same(kept, checkpoint_of(tmp_path)["system"])
    before = contents(tmp_path)
    train(untrained, packed, tmp_path)
    assert contents(tmp_path) == before


# ---------------------------------------------------------------- no effect on the training


def test_the_last_epoch_is_to_the_bit_what_it_is_in_a_run_that_keeps_none(packed: Path, undisturbed: Path, tmp_path: Path) -> None:
    train(PLAIN, packed, tmp_path)
    plain, keeping = checkpoint_of(tmp_path), checkpoint_of(undisturbed)
    assert same(plain["system"], weights_of(keeping, "last")[0])
    assert str(plain["optimiser"]) == str(keeping["optimiser"])
    rows = read_history(undisturbed)
    assert sum(row.pop(ORACLE, None) is not None for row in rows) == 5
    assert rows == read_history(tmp_path)


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_stopped_after_every_epoch_ends_with_the_bytes_of_an_undisturbed_one(
    packed: Path, undisturbed: Path, tmp_path: Path, every: int
) -> None:
    """Also if checkpoints are rarer than epochs, so that a better epoch is lost and found again."""
    config = KEEPING.model_copy(update={"checkpoint_every_epochs": every})
    for num_epochs in range(1, 6):
        with pytest.raises(StoppedError):
            train(config, packed, tmp_path, stop_after(num_epochs))
    train(config, packed, tmp_path)
    assert contents(tmp_path) == contents(undisturbed)


def test_both_kinds_survive_a_stop_to_the_byte(packed: Path, tmp_path: Path) -> None:
    train(BOTH, packed, tmp_path / "undisturbed")
    with pytest.raises(StoppedError):
        train(BOTH, packed, tmp_path / "stopped", stop_after(4))
    train(BOTH, packed, tmp_path / "stopped")
    assert contents(tmp_path / "stopped") == contents(tmp_path / "undisturbed")


def test_a_kept_epoch_that_is_damaged_is_never_loaded_and_comes_back_to_the_byte(packed: Path, undisturbed: Path, tmp_path: Path) -> None:
    """One bit of the kept weights is flipped."""
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    kept, _ = weights_of(checkpoint_of(folder), "oracle")
    number = bytes(max(kept.values(), key=lambda value: value.numel()).untyped_storage())  # as stored in the file
    path, data = folder / CHECKPOINT_FILE, (folder / CHECKPOINT_FILE).read_bytes()
    assert data.count(number) == 1
    place = data.index(number) + len(number) // 2
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    with pytest.raises(StoreError, match="damaged"):
        load_checkpoint(folder)
    train(KEEPING, packed, folder)
    assert contents(folder) == contents(undisturbed)


# ---------------------------------------------------------------- refusals


def test_an_epoch_that_was_not_kept_is_not_found(packed: Path, undisturbed: Path) -> None:
    with pytest.raises(StoreError, match=r"a run has no 'best_validation' epoch; train with keep_epochs: \[best_validation\]"):
        weights_of(checkpoint_of(undisturbed), "best_validation")


def test_a_run_of_which_no_epoch_could_be_scored_says_so_each_time(packed: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(TrainingError, match="no epoch's oracle_recall_at_1 could be computed"):
            kept_by(Scripted(*[None] * 5), packed, tmp_path)


def test_classes_of_one_image_each_tell_no_epoch_from_another(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldOutRecall, "can_score", False)
    with pytest.raises(ConfigError, match="'oracle' epoch cannot be chosen, as no class that it is scored on has two images"):
        scorers(packed, KEEPING, ScoredImages(CPU))
    assert scorers(packed, PLAIN, ScoredImages(CPU)) == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keep_epochs": ["best_validation"]}, r"'best_validation' needs classes that are held out; set validation: \{share: 0.2\}"),
        ({"keep_epochs": ["oracle", "oracle"]}, "keep_epochs names one twice: oracle, oracle"),
        ({"keep_epochs": ["last"]}, "keep_epochs"),
        ({"keep_every_epochs": 0}, "keep_every_epochs"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small_training(**changes)


def test_an_oracle_is_not_scored_on_validation_classes() -> None:
    with pytest.raises(ConfigError, match="'oracle' is the best on the test classes, which role 'validation' does not look at"):
        parse(EvaluationConfig, {"role": "validation", "epoch": "oracle"}, "test")


@pytest.mark.parametrize("epoch", ["oracle", "best_validation"])
def test_an_epoch_chosen_by_cosines_is_not_scored_by_distances(epoch: str) -> None:
    with pytest.raises(
        ConfigError, match=f"epoch '{epoch}' is chosen by cosines, whatever the metric is; use metric: cosine, or epoch: last"
    ):
        parse(EvaluationConfig, {"metric": "euclidean", "epoch": epoch}, "test")
    parse(EvaluationConfig, {"metric": "euclidean"}, "test")
    parse(EvaluationConfig, {"epoch": epoch}, "test")
