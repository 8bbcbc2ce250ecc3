"""Processes that a flow cannot go on without, watched: when one of them dies the flow ends at once, with one line.

Ray's client and Prefect's each wait for minutes for a server that will not come back, and then end in pages of their own traces. A server
that was started on this machine for this flow is not coming back, so there is nothing to wait for. The flow's process does not unwind:
what it works with is gone, and everything that it has written is whole at any moment (files are put in place by renaming, and a run goes
on from its last checkpoint). `flows.cli.supervisor` ends what is left of the others.
"""

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable

GO_ON = "the same command goes on from the last checkpoint"


def watch_children(names: dict[str, str]) -> Callable[[], None]:
    """Watch the processes that this one has started, and return what ends the watch; to be called before they are stopped.

    Args:
        names: part of a process's command line -> what a person calls it.
    """
    import psutil

    over = threading.Event()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(child.cmdline()[:8])
            name = next((name for part, name in names.items() if part in words), None)
            if name is not None:
                threading.Thread(target=_watch, args=(os.pidfd_open(child.pid), name, over), name=f"watch-{name}", daemon=True).start()
    return over.set


def _watch(process: int, name: str, over: threading.Event) -> None:
    """Wait for a process's end; it is not reaped here, who started it may ask for its exit code."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.poll()
    if not over.is_set():
        end_flow(f"{name} died; {GO_ON}")


def end_flow(line: str) -> None:
    """Say why, and end this process now, without unwinding; whoever comes second says nothing."""
    if _ending.acquire(blocking=False):
        print(f"error: {line}", file=sys.stderr, flush=True)
        os._exit(2)


_ending = threading.Lock()
