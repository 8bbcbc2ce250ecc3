"""First clusters for k-means: greedy k-means++ in rounds, at the speed of matrix products.

k-means++ draws each centre with probability proportional to its squared distance to the nearest centre so far (Arthur and Vassilvitskii
2007); its greedy form draws several candidates for each centre and keeps the one with the largest gain. One centre at a time means
thousands of passes over the data. Here a round draws candidates for an eighth as many centres as exist, and keeps the best of all; if two
are close together, the lesser is dropped with the probability that it would not have been drawn.

Gains are only compared with each other, so if the work is large and the processor multiplies bfloat16, they are computed in it until the
remaining distances are too small for its rounding. Smaller work is fast anyway, and float32 chooses the same on nearly every machine.

Shapes: N points, D dimensions, K centres, T candidates and B new centres of a round, R points of a block.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dml_core.evaluation.retrieval.geometry import blocks
from dml_core.evaluation.threads import BlockThreads, is_large

Summary = TypeVar("Summary")
CPU = torch.device("cpu")
CENTRES_PER_ROUND = 1 / 8
LARGEST_ROUND = 192  # fewer centres per round give better centres, more slowly
NUM_CANDIDATES = 10  # for each centre
NUM_ROWS_AT_ONCE = 1024
NUM_ROWS_ON_GPU = 16_384
ALIGNMENT = 32
SMALLEST_SHARE = 1 / 64  # minimum ratio of distances to the points' squares for bfloat16, which errs by up to 1/256 of a product


def first_clusters(
    points_ND: NDArray[np.float32], num_centres: int, seed: int, device: torch.device = CPU
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return indices (K,) of different initial points, K at most N, and the nearest of them to each point, (N,), each being its own.

    Deterministic for a seed. With bfloat16 only nearly the nearest. If fewer than K points are distinct, the others are arbitrary points.
    """
    generator = np.random.default_rng(seed)
    points = torch.from_numpy(points_ND).to(device)
    squares_N = points.square().sum(dim=1)
    is_narrow = device == CPU and is_large(points.numel() * num_centres) and torch.cpu._is_avx512_bf16_supported()
    factors_NF = _factors(points, torch.bfloat16 if is_narrow else torch.float32)
    smallest_mean = SMALLEST_SHARE * float(squares_N.mean())
    chosen = generator.integers(len(points), size=1)
    clusters_N = torch.zeros(len(points), dtype=torch.int64, device=device)
    nearest_N = (points - points[chosen]).square().sum(dim=1)
    with BlockThreads(is_narrow) as threads:
        while len(chosen) < num_centres:
            weights_N = nearest_N.double().cpu().numpy()
            if not weights_N.any():
                chosen = np.concatenate([chosen, np.setdiff1d(np.arange(len(points)), chosen)[: num_centres - len(chosen)]])
                break
            if factors_NF.dtype == torch.bfloat16 and float(nearest_N.mean()) < smallest_mean:
                factors_NF = _factors(points, torch.float32)
            size = min(max(1, int(len(chosen) * CENTRES_PER_ROUND)), LARGEST_ROUND, num_centres - len(chosen))
            candidates = np.unique(generator.choice(len(points), size * NUM_CANDIDATES, p=weights_N / weights_N.sum()))
            total_T = torch.zeros(len(candidates), device=device)
            gains = partial(_gains, threads, factors_NF, points.shape[1], squares_N, nearest_N)
            for _, sums_T in gains(candidates, lambda gains_TR: gains_TR.sum(dim=1)):
                total_T += sums_T
            best_B = candidates[np.argsort(-total_T.cpu().numpy(), kind="stable")[:size]]
            new_B = best_B[_kept(points[best_B].cpu(), nearest_N[best_B].cpu().numpy(), generator)]
            for rows, (largest_R, index_R) in gains(new_B, lambda gains_BR: gains_BR.max(dim=0)):
                clusters_N[rows] = torch.where(largest_R > 0, index_R + len(chosen), clusters_N[rows])
                nearest_N[rows] = (nearest_N[rows] - 2 * largest_R).clamp_(min=0)
            chosen = np.concatenate([chosen, new_B])
            nearest_N[new_B] = 0
    clusters_N[chosen] = torch.arange(num_centres, device=device)
    return chosen, clusters_N.cpu().numpy()


def _factors(points: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of the products of `_gains`, (N, F): coordinates, four columns for the other terms, zeros up to whole registers."""
    num_dimensions = points.shape[1]
    factors_NF = torch.zeros((len(points), -(-(num_dimensions + 4) // ALIGNMENT) * ALIGNMENT), dtype=dtype, device=points.device)
    factors_NF[:, :num_dimensions] = points
    factors_NF[:, num_dimensions + 2 : num_dimensions + 4] = 1
    return factors_NF


def _gains(
    threads: BlockThreads,
    factors_NF: Tensor,
    num_dimensions: int,
    squares_N: Tensor,
    nearest_N: Tensor,
    candidates: NDArray[np.int64],
    summarise: Callable[[Tensor], Summary],
) -> Iterator[tuple[slice, Summary]]:
    """Yield a summary of the gains (T, R) of each block of points: half the decrease of a point's squared distance by each candidate.

    (n - |x|^2 - |c|^2) / 2 + xc with n the squared distance so far, by a single product: its terms are separate columns, each in two
    parts, because one would be rounded too much.
    """
    of_point, of_candidate = slice(num_dimensions, num_dimensions + 2), slice(num_dimensions + 2, num_dimensions + 4)
    left_TF = factors_NF[candidates]
    left_TF[:, of_point] = 1
    left_TF[:, of_candidate] = _in_two_parts(-squares_N[candidates] / 2, left_TF.dtype)
    factors_NF[:, of_point] = _in_two_parts((nearest_N - squares_N) / 2, left_TF.dtype)

    def summary(rows: slice) -> tuple[slice, Summary]:
        return rows, summarise(torch.mm(left_TF, factors_NF[rows].T).clamp_(min=0))

    yield from threads.map(summary, blocks(len(factors_NF), NUM_ROWS_AT_ONCE if factors_NF.is_cpu else NUM_ROWS_ON_GPU))


def _in_two_parts(values: Tensor, dtype: torch.dtype) -> Tensor:
    high = values.to(dtype)
    return torch.stack([high, (values - high).to(dtype)], dim=1)


def _kept(points_BD: Tensor, nearest_B: NDArray[np.float32], generator: np.random.Generator) -> NDArray[np.int64]:
    """Return which choices of a round stay: each with probability equal to the share of its squared distance left by the earlier ones."""
    distances_BB, draws_B = torch.cdist(points_BD, points_BD).square().numpy(), generator.random(len(points_BD))
    kept = [0]
    for number in range(1, len(points_BD)):
        if draws_B[number] * nearest_B[number] < distances_BB[number, kept].min():
            kept.append(number)
    return np.array(kept)
