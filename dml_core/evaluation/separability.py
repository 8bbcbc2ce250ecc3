"""Class separation: SGSL's class separability criterion, distances within and between classes, SoftTriple's unique centres.

Shapes: N samples, D dimensions, C classes, K centres per class.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from dml_core.evaluation.retrieval.geometry import NUM_ROWS_AT_ONCE, Points, blocks

ROUNDING = 1e-20  # of a squared distance, relative to the points' squared norms: below it there is no scatter


def class_means(points: Points, codes_N: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return mean (C, D) and size (C,) of each class, with codes 0 to C-1."""
    sizes_C = np.bincount(codes_N)
    sums_CD = np.zeros((len(sizes_C), points.raw.shape[1]))
    for rows in blocks(len(points), NUM_ROWS_AT_ONCE):
        codes, class_I = np.unique(codes_N[rows], return_inverse=True)
        membership = csr_array((np.ones(len(class_I)), (class_I, np.arange(len(class_I)))))
        sums_CD[codes] += membership @ points.rows(rows)
    return sums_CD / sizes_C[:, None], sizes_C


def class_separability(points: Points, codes_N: NDArray[np.int64]) -> dict[str, float]:
    """Return CSC = trace(S_b) / trace(S_w) and its traces (SGSL, eq. 9), classes weighted by their share of the samples.

    The published traces use embeddings that are not normalised, so `points` should be Euclidean. Without scatter within classes CSC is
    undefined and omitted.
    """
    means_CD, sizes_C = class_means(points, codes_N)
    shares_C = sizes_C / sizes_C.sum()
    between = float(shares_C @ np.square(means_CD - shares_C @ means_CD).sum(axis=1))
    within = float(_squared_distances_to(means_CD, points, codes_N).mean())
    traces = {"csc_trace_between": between, "csc_trace_within": within}
    return {"csc": between / within, **traces} if within > ROUNDING * np.square(means_CD).sum(axis=1).max() else traces


def class_distances(points: Points, codes_N: NDArray[np.int64]) -> dict[str, float]:
    """Return root mean square distances from a sample to its class mean, and between two class means (omitted for one class).

    The first weights every sample equally, the second every class.
    """
    means_CD, sizes_C = class_means(points, codes_N)
    distances = {"intra_class_distance": float(np.sqrt(_squared_distances_to(means_CD, points, codes_N).mean()))}
    num_classes = len(sizes_C)
    if num_classes > 1:
        # The mean over pairs of |a - b|^2 is twice the variance, times C / (C - 1) as no class is paired with itself.
        spread = float(np.square(means_CD - means_CD.mean(axis=0)).sum(axis=1).mean())
        distances["inter_class_distance"] = float(np.sqrt(2 * spread * num_classes / (num_classes - 1)))
    return distances


def num_unique_centres(centres_CKD: NDArray[np.floating[Any]], max_distance: float = 0.1) -> NDArray[np.int64]:
    """Return the number of different centres of each class, (C,), as in SoftTriple's figure 3.

    Centres are compared as unit vectors; two within `max_distance`, directly or through other centres, count as one. The paper states no
    threshold; 0.1 (an angle of 5.7 degrees) is assumed.
    """
    units_CKD = centres_CKD / np.linalg.norm(centres_CKD, axis=2, keepdims=True)
    distances_CKK = (np.linalg.norm(units_KD[:, None] - units_KD, axis=2) for units_KD in units_CKD)  # of all classes at once: gigabytes
    return np.array([connected_components(distances_KK <= max_distance)[0] for distances_KK in distances_CKK])


def _squared_distances_to(means_CD: NDArray[np.float64], points: Points, codes_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the squared distance of each point to its class mean, (N,)."""
    parts = [np.square(points.rows(rows) - means_CD[codes_N[rows]]).sum(axis=1) for rows in blocks(len(points), NUM_ROWS_AT_ONCE)]
    return np.concatenate(parts)
