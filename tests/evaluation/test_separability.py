"""Class separability, class distances and unique centres, compared with hand calculations and slow loops."""

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from dml_core.evaluation import separability
from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.evaluation.separability import class_distances, class_separability, num_unique_centres


def test_csc_worked_out_by_hand() -> None:
    # Means 1 and 7, shares 2/3 and 1/3, global mean 3: between 2/3 * 4 + 1/3 * 16 = 8; within (1 + 1 + 1 + 1 + 0 + 0) / 6 = 2/3.
    embeddings = np.array([[0.0], [2.0], [0.0], [2.0], [7.0], [7.0]])
    values = class_separability(as_points(embeddings, "euclidean"), np.array([0, 0, 0, 0, 1, 1]))
    assert values == pytest.approx({"csc": 12, "csc_trace_between": 8, "csc_trace_within": 2 / 3})
    distances = class_distances(as_points(embeddings, "euclidean"), np.array([0, 0, 0, 0, 1, 1]))
    assert distances == pytest.approx({"intra_class_distance": (2 / 3) ** 0.5, "inter_class_distance": 6})


@pytest.mark.parametrize("num_rows_at_once", [1000, 7])
def test_traces_are_those_of_the_scatter_matrices_and_add_up_to_the_variance(
    num_rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(separability, "NUM_ROWS_AT_ONCE", num_rows_at_once)  # all at once, or a class over several blocks
    generator = np.random.default_rng(0)
    embeddings, codes = generator.standard_normal((50, 4)) + 3, generator.permutation(np.arange(50) % 6)
    between, within = np.zeros((4, 4)), np.zeros((4, 4))
    for code in range(6):
        members = embeddings[codes == code]
        offset = (members.mean(axis=0) - embeddings.mean(axis=0))[:, None]
        between += len(members) / 50 * offset @ offset.T
        within += len(members) / 50 * np.cov(members.T, bias=True)
    values = class_separability(as_points(embeddings, "euclidean"), codes)
    assert values["csc_trace_between"] == pytest.approx(np.trace(between))
    assert values["csc_trace_within"] == pytest.approx(np.trace(within))
    assert values["csc_trace_between"] + values["csc_trace_within"] == pytest.approx(embeddings.var(axis=0).sum())


def test_classes_without_scatter_have_no_csc() -> None:
    values = class_separability(as_points(np.eye(2), "euclidean"), np.array([0, 1]))
    assert values == {"csc_trace_between": pytest.approx(0.5), "csc_trace_within": 0}
    codes = np.arange(21) % 3
    for of_classes in (np.random.default_rng(0).standard_normal((3, 2)), np.full((3, 2), 0.1)):  # their sums in float64 are rounded
        assert "csc" not in class_separability(as_points(of_classes[codes], "euclidean"), codes)


def test_class_distances_are_root_mean_squares_over_pairs() -> None:
    generator = np.random.default_rng(0)
    embeddings, codes = generator.standard_normal((40, 3)), np.arange(40) % 5
    means = np.stack([embeddings[codes == code].mean(axis=0) for code in range(5)])
    values = class_distances(as_points(embeddings, "euclidean"), codes)
    assert values["inter_class_distance"] == pytest.approx(np.sqrt((pdist(means) ** 2).mean()))
    assert values["intra_class_distance"] == pytest.approx(np.sqrt(((embeddings - means[codes]) ** 2).sum(axis=1).mean()))
    assert set(class_distances(as_points(embeddings, "cosine"), np.zeros(40, dtype=np.int64))) == {"intra_class_distance"}


def test_centres_that_merged_count_once() -> None:
    angles = np.deg2rad([[0, 1, 90, 180], [0, 4, 8, 12]])  # two separate centres and a pair; a chain of neighbours
    centres = np.stack([np.cos(angles), np.sin(angles)], axis=2) * [[[1], [20], [3], [4]], [[5], [60], [7], [8]]]  # lengths have no effect
    assert num_unique_centres(centres).tolist() == [3, 1]
    assert num_unique_centres(centres, max_distance=0.001).tolist() == [4, 4]
    assert num_unique_centres(np.array([[[1.0, 0], [-1, 0]]]), max_distance=2).tolist() == [1]  # exactly the maximum distance apart
