"""SIGTERM to a worker: while it trains, it is to leave a checkpoint and end; at any other time it ends at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_is_training = threading.Event()
_has_come = threading.Event()


def heed_sigterm() -> None:
    """Take SIGTERM from now on; to be called in the worker's main thread, which Ray keeps free while the work is in another."""
    signal.signal(signal.SIGTERM, _on_sigterm)


@contextlib.contextmanager
def training() -> Iterator[None]:
    """While inside, SIGTERM is kept for whoever asks `has_come`; a second one ends the process."""
    _is_training.set()
    try:
        yield
    finally:
        _is_training.clear()


def has_come() -> bool:
    """Whether SIGTERM has come while training."""
    return _has_come.is_set()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if not _is_training.is_set() or _has_come.is_set():
        os._exit(128 + number)
    _has_come.set()
