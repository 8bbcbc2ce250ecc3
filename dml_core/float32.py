"""Arithmetic in whole float32 on GPUs that would shorten it: by default torch's convolutions round their inputs to TF32's 10 bits there."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from dml_core.training.config import TrainingConfig

P = ParamSpec("P")
R = TypeVar("R")


_lock = threading.Lock()
_before: tuple[str, str, str]  # while anybody computes without TF32: what the process had set
_inside = 0  # how many do, in any thread


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute float32 without TF32, in every thread; what the process had set before comes back when the last one is through."""
    global _before, _inside
    with _lock:
        if _inside == 0:
            conv, rnn, matmul = _settings()
            _before = conv.fp32_precision, rnn.fp32_precision, matmul.fp32_precision
            _set("ieee", "ieee", "ieee")
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _set(*_before)


def _settings() -> tuple[Any, Any, Any]:
    """Torch's newer settings; the older ones cannot be read in every process that has used the newer."""
    return torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul  # type: ignore[attr-defined]


def _set(conv: str, rnn: str, matmul: str) -> None:
    """The older settings are written too: torch reads them as it exports a network, and refuses where they say something else."""
    torch.backends.cudnn.allow_tf32 = conv == rnn == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = matmul == "tf32"
    for setting, precision in zip(_settings(), (conv, rnn, matmul), strict=True):
        setting.fp32_precision = precision


def in_its_precision(train: Callable[Concatenate[TrainingConfig, P], R]) -> Callable[Concatenate[TrainingConfig, P], R]:
    """A function that trains, without TF32 where its configuration says `precision: float32`."""

    @wraps(train)
    def trains(config: TrainingConfig, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with without_tf32() if config.precision == "float32" else nullcontext():
            return train(config, *args, **kwargs)

    return trains
