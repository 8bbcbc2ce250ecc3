"""Weighted sum of registered losses, for "softmax + X" (SGSL's Table 3; always for center loss and ring loss).

Shapes: N samples, D embedding dimensions.
"""

from typing import Any

import torch
from pydantic import Field
from torch import Generator, Tensor, nn

from dml_core.config import Config
from dml_core.losses.contract import Loss, LossConfig, LossOutput, Needs
from dml_core.losses.registry import build_loss


class Term(Config):
    """One loss of the sum: registered name, options and weight."""

    name: str
    weight: float = Field(default=1.0, gt=0.0)
    options: dict[str, Any] = Field(default_factory=dict)


class CombinedConfig(LossConfig):
    """Options.

    Attributes:
        terms: the losses to sum.
    """

    terms: tuple[Term, ...] = Field(min_length=1)


class Combined(Loss):
    """sum_t weight_t loss_t, each term with its own centres or classifier.

    Raises:
        ConfigError: a term's name or options are wrong.
    """

    Config = CombinedConfig
    config: CombinedConfig

    def __init__(self, config: CombinedConfig, num_classes: int, embedding_dim: int) -> None:
        super().__init__(config, num_classes, embedding_dim)
        self._terms: list[Loss] = [build_loss(term.name, term.options, num_classes, embedding_dim) for term in config.terms]
        self.losses = nn.ModuleList(self._terms)

    @property
    def needs(self) -> Needs:
        """Union of the terms' needs."""
        needs = [loss.needs for loss in self._terms]
        return Needs(
            sampler="k_by_n" if any(need.sampler == "k_by_n" for need in needs) else "any",
            global_batch=any(need.global_batch for need in needs),
            initial_embeddings=any(need.initial_embeddings for need in needs),
            labels_on_cpu=any(need.labels_on_cpu for need in needs),
        )

    @property
    def learning_rate_factor(self) -> float:
        """Smallest factor of the terms."""
        return min(loss.learning_rate_factor for loss in self._terms)

    def start_epoch(self, epoch: int, num_epochs: int) -> None:
        """Pass the epoch to every term."""
        for loss in self._terms:
            loss.start_epoch(epoch, num_epochs)

    def initialise(self, embeddings_ND: Tensor, labels_N: Tensor) -> None:
        """Pass the embeddings to the terms that need them."""
        for loss in self._terms:
            if loss.needs.initial_embeddings:
                loss.initialise(embeddings_ND, labels_N)

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the weighted sum; parts are named `<term>.<part>`, or `<term>_<n>.<part>` for the n-th term of one name."""
        there_N = labels_N.to(embeddings_ND.device, non_blocking=True)
        outputs = [loss.compute(embeddings_ND, labels_N if loss.needs.labels_on_cpu else there_N, generator) for loss in self._terms]
        weighted = [term.weight * output.total for term, output in zip(self.config.terms, outputs, strict=True)]
        names = [term.name for term in self.config.terms]
        titles = [name if name not in names[:n] else f"{name}_{names[:n].count(name) + 1}" for n, name in enumerate(names)]
        parts = {f"{title}.{part}": value for title, output in zip(titles, outputs, strict=True) for part, value in output.parts.items()}
        return LossOutput(torch.stack(weighted).sum(), parts)
