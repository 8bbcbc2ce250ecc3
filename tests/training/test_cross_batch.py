"""The cross-batch memory: compared with pytorch-metric-learning's step by step and by hand, with several workers and interruptions."""

from pathlib import Path

import pytest
import torch
from pytorch_metric_learning import losses, miners, reducers
from pytorch_metric_learning.distances import LpDistance
from torch import Tensor, nn

from dml_core.config import parse
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import ConfigError
from dml_core.losses.registry import build_loss
from dml_core.training import loop
from dml_core.training.config import CrossBatchConfig, TrainingConfig
from dml_core.training.history import read_history
from dml_core.training.parallel.cross_batch import CrossBatchMemory
from tests.conftest import small_training
from tests.training.stopping import StoppedError, checkpoint_of, same, stop_after
from tests.workers import load_float64, spawn

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
PAIRS = {"sampler": {"kind": "k_by_n", "num_classes_per_batch": 4, "num_samples_per_class": 2}, "num_epochs": 3}
SIZE, DIM, NUM_CLASSES = 20, 6, 5  # batches of 8 fill the ring in the third step, whose batch wraps around its end


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(8, DIM, generator=random, dtype=torch.float64), torch.randint(NUM_CLASSES, (8,), generator=random)


def memory(name: str, options: dict[str, object], after_epochs: int = 0) -> CrossBatchMemory:
    return CrossBatchMemory(
        build_loss(name, options, NUM_CLASSES, DIM), CrossBatchConfig(size=SIZE, after_epochs=after_epochs), name
    ).double()


def library_memory(loss: nn.Module, miner: nn.Module | None = None) -> losses.CrossBatchMemory:
    found = losses.CrossBatchMemory(loss, DIM, SIZE, miner)
    found.embedding_memory = found.embedding_memory.double()
    return found


def mean_square(terms: dict[str, dict[str, Tensor]], num_pairs: int) -> Tensor:
    """Return the contrastive loss of Hadsell et al. from the library's terms, which are distances and shortfalls."""
    values = [torch.as_tensor(part["losses"]) for part in terms.values()]
    return sum((value.square().sum() for value in values), torch.zeros(())) / (2 * num_pairs)


@pytest.mark.parametrize(
    "name", ["contrastive", "triplet_batch_hard", "pml:TripletMarginLoss", "pml:ContrastiveLoss", "pml:MultiSimilarityLoss"]
)
def test_ten_steps_have_the_losses_and_gradients_of_the_library_s_memory(name: str) -> None:
    ours = memory(name, {"margin": 0.7} if name == "contrastive" else {})
    if name == "contrastive":
        terms = losses.ContrastiveLoss(0, 0.7, distance=LpDistance(), reducer=reducers.DoNothingReducer())
        theirs = library_memory(terms)
    elif name == "triplet_batch_hard":  # each anchor has one positive and one negative, the hardest; the library averages over them
        distance = LpDistance(normalize_embeddings=False)
        soft = losses.TripletMarginLoss(margin=0, smooth_loss=True, distance=distance, reducer=reducers.MeanReducer())
        theirs = library_memory(soft, miners.BatchHardMiner(distance=distance))
    else:
        theirs = library_memory(getattr(losses, name.removeprefix("pml:"))())
    for step in range(10):
        embeddings_ND, labels_N = batch(step)
        gradients = []
        for loss in (ours, theirs):
            leaf_ND = embeddings_ND.clone().requires_grad_()
            found = loss(leaf_ND, labels_N)
            if name == "contrastive" and loss is theirs:
                total = mean_square(found, 8 * (min(SIZE, 8 * (step + 1)) - 1))
            else:
                total = found if loss is theirs else found.total
            total.backward()
            gradients.append((total.detach(), leaf_ND.grad))
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12, msg=lambda m, step=step: f"step {step}: {m}")


@pytest.mark.parametrize("name", ["contrastive", "triplet_batch_hard"])
def test_a_memory_of_the_batch_alone_is_the_loss_of_the_batch(name: str) -> None:
    embeddings_ND, labels_N = batch(0)
    alone = build_loss(name, {}, NUM_CLASSES, DIM)(embeddings_ND, labels_N).total
    torch.testing.assert_close(memory(name, {})(embeddings_ND, labels_N).total, alone)


def test_the_first_epochs_are_the_loss_s_own_and_fill_the_memory() -> None:
    loss, alone = memory("contrastive", {}, after_epochs=1), build_loss("contrastive", {}, NUM_CLASSES, DIM)
    loss.start_epoch(0, 2)
    for step in range(2):
        assert loss(*batch(step)).total == alone(*batch(step)).total
    assert torch.equal(loss.embeddings[:16], torch.cat([batch(0)[0], batch(1)[0]]))
    loss.start_epoch(1, 2)
    assert loss(*batch(2)).total != alone(*batch(2)).total
    assert torch.equal(loss.embeddings, torch.cat([batch(2)[0][4:], batch(0)[0][4:], batch(1)[0], batch(2)[0][:4]]))


def test_what_cannot_compare_and_what_does_not_fit_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^cross_batch_memory: loss 'softtriple' cannot compare a batch with a memory: remove it"):
        memory("softtriple", {})
    for name in ("FastAPLoss", "ArcFaceLoss"):
        with pytest.raises(ConfigError, match=f"^cross_batch_memory: 'pml:{name}' cannot take a memory .*; remove it$"):
            memory(f"pml:{name}", {})
    with pytest.raises(ConfigError, match=r"^cross_batch_memory: size 20 is less than a batch of 24: raise it$"):
        memory("contrastive", {})(torch.randn(24, DIM, dtype=torch.float64), torch.zeros(24, dtype=torch.int64))


def with_memory(loss: str, **changes: object) -> TrainingConfig:
    config = small_training(loss, **PAIRS)
    return parse(TrainingConfig, config.model_dump() | {"cross_batch_memory": {"size": 20, "after_epochs": 1}} | changes, "test")


RUNS = {
    "pairs": with_memory("contrastive"),
    "triplets": with_memory("triplet_batch_hard"),
    "chunks": with_memory("contrastive", embed_at_once=3),
}


def fit_all(rank: int, packed: Path, folder: Path) -> None:
    load_float64()
    for name, config in RUNS.items():
        system = loop.fit(config, PackedDataset(packed, "train"), 0, folder / name / f"rank{rank}", CPU)
        torch.save(system.state_dict(), folder / f"{name}-{rank}.pt")


@pytest.mark.slow
def test_any_number_of_workers_keeps_the_same_memory_and_ends_in_the_same_weights(packed: Path, tmp_path: Path) -> None:
    for num_workers in (1, 4):
        spawn(fit_all, num_workers, packed, tmp_path / str(num_workers))
    for name in RUNS:
        alone = torch.load(tmp_path / f"1/{name}-0.pt")
        assert int(alone["loss._extra_state"]) > 20
        for rank in range(4):
            together = torch.load(tmp_path / f"4/{name}-{rank}.pt")
            for key, value in alone.items():
                torch.testing.assert_close(
                    together[key], value, rtol=1e-7, atol=1e-9, msg=lambda m, name=name, key=key: f"{name}: {key}: {m}"
                )
    for key, value in torch.load(tmp_path / "1/pairs-0.pt").items():
        torch.testing.assert_close(torch.load(tmp_path / "1/chunks-0.pt")[key], value, rtol=1e-7, atol=1e-9)


def test_the_average_of_the_weights_holds_the_last_step_s_memory(packed: Path, tmp_path: Path) -> None:
    config = with_memory("contrastive", average={"decay": 0.5, "after": 0.0})
    loop.fit(config, PackedDataset(packed, "train"), 0, tmp_path, CPU)
    state = checkpoint_of(tmp_path)
    for name in ("loss.labels", "loss.embeddings", "loss._extra_state"):
        assert torch.equal(state["averaged"][name], state["system"][name]), name
    weight = "model.head.linear.weight"
    assert not torch.equal(state["averaged"][weight], state["system"][weight])


def test_a_run_that_was_stopped_goes_on_bit_for_bit(packed: Path, tmp_path: Path) -> None:
    config, dataset = RUNS["pairs"], PackedDataset(packed, "train")
    whole = loop.fit(config, dataset, 0, tmp_path / "whole", CPU).state_dict()
    with pytest.raises(StoppedError):
        loop.fit(config, dataset, 0, tmp_path / "stopped", CPU, report=stop_after(2))
    resumed = loop.fit(config, dataset, 0, tmp_path / "stopped", CPU).state_dict()
    assert same(resumed, whole)
    assert read_history(tmp_path / "stopped") == read_history(tmp_path / "whole")
