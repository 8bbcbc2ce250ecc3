"""A plan computes the memory of a training once for the same settings, code and libraries, and always prints what they need today."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.environment import Project
from tasks.files import files_set_aside
from tasks.plans import known_memory, memory
from tasks.plans.known_memory import MEMORY_FILE
from tasks.plans.plan import plan_tables
from tasks.plans.resources import Resources, resources_of
from tasks.tables.choice import Choice
from tasks.workers.placement import Placement
from tests.conftest import ROOT
from tests.damage import DAMAGE, as_format
from tests.tasks.plans.conftest import look

ONE = Placement("cpu", 1, 1)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices of the trainings whose memory was computed."""
    devices: list[str] = []
    compute = memory.training_memory

    def count(*arguments: object) -> object:
        devices.append(str(arguments[4]))
        return compute(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(memory, "training_memory", count)
    return devices


def planned(project: Project, placement: Placement = ONE, row: str = "softtriple", seeds: tuple[int, ...] = (0,)) -> Resources:
    here = look(project)
    vars(here)["placement"] = placement
    return resources_of(here, plan_tables(here, ["softtriple/table1"], Choice(rows=(row,), seeds=seeds)))


def test_the_same_settings_are_computed_once_whatever_the_seeds(project: Project, computed: list[str]) -> None:
    first, again, five = planned(project), planned(project), planned(project, seeds=(0, 1, 2, 3, 4))
    assert first.memory is not None
    assert first.memory == again.memory == five.memory
    assert computed == ["cpu"]


@pytest.mark.parametrize("placement", [Placement("cpu", 2, 1), Placement("cuda", 1, 1)], ids=["workers", "device"])
def test_other_workers_and_another_device_are_other_settings(project: Project, computed: list[str], placement: Placement) -> None:
    planned(project)
    after = planned(project, placement).memory
    assert len(computed) == 2
    (project.state / MEMORY_FILE).unlink()
    assert planned(project, placement).memory == after


def test_another_row_is_another_training(project: Project, computed: list[str]) -> None:
    first, other = (planned(project, row=row).memory for row in ("softtriple", "softmax-norm"))
    assert first != other
    assert [planned(project, row=row).memory for row in ("softmax-norm", "softtriple")] == [other, first]
    assert len(computed) == 2


def changed_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_memory, "hash_of_states", lambda paths: "after an edit")


def changed_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_memory, "versions", lambda: {"torch": "99"})


def unreadable_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_memory, "hash_of_states", lambda paths: None)


@pytest.mark.parametrize("change", [changed_file, changed_library, unreadable_file])
def test_other_code_and_libraries_compute_it_again(
    project: Project, computed: list[str], monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    before = planned(project).memory
    change(monkeypatch)
    assert planned(project).memory == before
    assert len(computed) == 2


@pytest.mark.parametrize("how", [*DAMAGE, "newer"])
def test_a_damaged_file_is_computed_again_and_one_of_a_newer_version_stays(project: Project, computed: list[str], how: str) -> None:
    before, path = planned(project).memory, project.state / MEMORY_FILE
    if how == "newer":
        path.write_text(as_format(path.read_text(), 7))
    else:
        DAMAGE[how](path)
    content = path.read_bytes() if path.exists() else b""
    assert planned(project).memory == before
    assert len(computed) == 2
    assert how == "remove" or content in [file.read_bytes() for file in (path, *files_set_aside(project.state))]


def test_a_state_folder_that_cannot_be_written_is_no_failure(
    project: Project, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tasks.sealed.write_whole", refuse)
    assert planned(project).memory == planned(project).memory
    assert len(computed) == 2


def test_what_cannot_be_computed_is_tried_again_by_the_next_plan(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    monkeypatch.setattr(memory, "training_memory", lambda *arguments: tried.append(arguments))
    for _ in range(2):
        assert planned(project, seeds=(0, 1)).memory is None
    assert len(tried) == 2


@pytest.mark.slow
def test_a_second_plan_loads_neither_torch_nor_scipy(project: Project) -> None:
    params = project.params_file.read_text()
    assert params.count("device: auto") == 1, "which asks torch whether there is a GPU"
    project.params_file.write_text(params.replace("device: auto", "device: cpu"))
    here = look(project)
    resources_of(here, plan_tables(here, ["softtriple/table1"], Choice(rows=("softtriple",), seeds=(0,))))
    code = "import atexit, sys; from flows.cli import main; atexit.register(lambda: print(*sys.modules)); main()"
    command = [sys.executable, "-c", code, "plan", "softtriple/table1", "--row", "softtriple"]
    printed = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True).stdout
    assert "\nmemory: about " in printed
    loaded = set(printed.splitlines()[-1].split())
    assert "tasks.plans.resources" in loaded
    assert {"torch", "scipy", "mlflow", "prefect", "ray"} & loaded == set()
