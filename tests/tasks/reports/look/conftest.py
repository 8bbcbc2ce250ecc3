"""Pages of invented runs, written once for all tests that read them."""

from pathlib import Path

import pytest

from tasks.environment import Project
from tasks.reports.look.pages import write_look
from tasks.reports.look.runs import choose
from tasks.runs.specs import Params
from tests.tasks.reports.look.made_up import make_project


def quiet(line: str) -> None:
    """Print nothing."""


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Params]:
    """A project with three variants of three seeds on a dataset whose images are both queries and gallery."""
    return make_project(tmp_path_factory.mktemp("looked-at"))


@pytest.fixture(scope="session")
def comparison(made: tuple[Project, Params]) -> Path:
    """Folder of its comparison's pages."""
    project, params = made
    return write_look(project, choose(project, params, "photos"), "softmax", project.root / "comparison", "tsne", quiet).parent


@pytest.fixture(scope="session")
def single(made: tuple[Project, Params]) -> Path:
    """Folder of one run's page, of another seed."""
    project, params = made
    return write_look(project, choose(project, params, "photos/softmax/2"), "softmax", project.root / "single", "pca", quiet).parent
