"""How far classes lie apart: SGSL's class separability criterion, distances within and between classes, SoftTriple's unique centres.

Shapes: N samples, D dimensions, C classes, K centres per class.
"""

import numpy as np
from numpy.typing import NDArray

from dml_core.evaluation.geometry import NUM_ROWS_AT_ONCE, Points, blocks


def class_means(points: Points, codes_N: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Mean (C, D) and size (C,) of each class, codes being 0 to C-1."""
    sizes_C = np.bincount(codes_N)
    means_CD = np.zeros((len(sizes_C), points.raw.shape[1]))
    for rows in blocks(len(points), NUM_ROWS_AT_ONCE):
        np.add.at(means_CD, codes_N[rows], points.rows(rows))
    return means_CD / sizes_C[:, None], sizes_C


def class_separability(points: Points, codes_N: NDArray[np.int64]) -> dict[str, float]:
    """CSC = trace(S_b) / trace(S_w) and its traces (SGSL, eq. 9), classes weighted by their share of the samples.

    Without any scatter within classes CSC has no value and is left out.
    """
    means_CD, sizes_C = class_means(points, codes_N)
    shares_C = sizes_C / sizes_C.sum()
    between = float(shares_C @ np.square(means_CD - shares_C @ means_CD).sum(axis=1))
    within = 0.0
    for rows in blocks(len(points), NUM_ROWS_AT_ONCE):
        within += float(np.square(points.rows(rows) - means_CD[codes_N[rows]]).sum()) / len(points)
    traces = {"csc_trace_between": between, "csc_trace_within": within}
    return {"csc": between / within, **traces} if within > 0 else traces
