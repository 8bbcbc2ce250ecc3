"""Time of a comparison, measured on this machine: what it depends on, and a real training beside it."""

import os
import time

import pytest
import torch

from dml_core.models.embedder import Embedder
from tasks.plans import speed
from tasks.plans.speed import comparison_times, measured_rates
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.workers.placement import Placement
from tests.conftest import ROOT

COUNTS = {"train": 900, "test": 900}


@pytest.fixture(scope="module")
def runs() -> list[RunSpec]:
    return comparison_runs(load_params(ROOT / "params.yaml"), "fashion-mnist", ["untrained", "softmax", "softtriple"], [0, 1])


def test_it_is_epochs_times_images_over_the_measured_rate(runs: list[RunSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    """One second per image of a step: 4 runs of 20 epochs and 900 images, and 900 embedded images of all 6, on two cores."""
    monkeypatch.setattr(speed, "_seconds", lambda step, device: 16.0)
    monkeypatch.setattr(speed, "placement_here", lambda scale: Placement("cpu", 1, 2))
    untrained = [run for run in runs if run.variant == "untrained" and run.seed == 0]
    found = comparison_times([runs, untrained], COUNTS, ScaleSpec())
    assert found[0].seconds == pytest.approx(speed.START_SECONDS + (4 * 20 * 900 + 6 * 900) / 2)
    assert found[1].seconds == pytest.approx(speed.START_SECONDS + 900)


def test_without_the_gpu_that_is_required_there_is_no_estimate(runs: list[RunSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (found,) = comparison_times([runs], COUNTS, ScaleSpec(device="cuda"))
    assert (found.seconds, found.basis) == (None, "no time estimate (no GPU)")


@pytest.mark.parametrize("precision", ["auto", "bfloat16"])
def test_a_step_is_measured_in_the_precision_of_the_training(runs: list[RunSpec], monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """On a GPU `auto` is bfloat16, which is several times as fast as float32."""
    casts: list[bool] = []
    forward = Embedder.forward

    def noted(network: Embedder, images: torch.Tensor) -> torch.Tensor:
        casts.append(torch.is_autocast_enabled("cpu"))
        return forward(network, images)

    monkeypatch.setattr(Embedder, "forward", noted)
    training = runs[-1].training.model_copy(update={"precision": precision})
    measured_rates(runs[-1].model_copy(update={"training": training}), Placement("cpu", 1, 1))
    assert set(casts) == {precision == "bfloat16"}


def test_a_larger_network_takes_longer_and_the_number_of_threads_is_put_back(runs: list[RunSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of this thread alone, which has no others to wait for: a busy machine does not change it."""
    monkeypatch.setattr(speed, "_now", lambda device: time.thread_time())
    softmax = next(run for run in runs if run.variant == "softmax")
    training = softmax.training
    wide = training.model.model_copy(update={"backbone": training.model.backbone.model_copy(update={"width": 128})})
    larger = softmax.model_copy(update={"training": training.model_copy(update={"model": wide})})
    before, here = torch.get_num_threads(), Placement("cpu", 1, os.cpu_count() or 1)  # one thread for each worker
    small, large = (measured_rates(run, here)[0].images_per_second for run in (softmax, larger))
    assert small > 2 * large
    assert torch.get_num_threads() == before
