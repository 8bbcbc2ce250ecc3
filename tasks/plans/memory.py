"""Estimate the memory that a training takes on a device from its configuration, before anything is run. Imports torch.

Weights, gradients and the optimiser's state are counted. Activations are the tensors that a forward pass keeps for the backward pass: the
backbone runs on torch's meta device, which has shapes but no values, pooling and head run on the CPU, and each tensor that autograd keeps
is counted once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from dml_core.data.views.samplers import first_batch_size
from dml_core.losses.registry import build_loss
from dml_core.models.config import ModelConfig
from dml_core.models.embedder import Embedder
from dml_core.training.config import TrainingConfig
from dml_core.training.optimisation.config import OptimiserConfig

HALF = 2  # bytes of a bfloat16 number


@dataclass(frozen=True)
class Memory:
    """Bytes that a training holds on one device, in addition to those of CUDA and its libraries.

    Attributes:
        num_images: number of images whose activations are held at a time.
        weights: network and loss, and their moving average if any.
        gradients: those of the trained parameters.
        optimiser: state of the optimiser.
        activations: those of the network; the loss's, N x C for a classifier, are not counted.
    """

    num_images: int
    weights: int
    gradients: int
    optimiser: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimiser + self.activations

    @property
    def trained(self) -> int:
        """Bytes of a finished training on disk: its checkpoint (weights, optimiser's state), and in MLflow a copy of it and the network."""
        return 2 * (self.weights + self.optimiser) + self.weights


def training_memory(config: TrainingConfig, size: int, num_images: int, num_classes: int, device: str, num_workers: int) -> Memory | None:
    """Return the memory that one worker of a training holds.

    Args:
        config: configuration of the training.
        size: side of its input in pixels; 0 if images keep their own size.
        num_images, num_classes: size of the training part.
        device: "cpu" or "cuda"; `precision: auto` is bfloat16 on the latter.
        num_workers: number of workers that share a batch.

    Returns:
        None if `size` is 0, or torch's meta device cannot run the network.
    """
    if not size:
        return None
    batch = -(-first_batch_size(config.sampler, num_images, num_classes) // num_workers)
    batch = min(batch, config.embed_at_once or batch)
    try:
        activations, network = _network_bytes(config.model.model_dump_json(), size, batch)
        loss = _loss_bytes(config, num_classes)
    except (NotImplementedError, RuntimeError):
        return None
    is_half = config.precision == "bfloat16" or (config.precision == "auto" and device == "cuda")
    if is_half:  # autocast halves the bytes of activations, and keeps a cast copy of the weights
        activations = activations // 2 + network.parameters // 4 * HALF
    trained = network.trained + loss.trained
    kept = network.parameters + network.buffers + loss.parameters + loss.buffers
    weights = kept * (1 if config.average is None else 2)
    return Memory(batch, weights, trained, trained * num_states(config.optimiser), activations)


def embedding_bytes(config: TrainingConfig, num_images: int, num_classes: int) -> int:
    """Return the bytes of the float32 embeddings of images.

    Args:
        config: training configuration of the network that embeds them.
        num_images: number of embedded images.
        num_classes: number of classes of the training part.
    """
    return 4 * num_images * _embedding_dim(config.model.model_dump_json(), num_classes)


def num_states(optimiser: OptimiserConfig) -> int:
    """Return the number of tensors that an optimiser keeps for each parameter, each of its size."""
    return {"sgd": int(optimiser.momentum > 0)}.get(optimiser.name, 2)


def kept_storages(module: nn.Module, forward: Callable[[], Tensor]) -> tuple[Tensor, dict[int, int]]:
    """Run a forward pass and return what it keeps for its backward pass, without the module's parameters and buffers.

    Args:
        module: module whose parameters and buffers are not counted.
        forward: the pass, on any device, including torch's meta device.

    Returns:
        The output, which keeps the storages alive, and the bytes of each storage by its address.
    """
    own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()  # views of one storage count once, with the whole storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return forward(), kept


def activation_bytes(network: Embedder, images: Tensor) -> int:
    """Return the bytes that a forward pass of a network on the meta device keeps for its backward pass.

    Args:
        network: network on the meta device; its pooling and head are moved to the CPU, without their values.
        images: (N, 3, H, W), on the meta device.
    """
    maps, kept = kept_storages(network.backbone, lambda: network.backbone(images))
    # Generalised-mean pooling switches autocast off, and the meta device does not support autocast.
    rest = nn.Sequential(network.pooling, network.head).to_empty(device="cpu")
    seen = torch.zeros(maps.shape, requires_grad=True)
    _, kept_by_rest = kept_storages(rest, lambda: rest(seen))
    if maps.untyped_storage()._cdata in kept:
        kept_by_rest.pop(seen.untyped_storage()._cdata, None)  # counted already: the backbone keeps the same maps
    return sum(kept.values()) + sum(kept_by_rest.values())


@dataclass(frozen=True)
class _Bytes:
    parameters: int
    trained: int
    buffers: int


def _bytes_of(module: nn.Module) -> _Bytes:
    sizes = [(parameter.nbytes, parameter.requires_grad) for parameter in module.parameters()]
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    return _Bytes(sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains), buffers)


@cache
def _network_bytes(model: str, size: int, num_images: int) -> tuple[int, _Bytes]:
    """Return the bytes of a batch's activations and of the network."""
    config = ModelConfig.model_validate_json(model)
    backbone = config.backbone.model_copy(update={"weights": "none", "weights_sha256": None})
    with torch.device("meta"):
        network = Embedder(config.model_copy(update={"backbone": backbone}), num_classes=2).train()
        images = torch.empty(num_images, 3, size, size)
    if config.memory_format == "channels_last":
        images = images.to(memory_format=torch.channels_last)
    bytes_of_network = _bytes_of(network)
    return activation_bytes(network, images), bytes_of_network


def _loss_bytes(config: TrainingConfig, num_classes: int) -> _Bytes:
    embedding_dim = _embedding_dim(config.model.model_dump_json(), num_classes)
    with torch.device("meta"):
        loss = build_loss(config.loss.name, config.loss.options, num_classes, embedding_dim)
    return _bytes_of(loss)


@cache
def _embedding_dim(model: str, num_classes: int) -> int:
    from dml_core.models.heads import build_head

    config = ModelConfig.model_validate_json(model)
    with torch.device("meta"):
        return int(build_head(config.head, _num_features(config.backbone.model_dump_json()), num_classes).output_dim)


@cache
def _num_features(backbone: str) -> int:
    from dml_core.models.backbones.config import BackboneConfig
    from dml_core.models.backbones.registry import build_backbone

    config = BackboneConfig.model_validate_json(backbone).model_copy(update={"weights": "none", "weights_sha256": None})
    with torch.device("meta"):
        features = build_backbone(config).num_features
    assert isinstance(features, int)
    return features
