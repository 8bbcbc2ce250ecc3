"""The papers' propositions hold on random draws: SoftTriple's Proposition 1 and Theorem 1, the discriminative loss's Lemma 3.1."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_references import distance
from torch.nn import functional

from dml_core.losses.discriminative import bound_terms, kmeans_centroids
from dml_core.losses.registry import build_loss

DRAWS = settings(derandomize=True, deadline=None, max_examples=60)


def unit_vectors(num, dim, seed):
    random = torch.Generator().manual_seed(seed)
    return functional.normalize(torch.randn(num, dim, generator=random, dtype=torch.float64))


@DRAWS
@given(seed=st.integers(0, 10**6), scale=st.floats(0.5, 40.0))
def test_proposition_1_normalised_softmax_is_the_maximum_of_the_smoothed_triplet_objective(seed, scale):
    loss = build_loss("normalised_softmax", {"scale": scale}, 6, 4).double()
    sample, label = unit_vectors(1, 4, seed), torch.tensor([seed % 6])
    centres = functional.normalize(loss.centres_CD.detach())
    gains = scale * (centres - centres[label]) @ sample[0]

    def objective(p):
        return p @ gains - torch.special.xlogy(p, p).sum()

    value = loss(sample, label).total.detach()
    torch.testing.assert_close(objective(torch.softmax(gains, 0)), value, rtol=1e-9, atol=1e-9)
    others = torch.distributions.Dirichlet(torch.full((6,), 0.5, dtype=torch.float64)).sample((50,))
    assert all(objective(p) <= value + 1e-9 for p in others)


@DRAWS
@given(seed=st.integers(0, 10**6), spread=st.floats(0.01, 0.5))
def test_theorem_1_a_margin_on_centres_is_a_margin_on_samples(seed, spread):
    own, other = unit_vectors(2, 5, seed)
    near = functional.normalize(torch.stack([own, own, other]) + spread * unit_vectors(3, 5, seed + 1))
    epsilon = max(distance(near[0], own), distance(near[1], own), distance(near[2], other))
    delta = near[0] @ own - near[0] @ other
    assert near[0] @ near[1] - near[0] @ near[2] >= delta - 2 * epsilon - 1e-12


def brute_force(embeddings, labels, term):
    """Return the sum of term(i, j, k) over all triplets: j in i's class, k in another."""
    everyone = range(len(labels))
    return sum(
        term(i, j, k) for i in everyone for j in everyone if i != j and labels[i] == labels[j] for k in everyone if labels[k] != labels[i]
    )


@DRAWS
@given(seed=st.integers(0, 10**6), per_class=st.integers(2, 3), num_classes=st.integers(2, 4), spread=st.floats(0.0, 1.5))
def test_lemma_3_1_bounds_the_triplet_loss_from_above_and_not_from_far(seed, per_class, num_classes, spread):
    labels_N = torch.arange(num_classes * per_class) % num_classes
    centroids_CD = unit_vectors(num_classes, 4, seed)
    noise_ND = spread * unit_vectors(len(labels_N), 4, seed + 1)
    embeddings_ND = functional.normalize(centroids_CD[labels_N] + noise_ND)
    x, c, y = embeddings_ND.tolist(), centroids_CD.tolist(), labels_N.tolist()

    triplet = brute_force(x, y, lambda i, j, k: distance(x[i], x[j]) - distance(x[i], x[k]))
    eq_6 = brute_force(
        x, y, lambda i, j, k: distance(x[i], c[y[i]]) - distance(x[i], c[y[k]]) + distance(x[j], c[y[j]]) + distance(x[k], c[y[k]])
    )
    terms_N = bound_terms(embeddings_ND, embeddings_ND @ centroids_CD.T, labels_N, centroids_CD.square().sum(dim=1))
    bound = 3 * (num_classes - 1) * (per_class - 1) * per_class * float(terms_N.sum())  # eq. 8 with its constant G
    num_triplets = (per_class - 1) * len(y) * (len(y) - per_class)
    epsilon = 2 * max(distance(a, c[b]) for a, b in zip(x, y, strict=True))
    between_centroids = torch.pdist(centroids_CD.double())
    spread_of_centroids = float(between_centroids.max() - between_centroids.min())
    tolerance = 1e-7 * num_triplets  # distances of 0 have an error of up to 1.5e-8
    assert math.isclose(bound, eq_6, abs_tol=tolerance)
    assert -tolerance <= bound - triplet <= num_triplets * (spread_of_centroids + 3 * epsilon) + tolerance


def test_kmeans_centroids_have_unit_length_and_depend_on_the_seed_alone():
    centroids_CD = kmeans_centroids(100, 100, seed=0)
    torch.testing.assert_close(centroids_CD.norm(dim=1), torch.ones(100))
    assert torch.equal(centroids_CD, kmeans_centroids(100, 100, seed=0))
    assert not torch.equal(centroids_CD, kmeans_centroids(100, 100, seed=1))


def test_a_single_centroid_is_the_direction_of_the_mean_of_points_on_the_circle():
    points = np.random.default_rng(3).standard_normal((100, 2))
    mean = np.mean([point / math.hypot(*point) for point in points], axis=0)
    torch.testing.assert_close(kmeans_centroids(1, 2, seed=3)[0], torch.tensor(mean / math.hypot(*mean)).float())
