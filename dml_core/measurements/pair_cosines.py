"""Cosines of all pairs of training images: gap between positive and negative pairs, and variation of each kind (tuplet margin).

Shapes: N training images, P positive and Q negative pairs.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dml_core.config import Config
from dml_core.measurements.contract import FinishedRun

METRICS = ("pair_cosine_gap", "intra_pair_variation")
BLOCK_ROWS = 256  # images whose cosines with all others are in memory at a time


class Options(Config):
    """Options of the measurement.

    Attributes:
        epsilon: of eq. 15 and 16; published 0.01.
    """

    epsilon: float = Field(default=0.01, ge=0.0)


def measure(run: FinishedRun, options: Options, folder: Path) -> dict[str, float]:
    """Return mean positive minus mean negative cosine (section 3.3, figure 4), and L_pos + L_neg of eq. 15 and 16 over all pairs.

    As in the paper's histograms, the embeddings are those of the training images without augmentation.
    """
    scored = run.training_images
    return dict(zip(METRICS, gap_and_variation(scored.embeddings, scored.labels, options.epsilon), strict=True))


def gap_and_variation(embeddings_ND: NDArray[Any], labels_N: NDArray[Any], epsilon: float) -> tuple[float, float]:
    """Return the gap between the mean cosines of positive and negative pairs, and their variation.

    The variation is the sum over both kinds of the mean squared excess of the pairs that are worse than their kind's mean by more than
    `epsilon` of it. NaN if a kind has no pair.
    """
    mean_positive, mean_negative = _means(_cosines(embeddings_ND, labels_N))
    least_positive, most_negative = (1 - epsilon) * mean_positive, (1 + epsilon) * mean_negative
    excesses = (
        (np.square((least_positive - positive_P).clip(0.0)), np.square((negative_Q - most_negative).clip(0.0)))
        for positive_P, negative_Q in _cosines(embeddings_ND, labels_N)
    )
    return mean_positive - mean_negative, sum(_means(excesses))


def _cosines(embeddings_ND: NDArray[Any], labels_N: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield the cosines of positive pairs (P,) and of negative pairs (Q,), some images at a time, each pair once."""
    units_ND = embeddings_ND / np.linalg.norm(embeddings_ND, axis=1, keepdims=True)
    for start in range(0, len(labels_N), BLOCK_ROWS):
        cosines = units_ND[start : start + BLOCK_ROWS] @ units_ND[start:].T
        later = np.arange(cosines.shape[1]) > np.arange(cosines.shape[0])[:, None]  # each pair once, and no image with itself
        same = labels_N[start : start + BLOCK_ROWS, None] == labels_N[None, start:]
        yield cosines[later & same], cosines[later & ~same]


def _means(pairs: Iterable[tuple[NDArray[Any], NDArray[Any]]]) -> list[float]:
    """Return the mean of all first and of all second values; NaN if there are none."""
    sums, counts = [0.0, 0.0], [0, 0]
    for both in pairs:
        for kind, values in enumerate(both):
            sums[kind] += float(values.sum(dtype=np.float64))
            counts[kind] += len(values)
    return [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]
