"""A small supervisor process that waits for a flow and ends everything the flow started, however the flow itself ends.

`dml reproduce`, `dml run`, `dml tune` and `dml serve` fork before anything is loaded. The child runs the flow; the parent waits. The parent
adopts the processes of Ray and Prefect, DVC's command and their children (Linux's child subreaper), so that it finds them all when the flow
has ended, was interrupted or was killed. If the parent itself is killed, its pipe closes, and the child ends the others and itself.

An interrupted flow does not unwind: its state is consistent at any moment, as a power cut requires, and unwinding several busy libraries
takes minutes and prints pages. What libraries write to the standard error stream below Python (Ray's C++, the servers) goes to a log file
in `state/logs`; Python's own standard error stays the terminal.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

from flows.cli.exit_codes import BROKEN_PIPE, BUG, DONE, MENDABLE, SUPERVISED_BUG
from tasks.processes import GO_ON

PR_SET_CHILD_SUBREAPER = 36
INTERRUPTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def supervise(logs: Path, grace_seconds: float = 0.0, go_on: str = GO_ON, temporary: Path | None = None) -> Path:
    """Fork. The child returns its log file, which receives its standard error below Python; the parent waits for it and then exits.

    The exit code is the flow's; 128 + the signal (130 after Ctrl-C, 143 after SIGTERM) if it was interrupted; 2 if the flow's process was
    killed.

    Args:
        logs: folder of log files; created if missing.
        grace_seconds: time for the child to end after a signal; 0 if its state is always consistent.
        go_on: advice printed after an early end.
        temporary: a folder that is removed at the end, unless it has files of a flow that failed.

    Raises:
        OSError: the log file cannot be written.
    """
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"dml-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    log.touch()
    _adopt_orphans()
    handled = {number for number in INTERRUPTS if signal.getsignal(number) is not signal.SIG_IGN}  # under nohup some are ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, handled | {signal.SIGCHLD})
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        _adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to every process; the parent handles it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled | {signal.SIGCHLD})
        _divert_standard_error(log)
        threading.Thread(target=_end_with_the_parent, args=(read_end,), name="supervisor-watch", daemon=True).start()
        return log
    os.close(read_end)
    code = _stand_by(child, handled, log, grace_seconds, go_on)
    if temporary is not None and code in (BUG, MENDABLE):
        with contextlib.suppress(OSError):
            temporary.rmdir()
    elif temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    sys.exit(code)


def _adopt_orphans() -> None:
    """Make this process adopt descendants that lose their parent. The setting is not inherited by children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _stand_by(child: int, handled: set[signal.Signals], log: Path, grace_seconds: float, go_on: str) -> int:
    """Wait for the flow's end or a signal, end the remaining processes, print what the user must know, and return the exit code."""
    code: int | None = None
    while code is None:
        number = signal.sigwait(handled | {signal.SIGCHLD})
        code = _reap(child)
        if code is None and number != signal.SIGCHLD:
            _end_flow(child, grace_seconds)
            _end_descendants()
            _say(f"interrupted; {go_on}")
            _drop_if_empty(log)
            return 128 + number
    _end_descendants()
    if code == SUPERVISED_BUG:
        return BUG
    if code not in (DONE, MENDABLE, BROKEN_PIPE):
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"exited unexpectedly (exit code {code})"
        _say(f"error: the flow's process {how}; {go_on}; its last messages are in {log}")
        return MENDABLE
    if code == DONE:
        log.unlink(missing_ok=True)
    else:
        _drop_if_empty(log)
    return code


def _reap(child: int | None = None) -> int | None:
    """Reap all processes that have ended; return the child's exit code (minus the signal that killed it) if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _end_flow(child: int, grace_seconds: float) -> None:
    """End the flow's process, after `grace_seconds` in which it can end itself."""
    if grace_seconds:
        os.kill(child, signal.SIGTERM)
        until = time.monotonic() + grace_seconds
        while time.monotonic() < until:
            if _reap(child) is not None:
                return
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def _end_descendants() -> None:
    """End every process left below this one: terminate, then kill."""
    for process in _descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    until = time.monotonic() + 2.0
    while _descendants() and time.monotonic() < until:
        time.sleep(0.05)
    until = time.monotonic() + 3.0
    while (left := _descendants()) and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.05)


def _descendants() -> list[psutil.Process]:
    """Return the running processes below this one; reap those that have ended."""
    _reap()
    return list(psutil.Process().children(recursive=True))


def _end_with_the_parent(pipe: int) -> None:
    """Wait until the supervisor is gone; then kill every process this one started, and exit."""
    os.read(pipe, 1)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(MENDABLE)


def _divert_standard_error(log: Path) -> None:
    """Send what is written to file descriptor 2, here and in child processes, to the log; Python's own stderr keeps the terminal."""
    terminal = os.dup(2)
    sys.stderr.flush()
    sys.stderr = os.fdopen(terminal, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace")
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 2)
    os.close(file)


def _say(line: str) -> None:
    """Print a line on a terminal that may still show a progress bar: clear the bar's line, show the cursor."""
    clean = "\r\x1b[2K\x1b[?25h" if sys.stderr.isatty() else ""
    print(f"{clean}{line}", file=sys.stderr, flush=True)


def _drop_if_empty(log: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # the user may have removed the state
        if log.stat().st_size == 0:
            log.unlink()
