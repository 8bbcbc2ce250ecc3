"""SoftTriple loss (Qian et al., ICCV 2019, eq. 7-10): several centres per class with a soft assignment to them.

Shapes: N samples, C classes, K centres per class.
"""

import torch
from pydantic import Field
from torch import Tensor

from dml_core.losses.multi_centre import MultiCentre, MultiCentreConfig
from dml_core.search_space import searched


class SoftTripleConfig(MultiCentreConfig):
    """Options in addition to those of `MultiCentreConfig`.

    Attributes:
        gamma: temperature of the assignment to a class's centres (published 0.1).
    """

    gamma: float = Field(default=0.1, gt=0.0, json_schema_extra=searched(0.02, 0.5, log=True))

    @property
    def without_effect(self) -> frozenset[str]:
        """Also gamma if K = 1: the assignment to a single centre is always 1."""
        return super().without_effect | ({"gamma"} if self.num_centres == 1 else set())


class SoftTriple(MultiCentre):
    """S'_ic = sum_k softmax_k(x.w_c^k / gamma) x.w_c^k in the loss of eq. 8."""

    Config = SoftTripleConfig
    config: SoftTripleConfig

    def class_similarity(self, sim_NKC: Tensor) -> Tensor:
        """Return the relaxed similarity S' of section 3.1, (N, C)."""
        if sim_NKC.shape[1] == 1:
            return sim_NKC.squeeze(1)
        return (torch.softmax(sim_NKC / self.config.gamma, dim=1) * sim_NKC).sum(dim=1)
