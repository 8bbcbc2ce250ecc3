"""Compiled training ends near plain training; it is traced and differentiated by the compiler, but without its kernels."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dml_core.config import parse
from dml_core.data.store.packed import PackedDataset
from dml_core.losses.registry import build_loss
from dml_core.training import loop
from dml_core.training.config import TrainingConfig
from dml_core.training.history import Progress
from dml_core.training.parallel.grad_cache import ChunkedSystem, backward_in_chunks
from dml_core.training.parallel.workers import TrainingSystem
from tests.conftest import small_training

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
PAIRS = {"kind": "k_by_n", "num_classes_per_batch": 4, "num_samples_per_class": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"loss": {"name": "contrastive"}, "sampler": PAIRS}, {"loss": {"name": "normalised_softmax"}, "embed_at_once": 3}],
    ids=str,
)
def test_compiled_training_ends_near_plain_training(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """36 images in batches of 8 give the last batch of an epoch another shape."""
    compiled: list[str] = []
    whole = nn.Module.compile

    def without_kernels(module: nn.Module) -> None:
        compiled.append(type(module).__name__)
        whole(module, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", without_kernels)
    trained = []
    for setting in (None, True):
        config = parse(TrainingConfig, small_training(num_epochs=1).model_dump() | changes | {"compile": setting}, "test")
        trained.append(loop.fit(config, PackedDataset(packed, "train"), 0, tmp_path / str(setting), CPU).state_dict())
    assert len(compiled) == 2
    assert trained[0].keys() == trained[1].keys()
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("embed_at_once", [None, 20])
def test_a_compiled_loss_multiplies_in_float32_under_bfloat16_also_for_its_gradients(embed_at_once: int | None) -> None:
    """The compiler gave the backward pass its caller's autocast: the centres' gradients had errors of half a per cent."""
    images, labels_N = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 5
    torch._dynamo.reset()
    gradients = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        system = TrainingSystem(nn.Linear(64, 64), build_loss("normalised_softmax", {}, 5, 64))
        if is_compiled:
            system.loss.compile(backend="aot_eager")
        autocast = loop.autocast_of("bfloat16", CPU)
        if embed_at_once is None:
            with autocast():
                output = system(images, labels_N, [40])
            output.total.backward()
        else:
            backward_in_chunks(ChunkedSystem(system), images, labels_N, [40], torch.Generator(), embed_at_once, autocast)
        gradients.append([parameter.grad for parameter in system.parameters()])
    for plain, compiled in zip(*gradients, strict=True):
        assert torch.equal(plain, compiled)


@pytest.mark.slow
def test_a_cross_batch_memory_is_not_compiled_again_at_every_step(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: whole(module, backend="eager"))
    changes = {"loss": {"name": "contrastive"}, "sampler": PAIRS, "compile": True, "cross_batch_memory": {"size": 24, "after_epochs": 1}}
    config = parse(TrainingConfig, small_training(num_epochs=4).model_dump() | changes, "test")
    num_compiled: list[int] = []

    def count(progress: Progress) -> None:
        if progress.epoch_ended:
            num_compiled.append(int(counters["stats"]["unique_graphs"]))

    torch._dynamo.reset()
    counters.clear()
    loop.fit(config, PackedDataset(packed, "train"), 0, tmp_path, CPU, report=count)
    assert num_compiled[0] > 0
    assert num_compiled[3] == num_compiled[2] == num_compiled[1], "the second epoch is the first that compares with the memory"
