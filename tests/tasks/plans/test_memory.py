"""Memory of a training: activations by hand and compared with a real step on the CPU; the rest compared with a real optimiser."""

from typing import Any

import pytest
import torch
from torch import nn

from dml_core.config import merge, parse
from dml_core.models.embedder import Embedder
from dml_core.training.config import CrossBatchConfig, TrainingConfig
from dml_core.training.loop import build_system
from dml_core.training.optimisation.optimisers import build_optimiser
from tasks.plans.memory import activation_bytes, kept_storages, num_states, training_memory
from tasks.tables.file import STANDING, load_table, table_names
from tasks.tables.runs import runs_of

SIZE = 32
CONFIG: dict[str, Any] = {
    "model": {"backbone": {"name": "small_cnn", "width": 8}},
    "loss": {"name": "softtriple", "options": {"num_centres": 2}},
    "sampler": {"kind": "shuffled", "batch_size": 6},
    "transform": {"crop": "padded", "padding": 2, "crop_size": SIZE},
    "num_epochs": 1,
}


def config(**changes: Any) -> TrainingConfig:
    return parse(TrainingConfig, merge(CONFIG, changes), "test")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_activations_by_hand(device: str) -> None:
    """The convolution keeps its input (2 x 3 x 8 x 8), ReLU its output (2 x 4 x 8 x 8), the linear layer's input; 4 bytes each."""
    with torch.device(device):
        network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8 * 8, 5))
        images = torch.zeros(2, 3, 8, 8)
    _, kept = kept_storages(network, lambda: network(images))
    assert sum(kept.values()) == 4 * (2 * 3 * 64 + 2 * 4 * 64)


NETWORKS: dict[str, dict[str, Any]] = {
    "small_cnn": {},
    "resnet18": {},
    "googlenet": {},
    "bn_inception with frozen statistics": {"freeze_batchnorm": "statistics"},
    "resnet18 with GeM and a neck": {"pooling": {"kind": "gem"}, "head": {"kind": "bn_neck"}},
    "resnet18 with a learned GeM": {"pooling": {"kind": "gem", "learn_gem_power": True}, "head": {"kind": "two_layer"}},
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("num_images", [2, 5])
def test_the_meta_device_keeps_what_a_real_step_keeps(name: str, num_images: int) -> None:
    model = config(model={"backbone": {"name": name.split()[0], "width": 8 if name == "small_cnn" else 32}, **NETWORKS[name]}).model
    size = 64 if "inception" in name or "googlenet" in name else SIZE
    network = Embedder(model, 4).train()
    images = torch.randn(num_images, 3, size, size).to(memory_format=torch.channels_last)
    output, kept = kept_storages(network, lambda: network(images))
    output.sum().backward()  # the kept tensors suffice for the backward pass
    with torch.device("meta"):
        same, shapes = Embedder(model, 4).train(), torch.empty(num_images, 3, size, size)
    computed = activation_bytes(same, shapes.to(memory_format=torch.channels_last))
    # Frozen BatchNorm keeps empty means and deviations on the CPU, but full ones on the meta device: two numbers per channel.
    frozen = [module for module in network.backbone.modules() if isinstance(module, nn.BatchNorm2d) and not module.training]
    assert computed == sum(kept.values()) + 2 * 4 * sum(module.num_features for module in frozen)


OPTIMISERS: list[dict[str, Any]] = [
    {"name": "adam"},
    {"name": "adam", "eps_before_bias_correction": True},
    {"name": "adamw"},
    {"name": "sgd", "momentum": 0.9},
    {"name": "sgd"},
]


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_weights_gradients_and_state_are_those_of_a_real_step(optimiser: dict[str, Any]) -> None:
    asked = config(optimiser=optimiser)
    system = build_system(asked, 10, seed=0, device=torch.device("cpu"))
    steps = build_optimiser(asked.optimiser, system)
    parameters = list(system.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    steps.step()
    memory = training_memory(asked, SIZE, 100, 10, "cpu", num_workers=1)
    assert memory is not None
    assert memory.weights == sum(tensor.nbytes for tensor in (*parameters, *system.buffers()))
    assert memory.gradients == sum(parameter.nbytes for parameter in parameters)
    tensors = [value for state in steps.state.values() for value in state.values() if isinstance(value, torch.Tensor) and value.numel() > 1]
    assert memory.optimiser == sum(tensor.nbytes for tensor in tensors)
    assert num_states(asked.optimiser) == len(tensors) // len(parameters)


@pytest.mark.parametrize("average", [None, {"decay": 0.9}])
def test_a_cross_batch_memory_is_counted_on_the_device_and_in_the_checkpoint(average: dict[str, float] | None) -> None:
    """100,000 samples of 512 dimensions are 205 MB, as much as two ResNet-50s."""
    sampler = {"kind": "k_by_n", "num_classes_per_batch": 3, "num_samples_per_class": 2}
    plain = parse(TrainingConfig, {**CONFIG, "loss": {"name": "contrastive"}, "sampler": sampler, "average": average}, "test")
    asked = plain.model_copy(update={"cross_batch_memory": CrossBatchConfig(size=1000)})
    without, memory = (training_memory(one, SIZE, 100, 10, "cpu", num_workers=1) for one in (plain, asked))
    assert without is not None
    assert memory is not None
    buffers = sum(buffer.nbytes for buffer in build_system(asked, 10, seed=0, device=torch.device("cpu")).loss.buffers())
    assert memory.weights - without.weights == buffers * (1 if average is None else 2)
    assert memory.trained - without.trained == 3 * buffers * (1 if average is None else 2)


def test_a_batch_is_shared_by_workers_and_embedded_in_parts() -> None:
    def images(num_workers: int = 1, **changes: Any) -> tuple[int, int]:
        memory = training_memory(config(**changes), SIZE, 100, 10, "cpu", num_workers)
        assert memory is not None
        return memory.num_images, memory.activations

    whole, activations = images()
    assert whole == 6
    assert images(num_workers=2) == (3, activations // 2)
    assert images(num_workers=4)[0] == 2
    assert images(embed_at_once=2) == (2, activations // 3)
    assert images(sampler={"kind": "k_by_n", "num_classes_per_batch": 4, "num_samples_per_class": 3})[0] == 12


def test_classes_that_are_spread_over_workers_are_on_each_device_in_part_and_on_disk_as_a_whole() -> None:
    whole, part, alone = (
        training_memory(config(shard_classes=sharded), SIZE, 100, 10_000, "cuda", num_workers)
        for sharded, num_workers in ((None, 4), (True, 4), (True, 1))
    )
    assert whole is not None
    assert part is not None
    assert alone is not None
    centres = 4 * 2 * 10_000 * whole.embedding_dim
    assert whole.weights - part.weights == whole.gradients - part.gradients == 3 * centres // 4
    assert whole.optimiser - part.optimiser == num_states(config().optimiser) * 3 * centres // 4
    assert part.trained == whole.trained == 3 * whole.weights + 2 * whole.optimiser
    assert (alone.weights, alone.trained) == (whole.weights, whole.trained)


def test_a_network_that_is_frozen_in_parts_and_one_that_is_averaged() -> None:
    def memory(**changes: Any) -> Any:
        return training_memory(config(**changes), SIZE, 100, 10, "cpu", num_workers=1)

    plain, averaged = memory(), memory(average={"decay": 0.9})
    assert averaged.weights == 2 * plain.weights
    resnet, frozen = (memory(model={"backbone": {"name": "resnet18", "width": 32}, "freeze_batchnorm": kind}) for kind in ("none", "all"))
    network = Embedder(config(model={"backbone": {"name": "resnet18", "width": 32}}).model, 2)
    num_scales = sum(module.num_features for module in network.modules() if isinstance(module, nn.BatchNorm2d))
    assert resnet.gradients - frozen.gradients == 2 * 4 * num_scales


@pytest.mark.parametrize("name", ["resnet18", "bn_inception"])
def test_half_precision_is_near_what_autocast_keeps_on_the_cpu(name: str) -> None:
    """Autocast casts different operations on different devices, so that the estimate is only approximate."""
    asked = config(model={"backbone": {"name": name, "width": 32}}, precision="bfloat16")
    network = Embedder(asked.model, 4).train()
    images = torch.randn(6, 3, 64, 64).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, kept = kept_storages(network, lambda: network(images))
    memory = training_memory(asked, 64, 100, 10, "cpu", num_workers=1)
    assert memory is not None
    assert memory.activations == pytest.approx(sum(kept.values()), rel=0.2)
    assert training_memory(asked.model_copy(update={"precision": "auto"}), 64, 100, 10, "cuda", 1) == memory


def test_images_of_any_size_tell_nothing() -> None:
    assert training_memory(config(), 0, 100, 10, "cpu", num_workers=1) is None


@pytest.mark.parametrize("name", [name for name in table_names() if name != STANDING])
def test_the_losses_of_every_table_have_a_memory(name: str) -> None:
    """Also pytorch-metric-learning's, which torch's meta device cannot build. The network is a small one."""
    runs = [run for runs in runs_of(name, load_table(name)).values() for run in runs]
    trained = [run.training for run in runs if run.training.num_epochs]
    small = [one.model_copy(update={"model": config().model.model_copy(update={"head": one.model.head})}) for one in trained]
    for training in {one.loss.model_dump_json(): one for one in small}.values():
        memory = training_memory(training, SIZE, num_images=1000, num_classes=100, device="cpu", num_workers=1)
        if training.loss.options.get("centroids") == "kmeans":  # k-means of up to 1,000 classes
            assert memory is None
        else:
            assert memory is not None
            assert memory.total > 0
