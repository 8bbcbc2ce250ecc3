"""Schedules: the factor at every epoch against the papers' words and against torch's own schedulers."""

import pytest
import torch

from dml_core.config import parse
from dml_core.errors import ConfigError
from dml_core.training.schedules import ScheduleConfig, learning_rate_factor


def by_epoch(num_epochs, num_steps=10, **options):
    config = ScheduleConfig(**options)
    return [learning_rate_factor(config, epoch, 0, num_steps, num_epochs) for epoch in range(num_epochs)]


def torchs(scheduler_type, num_epochs, **options):
    """torch's scheduler, epoch by epoch, on a rate of 1."""
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = scheduler_type(optimiser, **options)
    rates = []
    for _ in range(num_epochs):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    return rates


def test_step_is_torchs_multistep():
    ours = by_epoch(50, kind="step", milestones=(20, 40))
    assert ours == pytest.approx(torchs(torch.optim.lr_scheduler.MultiStepLR, 50, milestones=[20, 40]))
    assert ours[19:21] == pytest.approx([1, 0.1])  # the 20th epoch is the last at the full rate


def test_every_is_torchs_step():
    ours = by_epoch(40, kind="every", every_epochs=5, factor=0.5)
    assert ours == pytest.approx(torchs(torch.optim.lr_scheduler.StepLR, 40, step_size=5, gamma=0.5))
    assert ours[35] == 0.5**7


def test_cosine_is_torchs_annealing():
    ours = by_epoch(100, kind="cosine", floor=0.01)
    assert ours == pytest.approx(torchs(torch.optim.lr_scheduler.CosineAnnealingLR, 100, T_max=100, eta_min=0.01))


@pytest.mark.parametrize(("moves", "halfway"), [("step", 0.5), ("epoch", 1.0)])
def test_the_cosine_moves_by_step_or_by_epoch(moves, halfway):
    config = ScheduleConfig(kind="cosine", cosine_moves=moves)
    assert learning_rate_factor(config, 0, 5, 10, num_epochs=1) == pytest.approx(halfway)


@pytest.mark.parametrize("length", [{"warmup_epochs": 2.0}, {"warmup_steps": 20}])
def test_warm_up_is_a_line_by_step(length):
    config = ScheduleConfig(warmup_from=0.1, **length)
    factors = [learning_rate_factor(config, epoch, step, 10, 5) for epoch in range(5) for step in range(10)]
    assert factors[:20] == pytest.approx([0.1 + 0.9 * step / 20 for step in range(20)])
    assert factors[20:] == [1.0] * 30


def test_warm_up_multiplies_the_course():
    factors = by_epoch(4, kind="step", milestones=(1,), warmup_epochs=2)
    assert factors == pytest.approx([0.0, 0.05, 0.1, 0.1])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kind": "step"}, "milestones go together"),
        ({"kind": "cosine", "milestones": [3]}, "milestones go together"),
        ({"kind": "every"}, "every_epochs go together"),
        ({"warmup_epochs": 1.0, "warmup_steps": 5}, "exclude each other"),
    ],
)
def test_what_is_not_read_or_missing_is_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        parse(ScheduleConfig, values, "schedule")
