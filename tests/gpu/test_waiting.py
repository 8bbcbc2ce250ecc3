"""No entry of a registry makes the CPU wait for a GPU within a step: seen on the meta device, forward, backward and optimiser.

Not seen here: operations that wait within a library's kernel, memory allocation, collectives, the speed of anything.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from dml_core.config import parse
from dml_core.data.store.decode import upright
from dml_core.data.views import transforms
from dml_core.data.views.transform_config import Scaling, TransformConfig
from dml_core.data.views.transforms import scale
from dml_core.losses.contract import Loss
from dml_core.losses.registry import LOSSES, build_loss, loss_class
from dml_core.models.backbones.registry import BACKBONES
from dml_core.models.config import HeadConfig, ModelConfig, PoolingConfig
from dml_core.models.embedder import Embedder
from dml_core.training.config import CrossBatchConfig
from dml_core.training.optimisation.averaging import WeightAverage
from dml_core.training.optimisation.config import AverageConfig, OptimiserConfig
from dml_core.training.optimisation.optimisers import build_optimiser, set_learning_rates
from dml_core.training.parallel.cross_batch import CrossBatchMemory
from dml_core.training.parallel.grad_cache import ChunkedSystem, backward_in_chunks
from dml_core.training.parallel.workers import TrainingSystem
from tests.data.views.test_transforms import CONFIGURATIONS
from tests.gpu.watching import META, Constants, waits_of

NUM_CLASSES, NUM_IMAGES, DIM = 6, 24, 16
LABELS = torch.arange(NUM_IMAGES) // 4
OPTIONS: dict[str, list[dict[str, Any]]] = {  # options that draw or choose another path on a GPU
    "combined": [{"terms": [{"name": "softmax"}, {"name": "tuplet_margin"}, {"name": "center_loss"}]}],
    "discriminative": [{}, {"centroids": "kmeans"}],
    "l2_constrained_softmax": [{}, {"dropout": 0.5}],
    "sgsl": [{}, {"dropout": 0.5}],
    "softtriple": [{}, {"num_centres": 2}],
    "triplet_batch_hard": [{}, {"margin": 0.2}],
    "tuplet_margin": [{}, {"negatives": "all"}],
}
AUTOCAST = torch.autocast
CASES = [(name, options) for name in LOSSES for options in OPTIONS.get(name, [{}])]
BATCHES = {"pairs": LABELS, "one class": torch.zeros_like(LABELS), "no pair": LABELS[::4]}


@pytest.fixture(autouse=True)
def _autocast_of_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has no autocast for this device; all of these steps are in float32."""
    monkeypatch.setattr(torch, "autocast", lambda device, **more: nullcontext() if device == "meta" else AUTOCAST(device, **more))


def choices(config: Any, option: str) -> tuple[str, ...]:
    return get_args(config.model_fields[option].annotation)


def built(loss: str, options: dict[str, Any]) -> Loss:
    return build_loss(loss, options, NUM_CLASSES, NUM_CLASSES if loss == "discriminative" else DIM).to(META)


def labels_for(loss: Loss, labels_N: Tensor) -> Tensor:
    """Return labels where the training loop has them."""
    return labels_N if loss.needs.labels_on_cpu else labels_N.to(META)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_no_loss_waits(name: str, options: dict[str, Any], batch: str) -> None:
    loss, labels_N = built(name, options), BATCHES[batch]
    embeddings_ND = torch.randn(len(labels_N), loss.embedding_dim, device=META, requires_grad=True)
    there_N = labels_for(loss, labels_N)
    assert waits_of(lambda: loss(embeddings_ND, there_N).total.backward()) == {}
    assert embeddings_ND.grad is not None


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_no_loss_sends_a_constant(name: str, options: dict[str, Any]) -> None:
    dim = NUM_CLASSES if name == "discriminative" else DIM
    loss, embeddings_ND = build_loss(name, options, NUM_CLASSES, dim), torch.randn(NUM_IMAGES, dim, requires_grad=True)
    with Constants() as constants:
        loss(embeddings_ND, LABELS).total.backward()
    assert constants.number == 0
    with constants:
        embeddings_ND.new_tensor(2.0)
    assert constants.number == 1


@pytest.mark.parametrize("name", [name for name in LOSSES if loss_class(name).COMPARES_WITH_MEMORY])
def test_a_memory_of_earlier_batches_does_not_wait(name: str) -> None:
    loss = CrossBatchMemory(built(name, {}), CrossBatchConfig(size=40, after_epochs=0), name).to(META)

    def steps() -> None:
        for _ in range(3):  # the memory fills and begins again
            loss(torch.randn(NUM_IMAGES, DIM, device=META, requires_grad=True), there_N).total.backward()

    there_N = labels_for(loss, LABELS)
    assert waits_of(steps) == {}


def side_of(backbone: str) -> int:
    return 28 if backbone.startswith("lenet") or backbone == "five_layer_cnn" else 64 if backbone == "small_cnn" else 224


def model(changes: dict[str, Any], backbone: str = "small_cnn") -> Embedder:
    width = {"width": 8} if backbone == "small_cnn" else {}
    config = parse(ModelConfig, {"backbone": {"name": backbone} | width} | changes, "test")
    with META:
        return Embedder(config, NUM_CLASSES)


def images(side: int = 32) -> Tensor:
    return torch.zeros(NUM_IMAGES, 3, side, side, device=META)


DISTINCT = [name for name in BACKBONES if name not in ("resnet34", "resnet101")]  # more layers of resnet18 and resnet50
PARTS = [
    *({"head": {"kind": kind, **({"embedding_dim": DIM} if kind != "identity" else {})}} for kind in choices(HeadConfig, "kind")),
    {"head": {"kind": "two_layer", "embedding_dim": DIM, "batchnorm": True, "test_layer": "last"}},
    {"head": {"kind": "linear", "embedding_dim": DIM, "normalise_in_training": True}},
    *({"pooling": {"kind": kind}} for kind in choices(PoolingConfig, "kind")),
    {"pooling": {"kind": "gem", "learn_gem_power": True}},
    {"freeze_batchnorm": "all"},
]


@pytest.mark.parametrize("changes", PARTS, ids=str)
def test_no_head_or_pooling_waits_in_training_or_serving(changes: dict[str, Any]) -> None:
    network, batch = model(changes), images()
    assert waits_of(lambda: network(batch).sum().backward()) == {}
    with torch.no_grad():
        assert waits_of(lambda: network.eval().embed(batch)) == {}


@pytest.mark.parametrize("name", DISTINCT)
def test_no_backbone_waits_in_training_or_serving(name: str) -> None:
    network, batch = model({}, name), images(side_of(name))
    assert waits_of(lambda: network(batch).sum().backward()) == {}
    with torch.no_grad():
        assert waits_of(lambda: network.eval().embed(batch)) == {}


@pytest.mark.parametrize("scaling", get_args(Scaling))
def test_scaling_pixels_waits_only_for_its_constants(scaling: str) -> None:
    pixels = torch.zeros(2, 3, 8, 8, dtype=torch.uint8, device=META)
    scale(pixels, scaling)  # sends the constants, once a process
    assert waits_of(lambda: scale(pixels, scaling)) == {}


@pytest.mark.parametrize("options", [options for options in CONFIGURATIONS if options.get("interpolation") != "lanczos"], ids=str)
def test_views_of_images_on_the_device_do_not_wait(options: dict[str, Any]) -> None:
    config, box = parse(TransformConfig, options, "test"), (10.5, 5.0, 70.2, 55.0)
    image = torch.zeros(3, 60, 80, dtype=torch.uint8, device=META)
    for turn in range(1, 9):
        assert waits_of(lambda turn=turn: transforms.train_pixels(upright(image, turn), config, 0, 0, turn, box)) == {}
    assert waits_of(lambda: transforms.test_pixels(image, config, box)) == {}


def system_of(loss: str = "softmax") -> TrainingSystem:
    return TrainingSystem(model({"head": {"kind": "linear", "embedding_dim": DIM}}), built(loss, {}))


OPTIMISERS: list[dict[str, Any]] = [
    *({"name": name} for name in choices(OptimiserConfig, "name")),
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
    {"name": "adam", "eps_before_bias_correction": True},
    {"name": "adamw", "without_decay": "one_dimension", "weight_decay": 0.1},
]


@pytest.mark.parametrize("options", OPTIMISERS, ids=str)
def test_no_optimiser_or_average_waits(options: dict[str, Any]) -> None:
    system = system_of()
    optimiser = build_optimiser(OptimiserConfig(**options, fused=False), system)  # torch has no fused kernels for the meta device
    averaged = WeightAverage(system, AverageConfig(decay=0.9))
    there_N = labels_for(system.loss, LABELS)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        set_learning_rates(optimiser, 0.5)
        system(images(), there_N, [NUM_IMAGES]).total.backward()
        optimiser.step()
        averaged.update()

    step()  # the first step makes the optimiser's state
    assert waits_of(step) == {}


@pytest.mark.parametrize("loss", ["softmax", "contrastive", "tuplet_margin"])
def test_no_step_in_chunks_waits(loss: str) -> None:
    config = parse(ModelConfig, {"backbone": {"name": "small_cnn", "width": 8}, "freeze_batchnorm": "statistics"}, "test")
    config = config.model_copy(update={"head": HeadConfig(kind="linear", embedding_dim=DIM)})
    with META:
        network = Embedder(config, NUM_CLASSES)
    system = TrainingSystem(network, built(loss, {}))
    there_N = labels_for(system.loss, LABELS)

    def step() -> None:
        backward_in_chunks(ChunkedSystem(system), images(), there_N, [NUM_IMAGES], None, 7, nullcontext)

    assert waits_of(step) == {}


WAITING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda values: values.sum().item(),
    "test": lambda values: bool(values.any()),
    "nonzero": lambda values: values.nonzero(),
    "mask": lambda values: values[values > 0],
    "unique": lambda values: values.unique(),
    "bincount": lambda values: values.long().bincount(),
    "copy back": lambda values: values.cpu(),
    "draw": lambda values: values * torch.rand(values.shape).to(values.device),
    "labels": lambda values: torch.zeros(3).to(values.device),
}


@pytest.mark.parametrize("name", WAITING)
def test_an_operation_that_waits_is_found(name: str) -> None:
    with pytest.raises((NotImplementedError, RuntimeError, AssertionError)):
        assert waits_of(lambda: WAITING[name](torch.zeros(3, device=META))) == {}
