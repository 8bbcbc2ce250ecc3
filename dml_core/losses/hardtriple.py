"""HardTriple loss (Qian et al., "SoftTriple Loss", ICCV 2019, eq. 5-6): several centres per class, of which only the nearest counts.

Shapes: N samples, C classes, K centres per class.
"""

from torch import Tensor

from dml_core.losses.multi_centre import MultiCentre, MultiCentreConfig


class HardTriple(MultiCentre):
    """S_ic = max_k x.w_c^k in the loss of eq. 6."""

    Config = MultiCentreConfig

    def class_similarity(self, sim_NKC: Tensor) -> Tensor:
        """Return the similarity to the nearest centre of each class (eq. 5), (N, C)."""
        return sim_NKC.amax(dim=1)
