"""First centres for k-means: greedy k-means++ in rounds, at the speed of matrix products.

k-means++ draws each centre with probability proportional to its squared distance to the nearest centre so far (Arthur and Vassilvitskii
2007); its greedy form draws several candidates for each centre and keeps the one that helps most. One centre at a time that is thousands
of passes over the data. Here a round chooses as many centres as an eighth of those already chosen, each the best of its own candidates;
where two of one round lie close together the later one is dropped, by the same odds that would have kept it from being drawn.

Shapes: N points, D dimensions, C centres, T candidates and B centres of a round.
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
    nearest_N = torch.cdist(points, points[chosen])[:, 0].square()
    largest_round = max(1, BYTES_AT_ONCE // (4 * len(points) * NUM_CANDIDATES))
    while len(chosen) < num_centres:
        size = min(max(1, int(len(chosen) * CENTRES_PER_ROUND)), largest_round, num_centres - len(chosen))
        weights_N = nearest_N.double().numpy()
        if not weights_N.any():
            left = np.setdiff1d(np.arange(len(points)), chosen)
            return np.array(chosen + left[: num_centres - len(chosen)].tolist())
        candidates = generator.choice(len(points), size * NUM_CANDIDATES, p=weights_N / weights_N.sum())
        gains_NT = torch.addmm((nearest_N - squares_N)[:, None], points, 2 * points[candidates].T)
        gains_NT.sub_(squares_N[candidates]).clamp_(min=0)
        best_B = gains_NT.sum(dim=0).view(size, NUM_CANDIDATES).argmax(dim=1).numpy() + np.arange(size) * NUM_CANDIDATES
        kept = _kept(points[candidates[best_B]], nearest_N[candidates[best_B]].numpy(), generator)
        chosen += candidates[best_B][kept].tolist()
        nearest_N = nearest_N.sub_(gains_NT[:, best_B[kept]].amax(dim=1)).clamp_(min=0)
        nearest_N[chosen] = 0
    return np.array(chosen)


def _kept(points_BD: Tensor, nearest_B: NDArray[np.float32], generator: np.random.Generator) -> NDArray[np.int64]:
    """Which of a round's choices stay: each with the share of its squared distance that the earlier ones have left."""
    distances_BB, draws_B = torch.cdist(points_BD, points_BD).square().numpy(), generator.random(len(points_BD))
    kept = [0]
    for number in range(1, len(points_BD)):
        if draws_B[number] * nearest_B[number] < distances_BB[number, kept].min():
            kept.append(number)
    return np.array(kept)
