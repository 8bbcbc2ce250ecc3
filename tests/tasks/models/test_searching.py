"""From images to a page of search results with a really trained model; names with markup are escaped."""

import io
import json
import re
import shlex
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from typer.testing import CliRunner

from dml_core.errors import ConfigError, DataError, EvaluationError
from dml_core.index.index import Index
from dml_core.index.thumbnails import picture_size
from dml_core.index.writing import add_items, build_index
from dml_core.network_description import read_description, write_description
from dml_core.trained import TrainedModel, load_model
from flows.cli import main
from flows.cli.app import app
from tasks.environment import Project
from tasks.models.embed import embed_to
from tasks.models.indexing import batches_of_embeddings, batches_of_images, is_embeddings
from tasks.models.lookup import resolve_model
from tasks.models.searching import _share, query_images, search_images, search_page
from tasks.models.sources import find_images
from tests.tasks.models.conftest import OPTIONS

NUM_IMAGES = 4 * OPTIONS["images_per_class"] + 1
SCRIPT = "<script>alert(1)<&'\".jpg"


@pytest.fixture(scope="module")
def model(project: Project) -> TrainedModel:
    return load_model(resolve_model("own/good/0", project))


@pytest.fixture(scope="module")
def images(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for each of four classes, and an image with a name that a page must escape."""
    folder = tmp_path_factory.mktemp("images")
    classes = sorted((project.root / "data/raw/own/CUB_200_2011/images").iterdir())[-4:]
    for place in classes:
        shutil.copytree(place, folder / place.name)
    shutil.copy(next(classes[0].iterdir()), folder / SCRIPT)
    (folder / ".hidden.jpg").write_bytes(b"not looked at")
    (folder / "notes.txt").write_text("not looked at either")
    return folder


@pytest.fixture(scope="module")
def index(model: TrainedModel, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Index:
    batches = batches_of_images(model, find_images(str(images)), 160)
    return build_index(tmp_path_factory.mktemp("indexes") / "own", batches, model.identity, model.metric, None, "own/good")


def test_an_image_finds_itself_and_the_scores_are_the_model_s(index: Index, model: TrainedModel, images: Path) -> None:
    names = find_images(str(images)).names
    rows = model.embed([images / name for name in names])
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    [answer] = search_images(index, model, query_images([images / names[20]]), 5)
    assert (answer.name, len(answer.hits)) == (str(images / names[20]), 5)
    expected = np.sort(rows @ rows[20])[::-1][:5]
    np.testing.assert_allclose([hit.score for hit in answer.hits], expected, atol=1e-5)
    by_name = dict(zip(names, rows, strict=True))
    np.testing.assert_allclose([by_name[hit.item.name] @ rows[20] for hit in answer.hits], expected, atol=1e-5)
    assert picture_size(answer.hits[0].item.thumbnail or b"") == (24, 24)


def test_a_page_is_one_file_that_escapes_every_name(index: Index, model: TrainedModel, images: Path) -> None:
    page = search_page(index, search_images(index, model, query_images([images]), 6))
    assert page.count("<script>") == 1  # the page's own script
    assert "&lt;script&gt;alert(1)&lt;&amp;" in page
    assert "alert(1)<&'" not in page
    assert re.findall(r'(?:src|href)="(?!data:|#)', page) == []
    pictures = re.findall(r"<img[^>]*>", page)
    assert len(pictures) >= NUM_IMAGES * 8
    assert all(" alt=" in picture for picture in pictures)
    assert page.count("<section") == NUM_IMAGES


def test_another_model_is_refused(index: Index, project: Project, images: Path) -> None:
    other = load_model(resolve_model("own/good/1", project))
    with pytest.raises(ConfigError, match="do not compare with it; use its own model"):
        search_images(index, other, query_images([images]), 3)


def test_a_damaged_image_is_named_and_left_out_only_on_demand(model: TrainedModel, images: Path, tmp_path: Path) -> None:
    shutil.copytree(images, tmp_path / "images")
    (tmp_path / "images" / "bad.jpg").write_bytes(b"\xff\xd8 cut off")
    (tmp_path / "images" / "gone.jpg").symlink_to(tmp_path / "images" / "bad.jpg")
    found = find_images(str(tmp_path / "images"))
    (tmp_path / "images" / "gone.jpg").unlink()
    with pytest.raises(DataError, match=r"^bad\.jpg: "):
        build_index(tmp_path / "index", batches_of_images(model, found, 160), model.identity)
    assert [path.name for path in (tmp_path / "index").iterdir()] == [".lock"]
    bad: list[str] = []
    assert build_index(tmp_path / "index", batches_of_images(model, found, 160, bad), model.identity).num_items == NUM_IMAGES
    assert [line.partition(":")[0] for line in bad] == ["bad.jpg", "gone.jpg"]


def test_of_a_folder_that_grows_the_new_images_are_added(
    project: Project, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    folder, (first, second, third, fourth) = (
        tmp_path / "grows" / "class",
        [path for path in sorted(images.rglob("*.jpg")) if path.parent != images][:4],
    )
    folder.mkdir(parents=True)

    def dml(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    def add(*options: str) -> Any:
        return dml("index", "add", tmp_path / "index", folder.parent, *options)

    for path, name in ((second, "2.jpg"), (fourth, "4.jpg")):
        shutil.copy(path, folder / name)
    assert dml("index", "own/good/0", folder.parent, "-o", tmp_path / "index").exit_code == 0
    none = add("--new")
    assert (none.exit_code, none.stdout, none.stderr) == (0, "", f"the index has all images of {folder.parent}\n")
    for path, name in ((first, "1.jpg"), (third, "3.jpg")):
        shutil.copy(path, folder / name)
    assert isinstance(add().exception, ConfigError)
    assert add("--new").exit_code == 0
    index = Index.open(tmp_path / "index")
    assert [index.item(place).name for place in range(4)] == [f"class/{number}.jpg" for number in (2, 4, 1, 3)]
    assert {index.item(place).class_name for place in range(4)} == {"class"}
    for number in (1, 3):  # each with its own pixels
        found = json.loads(dml("search", tmp_path / "index", folder / f"{number}.jpg", "-k", 1, "--json").stdout)["answers"][0]["found"][0]
        assert (found["name"], found["score"]) == (f"class/{number}.jpg", pytest.approx(1, abs=1e-5))


def test_what_became_outdated_in_the_index_of_a_source_that_grows_is_named(
    project: Project, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--new` leaves their names out: corrected classes were still found under the wrong one, and deleted images were found."""
    monkeypatch.chdir(project.root)
    index = str(tmp_path / "my index")
    for number, path in enumerate([path for path in sorted(images.rglob("*.jpg")) if path.parent != images][:5]):
        shutil.copy(path, tmp_path / f"-{number}.jpg")

    def add(rows: dict[int, str], *words: str) -> list[str]:
        (tmp_path / "list.csv").write_text("path,label\n" + "".join(f"-{number}.jpg,{label}\n" for number, label in rows.items()))
        done = CliRunner().invoke(app, [*words, str(tmp_path / "list.csv"), *(["--new"] if "add" in words else ["-o", index])])
        assert done.exit_code == 0
        return [line for line in done.stderr.splitlines() if line.startswith("note: ")]

    assert add({0: "finch", 1: "finch", 2: "wren"}, "index", "own/good/0") == []
    assert add({0: "finch", 1: "finch", 2: "wren", 3: "wren"}, "index", "add", index) == []
    assert add({0: "finch", 1: "wren", 3: "wren"}, "index", "add", index) == [
        f"note: {tmp_path}/list.csv has another class for 1 image of the index; remove them, then add them again: "
        f"dml index remove '{index}' -- -1.jpg",
        f"note: {tmp_path}/list.csv does not have 1 image of the index; if they were deleted there, remove them: "
        f"dml index remove '{index}' -- -2.jpg",
    ]
    assert add({4: "finch"}, "index", "add", index) == [], "another source"
    monkeypatch.setattr("flows.cli.search._NUM_SHOWN", 2)
    (note,) = add({0: "finch"}, "index", "add", index)
    said, _, command = note.rpartition(": ")
    assert said.endswith("remove them (these 2 first)")
    assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0
    assert set(Index.open(Path(index)).names()) == {"-0.jpg", "-3.jpg", "-4.jpg"}


def test_the_reasons_are_printed_also_where_all_images_are_damaged(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    (tmp_path / "images").mkdir()
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / "images" / name).write_bytes(b"\xff\xd8 cut off")
    arguments = ["index", "own/good/0", str(tmp_path / "images"), "-o", str(tmp_path / "index"), "--skip-bad"]
    failed = CliRunner().invoke(app, arguments)
    assert isinstance(failed.exception, ConfigError)
    assert re.findall(r"^skipped: (\w\.jpg): ", failed.stderr, re.MULTILINE) == ["a.jpg", "b.jpg"]


# ---------------------------------------------------------------- embeddings


@pytest.mark.parametrize("out", ["embeddings.npz", "embeddings.parquet", "embeddings"])
def test_embeddings_make_the_index_that_their_images_make(
    index: Index, model: TrainedModel, images: Path, tmp_path: Path, out: str
) -> None:
    source = tmp_path / out
    embed_to(model, find_images(str(images)), source, shard_rows=20)
    assert is_embeddings(source)
    assert not is_embeddings(images)
    network, batches = batches_of_embeddings(source, images, 160)
    made = build_index(tmp_path / "index", batches, network.model_identity)
    assert made.model_identity == model.identity
    assert (network.metric, network.weights_sha256) == (model.metric, model.weights_sha256)
    np.testing.assert_allclose(made.vectors_ND, index.vectors_ND, atol=1e-5)
    assert [*map(made.item, range(NUM_IMAGES))] == [*map(index.item, range(NUM_IMAGES))]
    with pytest.raises(ConfigError, match="do not compare"):
        add_items(index.folder, batches, "f" * 32)


@pytest.mark.parametrize("out", ["e.npz", "e.parquet", "e"])
def test_embeddings_are_refused_after_their_network_was_trained_again(
    project: Project, model: TrainedModel, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    """Trained again, it has the same identity and other weights."""
    monkeypatch.chdir(project.root)
    folder, again = resolve_model("own/good/0", project), tmp_path / "again"
    again.mkdir()
    torch.save({name: value + 1 for name, value in torch.load(folder / "network.pt").items()}, again / "network.pt")
    write_description(again, read_description(folder))
    embed_to(model, find_images(str(images)), tmp_path / out)

    def dml(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments]).exception

    refused = dml("index", again, tmp_path / out, "-o", tmp_path / "index")
    assert str(refused) == (
        f"{tmp_path / out}: embeddings of model {model.identity} with other weights: it was trained again since; embed the images again"
    )
    assert dml("index", folder, tmp_path / out, "-o", tmp_path / "index") is None
    query = next(path for path in images.rglob("*.jpg") if path.name != SCRIPT and "/." not in str(path))
    assert dml("search", tmp_path / "index", query, "--model", folder) is None
    assert "it was trained again since" in str(dml("search", tmp_path / "index", query, "--model", again))


def test_classes_come_with_embeddings(model: TrainedModel, images: Path, tmp_path: Path) -> None:
    one = next(path for path in sorted(images.iterdir()) if path.is_dir())
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(f"{path},=7\n" for path in sorted(one.iterdir())[:3]))
    for out in ("e.npz", "e.parquet", "e"):
        embed_to(model, find_images(str(tmp_path / "list.csv")), tmp_path / out)
        _, [batch] = batches_of_embeddings(tmp_path / out)
        assert [item.class_name for item in batch.items] == ["=7"] * 3
        assert batch.items[0].thumbnail is None


def test_thumbnails_come_with_embeddings_where_there_are_images_and_pixels(model: TrainedModel, images: Path, tmp_path: Path) -> None:
    embed_to(model, find_images(str(images)), tmp_path / "e.npz")
    for options, size in (((images, 12), (12, 12)), ((images, 0), None), ((images,), None), ((None, 12), None)):
        _, [batch] = batches_of_embeddings(tmp_path / "e.npz", *options)
        found = {None if item.thumbnail is None else picture_size(item.thumbnail) for item in batch.items}
        assert found == {size}, options


def test_an_archive_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").symlink_to("/dev/null")
    with pytest.raises(EvaluationError, match=r"a\.npz: cannot be read \([^\n]*not a regular file"):
        batches_of_embeddings(tmp_path / "a.npz")


def test_embeddings_of_nobody_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", embeddings=np.ones((2, 4), np.float32), names=np.array(["a", "b"]))
    parquet.write_table(pa.table({"name": ["a"], "embedding": [[1.0, 2.0]]}), tmp_path / "a.parquet")
    for source in (tmp_path / "a.npz", tmp_path / "a.parquet"):
        with pytest.raises(EvaluationError, match="does not name the model that made it"):
            batches_of_embeddings(source)
    np.savez(tmp_path / "c.npz", embeddings=np.ones((2, 4), np.float32), names=np.array(["a"]), model_identity=np.array("0" * 32))
    with pytest.raises(EvaluationError, match=r"c\.npz: cannot be read \(2 embeddings and 1 names\)"):
        batches_of_embeddings(tmp_path / "c.npz")
    (tmp_path / "b.npz").write_bytes(b"PK no archive")
    with pytest.raises(EvaluationError, match=r"b\.npz: cannot be read"):
        batches_of_embeddings(tmp_path / "b.npz")


# ---------------------------------------------------------------- the command


def test_images_without_the_boxes_on_which_a_network_was_trained_are_counted(
    project: Project, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    folder, cut, made = resolve_model("own/good/0", project), tmp_path / "cut", tmp_path / "index"
    cut.mkdir()
    shutil.copy(folder / "network.pt", cut)
    described = read_description(folder)
    write_description(cut, described.model_copy(update={"transform": described.transform.model_copy(update={"crop_to_box": True})}))
    photographs = sorted(path for path in images.rglob("*.jpg") if path.parent != images)[:3]
    rows = [f"{path},{box}" for path, box in zip(photographs, ("0,0,9,9", "0,0,9,9", ",,,"), strict=True)]
    some, every = tmp_path / "some.csv", tmp_path / "every.csv"
    some.write_text("\n".join(["path,left,top,right,bottom", *rows]))
    every.write_text("\n".join(["path,left,top,right,bottom", *rows[:2]]))

    def note(*arguments: object) -> str | None:
        ran = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        found = re.search(r"on the contents of boxes[;,] (.*)", ran.stderr)
        return found and found[1]

    assert note("index", cut, every, "-o", made) is None
    assert note("index", "add", made, photographs[2].parent, "--model", cut) is not None
    assert note("search", made, every, "--model", cut) is None
    assert note("search", made, *photographs, "--model", cut) == "3 of 3 images have no box and are embedded whole"
    assert note("embed", cut, some, "-o", tmp_path / "e.npz") == "1 of 3 images have no box and are embedded whole"
    monkeypatch.setattr("tasks.serving.service.run_service", lambda *_, **__: None)
    assert note("serve", cut) == "which requests cannot name; their images are embedded whole"
    assert note("serve", folder) is None


def test_the_verbs_from_a_folder_to_a_page(project: Project, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.root)

    def dml(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    folder, page = tmp_path / "index", tmp_path / "page.html"
    built = dml("index", "own/good/0", images, "-o", folder, "--approximate", "auto")
    assert built.exit_code == 0, built.output
    assert f"{NUM_IMAGES} items of " in built.stdout
    assert "nothing need be missed" in built.stdout
    assert "--approximate auto would choose" not in built.stdout
    in_lists = dml("index", "own/good/0", images, "-o", tmp_path / "in lists", "--approximate", "ivf")
    assert f"--approximate auto would choose exact for them: {NUM_IMAGES} items of " in in_lists.stdout
    assert isinstance(dml("index", "own/good/0", images, "-o", folder).exception, ConfigError)
    query = next(path for path in images.rglob("*.jpg") if path.name != SCRIPT and "/." not in str(path))
    found = dml("search", folder, query, "-k", 3, "--html", page, "--json")
    assert found.exit_code == 0, found.output
    values = json.loads(found.stdout)
    assert values["index"] == {"kind": "exact", "metric": "cosine", "items": NUM_IMAGES, "recalls": None}
    assert [hit["rank"] for hit in values["answers"][0]["found"]] == [1, 2, 3]
    assert values["answers"][0]["found"][0]["score"] == pytest.approx(1, abs=1e-5)
    assert page.read_text().startswith("<!doctype html>")
    assert dml("search", folder, query, "--html", page).exit_code == 0, "an earlier page is replaced"
    table = dml("search", folder, query, "-k", 3)
    assert query.name in table.stdout
    assert "exact search: finds all nearest neighbours" in table.stdout
    name = values["answers"][0]["found"][0]["name"]
    assert f"{NUM_IMAGES - 1} items" in dml("index", "remove", folder, name).stdout
    lone = tmp_path / "lone"
    (lone / Path(name).parent).mkdir(parents=True)
    shutil.copy(images / name, lone / name)
    assert f"{NUM_IMAGES} items" in dml("index", "add", folder, lone).stdout
    assert json.loads(dml("index", "show", folder, "--json").stdout)["num_items"] == NUM_IMAGES
    assert isinstance(dml("search", folder, query, "--model", "own/good/1").exception, ConfigError)
    assert "Build, change and show" in dml("index", "--help").stdout


def test_a_name_that_is_twice_is_found_before_any_image_is_embedded(
    index: Index, project: Project, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many images, the last batch would otherwise end hours of work."""
    monkeypatch.chdir(project.root)
    monkeypatch.setattr("tasks.models.indexing.embed_batches", lambda *_, **__: pytest.fail("embedded"))
    one = sorted(images.rglob("*.jpg"))[-1]
    (tmp_path / "list.csv").write_text(f"path\n{one}\n{one}\n")

    def error(*arguments: object) -> str:
        return str(CliRunner().invoke(app, [str(argument) for argument in arguments]).exception)

    assert error("index", "own/good/0", tmp_path / "list.csv", "-o", tmp_path / "new") == (
        f"two images are named {one}; an index finds each by a unique name"
    )
    assert error("index", "add", index.folder, images).startswith(f"{index.folder}: has an item named ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("truncated.jpg", "truncated.jpg: damaged or truncated"),
        ("missing.jpg", "missing.jpg: cannot be read (No such file or directory)"),
        ("notes.txt", "notes.txt: not an image, or damaged"),
        ("empty", "empty: no images found (recognised by suffix: .jpg, .png, ...)"),
        ("some", "some/bad.jpg: damaged or truncated"),
    ],
)
def test_what_cannot_be_searched_with_is_named(
    index: Index, project: Project, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    """The error is one line with exit code 2, and standard output is empty."""
    monkeypatch.chdir(project.root)
    whole = next(path for path in sorted(images.rglob("*.jpg")) if path.stat().st_size > 400).read_bytes()
    (tmp_path / "truncated.jpg").write_bytes(whole[:300])
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "a.jpg").write_bytes(whole)
    (tmp_path / "some" / "bad.jpg").write_bytes(whole[:300])
    monkeypatch.setattr("sys.argv", ["dml", "search", str(index.folder), str(tmp_path / name)])
    told, errors = io.StringIO(), io.StringIO()
    with pytest.raises(SystemExit) as ended, redirect_stdout(told), redirect_stderr(errors):
        main()
    assert ended.value.code == 2
    assert errors.getvalue() == f"error: {tmp_path}/{said}\n"
    assert told.getvalue() == ""


def test_nothing_is_made_by_looking_for_a_model(project: Project, tmp_path: Path) -> None:
    """Looking up the index's model creates no MLflow database."""
    elsewhere = Project(project.root, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path / 'mlflow.db'}")
    with pytest.raises(ConfigError, match="no trained run has this identity"):
        resolve_model("0" * 32, elsewhere)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("score", "best", "metric", "filled"),
    [
        *((1.0, 1.0, "cosine", 100), (0.25, 1.0, "cosine", 25), (-0.5, 0.5, "cosine", 0), (1.0000001, 1.0, "cosine", 100)),
        *((-4.0, -1.0, "euclidean", 25), (-1.0, -1.0, "euclidean", 100), (0.0, 0.0, "euclidean", 100), (-1.0, 0.0, "euclidean", 0)),
    ],
)
def test_a_bar_is_as_long_as_its_image_is_near(score: float, best: float, metric: str, filled: int) -> None:
    assert _share(score, best, metric) == filled
