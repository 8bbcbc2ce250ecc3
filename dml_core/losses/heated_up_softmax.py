"""Heated-up softmax (Zhang et al., "Heated-Up Softmax Embedding", 2018, eq. 1-3 and section 3.2): a temperature raised near the end.

The head normalises the embedding as the variant requires: l2-normalised (LN, HLN) or batch-normalised and divided by sqrt(k) (BN, HBN).
Variant SM is the plain `softmax` loss. Shapes: N samples, D = k embedding dimensions, C = M classes.
"""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Generator, Tensor, nn
from torch.nn import functional

from dml_core.initial_weights import UNIT_NORM, start_as_tensorflow, start_at_class_means
from dml_core.losses.class_shards import cross_entropy
from dml_core.losses.contract import Loss, LossConfig, LossOutput, Needs
from dml_core.search_space import searched
from dml_core.unit_length import unit_length


class HeatedUpSoftmaxConfig(LossConfig):
    """Options.

    Attributes:
        alpha: reciprocal temperature at the start (published 16).
        heated_alpha: reciprocal temperature when heated (published 4), at most alpha; None never heats (variants LN and BN).
        heat_from: share of the epochs trained before heating (released code: 61 of 80; the paper: "until convergence").
        schedule: "step" changes alpha and the learning rate at once; "gentle" changes both geometrically over the heated epochs (the
            paper tried a gentle increase without stating its schedule: assumed).
        heated_learning_rate_factor: factor on the learning rate when heated (published 0.1).
        bias: learn b_m, as in eq. 1 and the released code.
        bias_inside_alpha: logits alpha (w_m.f + b_m), eq. 1; else alpha w_m.f + b_m, as released, where the bias learns alpha times slower.
        initial: "uniform", torch's default: w_m of norm 0.58, random biases; "unit_norm", as released: w_m of norm near 1, zero biases.
            An optimiser step rotates a normalised w_m in proportion to 1 / norm squared.
        better_init: start the classifier at the normalised class means of the untrained embeddings (released code, on SOP).
    """

    alpha: float = Field(default=16.0, gt=0.0, json_schema_extra=searched(4, 64, log=True))
    heated_alpha: float | None = Field(default=4.0, gt=0.0, json_schema_extra=searched(1, 16, log=True))
    heat_from: float = Field(default=61 / 80, ge=0.0, le=1.0)
    schedule: Literal["step", "gentle"] = "step"
    heated_learning_rate_factor: float = Field(default=0.1, gt=0.0, le=1.0)
    bias: bool = True
    bias_inside_alpha: bool = True
    initial: Literal["uniform", "unit_norm"] = "uniform"
    better_init: bool = False

    @property
    def without_effect(self) -> frozenset[str]:
        """Options of the heating if there is none, and of the bias if there is none."""
        of_heating = {"heat_from", "schedule", "heated_learning_rate_factor"} if self.heated_alpha is None else set()
        return frozenset(of_heating if self.bias else of_heating | {"bias_inside_alpha"})

    @model_validator(mode="after")
    def _heats(self) -> Self:
        if self.heated_alpha is not None and self.heated_alpha > self.alpha:
            raise ValueError(f"heated_alpha {self.heated_alpha:g} is above alpha {self.alpha:g}: that cools; heating lowers alpha")
        return self


class HeatedUpSoftmax(Loss):
    """Cross-entropy of alpha (w_m.f + b_m), or of alpha w_m.f + b_m, with unit-length w_m."""

    Config = HeatedUpSoftmaxConfig
    config: HeatedUpSoftmaxConfig
    CLASS_DIMS: ClassVar = {"classifier.weight": 0, "classifier.bias": 0}

    def __init__(self, config: HeatedUpSoftmaxConfig, num_classes: int, embedding_dim: int) -> None:
        super().__init__(config, num_classes, embedding_dim)
        self.classifier = nn.Linear(embedding_dim, num_classes, bias=config.bias)
        if config.initial == "unit_norm":
            start_as_tensorflow(self.classifier, UNIT_NORM)
        self._heat = 0.0  # 0: not heated, 1: fully heated

    @property
    def needs(self) -> Needs:
        """The training set's embeddings, if the classifier starts at the class means."""
        return Needs(initial_embeddings=self.config.better_init)

    @property
    def alpha(self) -> float:
        """Reciprocal temperature of the current epoch."""
        start = self.config.alpha
        return float(start * ((self.config.heated_alpha or start) / start) ** self._heat)

    @property
    def learning_rate_factor(self) -> float:
        """1 before heating, the configured factor when heated."""
        return float(self.config.heated_learning_rate_factor**self._heat)

    def start_epoch(self, epoch: int, num_epochs: int) -> None:
        """Heat after the share `heat_from` of the epochs."""
        num_cold_epochs = round(self.config.heat_from * num_epochs)
        num_heated = epoch + 1 - num_cold_epochs
        if self.config.heated_alpha is None or num_heated <= 0:
            self._heat = 0.0
        else:
            self._heat = 1.0 if self.config.schedule == "step" else num_heated / (num_epochs - num_cold_epochs)

    def initialise(self, embeddings_ND: Tensor, labels_N: Tensor) -> None:
        """Set each w_m to the direction of its class's mean embedding."""
        start_at_class_means(self.classifier, embeddings_ND, labels_N)

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the batch mean of eq. 2."""
        bias_C: Tensor | None = self.classifier.bias
        if bias_C is not None and self.config.bias_inside_alpha:
            bias_C = self.alpha * bias_C
        logits_NC = functional.linear(self.alpha * embeddings_ND, unit_length(self.classifier.weight), bias_C)
        total = cross_entropy(logits_NC, labels_N, self.shard)
        return LossOutput(total, {"softmax": total.detach()})
