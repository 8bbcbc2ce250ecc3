"""L2-constrained softmax (Ranjan et al., 2017, eq. 2): embeddings on a sphere of fixed or learned radius, unconstrained classifier.

Shapes: N samples, D embedding dimensions, C classes.
"""

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional

from dml_core.losses.contract import Loss, LossConfig, LossOutput, Needs
from dml_core.losses.sgsl import drop_features
from dml_core.search_space import searched
from dml_core.unit_length import unit_length


class L2ConstrainedSoftmaxConfig(LossConfig):
    """Options.

    Attributes:
        radius: alpha, the norm of every embedding; the initial value if it is learned (assumed 40).
        learn_radius: learn alpha as a parameter.
        label_smoothing: epsilon, spread over all C classes (0 in the paper; SGSL's Table 3 adds it to every softmax).
        dropout: share of the features hidden from the classifier (0 in the paper; 0.5 in Boudiaf et al., whose settings SGSL's Table 3
            adopts).
    """

    radius: float = Field(default=40.0, gt=0.0, json_schema_extra=searched(5, 80, log=True))
    learn_radius: bool = False
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0, json_schema_extra=searched(0, 0.5))
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)


class L2ConstrainedSoftmax(Loss):
    """Cross-entropy of W (alpha x / ||x||) + b."""

    Config = L2ConstrainedSoftmaxConfig
    config: L2ConstrainedSoftmaxConfig

    def __init__(self, config: L2ConstrainedSoftmaxConfig, num_classes: int, embedding_dim: int) -> None:
        super().__init__(config, num_classes, embedding_dim)
        self.classifier = nn.Linear(embedding_dim, num_classes)
        self.radius = nn.Parameter(torch.tensor(config.radius), requires_grad=config.learn_radius)

    @property
    def needs(self) -> Needs:
        """The global batch with dropout, which is drawn for all its samples at once."""
        return Needs(global_batch=self.config.dropout > 0)

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the mean cross-entropy of the batch."""
        scaled_ND = self.radius * unit_length(embeddings_ND)
        logits_NC = self.classifier(drop_features(scaled_ND, self.config.dropout if self.training else 0.0, generator))
        total = functional.cross_entropy(logits_NC, labels_N, label_smoothing=self.config.label_smoothing)
        return LossOutput(total, {"softmax": total.detach()})
