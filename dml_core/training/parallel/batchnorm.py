"""BatchNorm over the global batch, so that a run on W workers has the statistics of one process.

CUDA uses torch's own SyncBatchNorm. It rejects CPU tensors, and parity is tested on CPUs, so this module implements it for them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dml_core.errors import ConfigError
from dml_core.float32 import at_least_float32
from dml_core.training.parallel.workers import world_size


def synchronise_batchnorm(module: nn.Module, device: torch.device) -> nn.Module:
    """Return `module` with every BatchNorm computed over all workers' samples; parameter names stay. Unchanged for one worker."""
    if world_size() == 1:
        return module
    on_gpu = device.type == "cuda"
    if on_gpu:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.__class__ = type("SyncedBatchNorm", (_SyncedOnGPU if on_gpu else _SyncedForward, type(norm)), {})
    return module


def first_batch_statistics(model: nn.Module) -> str | None:
    """Return the name of the first BatchNorm that normalises by the batch in training, or None; leaves the network in training mode."""
    norms = ((name, module) for name, module in model.train().named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    return next((name for name, module in norms if module.training), None)


def check_batches(model: nn.Module, num_images: int) -> None:
    """Reject batches of one image if a BatchNorm of the network normalises by the batch in training; the message names the first.

    Raises:
        ConfigError: there is such a layer.
    """
    if num_images == 1 and (name := first_batch_statistics(model)) is not None:
        raise ConfigError(f"sampler: the BatchNorm '{name}' cannot normalise batches of one image: raise sampler.batch_size")


class _SyncedOnGPU(nn.SyncBatchNorm):
    """torch's, followed by the layers that the BatchNorm contained."""

    def forward(self, values: Tensor) -> Tensor:
        """Normalise (N, C, ...) as `_SyncedForward` does."""
        return _inner_layers(self, super().forward(values))


def _inner_layers(norm: nn.Module, values: Tensor) -> Tensor:
    """Apply the layers inside a BatchNorm, after it: timm's BatchNormAct2d has a dropout and an activation, torch's BatchNorm none."""
    for layer in norm.children():
        values = layer(values)
    return values


class _SyncedForward(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm whose training forward uses all workers' samples; evaluation is inherited."""

    def forward(self, values: Tensor) -> Tensor:
        """Normalise (N, C, ...) by the mean and the biased variance over every worker's samples and positions.

        Computes in float32 or wider, also for half-precision values and under autocast; the result has the type of `values`.
        """
        if not self.training:
            return super().forward(values)
        self._check_input_dim(values)  # type: ignore[no-untyped-call]
        with torch.autocast(values.device.type, enabled=False):
            normalised = self._normalise(at_least_float32(values)).to(values.dtype)
        return _inner_layers(self, normalised)

    def _normalise(self, values: Tensor) -> Tensor:
        dims = [0, *range(2, values.dim())]
        shape = [1, -1, *[1] * (values.dim() - 2)]
        count = _AllReduceSum.apply(torch.tensor([values.numel() // values.shape[1]], dtype=torch.float64)).to(values.dtype)
        assert count > 1, "a batch of one value a channel is refused before training (`check_batches`)"
        mean = _AllReduceSum.apply(values.sum(dims)) / count
        centred = values - mean.view(shape)
        variance = _AllReduceSum.apply((centred * centred).sum(dims)) / count
        self._track(mean.detach(), (variance * count / (count - 1)).detach())
        normalised = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            normalised = normalised * self.weight.view(shape)
        return normalised if self.bias is None else normalised + self.bias.view(shape)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance, momentum)


class _AllReduceSum(torch.autograd.Function):
    """Sum over workers; its gradient is also summed over workers, since every worker's loss depends on every worker's samples."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total
