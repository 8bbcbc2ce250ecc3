"""Handle SIGTERM in a worker: during training it saves a checkpoint and ends, at any other time it ends at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_is_training = threading.Event()
_has_come = threading.Event()


def heed_sigterm() -> None:
    """Install the SIGTERM handler; call it in the worker's main thread, which Ray keeps free while work runs in another."""
    signal.signal(signal.SIGTERM, _on_sigterm)


@contextlib.contextmanager
def training() -> Iterator[None]:
    """Store a SIGTERM that arrives inside, for `has_come`; a second one ends the process."""
    _is_training.set()
    try:
        yield
    finally:
        _is_training.clear()


def has_come() -> bool:
    """Return whether SIGTERM arrived during training."""
    return _has_come.is_set()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if not _is_training.is_set() or _has_come.is_set():
        os._exit(128 + number)
    _has_come.set()
