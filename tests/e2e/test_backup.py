"""Backup and restore with the commands of docs/how-to/nightly-runs.md: afterwards nothing is trained again."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tasks import environment
from tasks.environment import stack_environment
from tasks.stack.settings import load_stack
from tests.e2e.conftest import ROOT, Project, make_project, steps_run

PAGE = (ROOT / "docs/how-to/nightly-runs.md").read_text()
BLOCKS = dict(re.findall(r"^```sh\n# ((?:back up|restore): [\w ]+)\n(.*?)^```$", PAGE, re.M | re.S))


def do(what: str, project: Project, **environment: str) -> None:
    """Run a block of the page; its first failing line ends it."""
    ran = subprocess.run(
        ["bash", "-ec", BLOCKS[what]], cwd=project.root, env=project.environment | environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def remove_all(project: Project) -> None:
    """Remove everything that a new machine with a fresh clone does not have."""
    for name in ("state", "data", "results", ".dvc/cache", ".dvc/tmp"):
        shutil.rmtree(project.root / name, ignore_errors=True)
    project.git("checkout", "--quiet", ".")


def test_the_page_has_the_four_blocks() -> None:
    assert set(BLOCKS) == {"back up: one machine", "restore: one machine", "back up: servers", "restore: servers"}


@pytest.mark.parametrize("own_s3", [None, "http://s3.example.invalid:9000"])
def test_the_records_of_either_kind_of_stack_and_the_verifications_are_kept(
    own_s3: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret of theirs")
    shutil.copytree(ROOT / "infra", tmp_path / "infra")
    stack = load_stack(environment.Project(tmp_path, tmp_path / "state", str(tmp_path / "state" / "store"), ""), own_s3)
    records = Path(stack.file.clients["PREFECT_LOCAL_STORAGE_PATH"])
    files = {str(records.relative_to(tmp_path) / "record"), "state/verifications/one.json", "state/alarms.json"}
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "backup").mkdir()
    command = BLOCKS["back up: servers"][BLOCKS["back up: servers"].index("tar --create") :]  # the others ask servers
    subprocess.run(["sh", "-ec", command], cwd=tmp_path, check=True)
    kept = subprocess.run(["tar", "--list", "--file=backup/state.tar"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert files == {line for line in kept.stdout.splitlines() if not line.endswith("/")}


@pytest.mark.slow
@pytest.mark.proof
def test_one_machine(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", ("softtriple",))
    project.run("dml", "reproduce")
    shown = project.run("dml", "compare")
    do("back up: one machine", project)
    remove_all(project)
    project.run("dml", "compare", code=2)
    do("restore: one machine", project)
    assert project.run("dml", "compare") == shown
    again = project.run("dml", "reproduce")
    assert steps_run(again) == {}, again
    assert project.run("dml", "compare") == shown


def servers(project: Project) -> dict[str, str]:
    """Return the environment variables for the stack's servers that the page requires."""
    chosen = json.loads((project.root / "state" / "stack" / "chosen.json").read_text())
    port, password = str(chosen["ports"]["postgres"]), chosen["secrets"]["postgres"]
    database = {"PGHOST": "127.0.0.1", "PGPORT": port, "PGUSER": "dml", "PGPASSWORD": password}
    return database | stack_environment(project.root / "state")


@pytest.mark.slow
@pytest.mark.proof
def test_servers(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", ("softtriple",))
    shutil.copytree(ROOT / "infra", project.root / "infra")
    project.commit("infra")
    try:
        project.run("dml", "stack", "up")
        project.run("dml", "reproduce", PREFECT_API_URL=servers(project)["PREFECT_API_URL"])
        shown = project.run("dml", "compare")
        do("back up: servers", project, **servers(project))
        project.run("dml", "stack", "down")
        remove_all(project)
        project.run("dml", "stack", "up")
        assert "has no run with the current data" in project.run("dml", "compare", code=2)
        do("restore: servers", project, **servers(project))
        assert table(project.run("dml", "compare")) == table(shown)
        again = project.run("dml", "reproduce", PREFECT_API_URL=servers(project)["PREFECT_API_URL"])
        assert steps_run(again) == {}, again
    finally:
        project.run("dml", "stack", "down")


def table(printed: str) -> list[str]:
    """Return the printed lines without the one that names the stack."""
    return [line for line in printed.splitlines() if "local stack" not in line]
