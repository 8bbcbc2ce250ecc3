"""Handle Ctrl-C while the command is still being imported, before any error handler is installed."""

import contextlib
import os
import signal
from collections.abc import Iterator

INTERRUPTED = 130  # 128 + SIGINT, as in shells


@contextlib.contextmanager
def interrupt_exits() -> Iterator[None]:
    """Let Ctrl-C end the process at once with exit code 130 while the body runs, without a traceback."""
    try:
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:  # as set by nohup
            signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    except ValueError:  # only the main thread receives signals
        before = signal.SIG_IGN
    yield
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, before)
