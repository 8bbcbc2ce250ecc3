"""Generated inputs of every kind that an evaluator gets."""

import numpy as np
from numpy.typing import NDArray

Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]
KINDS = ("random", "tied", "duplicated", "single_class", "two_items", "singletons", "far_from_zero", "identical", "tiny")


def make_inputs(kind: str, seed: int = 0) -> Arrays:
    """Return embeddings (N, D) and labels (N,) of the named kind."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 7, 60)
    embeddings = generator.standard_normal((7, 5))[labels] + generator.standard_normal((60, 5))
    if kind == "tied":
        embeddings = generator.integers(0, 3, (60, 4)) + np.array([1.0, 0, 0, 0])
    elif kind == "duplicated":
        embeddings[generator.integers(0, 60, 30)] = embeddings[generator.integers(0, 60, 30)]
    elif kind == "single_class":
        labels[:] = 3
    elif kind == "two_items":
        embeddings, labels = embeddings[:2], np.array([4, 4])
    elif kind == "singletons":
        labels = np.minimum(np.arange(60), 40)
    elif kind == "far_from_zero":
        embeddings = 0.01 * embeddings + 1000
    elif kind == "identical":
        embeddings[:] = 1.5
    elif kind == "tiny":  # products of float32 lose digits or are 0
        embeddings *= 1e-22
    return embeddings.astype(np.float32), labels
