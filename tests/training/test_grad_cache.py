"""Batches embedded in chunks: the weights of the whole batch on one and two workers, with less memory."""

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dml_core.config import parse
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import ConfigError
from dml_core.losses.registry import build_loss
from dml_core.training import loop
from dml_core.training.config import TrainingConfig
from dml_core.training.history import read_history
from dml_core.training.parallel.grad_cache import ChunkedSystem, backward_in_chunks
from dml_core.training.parallel.workers import TrainingSystem
from tests.conftest import small_training
from tests.workers import load_float64, spawn

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
PAIRS = {"sampler": {"kind": "k_by_n", "num_classes_per_batch": 4, "num_samples_per_class": 2}, "num_epochs": 2}
RUNS = {
    "triplets": small_training("triplet_batch_hard", **PAIRS),
    "pairs": small_training("contrastive", **PAIRS, average={"decay": 0.9, "after": 0.0}),
    "draws": small_training("tuplet_margin", **PAIRS, optimiser={"learning_rate": 1e-3}),
    "centres": small_training("softtriple", num_epochs=2, optimiser={"name": "adam", "momentum": 0.0, "learning_rate": 1e-3}),
    "gate": small_training("sgsl", num_epochs=2).model_copy(update={"loss": {"name": "sgsl", "options": {"dropout": 0.5}}}),
}


def in_chunks(config: TrainingConfig, embed_at_once: int | None) -> TrainingConfig:
    return parse(TrainingConfig, config.model_dump() | {"embed_at_once": embed_at_once}, "test")


def fit_all(rank: int, packed: Path, folder: Path, embed_at_once: int | None) -> None:
    """Train every run in float64."""
    load_float64()
    for name, config in RUNS.items():
        own = folder / name / f"rank{rank}"
        system = loop.fit(in_chunks(config, embed_at_once), PackedDataset(packed, "train"), 0, own, CPU)
        torch.save(system.state_dict(), folder / f"{name}-{rank}.pt")


@pytest.mark.slow
def test_a_batch_in_chunks_on_two_workers_ends_in_the_weights_of_the_whole(packed: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    spawn(fit_all, 1, packed, whole, None)
    spawn(fit_all, 2, packed, tmp_path, 3)
    for name in RUNS:
        expected = torch.load(whole / f"{name}-0.pt")
        for rank in range(2):
            found = torch.load(tmp_path / f"{name}-{rank}.pt")
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-9, msg=lambda m, n=name, k=key: f"{n}: {k}: {m}")
        expected_losses = [row["loss"] for row in read_history(whole / name / "rank0")]
        assert [row["loss"] for row in read_history(tmp_path / name / "rank0")] == pytest.approx(expected_losses, rel=3e-7)  # float32


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_s_gradients_are_those_of_the_whole_batch_in_either_precision(precision: str) -> None:
    """One step, because later steps multiply rounding; bfloat16 rounds values to 2^-8."""
    torch.manual_seed(0)
    images, labels_N = torch.randn(12, 6), torch.arange(12) // 2
    gradients = []
    for embed_at_once in (None, 5):
        torch.manual_seed(1)
        system = TrainingSystem(nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 8)), build_loss("softtriple", {}, 6, 8))
        autocast = contextlib.nullcontext if precision == "float32" else lambda: torch.autocast("cpu", dtype=torch.bfloat16)
        if embed_at_once is None:
            with autocast():
                output = system(images, labels_N, [12], torch.Generator())
            output.total.backward()
        else:
            output = backward_in_chunks(ChunkedSystem(system), images, labels_N, [12], torch.Generator(), embed_at_once, autocast)
        gradients.append({"loss": output.total.detach()} | {name: p.grad for name, p in system.named_parameters()})
    tolerance = 1e-6 if precision == "float32" else 1e-2
    for name, expected in gradients[0].items():
        assert expected is not None
        assert gradients[1][name] is not None, name
        assert (gradients[1][name] - expected).norm() <= tolerance * expected.norm(), name


def test_dropout_draws_the_same_in_both_passes_and_the_stream_goes_on_after_the_first() -> None:
    """The reference is a single pass with a graph over the same chunks, which draws in the same order."""
    torch.manual_seed(0)
    images, labels_N = torch.randn(7, 6, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 2, 2, 2])
    system = TrainingSystem(
        nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 4)), build_loss("contrastive", {}, 3, 4)
    ).double()
    torch.manual_seed(5)
    expected = system.loss(torch.cat([system.model(chunk) for chunk in torch.split(images, 3)]), labels_N).total
    expected.backward()
    after = torch.rand(3)
    by_hand = [p.grad for p in system.parameters()]
    system.zero_grad()
    torch.manual_seed(5)
    output = backward_in_chunks(ChunkedSystem(system), images, labels_N, [7], torch.Generator(), 3, contextlib.nullcontext)
    torch.testing.assert_close(output.total, expected)
    torch.testing.assert_close([p.grad for p in system.parameters()], by_hand)
    assert torch.equal(torch.rand(3), after)


def reduce(rank: int, folder: Path) -> None:
    """Save the gradients and the reductions of each of two workers, with 5 and 2 images in chunks of 2."""
    system, images, labels_N = centres_system()
    parallel = DistributedDataParallel(ChunkedSystem(system))
    reductions = []
    parallel.register_comm_hook(None, lambda state, bucket: reductions.append(bucket.index()) or allreduce_hook(state, bucket))
    shard = torch.split(images, [5, 2])[rank]
    for _ in range(2):
        system.zero_grad()
        backward_in_chunks(parallel, shard, labels_N, [5, 2], torch.Generator(), 2, contextlib.nullcontext)
    torch.save({"gradients": [p.grad for p in system.parameters()], "reductions": reductions}, folder / f"{rank}.pt")


def centres_system() -> tuple[TrainingSystem, Tensor, Tensor]:
    torch.manual_seed(0)
    system = TrainingSystem(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), build_loss("softtriple", {}, 3, 4)).double()
    return system, torch.randn(7, 6, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 2, 2, 2])


@pytest.mark.slow
def test_gradients_are_reduced_once_a_step_the_loss_s_own_among_them(tmp_path: Path) -> None:
    spawn(reduce, 2, tmp_path)
    system, images, labels_N = centres_system()
    system(images, labels_N, [7]).total.backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(found["gradients"], [p.grad for p in system.parameters()], rtol=1e-9, atol=1e-12)
        assert found["reductions"] == [0, 0], "one bucket in each of two steps"


class Held:
    """Counter of the bytes that graphs hold for their backward passes."""

    now = peak = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.num_bytes = tensor, tensor.nbytes
        Held.now += self.num_bytes
        Held.peak = max(Held.peak, Held.now)

    def __del__(self) -> None:
        Held.now -= self.num_bytes


def peak_bytes(config: TrainingConfig, packed: Path, folder: Path) -> int:
    Held.now = Held.peak = 0
    with saved_tensors_hooks(Held, lambda held: held.tensor):
        loop.fit(config, PackedDataset(packed, "train"), 0, folder, CPU)
    return Held.peak


def test_what_is_held_for_the_backward_pass_falls_with_the_chunk(packed: Path, tmp_path: Path) -> None:
    batch = {"num_classes_per_batch": 4, "num_samples_per_class": 8}
    config = small_training("triplet_batch_hard", sampler={"kind": "k_by_n", **batch}, num_epochs=1)
    peaks = {chunk: peak_bytes(in_chunks(config, chunk), packed, tmp_path / str(chunk)) for chunk in (None, 16, 4)}
    assert peaks[None] is not None
    assert peaks[16] < 0.55 * peaks[None]
    assert peaks[4] < 0.2 * peaks[None]


def test_in_float32_too_a_run_in_chunks_ends_near_the_whole(packed: Path, tmp_path: Path) -> None:
    trained = [
        loop.fit(in_chunks(RUNS["pairs"], chunk), PackedDataset(packed, "train"), 0, tmp_path / str(chunk), CPU).state_dict()
        for chunk in (None, 2, 8)
    ]
    for other in trained[1:]:
        for name, value in trained[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


def test_bfloat16_with_an_average_trains_in_chunks(packed: Path, tmp_path: Path) -> None:
    config = small_training(precision="bfloat16", num_epochs=8, average={"decay": 0.5}, embed_at_once=3)
    loop.fit(config, PackedDataset(packed, "train"), 0, tmp_path, CPU)
    losses = [row["loss"] for row in read_history(tmp_path)]
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        ({"backbone": {"name": "timm:test_resnet"}}, "backbone"),
        ({"backbone": {"name": "timm:test_resnet"}, "freeze_batchnorm": "scale"}, "backbone"),
        ({"backbone": {"name": "small_cnn"}, "head": {"kind": "bn"}}, "head.norm"),
    ],
)
def test_a_batchnorm_that_would_see_chunks_is_refused(packed: Path, tmp_path: Path, model: dict, layer: str) -> None:
    config = small_training(model=model, embed_at_once=4)
    with pytest.raises(ConfigError, match=rf"embed_at_once: the BatchNorm '{layer}.* remove embed_at_once"):
        loop.fit(config, PackedDataset(packed, "train"), 0, tmp_path, CPU)


def test_a_frozen_batchnorm_trains_in_chunks(packed: Path, tmp_path: Path) -> None:
    model = {"backbone": {"name": "timm:test_resnet"}, "freeze_batchnorm": "statistics"}
    initial = loop.build_system(small_training(model=model), 4, 0, CPU).state_dict()
    whole, chunks = (
        loop.fit(
            small_training(model=model, embed_at_once=chunk, num_epochs=1),
            PackedDataset(packed, "train"),
            0,
            tmp_path / str(chunk),
            CPU,
        ).state_dict()
        for chunk in (None, 4)
    )
    for name, value in whole.items():
        torch.testing.assert_close(chunks[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
        is_frozen = "running" in name or "num_batches_tracked" in name
        assert torch.equal(value, initial[name]) == is_frozen, name
