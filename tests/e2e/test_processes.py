"""Processes of a flow: who can reach them, what remains after one is killed, and how damaged files are handled.

One unfinished run is interrupted and resumed several times; its result must equal, byte for byte, that of an uninterrupted run. Then its
files are damaged, and it runs again.
"""

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
import pytest

from tests.damage import contents, cut, flip, garble
from tests.e2e.conftest import Project, make_project

pytestmark = pytest.mark.slow
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
        assert len(workers) == 2
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)

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


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = make_project(tmp_path_factory.mktemp("project"), ("softtriple",))
    # The run must not replace the workers that this test stops.
    made.change(comparison={"protocol": {"num_epochs": 24}, "datasets": {"synthetic": {"num_epochs": 24}}}, scale={"hang_minutes": 60.0})
    return made


def test_a_run_is_reached_by_nobody_else_and_ends_with_its_gcs(project: Project, tmp_path: Path) -> None:
    run = Disturbed(project, tmp_path / "state")
    run.freeze_in_the_middle()
    nothing_listens_beyond_this_machine(run)
    nobody_submits_work_without_the_token(run)
    other_images_do_not_replace_those_of(run, project)
    (gcs,) = run.named("gcs/gcs_server")
    gcs.kill()
    run.ends(2, "error: Ray's GCS (gcs_server) died", within_seconds=15)


@pytest.mark.proof
def test_a_run_ends_the_same_after_every_loss(project: Project, tmp_path: Path) -> None:
    run = Disturbed(project, tmp_path / "state")
    (server, *_) = run.until(lambda: run.named("dvc") and run.named("flows.local_server"), "a flow and Prefect's server")
    server.kill()
    run.ends(2, "error: Prefect's server died", within_seconds=15)

    run = Disturbed(project, tmp_path / "state")
    run.freeze_in_the_middle()
    run.process.send_signal(signal.SIGTERM)
    run.ends(143, "interrupted", within_seconds=10)

    run = Disturbed(project, tmp_path / "state")
    run.until(lambda: run.named("RayTrainWorker"), "a worker")
    run.named("raylet/raylet")[0].kill()
    run.ends(2, "error: Ray's raylet died", within_seconds=15)

    run = Disturbed(project, tmp_path / "state")
    run.until(lambda: run.named("RayTrainWorker"), "a worker")
    (flow,) = run.supervisor.children()
    flow.kill()
    run.ends(2, "error: the flow's process was killed (SIGKILL)", within_seconds=15)

    run = Disturbed(project, tmp_path / "state")
    run.trains_further()
    run.named("RayTrainWorker")[0].kill()
    run.trains_further()
    run.named("ray::Board")[0].kill()
    printed, _ = run.process.communicate(timeout=600)
    assert run.process.returncode == 0, printed

    project.run(*RUN, DML_STATE=str(tmp_path / "undisturbed"))
    undisturbed = contents(tmp_path / "undisturbed/store")
    assert contents(tmp_path / "state/store") == undisturbed
    assert not list((tmp_path / "undisturbed/logs").iterdir())

    damage_much(tmp_path / "state")
    printed = project.run(*RUN, DML_STATE=str(tmp_path / "state"))
    assert contents(tmp_path / "state/store") == undisturbed
    assert "checkpoint.pt: the checkpoint is damaged" in printed
    assert "begins from the initial weights" in printed
    assert re.search(r"damaged; kept as \w+\.damaged-1; embed of .* runs again", printed)
    assert {line for line in printed.splitlines() if line.endswith(": ran")} == {f"{step}: ran" for step in ("train", "embed", "evaluate")}


def damage_much(state: Path) -> None:
    """Damage a checkpoint, a shard, the scores, and Prefect's record of a step."""
    flip(next((state / "store/train").rglob("checkpoint.pt")))
    cut(next((state / "store/train").rglob("history.jsonl")))
    garble(next((state / "store/embed").rglob("test-00000*.npy")))
    scores = next((state / "store/evaluate").rglob("metrics.json"))
    scores.write_text(scores.read_text().replace("0.", "0.9", 1))
    (kept,) = [path for path in (state / "prefect/storage").iterdir() if "EmbeddingRecord" in path.read_text()]
    cut(kept)


def other_images_do_not_replace_those_of(run: Disturbed, project: Project) -> None:
    """Start the stage of DVC that packs other images while the run trains, as another flow would, in another project's state."""
    one, other = sorted((project.root / "data/raw/synthetic").rglob("*.jpg"))[:2]
    before, packed = one.read_bytes(), contents(project.root / "data/packed/synthetic")
    one.write_bytes(other.read_bytes())
    printed = project.run("dvc", "repro", "prepare@synthetic", code=255, DML_STATE=str(run.state.with_name("other")))
    assert re.search(r"synthetic: in use by process \d+, whose runs would be lost", printed), printed
    one.write_bytes(before)
    assert contents(project.root / "data/packed/synthetic") == packed


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
        assert "ran here" not in said[name]
        assert "nauthenticated" in said[name] or "AuthenticationError" in said[name], said[name]
    agents_answer_nobody_without_the_token(run)
    commands = [word for process in run.processes() for word in process.cmdline()]
    written = [path for path in [*run.state.rglob("*"), *session_of(gcs).rglob("*")] if path.is_file()]
    assert not any(token in word for word in commands)
    assert not [path for path in written if token.encode() in path.read_bytes()]


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
