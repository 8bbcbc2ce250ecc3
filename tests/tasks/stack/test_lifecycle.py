"""Servers are started in order, watched and ended, by a stack of two small ones; `tests/e2e/test_stack.py` starts the real ones."""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dml_core.errors import ConfigError
from flows.cli.stack import _login as stack_login
from tasks.environment import Project, stack_environment
from tasks.stack import lifecycle
from tasks.stack.lifecycle import StackError, Status, down, processes_of, restart, status, up
from tasks.stack.settings import load_stack, run_folder
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")]  # supervisor's client leaves them
SERVER = "{python} -m http.server --bind {host}"
STACK: dict[str, Any] = {
    "host": "127.0.0.1",
    "versions": {"postgresql": "1"},
    "bucket": "dml",
    "clients": {"WEB": "{host}:{ports[web]}", **dict.fromkeys(("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "none")},
    "common": {},
    "services": {
        "s3": {"command": f"{SERVER} {{ports[s3]}}", "ports": ["s3"], "health": "tcp"},
        "web": {
            "command": f"{SERVER} {{ports[web]}}",
            "ports": ["web"],
            "health": "/",
            "after": ["s3"],
            "setup": ["{python} -c 'print(\"set up\")'"],
        },
    },
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra/stack.yaml").write_text(yaml.safe_dump(STACK))
    monkeypatch.setattr(lifecycle, "make_bucket", lambda *_: None)
    project = Project(tmp_path, tmp_path / "state", "", "")
    yield project
    down(project)


def states(project: Project) -> dict[str, Status]:
    return {server.name: server for server in status(project)}


def test_what_is_down_is_started_what_dies_is_restarted_and_down_leaves_only_logs(project: Project) -> None:
    lines: list[str] = []
    up(project, lines.append)
    assert [line.partition(":")[0] for line in lines] == ["s3", "web"]
    up(project, lines.append)
    assert len(lines) == 2, "what runs stays"
    before = states(project)
    assert {server.state for server in before.values()} == {"up"}
    assert stack_environment(project.state)["WEB"] == before["web"].address
    assert before["web"].pid is not None
    os.kill(before["web"].pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while states(project)["web"].state != "up" or states(project)["web"].pid == before["web"].pid:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert before["web"].log.read_text().count("set up") == 1
    os.kill(int((run_folder(project.state) / "supervisor.pid").read_text()), signal.SIGKILL)
    with pytest.raises(StackError, match=r"supervisor was killed, and nothing restarts the 2 processes .* loses the objects"):
        status(project)  # they still answer
    up(project, lines.append)
    assert len(lines) == 4, "what a killed supervisor left is ended and started again"
    assert before["web"].log.read_text().count("set up") == 1
    os.kill(int((run_folder(project.state) / "supervisor.pid").read_text()), signal.SIGKILL)
    shutil.rmtree(load_stack(project).data)
    up(project, lines.append)
    assert before["web"].log.read_text().count("set up") == 2, "with new databases, as after a machine's start has emptied /tmp"
    assert down(project) == 0
    assert processes_of(project.state / "stack", run_folder(project.state)) == []
    assert {path.name for path in (project.state / "stack").rglob("*") if path.is_file()} == {"log", "supervisor.log"}
    with pytest.raises(ConfigError, match="no stack of this project is up"):
        status(project)


def test_an_s3_server_that_starts_empty_beside_the_records_of_its_objects_says_so(project: Project) -> None:
    lines: list[str] = []
    up(project, lines.append)
    record = load_stack(project).folder / "records/one"
    record.parent.mkdir()
    record.touch()
    up(project, lines.append)
    assert not [line for line in lines if line.startswith("note:")], "it runs and has them"
    os.kill(int((run_folder(project.state) / "supervisor.pid").read_text()), signal.SIGKILL)  # as a machine that starts again
    up(project, lines.append)
    assert lines[-2] == "note: s3: its objects were in memory and are gone; finished steps run again"


def test_a_server_whose_parent_is_killed_is_restarted(project: Project) -> None:
    """As those of MLflow and Ray: the child continues and keeps the port."""
    child = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    command = f"{{python}} -m tasks.stack.run_alone {{python}} -c '{child}' {SERVER.removeprefix('{python} ')} {{ports[web]}}"
    services = STACK["services"] | {"web": STACK["services"]["web"] | {"command": command, "environment": {"PYTHONPATH": str(ROOT)}}}
    (project.root / "infra/stack.yaml").write_text(yaml.safe_dump(STACK | {"services": services}))
    up(project, print)
    before = states(project)["web"]
    assert before.pid is not None
    (child_before,) = psutil.Process(before.pid).children()
    os.kill(before.pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while states(project)["web"].state != "up":
        assert time.monotonic() < until, before.log.read_text()
        time.sleep(0.2)
    assert not child_before.is_running()


def test_a_program_that_answers_at_a_service_s_port_is_not_taken_for_it(project: Project) -> None:
    port = load_stack(project).ports["web"]
    with HTTPServer(("127.0.0.1", port), SimpleHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(StackError, match=f"web: port {port} is taken by another program"):
            up(project, print)
        assert {name: server.state for name, server in states(project).items()} == {"s3": "up", "web": "down"}
        other.shutdown()
    up(project, print)
    assert states(project)["web"].state == "up"


def test_a_port_is_a_process_s_own_only_if_it_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert lifecycle._listens(os.getpid(), port)
        with subprocess.Popen(["sleep", "5"]) as other:
            assert not lifecycle._listens(other.pid, port)
            other.kill()
    assert not lifecycle._listens(os.getpid(), port)


def test_the_databases_of_a_user_are_not_in_a_folder_that_the_system_empties(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() or 1)
    stack = load_stack(project)
    assert stack.data.is_relative_to(project.state)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert stack.data == stack.run, "PostgreSQL's user may not reach root's project"


def test_root_s_umask_does_not_keep_the_databases_user_out(project: Project) -> None:
    before = os.umask(0o077)
    try:
        up(project, print)
    finally:
        os.umask(before)
    assert load_stack(project).data.stat().st_mode & 0o777 == (0o755 if os.geteuid() == 0 else 0o700)


def test_a_user_that_the_machine_lacks_is_named(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    services = STACK["services"] | {"web": STACK["services"]["web"] | {"user": "nobody-of-this-name"}}
    (project.root / "infra/stack.yaml").write_text(yaml.safe_dump(STACK | {"services": services}))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match="web: no such user: 'nobody-of-this-name'; create this user and group"):
        up(project, print)


def test_a_webhook_that_is_given_later_is_set_up_and_stays(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for webhook in (None, "https://a.example", "https://a.example", None, "https://b.example"):
        monkeypatch.delenv("DML_WEBHOOK", raising=False)
        if webhook is not None:
            monkeypatch.setenv("DML_WEBHOOK", webhook)
        up(project, print)
        counts.append(states(project)["web"].log.read_text().count("set up"))
    assert counts == [1, 2, 2, 2, 3]


def test_what_the_setup_reads_is_set_up_again_after_a_change(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an upgrade; the webhook of an earlier shell stays."""
    file, params, flow = project.root / "infra/deployed.yaml", project.root / "params.yaml", project.root / "flows/reproduce.py"
    web = STACK["services"]["web"] | {"setup": ["{python} -c 'print(\"set up\")' infra/deployed.yaml"]}
    (project.root / "infra/stack.yaml").write_text(yaml.safe_dump(STACK | {"services": STACK["services"] | {"web": web}}))
    flow.parent.mkdir()
    flow.touch()
    monkeypatch.setenv("DML_WEBHOOK", "https://a.example")

    def upgrade(version: str) -> None:
        monkeypatch.setattr(lifecycle, "version", lambda package: version)

    steps: dict[str, Callable[[], object]] = {
        "first": lambda: file.write_text("deployments"),
        "deployments": lambda: file.write_text("other deployments"),
        "parameters of flows": lambda: flow.write_text("other"),
        "a dataset of the forms": lambda: params.write_text("{datasets: {birds: {}}, comparison: {datasets: {}, variants: {}}}"),
        "Prefect": lambda: upgrade("99"),
        "nothing": lambda: monkeypatch.delenv("DML_WEBHOOK"),
    }
    counts = []
    for change in steps.values():
        change()
        up(project, print)
        counts.append(states(project)["web"].log.read_text().count("set up"))
    assert counts == [1, 2, 3, 4, 5, 5], [*steps]


def test_a_restart_runs_new_commands_and_keeps_the_data(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no stack of this project is up"):
        restart(project, print)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret of theirs")
    stack, before = up(project, print, "http://s3.example.invalid:9000"), states(project)["web"]
    (stack.data / "database").touch()
    web = STACK["services"]["web"] | {"command": f"{SERVER} --directory infra {{ports[web]}}"}
    (project.root / "infra/stack.yaml").write_text(yaml.safe_dump(STACK | {"services": STACK["services"] | {"web": web}}))
    lines: list[str] = []
    up(project, lines.append)
    assert lines == [
        "note: the running servers have other settings than today's (version, cores or interpreter); to give them these: dml stack restart"
    ]
    assert states(project)["web"] == before
    lines.clear()
    assert restart(project, lines.append).file.clients == stack.file.clients
    after = states(project)["web"]
    assert lines == [f"web: up at {after.address}"]
    assert (after.state, after.address) == ("up", before.address)
    assert after.pid is not None
    assert "infra" in psutil.Process(after.pid).cmdline()
    assert (stack.data / "database").exists()


def test_a_restart_that_would_lose_objects_is_refused(project: Project) -> None:
    lines: list[str] = []
    up(project, lines.append)
    before = states(project)
    with pytest.raises(ConfigError, match="would lose the objects of the stack's S3 server"):
        restart(project, print)
    (project.root / "infra/stack.yaml").write_text((project.root / "infra/stack.yaml").read_text().replace("--bind", "-b"))
    up(project, lines.append)
    assert lines[2:] == [
        "note: the running servers have other settings than today's (version, cores or interpreter); "
        "to give them these: dml stack down, then up, which deletes the stack's data"
    ]
    assert states(project) == before


@pytest.mark.parametrize(("command", "message"), [("{python} -c 1", "web ended .*web/log"), ("/nowhere", "web cannot be started .NO_FILE")])
def test_a_server_that_does_not_start_is_named(project: Project, command: str, message: str) -> None:
    broken = STACK | {"services": STACK["services"] | {"web": STACK["services"]["web"] | {"command": command}}}
    (project.root / "infra/stack.yaml").write_text(yaml.safe_dump(broken))
    with pytest.raises(StackError, match=message):
        up(project, print)
    assert states(project)["s3"].state == "up", "what runs is left for a look"
    assert states(project)["web"].state in ("dead", "down")
    assert not (project.state / "stack/env").exists()


def test_a_setup_command_that_takes_too_long_is_named_and_runs_again(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    web = STACK["services"]["web"]
    setup = ["{python} -c 'from pathlib import Path; import time; time.sleep(0 if Path(\"again\").exists() else 60)'"]
    slow = STACK | {"services": STACK["services"] | {"web": web | {"setup": setup}}}
    (project.root / "infra/stack.yaml").write_text(yaml.safe_dump(slow))
    seconds = lifecycle.SETUP_SECONDS
    monkeypatch.setattr(lifecycle, "SETUP_SECONDS", 1)
    with pytest.raises(StackError, match=r"web: '.*' took longer than 1 s; see .*web/log, then rerun dml stack up"):
        up(project, print)
    monkeypatch.setattr(lifecycle, "SETUP_SECONDS", seconds)
    assert {server.state for server in states(project).values()} == {"up"}
    (project.root / "again").touch()
    up(project, print)


def test_the_page_s_password_is_named_only_if_the_servers_were_started_with_it(tmp_path: Path) -> None:
    config, named = tmp_path / "supervisor.conf", "PREFECT_API_AUTH_STRING in /state/env"
    assert named not in stack_login(tmp_path, Path("/state/env"))
    config.write_text('environment=PREFECT_HOME="x"')
    assert "without a password" in stack_login(tmp_path, Path("/state/env"))
    config.write_text('environment=PREFECT_SERVER_API_AUTH_STRING="dml:x"')
    assert stack_login(tmp_path, Path("/state/env")).endswith(named)


def test_a_person_s_shell_and_reader_of_logs_are_no_processes_of_the_stack(tmp_path: Path) -> None:
    """`down` kills what is left of the stack; a shell that stands in its folder of logs is not."""
    folder, run = tmp_path / "stack", tmp_path / "run"
    run.mkdir()
    (run / "log").touch()
    terminal, other_side = os.openpty()
    command = ["sh", "-c", "sleep 600"]
    try:
        shell = subprocess.Popen(command, cwd=run, preexec_fn=lambda: (os.setsid(), fcntl.ioctl(other_side, termios.TIOCSCTTY, 0)))
        server = subprocess.Popen(command, cwd=run, start_new_session=True)
        assert {process.pid for process in processes_of(folder, run)} >= {server.pid}
        assert shell.pid not in {process.pid for process in processes_of(folder, run)}
    finally:
        for process in (shell, server):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(terminal)
        os.close(other_side)
