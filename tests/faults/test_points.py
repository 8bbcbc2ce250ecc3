"""The breakpoints of the fault matrix name functions that exist: one that does not would never halt a run."""

import functools
import importlib

import pytest

from tests.faults.placed.sitecustomize import POINTS


@pytest.mark.parametrize("point", POINTS)
def test_a_breakpoint_names_a_function(point: str) -> None:
    module, function, _ = POINTS[point]
    assert callable(functools.reduce(getattr, function.split("."), importlib.import_module(module)))
