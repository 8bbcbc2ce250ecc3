"""Estimate the memory that a training takes on a device from its configuration, before anything is run. Imports torch.

Weights, gradients and the optimiser's state are counted. Activations are the tensors that a forward pass keeps for the backward pass: the
backbone runs on torch's meta device, which has shapes but no values, pooling and head run on the CPU, and each tensor that autograd keeps
is counted once.
"""

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor, nn

from dml_core.data.views.samplers import first_batch_size
from dml_core.errors import ConfigError
from dml_core.losses.class_shards import ClassShard
from dml_core.losses.contract import Loss
from dml_core.losses.registry import build_loss
from dml_core.models.config import ModelConfig
from dml_core.models.embedder import Embedder
from dml_core.training.config import TrainingConfig
from dml_core.training.optimisation.config import OptimiserConfig
from dml_core.training.parallel.workers import shard_sizes
from tasks.plans.known_memory import Memory


def training_memory(config: TrainingConfig, size: int, num_images: int, num_classes: int, device: str, num_workers: int) -> Memory | None:
    """Return the memory that one worker of a training holds.

    Args:
        size: side of its input in pixels; 0 if images keep their own size.
        num_images, num_classes: size of the training part.
        device: "cpu" or "cuda"; `precision: auto` is bfloat16 on the latter.
        num_workers: number of workers that share a batch.

    Returns:
        None if `size` is 0, or torch's meta device cannot run the network, or place the loss's centroids by k-means.
    """
    if not size:
        return None
    batch = -(-first_batch_size(config.sampler, num_images, num_classes) // num_workers)
    batch = min(batch, config.embed_at_once or batch)
    try:
        network, activations = _network(config.without_weights().model, size, batch, num_classes)
        loss = _loss(config, num_classes, network.head.output_dim)
    except (NotImplementedError, RuntimeError):
        return None
    is_half = config.precision == "bfloat16" or (config.precision == "auto" and device == "cuda")
    if is_half:  # autocast halves the bytes of activations, and keeps a cast copy of the weights
        activations = (activations + _num_bytes(network.parameters())) // 2
    system = nn.ModuleList([network, loss])
    if config.cross_batch_memory is not None:  # embeddings and labels
        with torch.device("meta"):
            loss.register_buffer("memory", torch.empty(config.cross_batch_memory.size, loss.embedding_dim + 2))
    weights, _, optimiser = _sizes(system, config)
    trained = 2 * (weights + optimiser) + weights
    if config.shard_classes:  # files have all classes, a device those of its worker; the first worker has the most
        loss.shard_classes(ClassShard(tuple(shard_sizes(num_classes, num_workers)), 0))
    return Memory(batch, *_sizes(system, config), activations, trained, network.head.output_dim)


def _loss(config: TrainingConfig, num_classes: int, embedding_dim: int) -> Loss:
    """Return the loss, without values unless it needs some to be built, as those of pytorch-metric-learning do."""
    try:
        with torch.device("meta"):
            return build_loss(config.loss.name, config.loss.options, num_classes, embedding_dim)
    except ConfigError:
        return build_loss(config.loss.name, config.loss.options, num_classes, embedding_dim)


def _sizes(system: nn.Module, config: TrainingConfig) -> tuple[int, int, int]:
    """Return the bytes of a system's weights, of their gradients and of the optimiser's state."""
    weights = (_num_bytes(system.parameters()) + _num_bytes(system.buffers())) * (1 if config.average is None else 2)
    trained = _num_bytes(parameter for parameter in system.parameters() if parameter.requires_grad)
    return weights, trained, trained * num_states(config.optimiser)


def num_states(optimiser: OptimiserConfig) -> int:
    """Return the number of tensors that an optimiser keeps for each parameter, each of its size."""
    return int(optimiser.momentum > 0) if optimiser.name == "sgd" else 2


def kept_storages(module: nn.Module, forward: Callable[[], Tensor]) -> tuple[Tensor, dict[int, int]]:
    """Run a forward pass, on any device, and return what it keeps for its backward pass, without the module's parameters and buffers.

    Returns:
        The output, which keeps the storages alive, and the bytes of each storage by its address.
    """
    not_counted = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    num_bytes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in not_counted:
            num_bytes[storage._cdata] = storage.nbytes()  # views of one storage count once, with the whole storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return forward(), num_bytes


def activation_bytes(network: Embedder, images: Tensor) -> int:
    """Return the bytes that a forward pass of a network on the meta device keeps for its backward pass.

    Args:
        network: network on the meta device; its pooling and head are moved to the CPU, without their values.
        images: (N, 3, H, W), on the meta device.
    """
    maps, of_backbone = kept_storages(network.backbone, lambda: network.backbone(images))
    # Generalised-mean pooling switches autocast off, and the meta device does not support autocast.
    rest = nn.Sequential(network.pooling, network.head).to_empty(device="cpu")
    maps_on_cpu = torch.zeros(maps.shape, requires_grad=True)
    _, of_rest = kept_storages(rest, lambda: rest(maps_on_cpu))
    if maps.untyped_storage()._cdata in of_backbone:
        of_rest.pop(maps_on_cpu.untyped_storage()._cdata, None)  # counted already: the backbone keeps the same maps
    return sum(of_backbone.values()) + sum(of_rest.values())


@cache
def _network(config: ModelConfig, size: int, num_images: int, num_classes: int) -> tuple[Embedder, int]:
    """Return the network of a configuration, without values, and the bytes of a batch's activations."""
    with torch.device("meta"):
        network = Embedder(config, num_classes).train()
        images = torch.empty(num_images, 3, size, size)
    if config.memory_format == "channels_last":
        images = images.to(memory_format=torch.channels_last)
    return network, activation_bytes(network, images)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
