"""Cases for the tests of the losses: every registered loss with small options, and the batches that fail most easily."""

import torch

from dml_core.losses.registry import LOSSES, build_loss

NUM_CLASSES = 5
DIM = 5  # equal, so that one-hot centroids fit

# Options that reach every branch of every registered loss; a name without an entry here runs with its defaults.
VARIANTS = {
    "softmax": [{}, {"bias": False, "label_smoothing": 0.1}, {"better_init": True}],
    "normalised_softmax": [{"scale": 8.0}],
    "softtriple": [{"num_centres": 3}, {"num_centres": 3, "regulariser_weight": 0.0, "margin": 0.1}, {"num_centres": 1}],
    "hardtriple": [{"num_centres": 4}],
    "heated_up_softmax": [{}, {"alpha": 8.0, "bias": False, "better_init": True}, {"bias_inside_alpha": False}],
    "discriminative": [{}, {"centroids": "kmeans"}],
    "tuplet_margin": [{}, {"negatives": "all"}, {"negatives": "all", "scale": 8.0, "slack_margin": 0.0, "variance_weight": 0.0}],
    "sgsl": [{}, {"gate": 0.0}, {"gamma": 5.0, "label_smoothing": 0.0, "weight": 2.0}],
    "triplet_batch_hard": [{}, {"margin": 0.3}],
    "triplet_global": [{}, {"margin": 0.3, "global_margin": 0.0, "mean_weight": 2.0, "global_weight": 0.5}],
    "proxy_nca": [{}, {"scale": 9.0}],
    "l2_constrained_softmax": [{}, {"learn_radius": True, "radius": 10.0, "label_smoothing": 0.1}, {"dropout": 0.5}],
    "combined": [
        {
            "terms": [
                {"name": "softmax", "options": {"label_smoothing": 0.1}},
                {"name": "triplet_batch_hard", "weight": 0.5},
                {"name": "ring_loss", "weight": 2.0},
            ]
        }
    ],
}
CASES = [(name, options) for name in LOSSES for options in VARIANTS.get(name, [{}])]


def case_id(case):
    name, options = case
    return "-".join([name, *(f"{key}={value}" for key, value in options.items() if key != "terms")])


def build(case, seed=0, num_classes=NUM_CLASSES, dim=DIM):
    """Build the case's loss in float64, with parameters drawn from `seed`."""
    name, options = case
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats its stack three times, for the seeds of absent GPUs
        return build_loss(name, options, num_classes, dim).double()


def random_batch(num_samples=10, seed=0, dim=DIM):
    """Embeddings of ordinary length, with two or more samples per class."""
    random = torch.Generator().manual_seed(seed)
    embeddings_ND = torch.randn(num_samples, dim, generator=random, dtype=torch.float64)
    return embeddings_ND, torch.arange(num_samples) % NUM_CLASSES


def duplicate_batch():
    """Every image twice, the copies of one class adjacent, and one copy with another label."""
    embeddings_ND, _ = random_batch(5)
    return embeddings_ND.repeat_interleave(2, 0), torch.tensor([0, 0, 1, 1, 2, 2, 0, 0, 3, 4])


def collinear_batch():
    """All embeddings on one line through the origin, on both sides of it."""
    direction_D = torch.linspace(0.2, 1.0, DIM, dtype=torch.float64)
    factors_N = torch.tensor([0.5, 1.0, 2.0, -1.0, -0.5, 3.0, 1.5, -2.0, 0.25, -3.0], dtype=torch.float64)
    return factors_N[:, None] * direction_D, torch.arange(10) % NUM_CLASSES


def single_class_batch():
    """No negative pair."""
    return random_batch(6, seed=3)[0], torch.full((6,), 2)


def distinct_classes_batch():
    """No positive pair."""
    return random_batch(5, seed=4)


def wide_class_batch():
    """Positives far apart, every negative nearer."""
    embeddings_ND = torch.tensor([[1.0, 0.1, 0, 0, 0], [-1, 0.2, 0.1, 0, 0], [0, 1, 0, 0.2, 0], [0.2, 0.1, 1, 0, 0.1]], dtype=torch.float64)
    return embeddings_ND, torch.tensor([0, 0, 1, 2])


def single_negative_batch():
    """One class except for one image, which is between the others."""
    return wide_class_batch()[0], torch.tensor([2, 2, 2, 4])


def two_images_batch():
    """The smallest batch with a pair."""
    return random_batch(2, seed=6)[0], torch.tensor([1, 1])


BATCHES = {
    "random": random_batch,
    "duplicate": duplicate_batch,
    "collinear": collinear_batch,
    "single_class": single_class_batch,
    "distinct_classes": distinct_classes_batch,
    "wide_class": wide_class_batch,
    "single_negative": single_negative_batch,
    "two_images": two_images_batch,
}
