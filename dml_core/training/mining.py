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

NUM_NEAREST = 10  # assumed: each epoch draws one of these at random, so that a few outlying images do not appear in every triplet
ROWS_AT_ONCE = 1024


def nearest_of_other_classes(embeddings_ND: Tensor, labels_N: Tensor, num_nearest: int = NUM_NEAREST) -> NDArray[np.int64]:
    """Return the (N, k) nearest images of other classes by cosine, nearest first; k is smaller if some image has fewer."""
    unit_ND = functional.normalize(embeddings_ND.float())
    fewest = len(labels_N) - int(torch.bincount(labels_N).max())
    nearest = []
    for rows_RD, labels_R in zip(torch.split(unit_ND, ROWS_AT_ONCE), torch.split(labels_N, ROWS_AT_ONCE), strict=True):
        sim_RN = (rows_RD @ unit_ND.T).masked_fill_(labels_R[:, None] == labels_N, -torch.inf)
        nearest.append(sim_RN.topk(min(num_nearest, fewest), dim=1).indices)
    return torch.cat(nearest).cpu().numpy()
