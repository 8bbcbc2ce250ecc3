"""The registered losses as criteria of an ordinary PyTorch loop: `loss(embeddings, labels)` is a scalar tensor.

`dml_core.losses` has one subclass of `MetricLoss` for each entry of the registry, made from it when first used: `SoftTriple`,
`HeatedUpSoftmax`, `Discriminative`, `TupletMargin`, `SGSL` and the baselines. Options are keyword arguments with the defaults of the loss's
own options class, which are the paper's values; `help(SoftTriple)` lists them.

Shapes: N samples, D embedding dimensions, C classes.
"""

import inspect
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dml_core.errors import DataError
from dml_core.losses.contract import Loss, LossConfig, LossOutput, Needs
from dml_core.losses.registry import build_loss, loss_class

SIZES = ("num_classes", "embedding_dim")


class MetricLoss(nn.Module):
    """A loss for any training loop. Its centres or classifier, if it has any, are its parameters and need an optimiser.

    Of several processes each sees its own batch alone, also a loss with `needs.global_batch`.

    Args:
        num_classes: C, the number of training classes, at least 2.
        embedding_dim: D, the size of the embeddings.
        **options: the loss's options.

    Attributes:
        name: name in the registry.
        loss: the loss as the training loop of `dml_core` uses it.
        parts: named parts of the last value, detached scalars, for curves.

    Raises:
        ConfigError: an unknown option, a value outside its range, or sizes that do not fit the loss.
    """

    name: ClassVar[str]

    def __init__(self, num_classes: int, embedding_dim: int, **options: Any) -> None:
        super().__init__()
        self.loss: Loss = build_loss(self.name, options, num_classes, embedding_dim)
        self.parts: dict[str, Tensor] = {}

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: None = None) -> Tensor:
        """Return the loss of one batch, a scalar, and set `parts`. It is computed in float32 or better, also under autocast.

        Args:
            embeddings: (N, D) floats; docs/how-to/use-the-losses.md lists the losses that expect unit length.
            labels: (N,) class indices in [0, C), integers of any type, on any device.
            indices_tuple: None, which pytorch-metric-learning's trainers pass if they have no miner.

        Raises:
            DataError: wrong shapes or types, labels outside [0, C) on the CPU, or pairs from a miner.
        """
        if indices_tuple is not None:
            raise DataError(f"loss '{self.name}' chooses its pairs from the whole batch: remove the miner")
        if isinstance(labels, Tensor) and isinstance(embeddings, Tensor) and not self.needs.labels_on_cpu:
            labels = labels.to(embeddings.device)
        output: LossOutput = self.loss(embeddings, labels)
        self.parts = output.parts
        return output.total

    @property
    def needs(self) -> Needs:
        """Requirements of the loss on its batches: with `needs.sampler` "k_by_n", several images of each of several classes."""
        return self.loss.needs

    def start_epoch(self, epoch: int, num_epochs: int) -> None:
        """Call before each epoch (0-based) for a loss that changes over the epochs (`HeatedUpSoftmax`); others ignore it."""
        self.loss.start_epoch(epoch, num_epochs)

    @property
    def learning_rate_factor(self) -> float:
        """Factor on all learning rates in the current epoch; 1 except in heated epochs of `HeatedUpSoftmax`."""
        return self.loss.learning_rate_factor

    @torch.no_grad()
    def initialise(self, embeddings: Tensor, labels: Tensor) -> None:
        """Set the loss's start from the training set's embeddings (M, D) and labels (M,), if `needs.initial_embeddings`.

        Raises:
            DataError: wrong shapes or types, or labels outside [0, C).
        """
        weights = next(self.loss.parameters(), None)
        embeddings = torch.as_tensor(embeddings)
        embeddings, labels = self.loss.checked(embeddings if weights is None else embeddings.to(weights), torch.as_tensor(labels).cpu())
        self.loss.initialise(embeddings, labels.to(embeddings.device))

    def extra_repr(self) -> str:
        """Return the arguments, for `print(loss)`."""
        values = {size: getattr(self.loss, size) for size in SIZES} | self.loss.config.model_dump()
        return ", ".join(f"{name}={value!r}" for name, value in values.items())


@cache
def metric_loss_class(name: str) -> type[MetricLoss]:
    """Return the subclass of `MetricLoss` of a registered loss, with its options in signature and docstring.

    Raises:
        ConfigError: unknown loss; the message suggests the nearest name.
    """
    loss = loss_class(name)
    members = {"name": name, "__module__": "dml_core.losses", "__doc__": _description(loss), "__signature__": _signature(loss.Config)}
    return type(loss.__name__, (MetricLoss,), members)


def _description(loss: type[Loss]) -> str:
    """Return the loss's docstring followed by those of its options classes."""
    configs = [base for base in loss.Config.__mro__ if issubclass(base, LossConfig) and base is not LossConfig]
    lines = ["Args:", "    num_classes: C, the number of training classes.", "    embedding_dim: D, the size of the embeddings."]
    for config in reversed(configs):
        lines += inspect.cleandoc(config.__doc__ or "").partition("Attributes:\n")[2].splitlines()
    formula = inspect.cleandoc(loss.__doc__ or "").partition("\n\nRaises:")[0]
    return "\n".join([formula, "", *lines])


def _signature(config: type[LossConfig]) -> inspect.Signature:
    sizes = [inspect.Parameter(size, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=int) for size in SIZES]
    options = inspect.signature(config).parameters  # annotated with each option's limits, too
    plain = [parameter.replace(annotation=config.model_fields[option].annotation) for option, parameter in options.items()]
    return inspect.Signature([*sizes, *plain])
