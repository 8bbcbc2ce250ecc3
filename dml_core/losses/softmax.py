"""Softmax cross-entropy over a linear classifier, the baseline of all five papers (SoftTriple section 3, heated-up softmax eq. 1-2).

Shapes: N samples, D embedding dimensions, C classes.
"""

from typing import Literal

from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional

from dml_core.initial_weights import UNIT_NORM, start_as_tensorflow, start_at_class_means
from dml_core.losses.contract import Loss, LossConfig, LossOutput, Needs
from dml_core.search_space import searched


class SoftmaxConfig(LossConfig):
    """Options.

    Attributes:
        bias: learn b_m (heated-up softmax eq. 1: yes; SoftTriple's and SGSL's equations: no).
        initial: "uniform", torch's default; or "unit_norm", weights of norm near 1 and zero biases (heated-up softmax's released code).
        label_smoothing: epsilon; the target is (1 - eps) on the true class plus eps / C on every class.
        better_init: start the weights at the directions of the untrained embeddings' class means (heated-up softmax's released code on
            SOP, also for plain softmax).
    """

    bias: bool = True
    initial: Literal["uniform", "unit_norm"] = "uniform"
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0, json_schema_extra=searched(0, 0.5))
    better_init: bool = False


class Softmax(Loss):
    """-log(exp(z_y) / sum_m exp(z_m)) with z = W f + b, neither W nor f normalised."""

    Config = SoftmaxConfig
    config: SoftmaxConfig

    def __init__(self, config: SoftmaxConfig, num_classes: int, embedding_dim: int) -> None:
        super().__init__(config, num_classes, embedding_dim)
        self.classifier = nn.Linear(embedding_dim, num_classes, bias=config.bias)
        if config.initial == "unit_norm":
            start_as_tensorflow(self.classifier, UNIT_NORM)

    @property
    def needs(self) -> Needs:
        """The training set's embeddings, if the classifier starts at the class means."""
        return Needs(initial_embeddings=self.config.better_init)

    def initialise(self, embeddings_ND: Tensor, labels_N: Tensor) -> None:
        """Set each row of W to the direction of its class's mean embedding."""
        start_at_class_means(self.classifier, embeddings_ND, labels_N)

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the mean cross-entropy of the batch."""
        logits_NC = self.classifier(embeddings_ND)
        total = functional.cross_entropy(logits_NC, labels_N, label_smoothing=self.config.label_smoothing)
        return LossOutput(total, {"softmax": total.detach()})
