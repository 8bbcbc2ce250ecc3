"""Plot of 2- or 3-dimensional embeddings and the directions of their classes (heated-up softmax, Figures 3 and 4; SGSL, Figure 3).

Shapes: N samples, D dimensions (2 or 3), C classes.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dml_core.config import Config
from dml_core.errors import EvaluationError
from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.evaluation.separability import class_separability
from dml_core.figures.directions import plot_directions
from dml_core.measurements.classifier import Floats, classifier_of, unit_rows
from dml_core.measurements.contract import FinishedRun

METRICS = ("class_spread", "own_angle", "classified_right", "embedding_norm", "map_csc")


class Options(Config):
    """Options of the measurement.

    Attributes:
        unit_length: divide the embeddings by their norms; False draws them unchanged.
    """

    unit_length: bool = True


def measure(run: FinishedRun, options: Options, folder: Path) -> dict[str, float]:
    """Draw `embedding_map.png`, save the drawn points in `embedding_map.npz`, and score how compact the classes are.

    `class_spread`: mean angle in degrees between an embedding and its class's mean direction. `own_angle`: between an embedding and its
    class's direction in the classifier. `classified_right`: share of correctly classified embeddings. `embedding_norm`: mean norm of the
    unchanged embeddings. `map_csc`: SGSL's eq. 9 of the drawn points, omitted if no class has a spread.

    Raises:
        EvaluationError: embeddings of other dimensions, or a loss without a classifier.
    """
    labels_N = run.gallery.labels
    raw_ND = run.gallery.embeddings.astype(np.float64)
    if raw_ND.shape[1] not in (2, 3):
        raise EvaluationError(f"{run.title}: a map is of embeddings of 2 or 3 dimensions, found {raw_ND.shape[1]}")
    classifier = classifier_of(run)
    units_ND = unit_rows(raw_ND)
    points_ND = units_ND if options.unit_length else raw_ND
    names = run.gallery.dataset.class_names
    directions_CD = classifier.directions
    plot_directions(
        points_ND, labels_N, names, directions_CD, folder / "embedding_map.png", f"{run.title}\n{len(labels_N)} {run.gallery.description}"
    )
    np.savez(folder / "embedding_map.npz", points=points_ND.astype(np.float32), labels=labels_N, directions=directions_CD)
    scores = {
        "class_spread": class_spread(units_ND, labels_N),
        "own_angle": float(_angles(units_ND, directions_CD[labels_N]).mean()),
        "classified_right": float((classifier.margins(raw_ND, labels_N) > 0).mean()),
        "embedding_norm": float(np.linalg.norm(raw_ND, axis=1).mean()),
    }
    separability = class_separability(as_points(points_ND, "euclidean"), np.unique(labels_N, return_inverse=True)[1])
    return scores | ({"map_csc": separability["csc"]} if "csc" in separability else {})


def class_spread(units_ND: Floats, labels_N: NDArray[np.int64]) -> float:
    """Return the mean angle, in degrees, between embeddings of unit length and their classes' mean directions, over all samples."""
    codes_N = np.unique(labels_N, return_inverse=True)[1]
    means_CD = np.stack([units_ND[codes_N == code].mean(axis=0) for code in range(codes_N.max() + 1)])
    return float(_angles(units_ND, unit_rows(means_CD)[codes_N]).mean())


def _angles(first_ND: Floats, second_ND: Floats) -> Floats:
    """Return (N,) degrees between rows of unit length."""
    return np.degrees(np.arccos(np.clip((first_ND * second_ND).sum(axis=1), -1, 1)))
