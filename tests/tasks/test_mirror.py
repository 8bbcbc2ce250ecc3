"""Copies of a bucket's objects, over HTTP."""

import contextlib
import os
import shutil
from pathlib import Path

import boto3
import pytest

from dml_core.errors import StoreError
from tasks.data import fetch_raw
from tasks.environment import Project
from tasks.mirror import copy_objects
from tasks.runs.specs import DatasetSpec
from tests.damage import contents


def test_a_mirror_s_objects_are_copied_and_what_is_there_stays(tmp_path: Path, s3_bucket: str) -> None:
    client = boto3.client("s3")
    for name in ("a.tgz", "sub/b.txt"):
        client.put_object(Bucket=s3_bucket, Key=f"mirror/{name}", Body=name.encode())
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.tgz").write_bytes(b"mine")
    told: list[tuple[int, int]] = []
    copy_objects(f"s3://{s3_bucket}/mirror", tmp_path / "raw", lambda done, total: told.append((done, total)))
    assert (tmp_path / "raw/a.tgz").read_bytes() == b"mine"
    assert (tmp_path / "raw/sub/b.txt").read_bytes() == b"sub/b.txt"
    assert told == [(9, 9)]


def test_a_mirror_s_copy_keeps_what_was_deleted_here_and_fetches_what_changed_there(
    tmp_path: Path, s3_bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A corrected label, as a file that is moved, would be in both classes."""
    client, folder = boto3.client("s3"), tmp_path / "birds"
    mirror = f"s3://{s3_bucket}/birds"
    spec = DatasetSpec(reader="folder", raw="birds", mirror=mirror)
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), "")

    def fetched() -> tuple[dict[str, bytes], list[str]]:
        caplog.clear()
        fetch_raw(project, spec)
        return contents(folder), [
            record.getMessage().removeprefix(f"{mirror}: ") for record in caplog.records if record.name == "tasks.mirror"
        ]

    def put(name: str, body: bytes) -> None:
        client.put_object(Bucket=s3_bucket, Key=f"birds/{name}", Body=body)

    for name in ("egret/1.jpg", "egret/2.jpg", "heron/1.jpg", "heron/2.jpg"):
        put(name, name.encode())
    assert len(fetched()[0]) == 4
    (folder / "egret/1.jpg").rename(folder / "heron/3.jpg")
    put("egret/2.jpg", b"better")
    put("egret/4.jpg", b"new")
    put("heron/1.jpg", b"better")
    (folder / "heron/1.jpg").write_bytes(b"mine")
    client.delete_object(Bucket=s3_bucket, Key="birds/heron/2.jpg")
    expected = {"heron/3.jpg": b"egret/1.jpg", "egret/2.jpg": b"better", "egret/4.jpg": b"new", "heron/1.jpg": b"mine"}
    expected |= {"heron/2.jpg": b"heron/2.jpg"}
    assert fetched() == (
        expected,
        [
            "new versions, which replace the files here: 1 object (egret/2.jpg)",
            "new versions, not copied over files that changed here: 1 object (heron/1.jpg)",
            "not copied again, since deleted here: 1 object (egret/1.jpg)",
            "deleted there, and still here: 1 object (heron/2.jpg)",
        ],
    )
    (folder / "heron/2.jpg").unlink()
    (folder / "heron/1.jpg").unlink()
    files, notes = fetched()
    assert files["heron/1.jpg"] == b"better"
    assert [note.partition(":")[0] for note in notes] == [
        "new versions, which replace the files here",
        "not copied again, since deleted here",
    ]
    shutil.rmtree(folder)
    assert set(fetched()[0]) == {"egret/1.jpg", "egret/2.jpg", "egret/4.jpg", "heron/1.jpg"}, "all are missing"


def test_an_interrupted_copy_goes_on_only_with_the_object_that_it_began_with(tmp_path: Path, s3_bucket: str) -> None:
    """Bytes of two versions would make one file of the right length."""
    client, told = boto3.client("s3"), []
    for number, content in enumerate((b"o" * 3_000_000, b"n" * 3_000_000)):
        client.put_object(Bucket=s3_bucket, Key="m/a.zip", Body=content)

        def interrupt(done: int, total: int) -> None:
            told.append(done)
            if len(told) == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) if not number else contextlib.nullcontext():
            copy_objects(f"s3://{s3_bucket}/m", tmp_path, interrupt)
    assert (tmp_path / "a.zip").read_bytes() == b"n" * 3_000_000


def test_an_interrupted_copy_does_not_ask_for_its_first_bytes_again(tmp_path: Path, s3_bucket: str) -> None:
    content, told = os.urandom(3_000_000), []
    etag = boto3.client("s3").put_object(Bucket=s3_bucket, Key="m/a.zip", Body=content)["ETag"].strip('"')
    for there in (1000, len(content)):  # or it was killed before it renamed the file
        (tmp_path / "a.zip").unlink(missing_ok=True)
        (tmp_path / f".a.zip.{etag}.partial").write_bytes(content[:there])
        copy_objects(f"s3://{s3_bucket}/m", tmp_path, lambda done, total: told.append(done))
        assert (tmp_path / "a.zip").read_bytes() == content
        assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]
    assert told == [1000 + 2**20, 1000 + 2**21, 3_000_000]


def test_a_mirror_s_object_that_leads_out_of_the_folder_is_refused(tmp_path: Path, s3_bucket: str) -> None:
    boto3.client("s3").put_object(Bucket=s3_bucket, Key="evil/../../outside.txt", Body=b"x")
    with pytest.raises(StoreError, match="would be written outside"):
        copy_objects(f"s3://{s3_bucket}/evil", tmp_path / "raw")
    assert not (tmp_path / "outside.txt").exists()
