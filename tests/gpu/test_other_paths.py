"""The path that losses take on a GPU gives the CPU's numbers, a tile of the evaluator is computed on another device, and forward passes do
not mix devices (fake CUDA tensors, which know their device also in products).
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.evaluation.retrieval.tiles import Side, tile
from dml_core.losses import selection
from dml_core.losses.registry import LOSSES, build_loss, loss_class
from dml_core.losses.selection import mean_where, variance_where
from tests.gpu.test_waiting import BATCHES, CASES, DIM, DISTINCT, LABELS, META, NUM_CLASSES, NUM_IMAGES, PARTS, model, side_of


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_means_of_selected_entries_are_numpys(share: float) -> None:
    """Also where entries that are not selected are infinite, and with gradients that are 0 for them."""
    random = torch.Generator().manual_seed(0)
    mask = torch.rand(7, 9, generator=random) < share
    values = torch.randn(7, 9, generator=random, dtype=torch.float64).masked_fill(~mask, torch.inf)
    some = values[mask].numpy()
    for function, expected in ((mean_where, some.mean() if len(some) else 0), (variance_where, some.var() if len(some) else 0)):
        for mean in (selection._mean_of_some, selection._mean_of_all):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(selection, "_mean_of_some", mean)
                leaf = values.clone().requires_grad_()
                found = function(leaf, mask)
                found.backward()
            assert found.item() == pytest.approx(expected, rel=1e-12, abs=0)
            assert torch.isfinite(leaf.grad).all()
            assert not leaf.grad[~mask].any()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_path_of_a_gpu_has_the_value_and_gradients_of_the_cpu(
    name: str, options: dict[str, Any], batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels_N, found = BATCHES[batch], []
    random = torch.Generator().manual_seed(1)
    dim = NUM_CLASSES if name == "discriminative" else DIM
    embeddings_ND = torch.randn(len(labels_N), dim, generator=random, dtype=torch.float64)
    for as_on_gpu in (False, True):
        if as_on_gpu:
            monkeypatch.setattr(selection, "_mean_of_some", selection._mean_of_all)
        torch.manual_seed(0)
        loss = build_loss(name, options, NUM_CLASSES, dim).double()
        leaf_ND = embeddings_ND.clone().requires_grad_()
        total = loss(leaf_ND, labels_N, torch.Generator().manual_seed(2)).total
        total.backward()
        found.append((total.detach(), leaf_ND.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


def test_draws_come_from_the_generator_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw within a loss names the embeddings' device: a draw on the CPU would be copied."""
    devices, rand = [], torch.rand

    def noted(*size: Any, device: Any = None, **more: Any) -> torch.Tensor:
        devices.append(torch.device("cpu" if device is None else device))
        return rand(*size, device=device, **more)

    monkeypatch.setattr(torch, "rand", noted)
    for name, options in (("tuplet_margin", {}), ("sgsl", {"dropout": 0.5}), ("l2_constrained_softmax", {"dropout": 0.5})):
        loss = build_loss(name, options, NUM_CLASSES, DIM).to(META)
        loss.compute(torch.zeros(NUM_IMAGES, DIM, device=META), LABELS if loss.needs.labels_on_cpu else LABELS.to(META), None)
    assert devices == [META] * 3


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_a_tile_of_the_evaluator_is_computed_on_another_device(metric: str) -> None:
    points = as_points(np.eye(8, DIM, dtype=np.float32), metric)
    codes = np.arange(8) // 2
    side = Side(points, np.arange(8), codes, torch.zeros(8, DIM, device=META), np.zeros(8), None, np.zeros(8))
    buffer = torch.empty(64, device=META)
    assert tile(side, side, buffer).device == META


@pytest.mark.parametrize("name", [name for name in LOSSES if not loss_class(name).NEEDS.labels_on_cpu])
def test_no_forward_pass_mixes_devices(name: str) -> None:
    """Fake CUDA tensors, forward only: torch cannot differentiate them without a GPU. Pairs indexed on the CPU need values."""
    dim = NUM_CLASSES if name == "discriminative" else DIM
    options = {"terms": [{"name": "softmax"}, {"name": "center_loss"}]} if name == "combined" else {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with torch.device("cuda"):
            loss = build_loss(name, options, NUM_CLASSES, dim)
            embeddings_ND = torch.zeros(NUM_IMAGES, dim)
            labels_N = torch.zeros(NUM_IMAGES, dtype=torch.int64)
        assert loss(embeddings_ND, labels_N).total.device.type == "cuda"


NETWORKS = [*(({}, name) for name in DISTINCT), *((changes, "small_cnn") for changes in PARTS)]


@pytest.mark.parametrize(("changes", "backbone"), NETWORKS, ids=str)
def test_no_network_mixes_devices(changes: dict[str, Any], backbone: str) -> None:
    network = model(changes, backbone)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        network.load_state_dict({name: torch.empty_like(value, device="cuda") for name, value in network.state_dict().items()}, assign=True)
        batch = torch.zeros(2, 3, side_of(backbone), side_of(backbone), device="cuda")
        assert network(batch).device.type == network.eval().embed(batch).device.type == "cuda"
