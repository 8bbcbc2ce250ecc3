"""Arithmetic in whole float32 on GPUs that would shorten it: by default torch's convolutions round their inputs to TF32's 10 bits there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from dml_core.training.config import TrainingConfig

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute convolutions and matrix products of float32 without TF32; what the process had set before comes back afterwards.

    By torch's newer settings alone: the older ones (`allow_tf32`) cannot be read in a process that has used the newer.
    """
    settings = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def in_its_precision(train: Callable[Concatenate[TrainingConfig, P], R]) -> Callable[Concatenate[TrainingConfig, P], R]:
    """A function that trains, without TF32 where its configuration says `precision: float32`."""

    @wraps(train)
    def trains(config: TrainingConfig, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with without_tf32() if config.precision == "float32" else nullcontext():
            return train(config, *args, **kwargs)

    return trains
