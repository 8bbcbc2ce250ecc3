"""`dml embed`: rows in order for every source; bad images are reported; an interrupted run resumes and ends with the same bytes."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import uuid4

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from dml_core import load_model
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import ConfigError, DataError, EvaluationError, StoreError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.index.writing import build_index
from dml_core.trained import TrainedModel
from flows.cli.models import embed as embed_command
from tasks.environment import Project
from tasks.models import embed
from tasks.models.embed import embed_images, embed_on_cluster, embed_to
from tasks.models.indexing import batches_of_embeddings, batches_of_images
from tasks.models.lookup import find_run, resolve_model
from tasks.models.searching import query_images, search_images
from tasks.models.sources import find_images
from tasks.runs.embeddings import load_embeddings
from tasks.scores.scoring import Files, score_files
from tasks.storage import Store
from tasks.workers import distribution, jobs
from tasks.workers.jobs import InfrastructureError

CONFIG = EvaluationConfig(recall_at=(1,), clustering=False)


@pytest.fixture(scope="module")
def model(project: Project) -> TrainedModel:
    return load_model(resolve_model("own/good/0", project), "cpu")


@pytest.fixture(scope="module")
def folder(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test images as files, with a folder per class."""
    dataset = PackedDataset(project.packed("own"), "test")
    root = tmp_path_factory.mktemp("images")
    for index, label in enumerate(dataset.labels):
        path = root / f"class {label:02d}" / f"{index:03d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(dataset.raw_bytes(index))
    (root / "class 00" / "notes.txt").write_text("no image by its name")
    return root


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".npy"}


def test_a_folder_is_embedded_as_the_run_was_and_scores_as_it_did(
    project: Project, model: TrainedModel, folder: Path, tmp_path: Path
) -> None:
    found = embed_images(model, find_images(str(folder)), tmp_path / "out", batch_size=7, shard_rows=50)
    assert (found.num_rows, found.num_reused, found.bad) == (240, 0, ())
    rows, labels = load_embeddings(tmp_path / "out", "images")
    run = find_run(project, "own/good/0")
    store = Store(project.store, project.state)
    expected, expected_labels = load_embeddings(store.folder(f"embed/{run.embedded}"), "test")
    order = np.argsort(expected_labels, kind="stable")  # by class, then by number: the order of the file names
    np.testing.assert_allclose(rows, expected[order], atol=1e-5)
    assert labels.tolist() == [f"class {label:02d}" for label in expected_labels[order]]
    recall = json.loads((store.folder(f"evaluate/{run.scored}") / "metrics.json").read_text())["recall@1"]
    for stream in (False, True):
        assert score_files(Files(tmp_path / "out", None, None, None), CONFIG, stream, None)["recall@1"] == pytest.approx(recall)
    items = pq.read_table(tmp_path / "out/items.parquet").to_pylist()
    assert items[0] == {"path": f"class 00/{order[0]:03d}.jpg", "label": "class 00"}
    assert len(items) == 240


def test_lists_and_buckets_give_the_rows_of_the_folder(model: TrainedModel, folder: Path, s3_bucket: str, tmp_path: Path) -> None:
    """Three shards of 45 images of three classes."""
    for name in ("class 00", "class 05", "class 11"):
        shutil.copytree(folder / name, tmp_path / "images" / name)
    folder = tmp_path / "images"
    embed_images(model, find_images(str(folder)), tmp_path / "folder", shard_rows=20)
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.jpg"))]
    client = boto3.client("s3")
    for name in names:
        client.put_object(Bucket=s3_bucket, Key=f"some/{name}", Body=(folder / name).read_bytes())
    (folder / "list.csv").write_text("path,label,other\n" + "".join(f"{name},{name[:8]},1\n" for name in names))
    pq.write_table(pa.table({"path": [str(folder / name) for name in names]}), tmp_path / "list.parquet")
    for number, source in enumerate((f"{folder}/list.csv", f"s3://{s3_bucket}/some")):
        embed_images(model, find_images(source), tmp_path / str(number), shard_rows=20)
        assert bytes_of(tmp_path / str(number)) == bytes_of(tmp_path / "folder")
    embed_images(model, find_images(str(tmp_path / "list.parquet")), tmp_path / "unlabelled", shard_rows=20)
    rows = {name: data for name, data in bytes_of(tmp_path / "folder").items() if "labels" not in name}
    assert bytes_of(tmp_path / "unlabelled") == rows
    with pytest.raises(EvaluationError, match="embedded without classes"):
        score_files(Files(tmp_path / "unlabelled", None, None, None), CONFIG, False, None)


def test_one_file_says_what_the_folder_says(model: TrainedModel, folder: Path, tmp_path: Path) -> None:
    images = find_images(str(folder))
    embed_images(model, images, tmp_path / "folder")
    rows, labels = load_embeddings(tmp_path / "folder", "images")
    for name in ("out.npz", "out.parquet"):
        embed_to(model, images, tmp_path / name, shard_rows=100)
        assert score_files(Files(tmp_path / name, None, None, None), CONFIG, False, None) == score_files(
            Files(tmp_path / "folder", None, None, None), CONFIG, False, None
        )
    with np.load(tmp_path / "out.npz") as found:
        assert np.array_equal(found["embeddings"], rows)
        assert found["names"].tolist() == images.names
        assert str(found["model_identity"]) == model.identity
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["label"].to_pylist() == labels.tolist()
    np.testing.assert_array_equal(np.array(table["embedding"].to_pylist(), np.float32), rows)
    assert table.schema.metadata[b"model_identity"] == model.identity.encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out.npz", "out.parquet"]
    embed_to(model, find_images(str(folder / "class 00")), tmp_path / "unlabelled.parquet")
    with pytest.raises(EvaluationError, match="not embeddings with classes"):
        score_files(Files(tmp_path / "unlabelled.parquet", None, None, None), CONFIG, False, None)


def test_an_interrupted_run_goes_on_to_the_same_bytes(model: TrainedModel, folder: Path, tmp_path: Path) -> None:
    class PowerCutError(Exception):
        pass

    images = find_images(str(folder))
    embed_images(model, images, tmp_path / "whole", shard_rows=50)

    def cut(done: int, of: int) -> None:
        if done == 150:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        embed_images(model, images, tmp_path / "cut", shard_rows=50, progress=cut)
    with pytest.raises(EvaluationError, match=r"no manifest\.json there"):
        score_files(Files(tmp_path / "cut", None, None, None), CONFIG, False, None)
    before = (tmp_path / "cut" / "images-00002-of-00005.npy").stat().st_mtime_ns
    found = embed_images(model, images, tmp_path / "cut", shard_rows=50)
    assert found.num_reused == 150
    assert (tmp_path / "cut" / "images-00002-of-00005.npy").stat().st_mtime_ns == before
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")
    assert (tmp_path / "cut/manifest.json").read_text() == (tmp_path / "whole/manifest.json").read_text()


def test_bad_images_end_it_with_a_list_or_are_left_out(model: TrainedModel, folder: Path, tmp_path: Path) -> None:
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.jpg"))][:9]
    source = tmp_path / "images"
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((folder / name).read_bytes())
    (source / names[2]).write_bytes((folder / names[2]).read_bytes()[:200])
    (source / names[7]).write_text("text")
    (source / names[8]).unlink()
    (source / names[8]).symlink_to("nowhere.jpg")
    (tmp_path / "list.csv").write_text("path\n" + "".join(f"images/{name}\n" for name in names))
    images = find_images(str(tmp_path / "list.csv"))
    with pytest.raises(
        DataError, match=rf"3 of 9 images are bad \(images/{names[2]}: damaged or truncated; images/{names[7]}: not an image"
    ):
        embed_images(model, images, tmp_path / "out", shard_rows=4)
    assert not (tmp_path / "out/manifest.json").exists()
    assert (tmp_path / "out/bad.csv").read_text().splitlines()[3] == f"images/{names[8]},cannot be read (No such file or directory)"
    found = embed_images(model, images, tmp_path / "out", skip_bad=True, shard_rows=4)
    assert (found.num_rows, len(found.bad)) == (6, 3)
    rows = np.concatenate([np.load(path) for path in sorted((tmp_path / "out").glob("images-*-of-*.npy"))])
    good = [number for number in range(9) if number not in (2, 7, 8)]
    np.testing.assert_allclose(rows, model.embed([folder / names[number] for number in good]), atol=1e-5)
    assert pq.read_table(tmp_path / "out/items.parquet")["path"].to_pylist() == [f"images/{names[number]}" for number in good]
    (source / names[8]).unlink()
    for number in (2, 7, 8):  # fixed: only their shards are computed again
        (source / names[number]).write_bytes((folder / names[number]).read_bytes())
    found = embed_images(model, images, tmp_path / "out", shard_rows=4)
    assert (found.num_rows, found.num_reused, found.bad) == (9, 0, ())
    assert not (tmp_path / "out/bad.csv").exists()


def test_an_image_of_a_size_that_the_network_does_not_take_is_a_bad_one(model: TrainedModel, folder: Path, tmp_path: Path) -> None:
    """Its views have the size of their image. One pixel is too few for the network's normalisation."""
    free = TrainedModel(
        model.description.model_copy(update={"transform": model.description.transform.model_copy(update={"crop_size": None})}),
        model.identity,
        model._forward,
    )
    (tmp_path / "in/x").mkdir(parents=True)
    for name, path in zip("ac", sorted(folder.rglob("*.jpg")), strict=False):
        shutil.copy(path, tmp_path / f"in/x/{name}.jpg")
    Image.new("RGB", (1, 1)).save(tmp_path / "in/x/b.png")
    images = find_images(str(tmp_path / "in"))
    with pytest.raises(DataError, match=r"1 of 3 images are bad \(x/b\.png: the network does not take its 1 x 1 pixels \(.*skip them with"):
        embed_images(free, images, tmp_path / "out")
    assert embed_images(free, images, tmp_path / "out", skip_bad=True).num_rows == 2
    rows, _ = load_embeddings(tmp_path / "out", "images")
    np.testing.assert_allclose(rows, free.embed([tmp_path / "in/x/a.jpg", tmp_path / "in/x/c.jpg"]), atol=1e-5)
    with pytest.raises(DataError, match=r"^x/b\.png: the network does not take its 1 x 1 pixels"):
        list(batches_of_images(free, images, 0))


def test_a_skipped_image_of_an_index_is_one_printable_line_whatever_its_name(model: TrainedModel, tmp_path: Path) -> None:
    (tmp_path / "red\x1b[31m\nline.png").write_bytes(b"no image")
    bad: list[str] = []
    list(batches_of_images(model, find_images(str(tmp_path)), 0, bad))
    assert bad == [r"red\x1b[31m line.png: not an image, or damaged"]


@pytest.mark.parametrize("box", ["1,1,9,9", ",,,"])
def test_boxes_that_the_network_does_not_use_are_reported(
    box: str, project: Project, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = next(folder.rglob("*.jpg")).relative_to(folder)
    shutil.copytree(folder / image.parent, tmp_path / image.parent)
    (tmp_path / "list.csv").write_text(f"path,left,top,right,bottom\n{image},{box}\n")
    embed_command(str(resolve_model("own/good/0", project)), str(tmp_path / "list.csv"), tmp_path / "out")
    assert ("the boxes of the list are not used" in capsys.readouterr().err) == (box != ",,,")


@pytest.mark.parametrize("num_bad", [10, 11])
def test_ten_bad_images_are_named_and_of_more_the_line_says_so(model: TrainedModel, tmp_path: Path, num_bad: int) -> None:
    (tmp_path / "in").mkdir()
    for number in range(num_bad):
        (tmp_path / f"in/{number:02d}.jpg").write_text("text")
    with pytest.raises(DataError) as raised:
        embed_images(model, find_images(str(tmp_path / "in")), tmp_path / "out")
    assert str(raised.value).count(".jpg: ") == 10
    assert ("; ...)" in str(raised.value)) == (num_bad == 11)


def test_an_image_whose_embedding_is_not_finite_is_a_bad_one(
    model: TrainedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as embedded, and no search finds it."""
    monkeypatch.setattr(model, "_forward", lambda views: np.full((len(views), model.num_dimensions), [[1], [np.nan], [np.inf]], np.float32))
    shutil.copytree(folder / "class 00", tmp_path / "in")
    for path in sorted((tmp_path / "in").iterdir())[3:]:
        path.unlink()
    images = find_images(str(tmp_path / "in"))
    assert len(images) == 3
    found = embed_images(model, images, tmp_path / "out", skip_bad=True)
    assert (found.num_rows, found.bad) == (1, tuple((name, "its embedding is not finite") for name in images.names[1:]))
    assert np.load(next((tmp_path / "out").glob("images-0*.npy"))).shape == (1, model.num_dimensions)


def test_all_bad_is_never_an_empty_result(model: TrainedModel, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jpg").write_text("text")
    with pytest.raises(DataError, match=r"1 of 1 images are bad \([^\n]*: fix them; --skip-bad would leave none$"):
        embed_images(model, find_images(str(tmp_path / "in")), tmp_path / "out", skip_bad=True)


def test_another_network_or_other_images_are_refused(project: Project, model: TrainedModel, folder: Path, tmp_path: Path) -> None:
    few = find_images(str(folder / "class 00"))
    assert few.classes is None
    embed_images(model, few, tmp_path / "out")
    for other, images in ((model, find_images(str(folder))), (load_model(resolve_model("own/good/1", project), "cpu"), few)):
        with pytest.raises(ConfigError, match="holds embeddings of other images or by another network"):
            embed_images(other, images, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/x").write_text("")
    with pytest.raises(ConfigError, match="was not created by dml embed"):
        embed_images(model, few, tmp_path / "mine")


def test_a_corrected_label_is_written_without_embedding_anything_again(model: TrainedModel, folder: Path, tmp_path: Path) -> None:
    paths = [str(path) for path in sorted(folder.rglob("*.jpg"))[:3]]

    def embed(*labels: str) -> tuple[int, list[str]]:
        (tmp_path / "list.csv").write_text("path,label\n" + "".join(f"{path},{label}\n" for path, label in zip(paths, labels, strict=True)))
        num_reused = embed_to(model, find_images(str(tmp_path / "list.csv")), tmp_path / "out").num_reused
        assert pq.read_table(tmp_path / "out/items.parquet")["label"].to_pylist() == [*labels]
        return num_reused, load_embeddings(tmp_path / "out", "images")[1].tolist()

    assert embed("wren", "finch", "wren") == (0, ["wren", "finch", "wren"])
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    before = json.dumps([paths, ["wren", "finch", "wren"], None])  # as of before 30 November 2026
    (tmp_path / "out/plan.json").write_text(json.dumps(plan | {"names_sha256": hashlib.sha256(before.encode()).hexdigest()}))
    assert embed("wren", "finch", "wren") == (3, ["wren", "finch", "wren"])
    assert embed("wren", "wren", "wren") == (3, ["wren", "wren", "wren"]), "the older plan is of today from then on"


def test_rows_of_another_folder_with_the_same_names_are_not_reused(model: TrainedModel, folder: Path, tmp_path: Path) -> None:
    """Monday's photographs and Tuesday's are both called 0.jpg, 1.jpg, ..."""
    for day, first in (("monday", 0), ("tuesday", 3)):
        (tmp_path / day).mkdir()
        for number in range(3):
            shutil.copy(sorted(folder.rglob("*.jpg"))[first + number], tmp_path / day / f"{number}.jpg")
    embed_images(model, find_images(str(tmp_path / "monday")), tmp_path / "out")
    with pytest.raises(ConfigError, match="holds embeddings of other images"):
        embed_images(model, find_images(str(tmp_path / "tuesday")), tmp_path / "out")


def test_rows_of_a_network_that_was_trained_again_are_not_mixed_with_earlier_ones(
    model: TrainedModel, folder: Path, tmp_path: Path
) -> None:
    """It may have other weights under the same identity."""
    images, out = find_images(str(folder / "class 00")), tmp_path / "out"
    embed_images(model, images, out)
    again = TrainedModel(model.description.model_copy(update={"file_sha256": "0" * 64}), model.identity, model._forward)
    with pytest.raises(ConfigError, match="holds embeddings of other images or by another network"):
        embed_images(again, images, out)
    plan = json.loads((out / "plan.json").read_text())
    del plan["weights_sha256"]
    (out / "plan.json").write_text(json.dumps(plan))  # written before the hash was
    assert embed_images(model, images, out).num_reused == len(images)


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_a_file_is_replaced_only_by_embeddings_of_the_same_images_and_network(
    project: Project, model: TrainedModel, folder: Path, tmp_path: Path, suffix: str
) -> None:
    few, everything = find_images(str(folder / "class 00")), find_images(str(folder))
    out = tmp_path / f"out{suffix}"
    embed_to(model, few, out)
    before = out.read_bytes()
    other = load_model(resolve_model("own/good/1", project), "cpu")
    again = TrainedModel(model.description.model_copy(update={"file_sha256": "0" * 64}), model.identity, model._forward)
    for network, images in ((model, everything), (other, few), (again, few)):
        with pytest.raises(ConfigError, match=f"out{suffix}: holds embeddings of other images or by another network; name another file"):
            embed_to(network, images, out)
    assert out.read_bytes() == before
    embed_to(model, few, out)
    out.with_name(f"link{suffix}").symlink_to("nowhere")
    out.with_name(f"other{suffix}").write_bytes(b"my data")
    for name in ("link", "other"):
        with pytest.raises(ConfigError, match=f"{name}{suffix}: already exists and was not created by dml embed; name another file"):
            embed_to(model, few, out.with_name(f"{name}{suffix}"))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["link", "other", "out"]


def test_the_list_of_the_images_is_not_replaced_by_their_embeddings(model: TrainedModel, folder: Path, tmp_path: Path) -> None:
    names = [str(path) for path in sorted(folder.rglob("*.jpg"))[:3]]
    pq.write_table(pa.table({"path": names, "price": [1, 2, 3]}), tmp_path / "catalogue.parquet")
    with pytest.raises(ConfigError, match="already exists and was not created by dml embed"):
        embed_to(model, find_images(str(tmp_path / "catalogue.parquet")), tmp_path / "catalogue.parquet")
    assert pq.read_schema(tmp_path / "catalogue.parquet").names == ["path", "price"]


def test_a_file_without_bad_images_is_completed_once_they_are_fixed(model: TrainedModel, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "class 00", tmp_path / "images")
    first = min((tmp_path / "images").glob("*.jpg"))
    whole = first.read_bytes()
    first.write_bytes(b"")
    images = find_images(str(tmp_path / "images"))
    embed_to(model, images, tmp_path / "out.npz", skip_bad=True)
    first.write_bytes(whole)
    assert embed_to(model, images, tmp_path / "out.npz").num_rows == len(images)


def test_a_folder_is_not_readable_from_the_moment_that_a_shard_of_it_is_removed(
    model: TrainedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "class 00", tmp_path / "images")
    embed_images(model, find_images(str(tmp_path / "images")), tmp_path / "out", shard_rows=2)
    first, *_, last = sorted(tmp_path.glob("images/*.jpg"))
    shutil.copy(last, first)
    monkeypatch.setattr("tasks.models.embed.write_whole", lambda *_: pytest.fail("power cut"))
    with pytest.raises(pytest.fail.Exception, match="power cut"):
        embed_images(model, find_images(str(tmp_path / "images")), tmp_path / "out", shard_rows=2)
    with pytest.raises(EvaluationError, match=r"no manifest\.json there"):
        score_files(Files(tmp_path / "out", None, None, None), CONFIG, False, None)


def test_a_folder_whose_first_file_was_being_written_is_begun_again(model: TrainedModel, folder: Path, tmp_path: Path) -> None:
    """What a kill leaves at that moment (`dml_core.files.writing`)."""
    images = find_images(str(folder / "class 00"))
    for name in ("first", "again"):
        leftover = tmp_path / "out" / f".plan.json.{uuid4().hex}"
        leftover.parent.mkdir(exist_ok=True)
        leftover.write_bytes(b"{")
        assert embed_to(model, images, tmp_path / "out").num_rows == len(images), name
        assert not leftover.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / f"mine/.plan.json.{uuid4().hex}x").write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"mine: already exists and was not created by dml embed"):
        embed_to(model, images, tmp_path / "mine")


def test_an_image_that_was_replaced_is_embedded_again(model: TrainedModel, folder: Path, s3_bucket: str, tmp_path: Path) -> None:
    """In a folder and in a bucket; only its shard is computed again."""
    (tmp_path / "images").mkdir()
    paths = [tmp_path / f"images/{number}.jpg" for number in range(4)]
    client = boto3.client("s3")
    first, *others = sorted(folder.rglob("*.jpg"))
    for path, source in zip(paths, others, strict=False):
        shutil.copy(source, path)
        client.put_object(Bucket=s3_bucket, Key=f"replaced/{path.name}", Body=path.read_bytes())
    sources = {"folder": str(tmp_path / "images"), "bucket": f"s3://{s3_bucket}/replaced"}
    for name, source in sources.items():
        embed_images(model, find_images(source), tmp_path / name, shard_rows=2)
        assert embed_images(model, find_images(source), tmp_path / name, shard_rows=2).num_reused == 4
    paths[3].write_bytes(first.read_bytes())
    client.put_object(Bucket=s3_bucket, Key="replaced/3.jpg", Body=first.read_bytes())
    for name, source in sources.items():
        assert embed_images(model, find_images(source), tmp_path / name, shard_rows=2).num_reused == 2
        rows = np.concatenate([np.load(path) for path in sorted((tmp_path / name).glob("images-*-of-*.npy"))])
        np.testing.assert_allclose(rows, model.embed(paths), atol=1e-5)


def test_a_bucket_that_stops_answering_is_no_bad_image(
    model: TrainedModel, folder: Path, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials expire after the first shard: with skip_bad the rest of the images would be left out of a finished folder."""
    client = boto3.client("s3")
    for number, source in enumerate(sorted(folder.rglob("*.jpg"))[:6]):
        client.put_object(Bucket=s3_bucket, Key=f"some/{number}.jpg", Body=source.read_bytes())
    images = find_images(f"s3://{s3_bucket}/some")
    client.delete_object(Bucket=s3_bucket, Key="some/1.jpg")
    with monkeypatch.context() as patched:
        read = Store.read

        def expire(store: Store, key: str) -> bytes:
            return read(store if key < "3" else Store("s3://no-such-bucket", tmp_path), key)

        patched.setattr(Store, "read", expire)
        with pytest.raises(StoreError, match="get_object failed"):
            embed_images(model, images, tmp_path / "out", skip_bad=True, shard_rows=3)
        assert not (tmp_path / "out/manifest.json").exists()
    found = embed_images(model, images, tmp_path / "out", skip_bad=True, shard_rows=3)
    assert found.num_rows == 5
    assert [name for name, _ in found.bad] == ["1.jpg"]


@pytest.mark.parametrize(
    ("source", "said"),
    [("gone", "no such folder"), ("gone.csv", "no such file"), (".", "no images found"), ("bad.csv", "column 'path' is missing")],
)
def test_sources_of_nothing(source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("image,label\na.jpg,b\n")
    with pytest.raises(DataError, match=said):
        find_images(source)


# ---------------------------------------------------------------- unreadable files are named and never block


BOMB = bytearray(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x75\x30\0\0\x75\x30\x08\2\0\0\0") + bytes(200)  # of 30000 x 30000 pixels
STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe.jpg": (os.mkfifo, "not a regular file"),
    "dangling.jpg": (lambda path: path.symlink_to("nowhere.jpg"), "No such file or directory"),
    "itself.jpg": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "device.png": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "empty.png": (Path.touch, "empty"),
    "cut.jpg": (lambda path: path.write_bytes(b"\xff\xd8\xff\xe0"), "not an image"),
    "text.webp": (lambda path: path.write_text("no image"), "not an image"),
    "bomb.png": (lambda path: path.write_bytes(BOMB), "of 30000 x 30000 pixels, more than"),
}


@pytest.fixture
def strange(folder: Path, tmp_path: Path) -> Path:
    """Four good images and one of every kind of bad file, with hidden files and folders."""
    place = tmp_path / "strange"
    (place / "class").mkdir(parents=True)
    for path in sorted(folder.rglob("*.jpg"))[:4]:
        shutil.copy(path, place / "class")
    for name, (make, _) in STRANGE.items():
        make(place / "class" / name)
    os.mkfifo(place / "class" / ".hidden.jpg")
    (place / "a folder.jpg").mkdir()
    return place


def test_everything_with_the_name_of_an_image_is_embedded_or_named(model: TrainedModel, strange: Path, tmp_path: Path) -> None:
    found = embed_images(model, find_images(str(strange)), tmp_path / "out", skip_bad=True)
    assert found.num_rows == 4
    assert {Path(name).name for name, _ in found.bad} == STRANGE.keys()
    for name, why in found.bad:
        assert STRANGE[Path(name).name][1] in why
        assert "\n" not in why
    with pytest.raises(DataError, match=r"^8 of 12 images are bad \([^\n]*$"):
        embed_images(model, find_images(str(strange)), tmp_path / "other")


def test_an_index_names_them_too(model: TrainedModel, strange: Path, tmp_path: Path) -> None:
    bad: list[str] = []
    index = build_index(tmp_path / "index", batches_of_images(model, find_images(str(strange)), 32, bad), model.identity)
    assert index.num_items == 4
    assert {Path(line.partition(":")[0]).name for line in bad} == STRANGE.keys()
    for name in STRANGE:
        with pytest.raises(DataError, match=rf"{re.escape(name)}: [^\n]+$"):
            search_images(index, model, query_images([strange / "class" / name]), 1)


def test_a_folder_whose_bad_images_are_embedded_again_is_not_readable_meanwhile(
    model: TrainedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the new shard would get the names of the old one's."""
    shutil.copytree(folder / "class 00", tmp_path / "images")
    first, second, *_ = sorted(tmp_path.glob("images/*.jpg"))
    whole = first.read_bytes()
    first.write_bytes(b"")
    images = find_images(str(tmp_path / "images"))
    embed_images(model, images, tmp_path / "out", skip_bad=True)
    first.write_bytes(whole)
    second.write_bytes(b"")
    monkeypatch.setattr("tasks.models.embed._finish", lambda *_: pytest.fail("power cut"))
    with pytest.raises(pytest.fail.Exception, match="power cut"):
        embed_images(model, images, tmp_path / "out", skip_bad=True)
    with pytest.raises(EvaluationError, match=r"^[^\n]+$"):
        batches_of_embeddings(tmp_path / "out")


def test_the_working_directory_can_be_the_folder(
    model: TrainedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    embed_to(model, find_images(str(folder / "class 00")), Path())
    assert pq.read_table("items.parquet")["path"].to_pylist() == find_images(str(folder / "class 00")).names


def test_a_path_with_a_nul_is_a_bad_image(model: TrainedModel, tmp_path: Path) -> None:
    pq.write_table(pa.table({"path": ["a\0.jpg"]}), tmp_path / "list.parquet")
    with pytest.raises(DataError, match=r"cannot be read \(embedded null byte\)"):
        embed_images(model, find_images(str(tmp_path / "list.parquet")), tmp_path / "out")


def test_links_to_folders_are_followed_but_not_in_a_circle(model: TrainedModel, folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "linked"
    (place / "own").mkdir(parents=True)
    (place / "class").symlink_to(next(path for path in sorted(folder.iterdir()) if path.is_dir()))
    (place / "own" / "round").symlink_to(place)
    assert {Path(name).parent.as_posix() for name in find_images(str(place)).names} == {"class"}


def test_a_name_that_is_not_utf_8_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copy(next(folder.rglob("*.jpg")), os.fsencode(tmp_path) + b"/\xff.jpg")
    with pytest.raises(DataError, match=r"the name of \\udcff\.jpg is not UTF-8; rename the file$"):
        find_images(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("path,path\na.jpg,b.jpg\n", "column 'path' appears twice"),
        ("path,left,top,right,bottom\na.jpg,0,0,wide,3\n", r"not readable as a table \(In CSV column #3"),
        ("path,left,top,right,botom\na.jpg,1,1,9,9\n", "a box needs all of the columns left, top, right, bottom"),
        ("path,left,top,right,bottom\na.jpg,1,1,9,\n", "row 1 has a box that is incomplete"),
        ("path,left,top,right,bottom\na.jpg,1,1,nan,9\n", "a side that is not a finite number"),
        ("path,label\na.jpg\n", "not readable as a table"),
        ("label\n1\n", "column 'path' is missing"),
    ],
)
def test_a_list_that_cannot_be_read(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError, match=rf"^[^\n]*{said}[^\n]*$"):
        find_images(str(tmp_path / "list.csv"))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_list_that_is_a_pipe_or_a_folder(suffix: str, tmp_path: Path) -> None:
    for make in (os.mkfifo, Path.mkdir):
        path = tmp_path / f"{make.__name__}{suffix}"
        make(path)
        with pytest.raises(DataError, match=r"not readable as a table \((not a regular file|a folder)\)$"):
            find_images(str(path))


@pytest.mark.parametrize("out", ["e.npz", "e.parquet", "e"])
def test_damaged_embeddings_are_one_line(model: TrainedModel, folder: Path, tmp_path: Path, out: str) -> None:
    """Truncated, zeroed or missing files give one line, whatever error numpy, zip or Arrow raise."""
    whole = tmp_path / out
    embed_to(model, find_images(str(folder)), whole)
    files = sorted(path for path in whole.iterdir() if path.suffix != ".csv") if whole.is_dir() else [whole]
    for file in files:
        data = file.read_bytes()
        for changed in (data[: len(data) // 2], data[:10], bytes(len(data)), b"", b"[]", b"{}", None):
            file.unlink() if changed is None else file.write_bytes(changed)
            if file.name != "images-labels.npy":  # items.parquet has the labels too
                with pytest.raises((EvaluationError, DataError), match=r"^[^\n]+$"):
                    list(batches_of_embeddings(whole)[1])
            file.write_bytes(data)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match=r"plan\.json: damaged; remove"):
        embed_images(model, find_images(str(folder)), tmp_path / "begun")


def test_a_node_with_other_code_or_libraries_embeds_nothing(
    project: Project, model: TrainedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shards would be of another version, under one identity."""
    network, images = resolve_model("own/good/0", project), find_images(str(folder))
    spread = partial(embed_on_cluster, network, 64)
    monkeypatch.setattr(distribution, "spread", lambda work, shared, shards: (work(shared, shard) for shard in shards))
    monkeypatch.setattr(jobs.socket, "gethostname", lambda: "node-2")
    assert embed_images(model, images, tmp_path / "out", spread=spread).num_rows == 240
    here = embed.source_digests
    for name, value, difference in (
        ("versions", lambda: {"torch": "1.0"}, f"torch {torch.__version__.partition('+')[0]}.*, dml embed 1.0: install the same"),
        ("source_digests", lambda of: here(of) | {"dml_core/models/backbones/small.py": "edited"}, "other code than dml embed.*small.py"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(embed, name, value)
            with pytest.raises(InfrastructureError, match=rf"^this machine \(node-2\) has {difference}"):
                embed_images(model, images, tmp_path / name, spread=spread)
