"""TensorFlow's variance scaling compared with known numbers."""

import pytest
import scipy.stats
import torch

from dml_core.initial_weights import STD_OF_CUT, truncated_normal_


def test_the_cut_normals_deviation_is_scipys():
    assert scipy.stats.truncnorm(-2, 2).std() == pytest.approx(STD_OF_CUT)


@pytest.mark.parametrize(
    ("shape", "gain", "std"),
    [((64, 1024), 2**0.5, 0.0442), ((32, 1, 5, 5), 2**0.5, 0.283), ((11318, 64), 1.0, 0.125)],  # bottleneck, LeNet's first, classifier
)
def test_deviations_are_those_of_the_released_layers_and_nothing_lies_beyond_the_cut(shape, gain, std):
    torch.manual_seed(0)
    weight = truncated_normal_(torch.empty(shape), gain)
    assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert weight.abs().max().item() <= 2 * std / STD_OF_CUT * 1.01


def test_rows_of_a_classifier_have_a_norm_near_one():
    torch.manual_seed(0)
    norms = truncated_normal_(torch.empty(100, 64), 1.0).norm(dim=1)
    assert norms.mean().item() == pytest.approx(1, abs=0.02)
