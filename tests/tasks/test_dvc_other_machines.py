"""What a machine does with the `dvc.lock` of another one: whose images are packed here, and what the user is told."""

import hashlib
import shutil
from pathlib import Path

import pytest
from PIL import Image

from dml_core.data.store.info import IMAGES_FILE, INFO_FILE, MANIFEST_FILE
from dml_core.errors import DataError
from tasks import environment
from tasks.data import changed_datasets, run_dvc, update_dataset
from tasks.dvc_lock import digests, dvc_digest, or_pull, packed_digest
from tasks.runs.params.file import load_params
from tests.e2e.conftest import make_project


def test_a_lock_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    project = environment.Project(tmp_path, tmp_path / "state", "", "")
    for text, message in (
        (
            "stages:\n<<<<<<< HEAD\n  a: 1\n=======\n  b: 2\n>>>>>>> theirs\n",
            r"has a merge conflict; keep the stages of both sides, as docs",
        ),
        ("stages: {prepare@birds: {outs: [{path: p, files: [{md5: 1a}]}]}}", r"prepare@birds: has no md5, as of a version_aware remote, "),
    ):
        (tmp_path / "dvc.lock").write_text(text)
        with pytest.raises(DataError, match=rf"dvc\.lock: {message}"):
            dvc_digest(project, "birds")
        assert or_pull(project, "birds") == ""


def test_the_packed_images_of_a_clone_without_raw_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`images.arrow` has gigabytes, and each command asks."""
    project, hashed, file_digest = environment.Project(tmp_path, tmp_path / "state", "", ""), list[str](), hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: hashed.append(Path(file.name).name) or file_digest(file, name))
    packed = project.packed("birds")
    packed.mkdir(parents=True)
    assert packed_digest(project, "birds") is None
    for part in (IMAGES_FILE, INFO_FILE, MANIFEST_FILE):
        (packed / part).write_text("former")
    first = packed_digest(project, "birds")
    hashed.clear()
    assert (packed_digest(project, "birds"), hashed) == (first, [])
    (packed / IMAGES_FILE).write_text("changed")
    second = packed_digest(project, "birds")
    assert second not in (None, first)
    assert IMAGES_FILE in hashed
    (project.state / "prepare/birds.packed_md5").write_bytes(b"\xff")
    assert packed_digest(project, "birds") == second


@pytest.mark.slow
def test_the_images_of_dvc_lock_are_used_and_neither_former_ones_that_are_packed_here_nor_former_raw_files_replace_them(
    tmp_path: Path, forked_stages: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """DVC's option `--allow-missing` takes any packed data for those of the lock that its cache lacks."""
    root, away = tmp_path / "project", tmp_path / "away"
    root.mkdir()
    made = make_project(root, ("untrained",))
    shutil.rmtree(root / "flows")  # the installed `dml` refuses a project with a whole copy of its code
    made.change(datasets={"birds": {"reader": "folder", "raw": "birds"}})
    project = environment.Project(root, root / "state", str(root / "state/store"), "")
    raw, packed, lock = root / "birds", project.packed("birds"), root / "dvc.lock"
    for number in range(8):
        (raw / "abcd"[number % 4]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (25 * number, 0, 0)).save(raw / "abcd"[number % 4] / f"{number}.png")
    run_dvc(project, "repro", "prepare@birds")
    assert packed_digest(project, "birds") == dvc_digest(project, "birds")
    colleague = environment.Project(tmp_path / "colleague", tmp_path / "colleague/state", "", "")
    shutil.copytree(root, colleague.root)
    shutil.copytree(packed, tmp_path / "former")
    Image.new("RGB", (16, 16), (0, 99, 0)).save(colleague.root / "birds/a/new.png")
    run_dvc(colleague, "repro", "prepare@birds")
    texts = {"former": lock.read_text(), "new": (colleague.root / "dvc.lock").read_text()}
    new, whole = digests(colleague, "birds"), {"train": 5, "test": 4}

    def pack(folder: Path) -> None:
        shutil.rmtree(packed)
        shutil.copytree(folder, packed)

    def changed() -> dict[str, bool]:
        return changed_datasets(project, load_params(project.params_file), ["birds"])

    def is_refused(recorded: str) -> None:
        lock.write_text(recorded)
        with pytest.raises(
            DataError, match=r"^birds: dvc\.lock records other images than those in \S+/birds, which is as it was packed here"
        ):
            update_dataset(project, "birds")
        assert (lock.read_text(), caplog.records) == (recorded, [])

    pack(colleague.packed("birds"))  # as `dvc pull`
    is_refused(texts["new"])
    raw.rename(away)
    assert update_dataset(project, "birds").counts == whole
    assert changed() == {}
    away.rename(raw)
    is_refused(texts["new"])
    raw.rename(away)
    pack(tmp_path / "former")
    with pytest.raises(DataError, match=r"birds: no raw files; put one [a-z ]+ there; or, if it was pushed, run: dvc pull prepare@birds$"):
        update_dataset(project, "birds")
    assert changed() == {"birds": False}
    away.rename(raw)
    shutil.copy(colleague.root / "birds/a/new.png", raw / "a")
    assert update_dataset(project, "birds").counts == whole
    assert (digests(project, "birds"), packed_digest(project, "birds")) == (new, new[1])
    assert caplog.records == []

    monkeypatch.setattr("tasks.data.run_dvc", lambda *_: lock.write_text(texts["new"]))  # it would pack the present images
    other = texts["new"].replace(str(new[0]), f"{'1' * 32}.dir").replace(str(new[1]), f"{'2' * 32}.dir")

    def is_replaced(recorded: str) -> None:
        lock.write_text(recorded)
        update_dataset(project, "birds")
        assert [record.getMessage() for record in caplog.records] == [
            "birds: dvc.lock recorded other packed images; it now records these: see git diff dvc.lock"
        ]
        caplog.clear()

    is_replaced(texts["former"])  # a colleague has undone the change: this machine had that lock, too
    (raw / "notes.txt").write_text("a change on this machine")
    is_replaced(other)
    is_refused(other)
