"""Deterministic algorithms: an operation without one is named in one line; all else is as before."""

import pytest
import torch

from dml_core.deterministic import deterministic_algorithms
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
