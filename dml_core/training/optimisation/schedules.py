"""Learning-rate schedules as pure functions of training progress: the factor on every group's base rate."""

import math
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dml_core.config import Config

READ_BY_KIND = {
    "constant": set[str](),
    "step": {"milestones", "factor"},
    "every": {"every_epochs", "factor"},
    "cosine": {"floor", "cosine_moves", "cosine_after_warmup"},
}


class ScheduleConfig(Config):
    """Settings of the learning-rate schedule; setting one that the kind does not read is an error.

    Attributes:
        kind: "constant"; "step" (times `factor` after each epoch count in `milestones`); "every" (times `factor` after every `every_epochs`
            epochs); "cosine" (to `floor` over the whole run).
        milestones: completed epochs after which the rate drops, rising, as SoftTriple's {20, 40}.
        every_epochs: as the 30 of tuplet margin and the 5 of the discriminative loss.
        factor: multiplies the rate at each drop.
        floor: the cosine's last factor.
        cosine_moves: update the cosine with each "step", or keep it constant within an "epoch".
        cosine_after_warmup: start the cosine at the end of the warm-up, which must not be empty, over the rest of the run, with the last
            epoch at the floor (SGSL's released code); else it covers the whole run and the warm-up multiplies it.
        warmup_epochs: epochs of linear warm-up, updated at each step.
        warmup_steps: steps of linear warm-up.
        warmup_from: initial factor of the rise.
    """

    kind: Literal["constant", "step", "every", "cosine"] = "constant"
    milestones: tuple[Annotated[int, Field(ge=1)], ...] = ()
    every_epochs: int | None = Field(default=None, ge=1)
    factor: float = Field(default=0.1, gt=0)
    floor: float = Field(default=0.0, ge=0, le=1)
    cosine_moves: Literal["step", "epoch"] = "step"
    cosine_after_warmup: bool = False
    warmup_epochs: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    warmup_from: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _fits(self) -> "ScheduleConfig":
        for name, kind in (("milestones", "step"), ("every_epochs", "every")):
            if self.kind == kind and not getattr(self, name):
                raise ValueError(f"kind '{kind}' needs {name}")
        always = {"kind", "warmup_epochs", "warmup_steps", "warmup_from"}
        if unread := sorted(self.model_dump(exclude_defaults=True).keys() - always - READ_BY_KIND[self.kind]):
            raise ValueError(f"kind is '{self.kind}', so {unread[0]} has no place: set it to null")
        if any(later <= earlier for earlier, later in pairwise(self.milestones)):
            raise ValueError(f"milestones must rise, found {', '.join(map(str, self.milestones))}")
        if self.warmup_epochs and self.warmup_steps:
            raise ValueError("warmup_epochs and warmup_steps exclude each other: set one to null")
        if self.cosine_after_warmup and self.cosine_moves != "epoch":
            raise ValueError("cosine_after_warmup has a place only with cosine_moves 'epoch': set it to null")
        for name in ("cosine_after_warmup", "warmup_from"):
            if getattr(self, name) and not (self.warmup_epochs or self.warmup_steps):
                raise ValueError(f"{name} needs a warm-up: set warmup_epochs or warmup_steps, or set it to null")
        return self


def learning_rate_factor(config: ScheduleConfig, epoch: int, step: int, num_steps: int, num_epochs: int) -> float:
    """Return the factor on the base rates.

    Args:
        config: the schedule.
        epoch: completed epochs.
        step: completed steps of the current epoch.
        num_steps: steps of every epoch.
        num_epochs: epochs of the whole run.
    """
    length = config.warmup_steps or config.warmup_epochs * num_steps
    share = min(1.0, (epoch * num_steps + step) / length) if length else 1.0
    warmup = config.warmup_from + (1.0 - config.warmup_from) * share
    if config.cosine_after_warmup:
        return warmup * _cosine(config, _share_after_warmup(length / num_steps, epoch, num_epochs))
    return warmup * _course(config, epoch, step / num_steps, num_epochs)


def _course(config: ScheduleConfig, epoch: int, part_of_epoch: float, num_epochs: int) -> float:
    if config.kind == "step":
        return config.factor ** sum(epoch >= milestone for milestone in config.milestones)
    if config.kind == "every":
        assert config.every_epochs is not None
        return float(config.factor ** (epoch // config.every_epochs))
    if config.kind == "cosine":
        return _cosine(config, (epoch + (part_of_epoch if config.cosine_moves == "step" else 0.0)) / num_epochs)
    return 1.0


def _cosine(config: ScheduleConfig, share: float) -> float:
    return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * share))


def _share_after_warmup(warmup_epochs: float, epoch: int, num_epochs: int) -> float:
    """Return fast-reid's share: one move after every epoch at whose end the warm-up is over; 0 if the warm-up fills the run."""
    num_warm_epochs = math.ceil(warmup_epochs)
    num_moves = epoch - max(0, num_warm_epochs - 1)
    return max(0, num_moves) / (num_epochs - num_warm_epochs) if num_warm_epochs < num_epochs else 0.0
