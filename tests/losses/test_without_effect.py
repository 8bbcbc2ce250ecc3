"""An option is declared to be without effect if and only if changing it changes neither the loss nor its gradients."""

import contextlib

import pytest
import torch

from dml_core.errors import ConfigError
from dml_core.losses.registry import LOSSES, parse_loss_options
from dml_core.search_space import declared_searches
from tests.losses.loss_cases import VARIANTS, build, case_id, random_batch

OFF = {
    "softtriple": [{"num_centres": 1}],
    "hardtriple": [{"num_centres": 1}],
    "sgsl": [{"weight": 0.0, "label_smoothing": 0.1}],
    "triplet_global": [{"global_weight": 0.0}, {"mean_weight": 0.0}],
}
NAMES = [name for name in LOSSES if name != "combined"]
CASES = [(name, options) for name in NAMES for options in (*VARIANTS.get(name, [{}]), *OFF.get(name, []))]
# A hinge far from all samples of these batches has no visible effect; these settings put samples on both sides of it.
NEAR = {"triplet_batch_hard": {"margin": 0.3}, "contrastive": {"margin": 0.5}}
BATCHES = [random_batch(seed=seed) for seed in range(2)]


def outcome(name, options):
    """Return the loss and the embeddings' gradients on a few batches, in the first and the last of ten epochs."""
    loss = build((name, options))
    parts = []
    for embeddings_ND, labels_N in BATCHES:
        for epoch, scale in ((0, 0.2), (9, 0.2), (0, 1.0), (9, 1.0)):
            loss.start_epoch(epoch, 10)
            leaf_ND = (scale * embeddings_ND).requires_grad_()
            total = loss(leaf_ND, labels_N, torch.Generator().manual_seed(0)).total
            parts += [total.detach().flatten(), torch.autograd.grad(total, leaf_ND)[0].flatten()]
    return torch.cat(parts)


def changed(name, options, option):
    """Yield other values of an option, the ends of its range and two between them, that the loss accepts."""
    search = declared_searches(parse_loss_options(name, options))[option]
    for share in (0.0, 0.3, 0.7, 1.0):
        other = {**options, option: search.low + share * (search.high - search.low)}
        with contextlib.suppress(ConfigError):
            parse_loss_options(name, other)
            yield other


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_it_is_the_same_with_any_value_of_these_and_of_no_other(case):
    name, options = case
    idle = parse_loss_options(name, options).without_effect
    for option in declared_searches(parse_loss_options(name, options)):
        own = {**NEAR.get(name, {}), **options}
        before = outcome(name, own)
        others = (outcome(name, other) for other in changed(name, own, option))  # up to the first that differs
        assert all(torch.equal(before, other) for other in others) == (option in idle), option


def test_every_loss_with_a_range_is_looked_at():
    assert sum(bool(declared_searches(parse_loss_options(name, NEAR.get(name, {})))) for name in NAMES) >= 10


@pytest.mark.parametrize(
    ("own", "others"),
    [
        ({"heated_alpha": None}, {"heat_from": 0.1, "schedule": "gentle", "heated_learning_rate_factor": 0.5}),
        ({"bias": False}, {"bias_inside_alpha": False}),
    ],
)
def test_options_of_a_heating_or_a_bias_that_is_not_there(own, others):
    assert parse_loss_options("heated_up_softmax", own).without_effect == set(others)
    assert parse_loss_options("heated_up_softmax", {}).without_effect == frozenset()
    assert torch.equal(outcome("heated_up_softmax", own), outcome("heated_up_softmax", own | others))
    loss = build(("heated_up_softmax", own | others))
    loss.start_epoch(9, 10)
    assert "heated_alpha" not in own or loss.learning_rate_factor == 1
