"""Effects of `precision` on a GPU besides autocast: full float32 disables TF32, in training and when embedding."""

from contextlib import closing

import numpy as np
import pytest
import torch

from dml_core.data.store.packed import PackedDataset
from dml_core.data.views.batches import Loader
from dml_core.data.views.transform_config import TransformConfig
from dml_core.float32 import full_float32
from dml_core.training import loop
from dml_core.training.checkpoints.file import load_checkpoint
from dml_core.training.loop import build_system, fit
from dml_core.training.preparing import training_outputs
from dml_core.training.validation import HeldOutRecall, ScoredImages
from tasks.workers import embedding
from tests.conftest import small_training

CPU = torch.device("cpu")


FULL = ("ieee",) * 4


def tf32():
    backends = torch.backends
    return tuple(
        place.fp32_precision for place in (backends.cudnn.conv, backends.cuda.matmul, backends.mkldnn.matmul, backends.mkldnn.conv)
    )


@pytest.fixture(params=["as torch has it", "older settings", "bfloat16 on CPUs", "newer settings"])
def allowed(request):
    """TF32 settings of a process, set in each of torch's two ways; torch refuses to read the older ones if the newer were used."""
    before = tf32()
    if request.param == "older settings":
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    elif request.param == "bfloat16 on CPUs":
        torch.set_float32_matmul_precision("medium")
    elif request.param == "newer settings":
        torch.backends.cudnn.conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "tf32"
    readable = request.param != "newer settings"
    expected = readable and torch.get_float32_matmul_precision()
    yield tf32()
    if readable:
        assert torch.get_float32_matmul_precision() == expected
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision, _ = (
        before
    )


@pytest.mark.parametrize("precision", ["float32", "auto"])
def test_training_in_float32_has_no_tf32_and_leaves_the_process_as_it_was(precision, allowed, packed, tmp_path):
    seen = set()
    fit(
        small_training(num_epochs=1, precision=precision),
        PackedDataset(packed, "train"),
        0,
        tmp_path,
        CPU,
        report=lambda _: seen.add(tf32()),
    )
    assert seen == {FULL if precision == "float32" else allowed}
    assert tf32() == allowed


@pytest.mark.parametrize("within", [False, True])
def test_each_step_in_bfloat16_uses_the_weights_of_the_step_before(within, packed, tmp_path, monkeypatch):
    """Torch keeps cast weights until its outermost autocast ends, of the caller or of the whole training: steps used those of the first."""
    differences = []

    def compute_again(module, given, output):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            differences.append(float((module.forward(*given) - output).abs().max()))

    def build(*given):
        system = build_system(*given)
        system.model.backbone.register_forward_hook(compute_again)
        return system

    monkeypatch.setattr(loop, "build_system", build)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=within):
        fit(small_training(num_epochs=2, precision="bfloat16"), PackedDataset(packed, "train"), 0, tmp_path, CPU, report=lambda _: None)
    assert (len(differences), max(differences)) == (10, 0)


@pytest.mark.parametrize("precision", ["float32", "auto", "bfloat16"])
def test_the_caller_s_autocast_changes_no_bit_of_a_training(precision, packed, tmp_path):
    def weights(folder):
        fit(small_training(num_epochs=1, precision=precision), PackedDataset(packed, "train"), 0, folder, CPU, report=lambda _: None)
        return load_checkpoint(folder)["system"]

    expected = weights(tmp_path / "outside")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = weights(tmp_path / "inside")
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_embeddings_are_made_in_full_float32(allowed, packed, tmp_path):
    seen = set()

    class Model(torch.nn.Module):
        head = type("Head", (), {"embedding_dim": 2})

        def embed(self, images):
            seen.add(tf32())
            return torch.zeros(len(images), 2)

    embedding.extract(Model(), TransformConfig(), {"test": PackedDataset(packed, "test")}, tmp_path, CPU)
    assert seen == {FULL}
    assert tf32() == allowed
    assert np.load(next(tmp_path.glob("test-00000*.npy"))).shape[1] == 2


def test_epochs_are_scored_and_centres_initialised_in_full_float32(allowed, packed):
    """As the final embeddings are made, whatever the precision of the training."""
    config, seen = small_training(precision="bfloat16"), set()
    system, images = build_system(config, 4, 0, CPU), PackedDataset(packed, "train")
    system.model.backbone.register_forward_hook(lambda *_: seen.add(tf32()))
    assert HeldOutRecall(ScoredImages(CPU), images, config.transform)(system.model)
    with closing(Loader(images, 0, CPU)) as loader:
        training_outputs(system, images, config, loader)
    assert seen == {FULL}
    assert tf32() == allowed


def test_threads_that_overlap_leave_the_process_as_it_was(allowed):
    """One thread may begin while the other is active and end after it; neither uses TF32 until its end."""
    first, second = full_float32(), full_float32()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert tf32() == FULL
    second.__exit__(None, None, None)
    assert tf32() == allowed


@pytest.mark.parametrize("trained_before", [False, True])
def test_a_network_can_be_exported_within_and_afterwards(trained_before, allowed):
    """Torch reads its older settings during the export, and refuses if they and the newer ones differ."""
    with full_float32():
        if not trained_before:
            torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
