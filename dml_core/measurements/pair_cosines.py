"""Cosines of all pairs of training images: gap between positive and negative pairs, and variation of each kind (tuplet margin).

Shapes: N training images, P positive and Q negative pairs.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dml_core.config import Config
from dml_core.measurements.contract import FinishedRun

METRICS = ("pair_cosine_gap", "intra_pair_variation")


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
    positive_P, negative_Q = pair_cosines(run.training_images.embeddings, run.training_images.labels)
    gap = float(positive_P.mean() - negative_Q.mean())
    return dict(zip(METRICS, (gap, intra_pair_variation(positive_P, negative_Q, options.epsilon)), strict=True))


def pair_cosines(embeddings_ND: NDArray[Any], labels_N: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the cosines of all positive (P,) and of all negative pairs (Q,)."""
    units_ND = embeddings_ND / np.linalg.norm(embeddings_ND, axis=1, keepdims=True)
    first, second = np.triu_indices(len(labels_N), k=1)
    cosines, same = (units_ND @ units_ND.T)[first, second], labels_N[first] == labels_N[second]
    return cosines[same], cosines[~same]


def intra_pair_variation(positive_P: NDArray[Any], negative_Q: NDArray[Any], epsilon: float) -> float:
    """Return the mean squared excess of the pairs that are worse than the mean of their kind by more than `epsilon` of it."""
    too_far_P = (1 - epsilon) * positive_P.mean() - positive_P
    too_near_Q = negative_Q - (1 + epsilon) * negative_Q.mean()
    return float(np.square(too_far_P.clip(0.0)).mean() + np.square(too_near_Q.clip(0.0)).mean())
