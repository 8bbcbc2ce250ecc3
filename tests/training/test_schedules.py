"""Schedules: the factor at every epoch compared with the papers' text and with torch's schedulers."""

import pytest
import torch

from dml_core.config import parse
from dml_core.errors import ConfigError
from dml_core.training.optimisation.schedules import ScheduleConfig, learning_rate_factor


def by_epoch(num_epochs, num_steps=10, **options):
    config = ScheduleConfig(**options)
    return [learning_rate_factor(config, epoch, 0, num_steps, num_epochs) for epoch in range(num_epochs)]


def torchs(scheduler_type, num_epochs, **options):
    """Return the rates of torch's scheduler by epoch, for a base rate of 1."""
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


# Rates printed by the logs of SGSL's released code: (steps per epoch, {(epoch, step): rate}).
CUB_LOG = (91, {(0, 90): 9.05e-3, (5, 90): 2.95e-2, (9, 90): 4.59e-2, (11, 90): 5e-2, (12, 90): 4.99e-2, (14, 90): 4.98e-2})
CUB_LOG[1].update({(15, 0): 4.96e-2, (19, 90): 4.88e-2, (24, 90): 4.70e-2, (27, 90): 4.57e-2, (31, 90): 4.35e-2})
CARS_LOG = (125, {(5, 124): 3.87e-2, (8, 124): 5e-2, (9, 124): 4.99e-2, (11, 124): 4.98e-2, (13, 124): 4.95e-2, (15, 124): 4.91e-2})
CARS_LOG[1].update({(19, 0): 4.80e-2, (24, 124): 4.59e-2, (33, 100): 4.09e-2, (43, 0): 3.35e-2, (48, 124): 2.95e-2, (50, 0): 2.78e-2})


@pytest.mark.parametrize(("num_steps", "printed"), [CUB_LOG, CARS_LOG], ids=["cub", "cars"])
def test_a_cosine_after_the_warm_up_is_what_the_released_logs_print(num_steps, printed):
    """1000 steps from a tenth, then a cosine by epoch to a hundredth of 0.05, over the remaining 89 or 92 of 100 epochs."""
    config = ScheduleConfig(kind="cosine", cosine_moves="epoch", cosine_after_warmup=True, floor=0.01, warmup_steps=1000, warmup_from=0.1)
    ours = {(epoch, step): 0.05 * learning_rate_factor(config, epoch, step, num_steps, 100) for epoch, step in printed}
    assert ours == pytest.approx(printed, abs=5.1e-5)  # the logs print three digits
    assert learning_rate_factor(config, 99, 0, num_steps, 100) == pytest.approx(0.01)


def test_a_warm_up_longer_than_the_run_leaves_no_cosine():
    factors = by_epoch(3, kind="cosine", cosine_moves="epoch", cosine_after_warmup=True, warmup_steps=1000)
    assert factors == pytest.approx([0.0, 0.01, 0.02])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kind": "step"}, "kind 'step' needs milestones$"),
        ({"kind": "cosine", "milestones": [3]}, "kind is 'cosine', so milestones has no place: set it to null$"),
        ({"kind": "step", "milestones": [0, 20]}, "milestones.0: Input should be greater than or equal to 1"),
        ({"kind": "step", "milestones": [20, 20]}, "milestones must rise, found 20, 20$"),
        ({"kind": "step", "milestones": [40, 20]}, "milestones must rise, found 40, 20$"),
        ({"kind": "every"}, "kind 'every' needs every_epochs$"),
        ({"kind": "step", "milestones": [3], "every_epochs": 2}, "kind is 'step', so every_epochs has no place: set it to null$"),
        ({"warmup_epochs": 1.0, "warmup_steps": 5}, "exclude each other: set one to null$"),
        ({"kind": "cosine", "cosine_after_warmup": True, "warmup_steps": 5}, "cosine_moves 'epoch': set it to null$"),
        ({"kind": "step", "milestones": [3], "floor": 0.1}, "kind is 'step', so floor has no place: set it to null$"),
        ({"kind": "constant", "cosine_moves": "epoch"}, "kind is 'constant', so cosine_moves has no place: set it to null$"),
        ({"kind": "cosine", "factor": 0.5}, "kind is 'cosine', so factor has no place: set it to null$"),
        ({"kind": "step", "milestones": [3], "cosine_after_warmup": True, "warmup_steps": 5}, "so cosine_after_warmup has no place"),
        ({"kind": "cosine", "warmup_from": 0.5}, "warmup_from needs a warm-up: set warmup_epochs or warmup_steps"),
        ({"kind": "cosine", "cosine_moves": "epoch", "cosine_after_warmup": True}, "needs a warm-up: set warmup_epochs or warmup_steps"),
    ],
)
def test_what_is_not_read_or_missing_is_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        parse(ScheduleConfig, values, "schedule")
