"""Full float32 arithmetic: for half-precision values, and on GPUs, where torch's convolutions round their inputs to TF32's 10 bits."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_lock = threading.Lock()
_before: tuple[str, str, str]  # the process's own settings, saved while any thread is inside `without_tf32`
_inside = 0  # number of callers inside, over all threads


def at_least_float32(values: Tensor) -> Tensor:
    """Return half-precision values as float32, others unchanged."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute float32 without TF32, in every thread; restore the process's settings when the last caller leaves."""
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
    """Return torch's newer settings; the older ones cannot be read in every process that has used the newer."""
    return torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul  # type: ignore[attr-defined]


def _set(conv: str, rnn: str, matmul: str) -> None:
    """Write the older settings too: torch reads them when exporting a network, and raises an error if they disagree."""
    torch.backends.cudnn.allow_tf32 = conv == rnn == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = matmul == "tf32"
    for setting, precision in zip(_settings(), (conv, rnn, matmul), strict=True):
        setting.fp32_precision = precision
