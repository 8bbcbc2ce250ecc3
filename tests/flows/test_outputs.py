"""An output that the user names never replaces another file: a slip such as `-o embeddings.npy` destroyed the embeddings."""

from pathlib import Path

import numpy as np
import pytest

from dml_core.errors import ConfigError
from flows.cli.options import check_folder, embeddings_place
from tasks.files import check_output
from tests.flows.test_cli import dml, project, refused

__all__ = ["project"]
OTHER = "\0an earlier file of the user"


WRITING = [
    ["evaluate", "--embeddings", "e.npy", "--labels", "l.npy", "-o"],
    ["search", "my.index", "query.jpg", "--html"],
    ["data", "show", "synthetic", "-o"],
    ["tables", "export", "project/glyphs", "-o"],
    ["receipt", "synthetic", "-o"],
]
FOLDERS = [
    ["embed", "own/good", "images"],
    ["index", "own/good", "images"],
    ["look", "synthetic"],
    ["models", "export", "own/good"],
    ["report", "softtriple/table1"],
]


@pytest.mark.parametrize("words", WRITING, ids=lambda words: " ".join(words[:2]))
def test_another_file_and_a_folder_are_not_replaced(words: list[str], project: Path) -> None:
    (project / "mine").write_text(OTHER)
    refused(dml(*words, "mine", cwd=project), "mine: already exists and was not written by this command; name another file")
    assert (project / "mine").read_text() == OTHER
    (project / "folder").mkdir()
    refused(dml(*words, "folder", cwd=project), f"{words[-1]} folder: expected a file, but folder is a folder; choose another name")
    inside = f"{words[-1]} mine/new/x: expected a file in a folder, but ", "/mine is not a folder; choose another place"
    refused(dml(*words, "mine/new/x", cwd=project), *inside)


@pytest.mark.parametrize("words", WRITING, ids=lambda words: " ".join(words[:2]))
@pytest.mark.parametrize(("name", "kind"), [("x.JPG", "image/jpeg"), ("x.csv", "text/csv"), ("x.json.gz", "gzip")])
def test_a_name_of_another_kind_of_file_is_refused(words: list[str], name: str, kind: str, project: Path) -> None:
    refused(dml(*words, name, cwd=project), f"{name}: named as {kind}, and the file would be ", "; choose another name")
    assert not (project / name).exists()


@pytest.mark.parametrize("words", FOLDERS, ids=lambda words: words[0])
def test_where_a_folder_is_expected_a_file_is_refused_by_the_name_of_the_option(words: list[str], project: Path) -> None:
    (project / "mine").write_text(OTHER)
    refused(dml(*words, "-o", "mine", cwd=project), "-o mine: expected a folder, but mine is not one; choose another place")
    (project / "link").symlink_to("mine")
    inside = "-o link/pages: expected a folder, but ", "/link is not one; choose another place"
    refused(dml(*words, "-o", "link/pages", cwd=project), *inside)
    assert (project / "mine").read_text() == OTHER


def test_a_new_folder_is_not_named_as_a_file(project: Path) -> None:
    for words, name in ((FOLDERS[1], "x.parquet"), (FOLDERS[2], "page.html"), (FOLDERS[3], "model.ONNX"), (FOLDERS[4], "x.json.gz")):
        said = f"-o {name}: named as a file, and this command writes a folder; choose another name"
        refused(dml(*words, "-o", name, cwd=project), said)
    check_folder(project / "birds.v2")
    (project / "page.html").mkdir()  # as of an earlier version
    check_folder(project / "page.html")


def test_embeddings_are_a_folder_or_a_file_of_a_known_format(project: Path) -> None:
    for name in ("e.csv", "e.npy", "e.NPZ", "e.npz/", "run.2"):
        formats = f"-o {name}: expected a name that ends with .npz or .parquet, or of a folder: one without suffix, or that ends with /"
        refused(dml(*FOLDERS[0], "-o", name, cwd=project), formats)
    refused(dml(*FOLDERS[0], "-o", "params.yaml/e.npz", cwd=project), "-o params.yaml/e.npz: expected a file in a folder, but ")
    for name in ("old.v1", "old.npz"):
        (project / name).mkdir()
    refused(dml(*FOLDERS[0], "-o", "old.npz", cwd=project), "-o old.npz: expected a file, but old.npz is a folder; choose another name")
    places = {"e.npz": "e.npz", "new/e.parquet": "new/e.parquet", "e": "e", "e.csv/": "e.csv", "old.v1": "old.v1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        assert {name: str(embeddings_place(name)) for name in places} == places


def test_scores_are_printed_before_they_are_written_and_replace_earlier_ones(project: Path) -> None:
    np.save(project / "e.npy", np.eye(8, dtype=np.float32)[[0, 1, 2, 3] * 2])
    np.save(project / "l.npy", np.arange(8) % 4)
    words = ["evaluate", "--embeddings", "e.npy", "--labels", "l.npy", "--k", "1", "-o"]
    for _ in range(2):
        shown = dml(*words, "scores.json", cwd=project)
        assert (shown.returncode, shown.stdout) == (0, (project / "scores.json").read_text())
    shown = dml(*words, "/proc/scores.json", cwd=project)
    assert (shown.returncode, shown.stdout) == (2, (project / "scores.json").read_text())
    refused(shown, "error: /proc/scores.json: cannot be written (")


def test_an_empty_file_is_written_and_a_device_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    check_output(tmp_path / "empty", "application/json", b"{")
    with pytest.raises(ConfigError, match=r"^/dev/null: cannot be written \(not a regular file\); choose another file$"):
        check_output(Path("/dev/null"), "application/json", b"{")


def test_a_file_of_another_kind_is_not_only_called_damaged(project: Path) -> None:
    refused(
        dml("tables", "import", "params.yaml", cwd=project), "params.yaml: damaged, or not exported by dml; write one with: dml tables "
    )
