"""Learning-rate schedules as pure functions of progress: the factor on every group's base rate."""

import math
from typing import Literal

from pydantic import Field

from dml_core.config import Config


class ScheduleConfig(Config):
    """How the learning rate moves.

    Attributes:
        kind: "constant", "step" (times `factor` after each epoch count in `milestones`) or "cosine" (to `floor` over the whole run).
        milestones: completed epochs after which the rate drops, as SoftTriple's {20, 40}.
        factor: what a milestone multiplies the rate by.
        floor: the cosine's last factor.
        warmup_epochs: linear rise from 0 over the first epochs, per step, before any kind.
    """

    kind: Literal["constant", "step", "cosine"] = "constant"
    milestones: tuple[int, ...] = ()
    factor: float = Field(default=0.1, gt=0)
    floor: float = Field(default=0.0, ge=0, le=1)
    warmup_epochs: float = Field(default=0.0, ge=0)


def learning_rate_factor(config: ScheduleConfig, progress_epochs: float, num_epochs: int) -> float:
    """The factor at `progress_epochs` (completed epochs, fractional inside an epoch) of `num_epochs`."""
    warmup = min(1.0, progress_epochs / config.warmup_epochs) if config.warmup_epochs > 0 else 1.0
    if config.kind == "step":
        return warmup * config.factor ** sum(progress_epochs >= milestone for milestone in config.milestones)
    if config.kind == "cosine":
        share = min(1.0, progress_epochs / num_epochs)
        return warmup * (config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * share)))
    return warmup
