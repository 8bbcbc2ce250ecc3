"""The pulse of a worker: a word from the work itself that it goes on, so that a worker that hangs is told from one that takes long.

Whoever does many like things beats once for each (a step, a batch that is embedded). What takes long and cannot say how far it is, such as
a download or the compilation before a first step, is done in `patient`. Nothing beats beside the work: a thread of its own would go on
while the work hangs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[bool], None]

_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Have `listener` told of every beat of this process from now on, alone; of each, whether the next may take long."""
    _listeners[:] = [listener]


def beat(patience: bool = False) -> None:
    """Say that the work goes on."""
    for listener in _listeners:
        listener(patience)


@contextmanager
def patient() -> Iterator[None]:
    """Something that may take long without a beat."""
    beat(patience=True)
    try:
        yield
    finally:
        beat()
