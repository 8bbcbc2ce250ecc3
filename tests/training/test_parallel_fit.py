"""Gloo workers with the same global batches end in the same weights: the real loop, with and without BatchNorm."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dml_core.data.store.packed import PackedDataset
from dml_core.training import loop, validation
from dml_core.training.checkpoints.file import weights_of
from dml_core.training.config import LossChoice
from dml_core.training.history import read_history
from dml_core.training.parallel.batchnorm import synchronise_batchnorm
from dml_core.training.parallel.workers import shard_sizes
from dml_core.training.validation import METRIC, HeldOutRecall, ScoredImages
from tests.conftest import small_training
from tests.training.stopping import checkpoint_of
from tests.workers import load_float64, spawn

CPU = torch.device("cpu")
RESNET = {"backbone": {"name": "timm:test_resnet"}, "head": {"kind": "bn", "embedding_dim": 8}}
MOBILENET = {"backbone": {"name": "timm:mobilenetv3_small_050"}, "freeze_batchnorm": "statistics"}
NO_TRIPLET = LossChoice(
    name="pml:MarginLoss",
    options={"learn_beta": True, "miner": {"name": "TripletMarginMiner", "margin": -2.5, "type_of_triplets": "hard"}},
)
BETTER_INIT = LossChoice(name="heated_up_softmax", options={"better_init": True})
RUNS = {
    "centres, GroupNorm": small_training("softtriple", num_epochs=2, keep_epochs=["oracle"]),
    "centres, BatchNorm": small_training(model=RESNET, num_epochs=1),
    # A last layer follows the features of this network, and a miner without a triplet leaves the learned boundary without a gradient.
    "a layer without a gradient": small_training(model=MOBILENET, num_epochs=1),
    "a loss without a gradient": small_training(
        sampler={"kind": "k_by_n", "num_classes_per_batch": 3, "num_samples_per_class": 2}, num_epochs=1
    ).model_copy(update={"loss": NO_TRIPLET}),
    # No step is trained: BatchNorm averages the training images, then the classifier is placed at the class means.
    "before the first epoch": small_training(model=RESNET, num_epochs=0, warm_up_batchnorm=True).model_copy(update={"loss": BETTER_INIT}),
}


def fit_all(rank: int, packed: Path, folder: Path) -> None:
    """Train every run in float64: in float32 a ResNet on a few images multiplies rounding differences by thousands at each step."""
    load_float64()
    validation.BATCH_SIZE = 8  # gives each worker a part of the 36 images
    for name, config in RUNS.items():
        held_out = HeldOutRecall(ScoredImages(CPU), PackedDataset(packed, "test"), config.transform) if config.keep_epochs else None
        _, tested, _ = validation.scorers(packed, config, validation.ScoredImages(CPU))
        own = folder / name / f"rank{rank}"
        system = loop.fit(config, PackedDataset(packed, "train"), 0, own, CPU, validate=held_out, score_test=tested)
        torch.save(system.state_dict(), folder / f"{name}-{rank}.pt")


@pytest.fixture(scope="module")
def one_worker(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    spawn(fit_all, 1, packed, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [pytest.param(2, marks=pytest.mark.proof), 3])
def test_any_number_of_workers_ends_in_the_weights_of_one(packed: Path, tmp_path: Path, one_worker: Path, num_workers: int) -> None:
    spawn(fit_all, num_workers, packed, tmp_path)
    for name in RUNS:
        alone = torch.load(one_worker / f"{name}-0.pt")
        for rank in range(num_workers):
            together = torch.load(tmp_path / f"{name}-{rank}.pt")
            assert alone.keys() == together.keys()
            for key, value in alone.items():
                torch.testing.assert_close(
                    together[key], value, rtol=1e-7, atol=1e-9, msg=lambda m, name=name, key=key: f"{name}: {key}: {m}"
                )
        histories = [read_history(folder / name / "rank0") for folder in (one_worker, tmp_path)]
        for one, other in zip(*histories, strict=True):  # named parts and scores included
            assert other == pytest.approx(one, rel=1e-6), name
    recalls = [
        [row[METRIC] for row in read_history(folder / "centres, GroupNorm/rank0") if METRIC in row] for folder in (one_worker, tmp_path)
    ]
    assert recalls[0] == recalls[1]
    assert len(recalls[0]) == 2
    (alone, best), (together, same_best) = (kept_by(folder / "centres, GroupNorm/rank0") for folder in (one_worker, tmp_path))
    assert best == same_best
    for key, value in alone.items():
        torch.testing.assert_close(together[key], value, rtol=1e-7, atol=1e-9)


def kept_by(folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    return weights_of(checkpoint_of(folder), "oracle")


def normalise(rank: int, folder: Path, num_workers: int) -> None:
    """Save outputs, gradients and running averages of a shard from the synchronised layer."""
    values = torch.load(folder / "values.pt")
    layer = synchronise_batchnorm(nn.Sequential(nn.BatchNorm2d(3)), CPU)
    shard = torch.split(values, shard_sizes(len(values), num_workers))[rank].clone().requires_grad_()
    output = layer(shard)
    (output**3).sum().backward()
    torch.save({"output": output.detach(), "gradient": shard.grad, "state": layer.state_dict()}, folder / f"{rank}.pt")


@pytest.mark.slow
def test_synchronised_batchnorm_is_batchnorm_of_the_whole_batch(tmp_path: Path) -> None:
    values = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 3 + 1
    torch.save(values, tmp_path / "values.pt")
    spawn(normalise, 2, tmp_path, 2)
    whole, layer = values.clone().requires_grad_(), nn.Sequential(nn.BatchNorm2d(3))
    output = layer(whole)
    (output**3).sum().backward()
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    torch.testing.assert_close(torch.cat([part["output"] for part in parts]), output.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([part["gradient"] for part in parts]), whole.grad, rtol=1e-4, atol=1e-4)
    for key, value in layer.state_dict().items():
        torch.testing.assert_close(parts[0]["state"][key], value, rtol=1e-5, atol=1e-6)


def fit_on_different_gpus(rank: int, packed: Path, folder: Path, num_able: int) -> None:
    loop._has_bfloat16 = lambda device: rank < num_able
    sampler = {"kind": "k_by_n", "num_classes_per_batch": 3, "num_samples_per_class": 2}
    system = loop.fit(
        small_training("contrastive", sampler=sampler, num_epochs=1), PackedDataset(packed, "train"), 0, folder / str(rank), CPU
    )
    torch.save(system.state_dict(), folder / f"{rank}.pt")


@pytest.mark.slow
def test_workers_whose_gpus_differ_compute_in_one_precision(packed: Path, tmp_path: Path) -> None:
    """A worker on an older GPU would receive bfloat16 embeddings as float32: as many bytes of others' memory as they lack."""
    losses = []
    for num_able in (0, 1, 2):
        (folder := tmp_path / str(num_able)).mkdir()
        spawn(fit_on_different_gpus, 2, packed, folder, num_able)
        losses.append([row["loss"] for row in read_history(folder / "0")])
        first, second = (torch.load(folder / f"{rank}.pt") for rank in range(2))
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert losses[0] == losses[1] != losses[2]
