"""First centres for k-means: greedy k-means++ in rounds, at the speed of matrix products.

k-means++ draws each centre with probability proportional to its squared distance to the nearest centre so far (Arthur and Vassilvitskii
2007); its greedy form draws several candidates for each centre and keeps the one that helps most. One centre at a time that is thousands
of passes over the data. Here a round chooses as many centres as an eighth of those already chosen, each the best of its own candidates;
where two of one round lie close together the later one is dropped, by the same odds that would have kept it from being drawn.

Shapes: N points, D dimensions, C centres, B centres of a round, T candidates for each.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CENTRES_PER_ROUND = 1 / 8
NUM_CANDIDATES = 12
BYTES_AT_ONCE = 2**27


def first_centres(points_ND: NDArray[np.float32], num_centres: int, seed: int) -> NDArray[np.int64]:
    """Indices of C different points to start from, C at most N; the same for the same seed.

    Where fewer than C points are distinct, the others are any points.
    """
    generator = np.random.default_rng(seed)
    points = torch.from_numpy(points_ND)
    squares_N = points.square().sum(dim=1)
    chosen = [int(generator.integers(len(points)))]
    nearest_N = _squared_distances(points, squares_N, np.array(chosen))[:, 0]
    largest_round = max(1, BYTES_AT_ONCE // (4 * len(points) * NUM_CANDIDATES))
    while len(chosen) < num_centres:
        size = min(max(1, int(len(chosen) * CENTRES_PER_ROUND)), largest_round, num_centres - len(chosen))
        weights_N = nearest_N.double().numpy()
        if not weights_N.any():
            left = np.setdiff1d(np.arange(len(points)), chosen)
            return np.array(chosen + left[: num_centres - len(chosen)].tolist())
        candidates = generator.choice(len(points), size * NUM_CANDIDATES, p=weights_N / weights_N.sum())
        distances_NB = _squared_distances(points, squares_N, candidates)
        gains = (nearest_N[:, None] - distances_NB).clamp_(min=0).sum(dim=0).view(size, NUM_CANDIDATES)
        best_B = gains.argmax(dim=1).numpy() + np.arange(size) * NUM_CANDIDATES
        kept = _kept(candidates[best_B], distances_NB[candidates[best_B]][:, best_B], nearest_N, generator)
        chosen += candidates[best_B][kept].tolist()
        nearest_N = torch.minimum(nearest_N, distances_NB[:, best_B[kept]].amin(dim=1))
        nearest_N[chosen] = 0
    return np.array(chosen)


def _squared_distances(points: Tensor, squares_N: Tensor, index: NDArray[np.int64]) -> Tensor:
    """(N, B), not below zero."""
    return torch.addmm(squares_N[:, None], points, points[index].T, alpha=-2).add_(squares_N[index]).clamp_(min=0)


def _kept(index_B: NDArray[np.int64], distances_BB: Tensor, nearest_N: Tensor, generator: np.random.Generator) -> NDArray[np.int64]:
    """Which of a round's choices stay: each with the share of its squared distance that the earlier ones have left."""
    before_B = nearest_N[index_B].numpy()
    distances, draws_B = distances_BB.numpy(), generator.random(len(index_B))
    kept = [0]
    for b in range(1, len(index_B)):
        if draws_B[b] * before_B[b] < distances[b, kept].min():
            kept.append(b)
    return np.array(kept)
