"""Copies of a bucket's objects, over HTTP."""

import contextlib
import hashlib
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

    def record() -> Path:
        (path,) = (project.state / "fetch").glob("*.json")
        return path

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
            "new versions, not copied over other files (remove these to get them): 1 object (heron/1.jpg)",
            f"not copied again, since deleted here (to get them, remove {record()}): 1 object (egret/1.jpg)",
            "deleted there, and still here: 1 object (heron/2.jpg)",
        ],
    )
    (folder / "heron/2.jpg").unlink()
    (folder / "heron/1.jpg").unlink()
    files, notes = fetched()
    assert files["heron/1.jpg"] == b"better"
    assert [note.partition(":")[0] for note in notes] == [
        "new versions, which replace the files here",
        f"not copied again, since deleted here (to get them, remove {record()})",
    ]
    record().unlink()
    assert "egret/1.jpg" in fetched()[0]
    shutil.rmtree(folder)
    assert set(fetched()[0]) == {"egret/1.jpg", "egret/2.jpg", "egret/4.jpg", "heron/1.jpg"}, "all are missing"


def test_files_of_a_copy_that_was_not_recorded_get_new_versions(tmp_path: Path, s3_bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    """As those of a copy that was killed, or of one before there were records."""
    client, record, raw = boto3.client("s3"), tmp_path / "record.json", tmp_path / "raw"
    large = os.urandom(9 * 2**20)  # in parts
    (tmp_path / "large").write_bytes(large)
    client.upload_file(str(tmp_path / "large"), s3_bucket, "m/large")
    for name in ("small", "other"):
        client.put_object(Bucket=s3_bucket, Key=f"m/{name}", Body=name.encode())
    copy_objects(f"s3://{s3_bucket}/m", raw)
    (raw / "other").write_bytes(b"mine")
    copy_objects(f"s3://{s3_bucket}/m", raw, record=record)
    notes = [entry.getMessage().partition(": ")[2] for entry in caplog.records if entry.name == "tasks.mirror"]
    assert notes == ["not copied over files that are others or cannot be compared: 1 object (other)"]
    for name in ("large", "small", "other"):
        client.put_object(Bucket=s3_bucket, Key=f"m/{name}", Body=b"new")
    copy_objects(f"s3://{s3_bucket}/m", raw, record=record)
    assert contents(raw) == {"large": b"new", "small": b"new", "other": b"mine"}


def test_a_folder_that_was_copied_gets_new_versions_and_keeps_what_was_changed(tmp_path: Path, s3_bucket: str) -> None:
    """By `cp -r`, an archive or a disk that rounds times."""
    client, record, raw = boto3.client("s3"), tmp_path / "record.json", tmp_path / "raw"
    for version in (b"old", b"new"):
        for name in ("a", "b"):
            client.put_object(Bucket=s3_bucket, Key=f"m/{name}", Body=version)
        copy_objects(f"s3://{s3_bucket}/m", raw, record=record)
        (raw / "b").write_bytes(b"mine")
        for name in ("a", "b"):
            os.utime(raw / name, (0, 0))
    assert contents(raw) == {"a": b"new", "b": b"mine"}


def test_a_file_that_was_removed_to_fetch_it_again_is_copied_where_only_the_publisher_corrects(tmp_path: Path, s3_bucket: str) -> None:
    """So say messages of damaged archives."""
    raw = tmp_path / "raw"
    for name in ("images.bin", "labels.txt"):
        boto3.client("s3").put_object(Bucket=s3_bucket, Key=f"m/{name}", Body=name.encode())
    spec = DatasetSpec(reader="cars196", raw="raw", mirror=f"s3://{s3_bucket}/m")
    for _ in range(2):
        fetch_raw(Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), ""), spec)
        assert len(contents(raw)) == 2
        (raw / "images.bin").unlink()


@pytest.mark.parametrize(("num_objects", "ends"), [(2, (6, 6)), (9, (9, 9))])
def test_the_progress_of_objects_that_are_copied_at_once_is_one_bar(
    num_objects: int, ends: tuple[int, int], tmp_path: Path, s3_bucket: str
) -> None:
    for number in range(num_objects):
        boto3.client("s3").put_object(Bucket=s3_bucket, Key=f"m/{number}", Body=b"abc")
    told: list[tuple[int, int]] = []
    copy_objects(f"s3://{s3_bucket}/m", tmp_path, lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == ends


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
    etag = boto3.client("s3").put_object(Bucket=s3_bucket, Key="m/a.zip", Body=content)["ETag"]
    for there in (1000, len(content)):  # or it was killed before it renamed the file
        (tmp_path / "a.zip").unlink(missing_ok=True)
        (tmp_path / f".{hashlib.sha256(f'a.zip {etag}'.encode()).hexdigest()}.partial").write_bytes(content[:there])
        copy_objects(f"s3://{s3_bucket}/m", tmp_path, lambda done, total: told.append(done))
        assert (tmp_path / "a.zip").read_bytes() == content
        assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]
    assert told == [1000 + 2**20, 1000 + 2**21, 3_000_000]


def test_a_mirror_s_object_that_leads_out_of_the_folder_is_refused(tmp_path: Path, s3_bucket: str) -> None:
    boto3.client("s3").put_object(Bucket=s3_bucket, Key="evil/../../outside.txt", Body=b"x")
    with pytest.raises(StoreError, match="would be written outside"):
        copy_objects(f"s3://{s3_bucket}/evil", tmp_path / "raw")
    assert not (tmp_path / "outside.txt").exists()


@pytest.mark.parametrize("names", [("a//b", "a/b"), ("a", "a/b")])
def test_objects_that_would_be_one_file_are_refused_by_name(tmp_path: Path, s3_bucket: str, names: tuple[str, str]) -> None:
    """One silently replaced the other."""
    for name in names:
        boto3.client("s3").put_object(Bucket=s3_bucket, Key=f"two/{name}", Body=name.encode())
    with pytest.raises(StoreError, match=r"refused, object 'a/+b' and another would be one file, or a file and its folder; rename one$"):
        copy_objects(f"s3://{s3_bucket}/two", tmp_path / "raw")
    assert not (tmp_path / "raw").exists()


def test_an_object_s_name_may_be_as_long_as_a_file_s(tmp_path: Path, s3_bucket: str) -> None:
    name = "n" * 251 + ".jpg"
    boto3.client("s3").put_object(Bucket=s3_bucket, Key=f"long/a//{name}", Body=b"x")
    copy_objects(f"s3://{s3_bucket}/long", tmp_path)
    assert [path.name for path in (tmp_path / "a").iterdir()] == [name]
