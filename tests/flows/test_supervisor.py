"""The process that supervises a flow: it leaves no process of the flow, whatever happens to the flow or to itself."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT

FLOW = """
import os, subprocess, sys, time
from pathlib import Path
from flows.cli.exit_codes import SUPERVISED_BUG
from flows.cli.supervisor import supervise
from tasks.processes import watch_children

supervise(Path(sys.argv[1]), temporary=Path(sys.argv[1]).with_name("temporary"))
server = subprocess.Popen(["sleep", "600"])
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
deaf = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE)
deaf.stdout.readline()
subprocess.run(["sh", "-c", "setsid sleep 601 &"])  # its parent is gone
os.write(2, b"a trace of a library\\n")
print(os.getpid(), server.pid, flush=True)
exec(sys.argv[2])
"""
TRAIN = "time.sleep(600)"
ONE_LINE = "interrupted; rerun the command to resume from the last checkpoint\n"


def _answer_signals() -> None:
    """Restore the default signal handlers, as in a terminal: under nohup or in the background the tests inherit ignored signals."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Started:
    """A supervised flow that has started three processes: a child, one that ignores SIGTERM, and an orphan."""

    def __init__(self, folder: Path, then: str) -> None:
        self.logs, self.temporary = folder / "logs", folder / "temporary"
        self.temporary.mkdir()
        (self.temporary / "log").touch()
        self.mark = f"DML_TEST_MARK={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-c", FLOW, str(self.logs), then],
            cwd=ROOT,
            env={name: text for name, text in os.environ.items() if name != "PREFECT_API_URL"} | {name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_answer_signals,
        )
        assert self.process.stdout is not None
        self.flow, self.server = map(int, self.process.stdout.readline().split())
        until = time.monotonic() + 20
        while len(self.left()) < 5 and self.process.poll() is None and time.monotonic() < until:  # the orphan may still be starting
            time.sleep(0.05)

    def left(self) -> list[list[str]]:
        """Return the processes with this test's mark in their environment, whatever their parent."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("DML_TEST_MARK") == self.mark.partition("=")[2]:
                    found.append(process.cmdline())
            except psutil.Error:
                continue
        return found

    def end(self, code: int) -> str:
        """Wait for the end, assert this exit code and that no process is left, nor files unless it failed; return the standard error."""
        _, printed = self.process.communicate(timeout=600)
        assert self.process.returncode == code, printed
        assert not self.left()
        assert self.temporary.exists() == (code in (1, 2))
        return printed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_an_interrupted_flow_ends_in_one_line(tmp_path: Path, number: signal.Signals, code: int) -> None:
    started = Started(tmp_path, TRAIN)
    assert len(started.left()) == 5
    began = time.monotonic()
    started.process.send_signal(number)
    assert started.end(code) == ONE_LINE
    assert time.monotonic() - began < 10


def test_a_terminal_s_ctrl_c_twice_reaches_every_process_and_is_still_one_line(tmp_path: Path) -> None:
    started = Started(tmp_path, TRAIN)
    for _ in range(2):
        with contextlib.suppress(ProcessLookupError):
            os.kill(started.flow, signal.SIGINT)
        started.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert started.end(130) == ONE_LINE


def test_a_flow_whose_logs_were_removed_is_interrupted_in_one_line(tmp_path: Path) -> None:
    started = Started(tmp_path, TRAIN)
    shutil.rmtree(started.logs)
    started.process.send_signal(signal.SIGINT)
    assert started.end(130) == ONE_LINE


def test_a_killed_flow_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    started = Started(tmp_path, TRAIN)
    os.kill(started.flow, signal.SIGKILL)
    (line,) = started.end(2).splitlines()
    (log,) = started.logs.iterdir()
    assert line.startswith("error: the flow's process was killed (SIGKILL)")
    assert str(log) in line
    assert log.read_text() == "a trace of a library\n"


def test_a_flow_whose_supervisor_is_killed_leaves_nothing(tmp_path: Path) -> None:
    started = Started(tmp_path, TRAIN)
    started.process.kill()
    until = time.monotonic() + 10
    while (left := started.left()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
    started.process.communicate()


def test_a_flow_whose_server_dies_ends_at_once_with_its_name(tmp_path: Path) -> None:
    started = Started(tmp_path, f"watch_children({{'sleep 600': 'the server'}}); print('watched', flush=True); {TRAIN}")
    assert started.process.stdout is not None
    started.process.stdout.readline()
    os.kill(started.server, signal.SIGKILL)
    assert started.end(2) == "error: the server died; rerun the command to resume from the last checkpoint\n"


def test_a_server_that_is_stopped_in_order_is_no_loss(tmp_path: Path) -> None:
    started = Started(tmp_path, "over = watch_children({'sleep 600': 'the server'}); over(); server.kill(); time.sleep(0.5)")
    assert started.end(0) == ""


@pytest.mark.parametrize(("then", "code"), [("pass", 0), ("sys.exit(2)", 2), ("sys.exit(SUPERVISED_BUG)", 1), ("sys.exit(141)", 141)])
def test_the_exit_code_is_the_flow_s_and_what_it_forgot_is_ended(tmp_path: Path, then: str, code: int) -> None:
    started = Started(tmp_path, then)
    assert started.end(code) == ""
    assert len(list(started.logs.iterdir())) == (0 if code == 0 else 1)


def test_a_process_that_ends_of_itself_is_told(tmp_path: Path) -> None:
    assert "exited unexpectedly (exit code 1)" in Started(tmp_path, "os._exit(1)").end(2)
