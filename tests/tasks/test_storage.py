"""Both kinds of store: a folder, and S3 over HTTP."""

import os
from pathlib import Path

import boto3
import pytest

from dml_core.errors import StoreError
from tasks.runs.records import StepRecord, describe_folder
from tasks.storage import Store, copy_objects, push_objects


@pytest.fixture
def address(s3_bucket: str) -> str:
    return f"s3://{s3_bucket}/some/prefix"


def write(folder: Path) -> tuple:
    (folder / "figures").mkdir(parents=True)
    (folder / "weights.pt").write_bytes(os.urandom(3000))
    (folder / "figures" / "curve.png").write_bytes(b"png")
    (folder / ".temporary").write_bytes(b"not part of it")
    return describe_folder(folder)


def record(files: tuple) -> StepRecord:
    return StepRecord(step="train", identity="x", key="train/x", files=files)


def test_a_folder_store_is_where_the_files_are(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"), tmp_path / "cache")
    store.check_writable()
    files = write(store.folder("train/x"))
    store.push("train/x")
    assert [file.name for file in files] == ["figures/curve.png", "weights.pt"]
    assert store.pull("train/x") == tmp_path / "store" / "train" / "x"
    assert store.checked(record(files)) == store.folder("train/x")
    (store.folder("train/x") / "weights.pt").write_bytes(b"damaged")
    assert store.changed_files(record(files)) == ["weights.pt"]
    with pytest.raises(StoreError, match=r"weights\.pt: changed or gone"):
        store.checked(record(files))
    (store.folder("train/x") / "weights.pt").unlink()
    assert store.changed_files(record(files)) == ["weights.pt"]


def test_what_one_machine_pushes_another_pulls(tmp_path: Path, address: str) -> None:
    here, there = Store(address, tmp_path / "here"), Store(address, tmp_path / "there")
    here.check_writable()
    files = write(here.folder("train/x"))
    assert len(here.changed_files(record(files))) == 2
    here.push("train/x")
    assert there.changed_files(record(files)) == []
    assert describe_folder(there.pull("train/x")) == files


def test_a_pull_fetches_what_differs_and_mends_what_is_damaged(tmp_path: Path, address: str) -> None:
    store = Store(address, tmp_path / "cache")
    files = write(store.folder("train/y"))
    store.push("train/y")
    (store.folder("train/y") / "weights.pt").write_bytes(b"damaged")
    assert describe_folder(store.pull("train/y")) == files
    untouched = (store.folder("train/y") / "weights.pt").stat().st_mtime_ns
    store.pull("train/y")
    assert (store.folder("train/y") / "weights.pt").stat().st_mtime_ns == untouched


def test_a_push_sends_a_changed_file(tmp_path: Path, address: str) -> None:
    here, there = Store(address, tmp_path / "here"), Store(address, tmp_path / "there")
    write(here.folder("train/z"))
    here.push("train/z")
    (here.folder("train/z") / "weights.pt").write_bytes(b"second epoch")
    here.push("train/z")
    assert (there.pull("train/z") / "weights.pt").read_bytes() == b"second epoch"


@pytest.mark.parametrize("address", ["s3://no-such-bucket/x", "/proc/cannot/be/written"])
def test_a_store_that_cannot_be_written_is_one_line(tmp_path: Path, s3_bucket: str, address: str) -> None:
    with pytest.raises(StoreError, match=address) as caught:
        Store(address, tmp_path).check_writable()
    assert "\n" not in str(caught.value)


def test_an_object_that_is_damaged_in_the_store_is_set_aside_so_that_the_next_push_brings_it(tmp_path: Path, address: str) -> None:
    here, there = Store(address, tmp_path / "here"), Store(address, tmp_path / "there")
    files = write(here.folder("train/w"))
    here.push("train/w")
    bucket = address.split("/")[2]
    head = boto3.client("s3").head_object(Bucket=bucket, Key="some/prefix/train/w/weights.pt")
    boto3.client("s3").put_object(Bucket=bucket, Key="some/prefix/train/w/weights.pt", Body=b"other", Metadata=head["Metadata"])
    of_w = StepRecord(step="train", identity="w", key="train/w", files=files)
    with pytest.raises(StoreError, match=r"weights\.pt: changed or gone"):
        there.checked(of_w)
    assert not (there.folder("train/w") / "weights.pt").exists()
    assert there.changed_files(of_w) == ["weights.pt"]
    here.push("train/w")
    assert describe_folder(there.checked(of_w)) == files
    assert "train/w/.damaged-weights.pt" in there.list_objects()


@pytest.mark.parametrize("remote", [False, True])
def test_a_step_that_runs_anew_finds_nothing_of_an_earlier_one(tmp_path: Path, address: str, remote: bool) -> None:
    stores = [Store(address if remote else str(tmp_path / "store"), tmp_path / name) for name in ("here", "there")]
    write(stores[0].folder("train/v"))
    stores[0].push("train/v")
    assert len(describe_folder(stores[1].pull("train/v"))) == 2
    stores[0].clear("train/v", keep=("weights.pt",))
    for store in stores:
        assert [file.name for file in describe_folder(store.pull("train/v"))] == ["weights.pt"]
    assert not (stores[0].folder("train/v") / ".temporary").exists()
    stores[0].clear("train/v")
    assert [describe_folder(store.pull("train/v")) for store in stores] == [(), ()]


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


def test_a_mirror_s_object_that_leads_out_of_the_folder_is_refused(tmp_path: Path, s3_bucket: str) -> None:
    boto3.client("s3").put_object(Bucket=s3_bucket, Key="evil/../../outside.txt", Body=b"x")
    with pytest.raises(StoreError, match="would be written outside"):
        copy_objects(f"s3://{s3_bucket}/evil", tmp_path / "raw")
    assert not (tmp_path / "outside.txt").exists()


def test_a_bucket_that_was_copied_is_brought_back_with_its_hashes(tmp_path: Path, s3_bucket: str) -> None:
    store = Store(f"s3://{s3_bucket}/store", tmp_path / "cache")
    files = write(store.folder("train/x"))
    store.push("train/x")
    copy_objects(f"s3://{s3_bucket}", tmp_path / "copy")
    store.clear("train/x")
    assert store.changed_files(record(files)) == [file.name for file in files]
    push_objects(tmp_path / "copy", f"s3://{s3_bucket}")
    assert describe_folder(Store(f"s3://{s3_bucket}/store", tmp_path / "other").checked(record(files))) == files
    with pytest.raises(StoreError, match="no such folder"):
        push_objects(tmp_path / "nowhere", f"s3://{s3_bucket}")
