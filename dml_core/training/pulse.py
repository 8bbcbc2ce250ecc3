"""The heartbeat of a worker, sent by the work itself, so that a monitor can distinguish a hung worker from a slow one.

Repeated work beats once per item (a step, an embedded batch). Slow work without progress, such as a download or the compilation before a
first step, runs in `patient`. No separate thread beats: it would continue while the work hangs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[bool], None]

_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Call only `listener` for every beat of this process from now on, with True if the next beat may take long."""
    _listeners[:] = [listener]


def beat(patience: bool = False) -> None:
    """Report that the work continues."""
    for listener in _listeners:
        listener(patience)


@contextmanager
def patient() -> Iterator[None]:
    """Mark work that may take long without a beat."""
    beat(patience=True)
    try:
        yield
    finally:
        beat()
