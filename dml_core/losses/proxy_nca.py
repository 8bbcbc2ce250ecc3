"""ProxyNCA (Movshovitz-Attias et al., "No Fuss Distance Metric Learning using Proxies", ICCV 2017, eq. 4): one proxy per class.

The sum runs over the other classes' proxies only, so the loss has no lower bound (SoftTriple, Remark 3); pytorch-metric-learning
includes the own proxy. Shapes: N samples, D embedding dimensions, C classes.
"""

import torch
from pydantic import Field
from torch import Generator, Tensor, nn

from dml_core.losses.contract import Loss, LossConfig, LossOutput
from dml_core.search_space import searched
from dml_core.unit_length import unit_length


class ProxyNCAConfig(LossConfig):
    """Options.

    Attributes:
        scale: factor on the squared distances of unit-length vectors (published 1).
    """

    scale: float = Field(default=1.0, gt=0.0, json_schema_extra=searched(1, 40, log=True))


class ProxyNCA(Loss):
    """-log(exp(-d(x, p_y)) / sum_{z != y} exp(-d(x, p_z))) with squared distances d of unit-length vectors."""

    Config = ProxyNCAConfig
    config: ProxyNCAConfig

    def __init__(self, config: ProxyNCAConfig, num_classes: int, embedding_dim: int) -> None:
        super().__init__(config, num_classes, embedding_dim)
        self.proxies_CD = nn.Parameter(torch.randn(num_classes, embedding_dim))

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the batch mean of eq. 4."""
        # -d = 2 cos - 2, and the constant cancels in the quotient.
        logits_NC = 2.0 * self.config.scale * unit_length(embeddings_ND) @ unit_length(self.proxies_CD).T
        own_N1 = labels_N[:, None]
        others_N = logits_NC.scatter(1, own_N1, -torch.inf).logsumexp(dim=1)
        total = (others_N - logits_NC.gather(1, own_N1).squeeze(1)).mean()
        return LossOutput(total, {"proxy_nca": total.detach()})
