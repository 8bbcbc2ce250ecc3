"""Deterministic algorithms: an operation without one is named in one line; all else is as before."""

import pytest
import torch

from dml_core.deterministic import deterministic_algorithms, fastest_convolutions
from dml_core.errors import TrainingError


def overwrite() -> torch.Tensor:
    return torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_an_operation_without_a_deterministic_algorithm_is_named_and_the_setting_is_restored() -> None:
    with pytest.raises(TrainingError, match=r"^torch has no deterministic algorithm for put_[^\n]*$"), deterministic_algorithms():
        overwrite()
    assert not torch.are_deterministic_algorithms_enabled()
    overwrite()


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"), deterministic_algorithms():
        torch.zeros(2) + torch.zeros(3)


def test_the_fastest_convolutions_are_a_setting_within_the_context_only() -> None:
    with fastest_convolutions():
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark
    with deterministic_algorithms():
        assert not torch.backends.cudnn.benchmark
