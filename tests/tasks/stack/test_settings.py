"""Parts of the stack on this machine: with its own S3 server, and with the user's."""

import json
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import pytest
from ray._private.utils import validate_socket_filepath
from requests.utils import should_bypass_proxies

from dml_core.errors import ConfigError
from tasks.environment import Project
from tasks.stack import settings
from tasks.stack.lifecycle import down, status, up
from tasks.stack.settings import load_stack, run_folder
from tests.conftest import ROOT

OWN = "http://s3.example.invalid:9000"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    shutil.copytree(ROOT / "infra", tmp_path / "infra")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    return Project(tmp_path, tmp_path / "state", str(tmp_path / "state" / "store"), "")


def logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret of theirs")


def test_ports_and_secrets_are_chosen_once_and_no_two_services_share_a_port(project: Project) -> None:
    stack = load_stack(project)
    assert load_stack(project) == stack
    assert len(set(stack.ports.values())) == len(stack.ports)
    given = set()
    for _ in range(20_000):
        with socket.socket() as other:
            other.bind((stack.file.host, 0))
            given.add(other.getsockname()[1])
    assert given.isdisjoint(stack.ports.values()), "the system gives none of them to another program before its server starts"
    assert (project.state / "stack" / "chosen.json").stat().st_mode & 0o777 == 0o600
    assert stack.file.clients["AWS_ENDPOINT_URL"] == f"http://127.0.0.1:{stack.ports['s3']}"
    assert len(stack.file.clients["AWS_SECRET_ACCESS_KEY"]) == 32
    login = stack.file.clients["PREFECT_API_AUTH_STRING"]
    assert re.fullmatch("dml:[0-9a-f]{32}", login)
    assert stack.file.services["prefect-server"].environment["PREFECT_SERVER_API_AUTH_STRING"] == login


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        ports = [server.getsockname()[1] for server in (taken, free)]
        monkeypatch.setattr(settings, "ALL_PORTS", ports)  # all in the system's range
        free.close()
        assert [*settings.free_ports("127.0.0.1")] == ports[1:]


def test_a_stack_of_a_version_without_a_password_of_prefect_is_given_one(project: Project) -> None:
    path = load_stack(project).folder / "chosen.json"
    chosen = json.loads(path.read_text())
    del chosen["secrets"]["prefect"]
    path.write_text(json.dumps(chosen))
    given = [load_stack(project).file.clients["PREFECT_API_AUTH_STRING"] for _ in range(2)]
    assert re.fullmatch("dml:[0-9a-f]{32}", given[0])
    assert given[0] == given[1], "all that use it read the same"


@pytest.mark.parametrize("text", ['{"ports": {', "{}", "[]", "7", '{"ports": {}}', ""])
def test_damaged_settings_are_refused_by_name(project: Project, text: str) -> None:
    load_stack(project)
    (project.state / "stack" / "chosen.json").write_text(text)
    with pytest.raises(ConfigError, match=r"stack/chosen\.json: damaged; remove it, then: dml stack down"):
        load_stack(project)


def test_the_settings_of_another_user_are_not_called_damaged(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    load_stack(project)

    def refuses(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuses)
    with pytest.raises(ConfigError, match=r"chosen\.json: cannot be read; only the user who started the stack can use it"):
        load_stack(project)


def test_another_machine_with_the_same_folder_neither_starts_nor_deletes_the_stack(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over NFS: a second PostgreSQL would write the files of the first."""
    monkeypatch.setattr(socket, "gethostname", lambda: "first")
    chosen = load_stack(project).folder / "chosen.json"
    before = chosen.read_bytes()
    monkeypatch.setattr(socket, "gethostname", lambda: "second")
    for command in (lambda: up(project, print), lambda: down(project), lambda: status(project)):
        with pytest.raises(ConfigError, match="belongs to the machine first; run dml stack there, or if second is its new name"):
            command()
    assert chosen.read_bytes() == before
    chosen.write_text(json.dumps({key: value for key, value in json.loads(before).items() if key != "machine"}))
    assert load_stack(project).ports == json.loads(before)["ports"], "an earlier version's file is read"


def test_a_stack_with_other_servers_than_today_s_is_taken_down_first(project: Project) -> None:
    path = project.root / "infra" / "stack.yaml"
    load_stack(project)
    path.write_text(path.read_text().replace("ports: [mlflow]", "ports: [mlflow, mlflow-metrics]"))
    with pytest.raises(ConfigError, match=r"chosen\.json: of a stack of another version.*dml stack down"):
        load_stack(project)
    assert run_folder(project.state), "`down` needs no more"


def test_paths_with_a_space_are_one_word_of_a_command(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my projects" / "python"))
    monkeypatch.setattr(tempfile, "tempdir", "/my files")
    services = load_stack(project).file.services.values()
    commands = [shlex.split(command) for service in services for command in (service.command, *service.setup) if "python" in command]
    assert len(commands) > 8
    assert {command[0] for command in commands} == {sys.executable}
    assert f"--temp-dir={run_folder(project.state)}/ray" in [word for command in commands for word in command]


def test_a_folder_that_another_user_has_made_is_refused(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(project.state)
    folder.mkdir()
    try:
        load_stack(project)
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        with pytest.raises(ConfigError, match="another user's; remove it"):
            load_stack(project)
    finally:
        folder.rmdir()


def test_two_users_of_a_machine_share_no_temporary_folder(project: Project) -> None:
    """Prefect's worker makes `runner_storage` in it, which no other user can write."""
    stack = load_stack(project)
    assert stack.environment["TMPDIR"] == str(stack.run)


def test_its_servers_are_reached_without_a_proxy(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The health of each service is asked by HTTP, by this process; its setup and its clients ask too."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example.org:3128")
    assert "127.0.0.1" in load_stack(project).environment["no_proxy"].split(",")
    assert should_bypass_proxies("http://127.0.0.1:4200/api", None)


@pytest.mark.parametrize("temporary", ["/scratch/ann", "/scratch/users/ann/job-1234567", None])
def test_a_stack_s_folder_is_short_and_stays_where_the_first_up_was(
    temporary: str | None, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other shells, and schedules, may have another TMPDIR."""
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    folder = load_stack(project).run
    assert (str(folder.parent) == temporary) == (temporary == "/scratch/ann")
    validate_socket_filepath(f"{folder}/ray/session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{2**22}/sockets/plasma_store")
    monkeypatch.setattr(tempfile, "tempdir", "/other")
    assert run_folder(project.state) == load_stack(project).run == folder


def test_every_service_starts_after_those_that_it_names_and_all_start(project: Project) -> None:
    stack = load_stack(project)
    order = [name for level in stack.levels for name in level]
    assert sorted(order) == sorted(stack.file.services)
    for name, service in stack.file.services.items():
        assert all(order.index(other) < order.index(name) for other in service.after)


def test_an_s3_server_of_one_s_own_takes_the_place_of_the_stack_s(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    logged_in(monkeypatch)
    stack = load_stack(project, OWN)
    assert "s3" not in stack.file.services
    assert stack.file.services["mlflow"].after == ("postgres",)
    for environment in (stack.file.clients, stack.environment):
        assert environment["AWS_ENDPOINT_URL"] == OWN
        assert environment["AWS_ACCESS_KEY_ID"] == "somebody"
        assert environment["AWS_SECRET_ACCESS_KEY"] == "a secret of theirs"
    assert all("a secret of theirs" not in service.command for service in stack.file.services.values())
    # A later `up` or `status` keeps this server, even if the environment has changed.
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert load_stack(project).file.clients == stack.file.clients
    assert load_stack(project, OWN).file.clients == stack.file.clients


def test_records_of_steps_whose_files_are_in_one_server_are_not_taken_for_those_of_another(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged_in(monkeypatch)
    kept = []
    for own in (None, OWN, f"{OWN}/", f"{OWN}1"):
        kept.append(load_stack(project, own).file.clients["PREFECT_LOCAL_STORAGE_PATH"])
        (project.state / "stack" / "chosen.json").unlink()  # as `down` does
    assert len(set(kept)) == 3
    assert kept[1] == kept[2], "a slash at the end names no other server"


@pytest.mark.parametrize("address", ["host:9000", "http://", "s3://bucket", "http://ann:planted-secret@host:9000"])
def test_what_is_no_address_of_an_s3_server_is_refused_before_it_is_chosen(
    address: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged_in(monkeypatch)
    with pytest.raises(ConfigError, match=r"--s3 [^ ]*: expected an address as http://host:9000") as refused:
        load_stack(project, address)
    assert "planted-secret" not in str(refused.value)
    assert not (project.state / "stack" / "chosen.json").exists()


def test_another_s3_server_needs_a_stack_that_is_down_and_a_login(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID is not set"):
        load_stack(project, OWN)
    assert not (project.state / "stack" / "chosen.json").exists()
    load_stack(project)
    logged_in(monkeypatch)
    with pytest.raises(ConfigError, match="dml stack down first"):
        load_stack(project, OWN)
    assert json.loads((project.state / "stack" / "chosen.json").read_text())["s3"]["is_stacks"]
