"""Properties of all registered losses: order of the batch, names of the classes, rotations, and batches without a valid pair."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import CASES, DIM, NUM_CLASSES, build, case_id

from dml_core.losses.tuplet_margin import batch_pairs, random_negatives

DRAWS = settings(derandomize=True, deadline=None, max_examples=8)
LABELS = st.lists(st.integers(0, NUM_CLASSES - 1), min_size=2, max_size=12)
SEEDS = st.integers(0, 10**6)

# Reordering the batch or renaming the classes changes which random negatives are drawn.
FIXED = [case for case in CASES if case[0] != "tuplet_margin" or case[1].get("negatives") == "all"]
# One-hot centroids are tied to the axes: they permute with the classes but do not rotate.
ROTATING = [case for case in FIXED if case != ("discriminative", {})]
COSINE = [
    "normalised_softmax",
    "softtriple",
    "hardtriple",
    "tuplet_margin",
    "triplet_semi_hard",
    "triplet_global",
    "contrastive",
    "proxy_nca",
]
OVER_PAIRS = [case for case in CASES if build(case).needs.sampler == "k_by_n" and case[0] != "combined"]


def embeddings(num_samples, seed):
    return torch.randn(num_samples, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def total(loss, embeddings_ND, labels):
    return loss.eval()(embeddings_ND, torch.as_tensor(labels)).total


def equal(left, right):
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", FIXED, ids=case_id)
@DRAWS
@given(labels=LABELS, seed=SEEDS)
def test_order_of_the_batch_does_not_matter(case, labels, seed):
    loss, batch_ND = build(case), embeddings(len(labels), seed)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    equal(total(loss, batch_ND[order], torch.tensor(labels)[order]), total(loss, batch_ND, labels))


def rename(key, value, to):
    """Return a loss's value per class in the new order of the classes; the key determines the axis."""
    axis = 1 if key.endswith("_KCD") else 0
    return value.index_select(axis, to.argsort()) if value.dim() else value


@pytest.mark.parametrize("case", FIXED, ids=case_id)
@DRAWS
@given(labels=LABELS, seed=SEEDS)
def test_names_of_the_classes_do_not_matter(case, labels, seed):
    """Class c becomes class to[c]; the loss's values per class and the axes of one-hot centroids move with it."""
    loss, renamed, batch_ND = build(case), build(case), embeddings(len(labels), seed)
    to = torch.randperm(NUM_CLASSES, generator=torch.Generator().manual_seed(seed))
    moved_ND = batch_ND[:, to.argsort()] if case == ("discriminative", {}) else batch_ND
    renamed.load_state_dict({key: rename(key, value, to) for key, value in loss.state_dict().items()})
    equal(total(renamed, moved_ND, to[labels]), total(loss, batch_ND, labels))


@pytest.mark.parametrize("case", ROTATING, ids=case_id)
@DRAWS
@given(labels=LABELS, seed=SEEDS)
def test_rotating_embeddings_and_centres_together_does_not_matter(case, labels, seed):
    loss, rotated, batch_ND = build(case), build(case), embeddings(len(labels), seed)
    rotation_DD = torch.linalg.qr(embeddings(DIM, seed + 1)).Q
    rotated.load_state_dict({key: value @ rotation_DD if value.dim() > 1 else value for key, value in loss.state_dict().items()})
    equal(total(rotated, batch_ND @ rotation_DD, labels), total(loss, batch_ND, labels))


@pytest.mark.parametrize("case", [case for case in FIXED if case[0] in COSINE], ids=case_id)
@DRAWS
@given(labels=LABELS, seed=SEEDS)
def test_lengths_of_embeddings_do_not_matter_to_cosine_losses(case, labels, seed):
    loss, batch_ND = build(case), embeddings(len(labels), seed)
    lengths_N1 = 0.1 + 10 * torch.rand(len(labels), 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    equal(total(loss, batch_ND * lengths_N1, labels), total(loss, batch_ND, labels))


def test_there_are_losses_over_pairs():
    assert {name for name, _ in OVER_PAIRS} == {"tuplet_margin", "triplet_semi_hard", "triplet_batch_hard", "triplet_global", "contrastive"}


@pytest.mark.parametrize("labels", [[3], [0, 1, 2, 3], [2, 2, 2]])
@pytest.mark.parametrize("case", OVER_PAIRS, ids=case_id)
def test_a_batch_without_a_valid_pair_gives_exactly_zero_and_zero_gradients(case, labels):
    if case[0] == "contrastive":
        labels = labels[:1]  # the contrastive loss uses any two samples as a pair
    batch_ND = embeddings(len(labels), 0).requires_grad_()
    value, parts = build(case)(batch_ND, torch.tensor(labels))
    assert value == 0
    assert not any(parts.values())
    value.backward()
    assert torch.equal(batch_ND.grad, torch.zeros_like(batch_ND))


def test_random_negatives_are_uniform_within_each_other_class():
    """For classes of 1, 2 and 3 samples, 3000 draws are uniform over the samples of each class; no class draws for its own pairs."""
    labels_N = torch.tensor([7, 4, 9, 4, 9, 9])
    anchor_P = torch.tensor([1, 2]).repeat(3000)
    negative_PG, own_PG = random_negatives(batch_pairs(labels_N)._replace(anchors=anchor_P), torch.Generator().manual_seed(0))
    assert torch.equal(labels_N[negative_PG], torch.tensor([4, 7, 9]).expand(6000, 3))
    assert torch.equal(own_PG, labels_N[negative_PG] == labels_N[anchor_P][:, None])
    shares = torch.bincount(negative_PG[:, 2], minlength=6)[[2, 4, 5]] / 6000
    torch.testing.assert_close(shares, torch.full((3,), 1 / 3), rtol=0.0, atol=0.02)
