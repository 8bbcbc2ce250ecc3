"""TensorFlow's variance scaling compared with known numbers."""

import pytest
import scipy.stats
import torch
from torch import nn

from dml_core.initial_weights import SLIM, STD_OF_CUT, UNIT_NORM, start_as_tensorflow


def test_the_cut_normals_deviation_is_scipys():
    assert scipy.stats.truncnorm(-2, 2).std() == pytest.approx(STD_OF_CUT)


@pytest.mark.parametrize(
    ("layer", "gain", "std"),
    # bottleneck, LeNet's first, classifier
    [(nn.Linear(1024, 64), SLIM, 0.0442), (nn.Conv2d(1, 32, 5), SLIM, 0.283), (nn.Linear(64, 11318), UNIT_NORM, 0.125)],
)
def test_deviations_are_those_of_the_released_layers_and_nothing_lies_beyond_the_cut(layer, gain, std):
    torch.manual_seed(0)
    start_as_tensorflow(layer, gain)
    weight = layer.weight
    assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert weight.abs().max().item() <= 2 * std / STD_OF_CUT * 1.01


def test_rows_of_a_classifier_have_a_norm_near_one():
    torch.manual_seed(0)
    layer = nn.Linear(64, 100)
    start_as_tensorflow(layer, UNIT_NORM)
    norms = layer.weight.norm(dim=1)
    assert not layer.bias.any()
    assert norms.mean().item() == pytest.approx(1, abs=0.02)
