"""Compiled training ends near the training that is compiled: through the compiler's tracing and gradients, without its kernels."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dml_core.config import parse
from dml_core.data.store.packed import PackedDataset
from dml_core.training import loop
from dml_core.training.config import TrainingConfig
from tests.conftest import small_training

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
PAIRS = {"kind": "k_by_n", "num_classes_per_batch": 4, "num_samples_per_class": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"loss": {"name": "normalised_softmax"}}, {"loss": {"name": "contrastive"}, "sampler": PAIRS}, {"embed_at_once": 3}],
    ids=str,
)
def test_compiled_training_ends_near_plain_training(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """36 images in batches of 8, so that the last batch of an epoch has another shape."""
    compiled: list[str] = []
    whole = nn.Module.compile

    def without_kernels(module: nn.Module) -> None:
        compiled.append(type(module).__name__)
        whole(module, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", without_kernels)
    trained = []
    for setting in (None, True):
        config = parse(TrainingConfig, small_training(num_epochs=2).model_dump() | changes | {"compile": setting}, "test")
        trained.append(loop.fit(config, PackedDataset(packed, "train"), 0, tmp_path / str(setting), CPU).state_dict())
    assert len(compiled) == 2
    assert trained[0].keys() == trained[1].keys()
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, rtol=1e-3, atol=1e-5)
