"""Full float32 arithmetic: for half-precision values, and where a process lets torch round float32 to TF32's 10 or bfloat16's 7 bits."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

_lock = threading.Lock()
_before: "_Precision"  # the process's own settings, saved while any thread is inside `full_float32`
_inside = 0  # number of callers inside, over all threads


def at_least_float32(values: Tensor) -> Tensor:
    """Return half-precision values as float32, others unchanged."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 in full: without TF32 and bfloat16 in every thread, without autocast in this one.

    The process's settings are restored when the last caller leaves.
    """
    global _before, _inside
    with _lock:
        if _inside == 0:
            _before = _read()
            _write(_Precision("highest", ("ieee",) * len(_places())))
        _inside += 1
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _write(_before)


class _Precision(NamedTuple):
    """Settings of a process: torch's older one of products, None if it cannot be read, and the newer ones of `_places`."""

    of_products: str | None
    of_places: tuple[str, ...]


def _places() -> tuple[Any, ...]:
    backends: Any = torch.backends
    cuda, cpu = backends.cudnn, backends.mkldnn
    return cuda.conv, cuda.rnn, backends.cuda.matmul, cpu.conv, cpu.rnn, cpu.matmul


def _read() -> _Precision:
    try:
        of_products = torch.get_float32_matmul_precision()
    except RuntimeError:  # the process has used the newer settings, which it contradicts
        of_products = None
    return _Precision(of_products, tuple(place.fp32_precision for place in _places()))


def _write(precision: _Precision) -> None:
    """Write the older settings too: torch reads them when it exports or compiles a network, and raises an error if they disagree."""
    conv, rnn, products, *_ = precision.of_places
    torch.backends.cudnn.allow_tf32 = conv == rnn == "tf32"
    torch.set_float32_matmul_precision(precision.of_products or ("high" if products == "tf32" else "highest"))
    for place, value in zip(_places(), precision.of_places, strict=True):
        place.fp32_precision = value
