"""Projects with an invented table and with invented runs, and their pages as a browser would parse them."""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tasks.environment import Project
from tasks.reports.finished_runs import choose
from tasks.reports.run_pages import write_look
from tasks.reports.table_pages import TablePage, write_site
from tasks.runs.params.file import load_params
from tasks.runs.specs import Params
from tasks.tables import file, view
from tests.conftest import ROOT
from tests.tasks.reports.made_up_runs import make_project
from tests.tasks.reports.made_up_table import NAME, TABLE, make_result

VOID = {"meta", "img", "link", "br", "input", "hr"}


class Element:
    """A parsed element: tag, attributes, children in order (elements and text)."""

    def __init__(self, tag: str, attributes: dict[str, str | None]) -> None:
        self.tag, self.attributes = tag, attributes
        self.children: list[Element | str] = []

    @property
    def text(self) -> str:
        """All text in the element, in one line."""
        return " ".join(" ".join(child if isinstance(child, str) else child.text for child in self.children).split())

    def all(self, tag: str | None = None, css: str | None = None) -> "list[Element]":
        """Return descendants by tag and class, in order."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                fits = (tag is None or child.tag == tag) and (css is None or css in (child.attributes.get("class") or "").split())
                found += [child] if fits else []
                found += child.all(tag, css)
        return found


class Reader(HTMLParser):
    """Parser of a page; an end tag that does not match the open element is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Element("root", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}> at {self.getpos()}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def read(text: str) -> Element:
    """Return the page's elements; each must be closed."""
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader._open == [reader.root]
    return reader.root


@pytest.fixture(scope="module", autouse=True)
def of_this_code() -> Iterator[None]:
    """Take invented runs for runs of this code, except those whose other files are named."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "is_of_other_code", lambda run: bool(run.older_code))
        yield


@pytest.fixture(scope="module")
def table_project(tmp_path_factory: pytest.TempPathFactory) -> "tuple[Project, Params]":
    """A project with the invented table, its runs and their images."""
    root = tmp_path_factory.mktemp("project")
    tables = root / "tables" / NAME
    tables.parent.mkdir(parents=True)
    tables.with_suffix(".yaml").write_text(yaml.safe_dump(TABLE, sort_keys=False))
    (root / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    project = Project(root, root / "state", str(root / "store"), f"sqlite:///{root}/mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "TABLES", root / "tables")
        make_result(project)
        yield project, load_params(project.params_file)


@pytest.fixture(scope="module")
def page(table_project: "tuple[Project, Params]") -> TablePage:
    """Page of the table, written into the project's site."""
    return write_site(*table_project, [NAME])[0]


@pytest.fixture(scope="module")
def html(page: TablePage) -> Element:
    """The parsed page."""
    return read(Path(page.html).read_text())


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
