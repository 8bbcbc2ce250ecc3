"""Hard negatives from the whole training set (Harwood et al., "Smart Mining for Deep Metric Learning", ICCV 2017).

Written only from its description ("fast nearest neighbour search for mining triplets", discriminative loss, sections 2 and 4.4): at the
start of an epoch all training images are embedded, and the nearest images of other classes are found for each. The search is exact, theirs
uses an approximate index; their adaptive control of the triplets' difficulty is not implemented.

Shapes: N training images, D embedding dimensions, k negatives of each.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dml_core.training.parallel.workers import rank, sum_over_workers, world_size

NUM_NEAREST = 10  # assumed: each epoch draws one of these at random, so that a few outlying images do not appear in every triplet
ROWS_AT_ONCE = 1024


def nearest_of_other_classes(embeddings_ND: Tensor, labels_N: Tensor, num_nearest: int = NUM_NEAREST) -> NDArray[np.int64]:
    """Return the (N, k) nearest images of other classes by cosine, nearest first; k is smaller if some image has fewer.

    All workers call it with the same arguments; each searches for a part of the images.
    """
    unit_ND = functional.normalize(embeddings_ND.float())
    num_found = min(num_nearest, len(labels_N) - int(torch.bincount(labels_N).max()))
    nearest_Nk = labels_N.new_zeros(len(labels_N), num_found)
    for first in range(rank() * ROWS_AT_ONCE, len(labels_N), world_size() * ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        sim_RN = (unit_ND[rows] @ unit_ND.T).masked_fill_(labels_N[rows, None] == labels_N, -torch.inf)
        nearest_Nk[rows] = sim_RN.topk(num_found, dim=1).indices
    return sum_over_workers(nearest_Nk).cpu().numpy()
