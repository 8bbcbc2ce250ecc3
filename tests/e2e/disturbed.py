"""A run that a test disturbs: its processes, who can reach them, and how it ends after one was killed."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.conftest import HANGS_SECONDS, Project

RUN = ("dml", "run", "synthetic", "softtriple")
GO_ON = "rerun the command to resume from the last checkpoint"
# An attack open to anyone who can reach Ray's GCS: submitting a function.
SUBMIT = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False); print(ray.get(ray.remote(num_cpus=0)(lambda: 'ran here').remote()))"


class Disturbed:
    """An unfinished run with all of its processes."""

    def __init__(self, project: Project, state: Path, command: tuple[str, ...] = RUN) -> None:
        self.state = state
        self.process = project.start(*command, DML_STATE=str(state))
        self.supervisor = psutil.Process(self.process.pid)

    def until(self, found: Callable[[], Any], what: str) -> Any:
        """Wait until `found` returns a true value, and return it."""
        deadline = time.monotonic() + 600
        while not (result := found()):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"{what} did not appear"
            time.sleep(0.02)
        return result

    def processes(self) -> list[psutil.Process]:
        """Return the run's existing processes: the supervisor and all of its descendants."""
        return [self.supervisor, *self.supervisor.children(recursive=True)]

    def named(self, part: str) -> list[psutil.Process]:
        """Return the run's processes with `part` in their command line."""
        found = []
        for process in self.processes():
            try:
                if part in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def trains_further(self) -> None:
        """Wait until the run has recorded more steps than it has now."""
        before = trained(self.state)
        self.until(lambda: trained(self.state) > before, "a new epoch")

    def freeze_in_the_middle(self) -> None:
        """Wait until the run has trained further, then stop its workers."""
        self.trains_further()
        workers = self.named("RayTrainWorker")
        assert workers, "no worker has started"
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)

    def continues(self) -> str:
        """Let the stopped workers continue, wait for the run's end, and return what it printed."""
        for worker in self.named("RayTrainWorker"):
            worker.send_signal(signal.SIGCONT)
        printed, _ = self.process.communicate(timeout=HANGS_SECONDS)
        assert self.process.returncode == 0, printed
        return printed

    def ends(self, code: int, line: str, within_seconds: float) -> None:
        """Assert that the run ends with this exit code, a last line that starts with `line` and says how to resume, and no process left."""
        began, started = time.monotonic(), self.processes()
        printed, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == code, printed
        assert time.monotonic() - began < within_seconds
        assert not re.search(r"Traceback|^\s+(File|@) |ERROR|WARNING|\*\*\*", printed, re.MULTILINE), printed
        said = [text for text in printed.splitlines() if text.startswith(("error", "interrupted"))]
        assert said == printed.splitlines()[-1:], printed
        assert said[0].startswith(line), printed
        assert GO_ON in said[0]
        assert [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []


def trained(state: Path) -> int:
    """Return the number of recorded steps of a run; 0 before its first checkpoint."""
    histories = list((state / "store/train").glob("*/history.jsonl"))
    return len(histories[0].read_text().splitlines()) if histories and list(histories[0].parent.glob("checkpoint*")) else 0


def nothing_listens_beyond_this_machine(run: Disturbed) -> None:
    listening: dict[str, list[str]] = {}
    for process in run.processes():
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                listening.setdefault(" ".join(process.cmdline())[:300], []).append(connection.laddr.ip)
    for part in ("gcs_server", "raylet", "RayTrainWorker", "DashboardAgent", "RuntimeEnvAgent", "flows.local_server"):
        assert any(part in words for words in listening), (part, list(listening))  # an empty list proves nothing
    assert {address for addresses in listening.values() for address in addresses} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, listening


def nobody_submits_work_without_the_token(run: Disturbed) -> None:
    gcs, raylet = run.named("gcs/gcs_server")[0], run.named("raylet/raylet")[0]
    token = gcs.environ()["RAY_AUTH_TOKEN"]
    (address,) = [word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--gcs-address=")]
    attempts = {
        "the token": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
        "another": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * len(token)},
        "none": {"RAY_AUTH_MODE": "disabled"},
    }
    of_attempts = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_NUM_REDIS_GET_RETRIES": "2"}  # of 20, a second each
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | of_attempts
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", SUBMIT, address], env=clean | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name, environment in attempts.items()
    }
    said = {name: process.communicate(timeout=180)[0] for name, process in started.items()}
    assert "ran here" in said["the token"], said["the token"]
    for name in ("another", "none"):
        assert "ran here" not in said[name], f"work was accepted with {name} as its token"
        assert "nauthenticated" in said[name] or "AuthenticationError" in said[name], said[name]
    agents_answer_nobody_without_the_token(run)
    commands = [word for process in run.processes() for word in process.cmdline()]
    written = [path for path in [*run.state.rglob("*"), *session_of(gcs).rglob("*")] if path.is_file()]
    assert not any(token in word for word in commands), "the token is on a command line"
    assert [path for path in written if token.encode() in path.read_bytes()] == [], "the token is in a file"


def agents_answer_nobody_without_the_token(run: Disturbed) -> None:
    """Assert that Ray's HTTP agents, one of which accepts whole jobs once it has started, reject requests without the token."""
    run.until(lambda: 401 in answers_of_agents(run), "an agent that refuses a job")
    assert set(answers_of_agents(run)) <= {401, 403, 404, 405}


def answers_of_agents(run: Disturbed) -> list[int]:
    answers = []
    for agent in run.named("DashboardAgent"):
        for port in {connection.laddr.port for connection in agent.net_connections("inet") if connection.status == psutil.CONN_LISTEN}:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/api/job_agent/jobs/", json.dumps({"entrypoint": "true"}).encode())
            try:
                answers.append(urllib.request.urlopen(request, timeout=10).status)
            except urllib.error.HTTPError as error:
                answers.append(error.code)
            except (OSError, http.client.HTTPException):  # a port that does not speak HTTP
                continue
    return answers


def session_of(gcs: psutil.Process) -> Path:
    """Return the log folder of Ray's session."""
    return Path(next(word.partition("=")[2] for word in gcs.cmdline() if word.startswith("--log_dir=")))
