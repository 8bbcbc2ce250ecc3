"""`dml data add` of a published dataset: archives are unpacked, folders stay, and only the published data is added."""

import hashlib
import re
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from dml_core.config import read_yaml
from dml_core.data.drawing.layouts import WRITERS
from dml_core.data.readers.cub200 import Cub200
from dml_core.data.readers.synthetic import Synthetic, draw_pictures
from dml_core.data.store.rows import Counts
from dml_core.errors import ConfigError
from flows.cli import main
from tasks.data import dataset_spec
from tasks.runs.params.file import load_params
from tests.conftest import ROOT

DRAWN = Synthetic(num_classes=4, images_per_class=3, image_size=16)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project next to `CUB_200_2011.tgz`, which has drawn images."""
    for name in ("DML_STATE", "DML_STORE"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "project"
    root.mkdir()
    (root / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    monkeypatch.chdir(root)
    WRITERS["cub200"](tmp_path / "drawn", draw_pictures(DRAWN), DRAWN.num_classes)
    with tarfile.open(tmp_path / "CUB_200_2011.tgz", "w:gz") as archive:
        archive.add(tmp_path / "drawn/CUB_200_2011", "CUB_200_2011")
    return root


@pytest.fixture
def add(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def added(*words: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["dml", "data", "add", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert ended.value.code == code, printed.err
        if code:
            assert re.fullmatch(r"error: .+\n", printed.err), printed.err
        return printed.err if code else printed.out

    return added


def blocks(project: Path) -> dict[str, object]:
    """Return the datasets added to params.yaml."""
    before, now = read_yaml(ROOT / "params.yaml"), read_yaml(project / "params.yaml")
    assert {**now, "datasets": None} == {**before, "datasets": None}
    return {name: block for name, block in now["datasets"].items() if name not in before["datasets"]}


def test_an_archive_is_unpacked_and_its_block_written(project, add, tmp_path, monkeypatch) -> None:
    """The drawn archive's checksum and counts replace the published ones."""
    archive = tmp_path / "CUB_200_2011.tgz"
    md5 = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(Cub200, "archives", (replace(Cub200.archives[0], md5=md5),))
    monkeypatch.setattr(Cub200, "published", {"train": Counts(6, 2), "test": Counts(6, 2)})
    printed = add("cub200", str(archive))
    assert "+    raw: data/raw/cub200" in printed
    assert "6 train images of 2 classes, 6 test images of 2 classes; raw files in data/raw/cub200" in printed
    assert blocks(project) == {"cub200": {"reader": "cub200", "raw": "data/raw/cub200"}}
    assert sorted(path.name for path in (project / "data/raw/cub200").iterdir()) == ["CUB_200_2011"]
    assert archive.is_file()
    assert "has a dataset 'cub200' already" in add("cub200", str(archive), code=2)


def test_a_part_is_not_compared_with_what_is_published(project, add, tmp_path) -> None:
    archive = str(tmp_path / "CUB_200_2011.tgz")
    assert "published is 97eceeb196236b17998738112f37df78" in add("cub200", archive, code=2)
    assert not (project / "data/raw/cub200").exists()
    assert "6 train images" in add("cub200", archive, "--part")
    assert blocks(project)["cub200"]["options"] == {"published_counts": False}
    (project / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    refusal = "data/raw/cub200/CUB_200_2011: exists already; remove it, or add what it has: dml data add cub200 "
    assert refusal in add("cub200", archive, "--part", code=2), "what is unpacked there may be another archive's"


def test_a_folder_stays_where_it_is(project, add, tmp_path) -> None:
    assert "published are 5864 of 100" in add("cub200", str(tmp_path / "drawn"), code=2)
    add("cub200", str(tmp_path / "drawn"), "--part")
    assert blocks(project)["cub200"]["raw"] == str(tmp_path / "drawn")
    assert not (project / "data").exists()


def test_a_folder_that_is_a_link_stays_one(project, add, tmp_path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "drawn")
    add("cub200", str(tmp_path / "link"), "--part")
    assert blocks(project)["cub200"]["raw"] == str(tmp_path / "link")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cub200", "nowhere.tgz"), r"nowhere\.tgz: no such file or folder; download CUB_200_2011\.tgz"),
        (("cub200", "params.yaml"), r"params\.yaml: expected CUB_200_2011\.tgz or the folder with all"),
        (("cars196", "params.yaml"), r"params\.yaml: expected the folder with all of the dataset's files; the official links are dead"),
        (("inshop", "../drawn"), r"has CUB_200_2011/, and neither Eval/list_eval_partition\.txt"),
        (("birds", "../drawn", "--part"), r"'birds' is not a published dataset"),
        (("cub200", "../drawn", "--part", "--reader", "folder"), r"--part: cannot be combined with --reader"),
    ],
)
def test_what_is_not_the_dataset_is_refused_and_nothing_changes(project, add, words, message) -> None:
    assert re.search(message, add(*words, code=2))
    assert (project / "params.yaml").read_bytes() == (ROOT / "params.yaml").read_bytes()


def test_own_images_may_have_a_published_name_where_the_reader_is_named(project, add, tmp_path) -> None:
    for index, picture in enumerate(draw_pictures(Synthetic(num_classes=4, images_per_class=4, image_size=16))):
        path = tmp_path / f"images/class-{picture.class_index}/{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture.jpeg)
    assert "dml reproduce --dataset sop\n" in add("sop", str(tmp_path / "images"), "--reader", "folder")
    assert read_yaml(project / "params.yaml")["datasets"]["sop"]["reader"] == "folder"


def test_a_published_dataset_that_is_not_added_names_the_command_that_adds_it() -> None:
    params = load_params(ROOT / "params.yaml")
    with pytest.raises(ConfigError, match="add it with its archive or folder: dml data add cub200 PATH"):
        dataset_spec(params, "cub200")
    with pytest.raises(ConfigError, match="unknown dataset 'synthetik'; did you mean 'synthetic'"):
        dataset_spec(params, "synthetik")
