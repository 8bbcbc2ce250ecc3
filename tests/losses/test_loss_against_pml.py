"""Our losses equal pytorch-metric-learning's where the definitions coincide, and differ as stated elsewhere."""

import pytest
import torch
from loss_cases import DIM, NUM_CLASSES, build, random_batch
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers
from torch.nn import functional

EMBEDDINGS, LABELS = random_batch(20, seed=7)


def ours(name, options, **centres):
    loss = build((name, options))
    for key, value in centres.items():
        getattr(loss, key).data = value
    return loss(EMBEDDINGS, LABELS).total


def equal(left, right):
    torch.testing.assert_close(left, right.double(), rtol=1e-9, atol=1e-9)


def centres(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_normalised_softmax():
    theirs = losses.NormalizedSoftmaxLoss(NUM_CLASSES, DIM, temperature=1 / 20)
    theirs.W.data = centres(NUM_CLASSES, DIM).T.contiguous()
    equal(ours("normalised_softmax", {}, centres_CD=centres(NUM_CLASSES, DIM)), theirs(EMBEDDINGS, LABELS))


@pytest.mark.parametrize("num_centres", [2, 5])
@pytest.mark.parametrize("weight", [0.0, 0.2])
def test_softtriple_with_and_without_the_regulariser(weight, num_centres):
    """Theirs adds the type's epsilon under the root instead of our 1e-5; the regularisers differ by less than that."""
    centres_KCD = centres(num_centres, NUM_CLASSES, DIM)
    regulariser = regularizers.SparseCentersRegularizer(NUM_CLASSES, num_centres) if weight else None
    theirs = losses.SoftTripleLoss(
        NUM_CLASSES, DIM, centers_per_class=num_centres, weight_regularizer=regulariser, weight_reg_weight=weight
    )
    theirs.fc.data = centres_KCD.transpose(0, 1).flatten(0, 1).T.contiguous()
    mine = ours("softtriple", {"num_centres": num_centres, "regulariser_weight": weight}, centres_KCD=centres_KCD)
    torch.testing.assert_close(mine, theirs(EMBEDDINGS, LABELS), rtol=0.0, atol=1e-5 * weight + 1e-9)


def test_tuplet_margin_with_all_negatives():
    """Their margin is in degrees, and they have no counterpart of the paper's random negatives."""
    theirs = losses.TupletMarginLoss(margin=torch.rad2deg(torch.tensor(0.1, dtype=torch.float64)).item(), scale=64)
    options = {"negatives": "all", "variance_weight": 0.0, "scale": 64.0, "slack_margin": 0.1}
    equal(ours("tuplet_margin", options), theirs(EMBEDDINGS, LABELS))


def test_intra_pair_variance():
    options = {"negatives": "all", "scale": 64.0, "slack_margin": 0.1}
    spread = ours("tuplet_margin", {**options, "variance_weight": 1.0}) - ours("tuplet_margin", {**options, "variance_weight": 0.0})
    equal(spread, losses.IntraPairVarianceLoss()(EMBEDDINGS, LABELS))


@pytest.mark.parametrize("scale", [1.0, 9.0])
def test_proxy_nca_differs_by_the_own_proxy_in_the_denominator(scale):
    """With the own proxy in the sum, the loss of each sample is log(1 + e^L) instead of the paper's L."""
    theirs = losses.ProxyNCALoss(NUM_CLASSES, DIM, softmax_scale=scale)
    theirs.proxies.data = centres(NUM_CLASSES, DIM)
    mine = build(("proxy_nca", {"scale": scale}))
    mine.proxies_CD.data = centres(NUM_CLASSES, DIM)
    per_sample = torch.stack([mine(x[None], y[None]).total for x, y in zip(EMBEDDINGS, LABELS, strict=True)])
    equal(functional.softplus(per_sample).mean(), theirs(EMBEDDINGS, LABELS))


def test_proxy_nca_of_the_paper_has_no_lower_bound():
    loss = build(("proxy_nca", {"scale": 9.0}))
    assert loss(loss.proxies_CD.detach(), torch.arange(NUM_CLASSES)).total < 0


@pytest.mark.parametrize("margin", [0.3, None])
def test_batch_hard_triplet(margin):
    """The losses are equal if theirs averages over all triplets, not only the violated ones, and does not normalise embeddings."""
    theirs = losses.TripletMarginLoss(
        margin=margin or 0.0,
        smooth_loss=margin is None,
        distance=distances.LpDistance(normalize_embeddings=False),
        reducer=reducers.MeanReducer(),
    )
    indices = miners.BatchHardMiner(distance=distances.LpDistance(normalize_embeddings=False))(EMBEDDINGS, LABELS)
    equal(ours("triplet_batch_hard", {"margin": margin}), theirs(EMBEDDINGS, LABELS, indices))


def test_semi_hard_triplet_takes_one_negative_where_theirs_takes_all():
    theirs = losses.TripletMarginLoss(margin=0.2, distance=distances.LpDistance(power=2), reducer=reducers.MeanReducer())
    indices = miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard", distance=distances.LpDistance(power=2))(EMBEDDINGS, LABELS)
    assert not torch.isclose(ours("triplet_semi_hard", {}), theirs(EMBEDDINGS, LABELS, indices))


def test_contrastive_is_squared_where_theirs_is_not():
    """Ours is half the square of theirs per pair, and averages over all pairs; theirs averages over the nonzero pairs of each kind."""
    theirs = losses.ContrastiveLoss(neg_margin=1.0)
    theirs.reducer = reducers.DoNothingReducer()
    found = theirs(EMBEDDINGS, LABELS)
    squares = torch.cat([found[kind]["losses"].square() for kind in ("pos_loss", "neg_loss")])
    equal(ours("contrastive", {}), squares.mean() / 2)
