"""Watch the processes a flow depends on: if one of them dies, the flow ends at once with a one-line error.

The clients of Ray and Prefect each wait for minutes for a server that does not return, and then end with long traces. A server started on
this machine for this flow does not return, so waiting is useless. The flow's process ends without unwinding: its services are gone, and all
its files are complete at any moment (they are put in place by renaming, and a run resumes from its last checkpoint). `flows.cli.supervisor`
ends the remaining processes.
"""

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import psutil

GO_ON = "rerun the command to resume from the last checkpoint"
GO_ON_FORCED = "rerun it without --force to complete the runs that it had begun; force the others with --variant and --seed"
KILL_SECONDS = 5.0
_ending = threading.Lock()  # held by the thread that ends this process


def go_on() -> str:
    """Return the advice to the user of a flow that was interrupted; the same `--force` would begin again from the initial weights."""
    return GO_ON_FORCED if "--force" in sys.argv else GO_ON


def watch_children(names: Mapping[str, str]) -> Callable[[], None]:
    """Watch this process's children; return a function that ends the watch, to be called before they are stopped.

    Args:
        names: part of a process's command line -> name for messages.
    """
    over = threading.Event()
    for child, name in _named_children(names):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            threading.Thread(target=_watch, args=(os.pidfd_open(child.pid), name, over), name=f"watch-{name}", daemon=True).start()
    return over.set


def kill_children(names: Mapping[str, str]) -> None:
    """Kill those children of this process that `watch_children` would watch."""
    children = [child for child, _ in _named_children(names)]
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, KILL_SECONDS)


def kill_with_descendants(process: "subprocess.Popen[str]") -> None:
    """Kill a process and all that it has started, and wait for its end."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, of the same Ctrl-C
        started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def _named_children(names: Mapping[str, str]) -> Iterator[tuple[psutil.Process, str]]:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(child.cmdline()[:8])
            name = next((name for part, name in names.items() if part in words), None)
            if name is not None:
                yield child, name


def _watch(process: int, name: str, over: threading.Event) -> None:
    """Wait for a process to end without reaping it, so that its parent can read its exit code; then end this one, once."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.poll()
    os.close(process)
    if not over.is_set() and _ending.acquire(blocking=False):
        print(f"error: {name} died; {go_on()}", file=sys.stderr, flush=True)
        os._exit(2)
