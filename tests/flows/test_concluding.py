"""The end of a flow of tables: after the workers have ended, each table is computed once and the index is written once."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flows.concluding
import flows.table
from tasks.environment import Project
from tasks.reports import table_pages
from tasks.tables.file import table_names
from tasks.tables.result import TableResult
from tests.conftest import ROOT

NAMES = ["project/claims", "softtriple/table1", "project/standing"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    return Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path}/mlflow.db")


class NoServices:
    """The services of a flow without runs, which record when they are closed."""

    def __init__(self, project: Project, scale: Any) -> None:
        self.project, self.tags, self.is_closed = project, {}, False
        self.tracker: Any = SimpleNamespace(publish=lambda report: "run")
        self.display: Any = SimpleNamespace(say=lambda text: None)

    def close(self) -> None:
        self.is_closed = True


def test_each_table_is_worked_out_once_and_the_index_is_written_once_when_the_workers_have_ended(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, written, closed = Counter[str](), Counter[str](), []
    services = NoServices(project, None)
    work_out, write = table_pages.shown_table, table_pages.write_whole

    def counted(name: str, *rest: Any) -> Any:
        shown[name] += 1
        closed.append(services.is_closed)
        return work_out(name, *rest)

    def noted(path: Path, content: str) -> None:
        written[path.name] += 1
        write(path, content)

    runs = [SimpleNamespace(dataset="d", table=name, smoke=False) for name in NAMES]
    for name, stand_in in {
        "open_project": lambda: project,
        "Services": lambda project, scale: services,
        "chosen_runs": lambda params, names, choice: runs,
        "check_tables": lambda project, params, chosen, choice: runs,
        "table_of": lambda run: run.table,
        "_prepare": lambda *_: None,
        "run_chains": lambda *_: ([], []),
    }.items():
        monkeypatch.setattr(flows.table, name, stand_in)
    monkeypatch.setattr(flows.concluding, "create_markdown_artifact", lambda *_, **__: None)
    monkeypatch.setattr(table_pages, "shown_table", counted)
    monkeypatch.setattr(table_pages, "write_whole", noted)
    concluded = flows.table.table.fn(NAMES)
    assert [outcome.name for outcome in concluded] == NAMES
    assert shown == dict.fromkeys(NAMES, 1)
    assert written["index.html"] == 1
    assert all(closed)


def test_the_index_lists_every_table_by_the_pages_that_are_there_and_reads_no_other_result(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(project: Project, name: str) -> TableResult:
        assert name in {"project/standing", "softtriple/table2"}, f"{name} may be damaged"
        return TableResult(name=name)

    monkeypatch.setattr(table_pages, "load_result", load)
    params, site = flows.table.load_params(project.params_file), project.root / table_pages.SITE
    for name in ("project/standing", "softtriple/table2"):  # writing the second page keeps the first in the index
        table_pages.write_site(project, params, [name])
    (site / "softtriple/table2.json").write_text("{}")  # of another version
    table_pages.write_site(project, params, ["project/standing"])
    index = (site / table_pages.INDEX).read_text()
    assert index.count("<li>") == len(table_names())
    assert all(f'href="{name}.html"' in index for name in ("project/standing", "softtriple/table2"))
    assert index.count("rows measured</span>") == 1
    assert index.count("<code>dml report ") == len(table_names()) - 2
