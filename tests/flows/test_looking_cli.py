"""`dml look` from the user's side; tests/tasks/reports tests the content of its pages."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.cli import main
from tests.tasks.reports.made_up_runs import make_project


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a project with finished runs."""
    return make_project(tmp_path_factory.mktemp("project") / "photos")[0].root


def look(root: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Return the exit code of `dml look`, run in this process."""
    monkeypatch.chdir(root)
    environment = dict(os.environ) | {"DML_STATE": str(root / "state"), "DML_STORE": str(root / "store")}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(sys, "argv", ["dml", "look", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(str(ended.value.code))


def test_the_page_is_told_and_is_there(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert look(root, monkeypatch, "photos/no-such", "--map", "pca") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert look(root, monkeypatch, "photos/softmax/1", "--map", "pca") == 0
    printed = capsys.readouterr()
    assert printed.out == f"{root / 'results/site/look/photos-softmax-1/index.html'}\n"
    assert printed.err.splitlines() == ["evaluating photos / softmax / seed 1", "drawing 108 thumbnails"]
    assert Path(printed.out.strip()).is_file()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.reports.run_pages.write_look", lambda project, selection, reference, folder, *given: folder)
        patch.setattr("tasks.reports.finished_runs.choose", lambda *given: SimpleNamespace(missing=()))
        for words in (["photos"], ["photos", "--set", "evaluation.recall_at=[1]"], ["photos", "--set", "scale.num_workers=2"]):
            assert look(root, monkeypatch, *words) == 0
    standing, other, same = capsys.readouterr().out.splitlines()
    assert standing == same == str(root / "results/site/look/photos")
    assert other.startswith(f"{standing}-"), "pages of other settings do not replace the comparison's"
    page, opened = root / "elsewhere" / "index.html", list[str]()
    for has_browser in (True, False):  # without xdg-open, typer's own function opened nothing and said nothing
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("webbrowser.open", lambda address, has_browser=has_browser: opened.append(address) or has_browser)
            assert look(root, monkeypatch, "photos", "-o", str(page.parent), "--seed", "1", "--map", "pca", "--open") == 0
        assert ("no browser was found" in capsys.readouterr().err) is not has_browser
    assert opened == [page.as_uri()] * 2
    assert (page.parent / "run-01-proxy-nca.html").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["photos/softmax/9"], "no finished run with seed 9"),
        (["photoss"], "did you mean 'photos'"),
        (["photos", "--set", "comparison.protocol.num_epochs=9"], "no finished run with seed 0"),
        (["photos", "-o", "raw"], "contains other files"),
    ],
)
def test_what_a_person_can_mend_is_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert look(root, monkeypatch, *words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line
