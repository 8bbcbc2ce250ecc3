"""Difference of two systems generalised to other classes of the same kind as the test classes.

Intervals over seeds hold only for these test classes. Here both seeds and classes are samples.
The difference of seed s on class c is m + a_s + b_c + e_sc, all independent.

Shapes: S seeds, C classes.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from dml_core.evaluation.statistics.paired import MIN_CLASSES, MIN_SEEDS


def difference_over_classes(
    values_SC: NDArray[np.float64], references_SC: NDArray[np.float64], level: float = 0.05
) -> tuple[float, float] | None:
    """Return the mean difference over seeds and classes, and half of its interval; None for too few seeds or classes.

    The variance is that of the seeds' means over S plus that of the classes' means over C. Each includes the variance of e, which is thus
    counted twice: slightly too wide rather than too narrow. Student's t has Satterthwaite's degrees of freedom (Biometrics 1946).

    Args:
        values_SC: Recall@1 (or another mean over queries) of each class for each seed.
        references_SC: the same of the other system, with the same seeds and classes.
        level: 1 - the confidence.
    """
    num_seeds, num_classes = values_SC.shape
    if num_seeds < MIN_SEEDS or num_classes < MIN_CLASSES:
        return None
    differences_SC = values_SC - references_SC
    of_seeds = float(differences_SC.mean(axis=1).var(ddof=1)) / num_seeds
    of_classes = float(differences_SC.mean(axis=0).var(ddof=1)) / num_classes
    total = of_seeds + of_classes
    if total == 0:
        return None
    freedom = total**2 / (of_seeds**2 / (num_seeds - 1) + of_classes**2 / (num_classes - 1))
    return float(differences_SC.mean()), float(stdtrit(freedom, 1 - level / 2)) * total**0.5
