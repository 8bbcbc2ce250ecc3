"""Measurements of losses on drawn embeddings: compared with equation 3 and a known cost; effects of the seed."""

import math

import pytest
import torch

from dml_core.measurements import drawn_centres, drawn_gradients, loss_costs
from dml_core.measurements.drawn_centres import num_centres
from dml_core.measurements.drawn_gradients import gradient_norm
from dml_core.measurements.loss_costs import exponent


@pytest.mark.parametrize("alpha", [0.5, 16.0])
@pytest.mark.parametrize("nearest", [0, 1])
def test_gradient_norms_are_equation_3(alpha: float, nearest: int) -> None:
    """alpha * || sum_m (p_m - q_m) w_m ||, computed without autograd."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.functional.normalize(torch.randn(20, 64, generator=generator))
    noise = torch.nn.functional.normalize(torch.randn(200, 64, generator=generator))
    embeddings = torch.nn.functional.normalize(weight[nearest] + noise)
    residual = torch.softmax(alpha * embeddings @ weight.T, dim=1)
    residual[:, 0] -= 1.0
    assert gradient_norm(0, alpha, nearest) == pytest.approx(float((alpha * residual @ weight).norm(dim=1).mean()), rel=1e-4)


def test_every_kind_and_alpha_has_its_metric() -> None:
    assert len(set(drawn_gradients.METRICS)) == 8
    assert {"gradient_norm_easy_0.25", "gradient_norm_hard_64"} <= set(drawn_gradients.METRICS)


@pytest.mark.slow
@pytest.mark.proof
def test_centres_merge_with_the_regulariser_alone_and_by_the_seed_alone() -> None:
    counts = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        counts.append((num_centres(3, 0.2, 300), num_centres(3, 0.0, 300)))
    assert counts[0] == counts[1]
    regularised, free = counts[0]
    assert regularised < free == 10


def test_an_exponent_is_that_of_a_known_cost() -> None:
    assert exponent((10, 40), lambda number: 3.0 * number**2) == pytest.approx(2)
    assert exponent((10, 40), lambda number: 5.0 * number) == pytest.approx(1)


def test_costs_are_measured() -> None:
    seconds = loss_costs.all_triplets_seconds(0, 12), loss_costs.discriminative_seconds(0, 8, 20)
    assert all(math.isfinite(value) and value > 0 for value in seconds)


def test_centres_are_trained_as_published() -> None:
    assert drawn_centres.REGULARISER_WEIGHT == 0.2
    assert drawn_centres.LEARNING_RATE == 0.01
