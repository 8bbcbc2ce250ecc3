"""Both kinds of store: a folder, and S3 over HTTP."""

import os
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest

import tasks.storage
from dml_core.errors import DataError, StoreError
from tasks.mirror import copy_objects
from tasks.models.sources import find_images
from tasks.runs.records import StepRecord, describe_folder, visible_files
from tasks.storage import Store, make_bucket, push_objects


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
    there.clear("train/w")
    assert [*there.list_objects()] == ["train/w/.weights.pt.damaged-1"]  # for a person to look at


def test_an_object_that_another_machine_replaces_during_a_pull_is_fetched_as_it_is_now(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts that train one run push its checkpoint while the other pulls it: it is whole, only not the one that was asked for."""
    here, there = Store(address, tmp_path / "here"), Store(address, tmp_path / "there")
    write(here.folder("train/w"))
    here.push("train/w")
    version = there.version

    def replaced_after_its_hash_is_known(key: str) -> tuple[str, str]:
        answer = version(key)
        if key.endswith("weights.pt") and not (here.folder("train/w") / "pushed").exists():
            (here.folder("train/w") / "weights.pt").write_bytes(b"of the next epoch")
            (here.folder("train/w") / "pushed").touch()
            here.push("train/w")
        return answer

    monkeypatch.setattr(there, "version", replaced_after_its_hash_is_known)
    assert (there.pull("train/w") / "weights.pt").read_bytes() == b"of the next epoch"
    assert {*there.list_objects("train/w")} == {file.name for file in describe_folder(here.folder("train/w"))}


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
    assert [visible_files(store.pull("train/v")) for store in stores] == [[], []]


def test_a_finished_step_without_a_file_is_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"), tmp_path / "cache")
    with pytest.raises(StoreError, match="train/x: the step left no file here"):
        describe_folder(store.pull("train/x"))
    store.folder("train/x").mkdir(parents=True)
    (store.folder("train/x") / ".temporary").touch()
    with pytest.raises(StoreError, match="train/x: the step left no file here"):
        describe_folder(store.pull("train/x"))


def test_folder_markers_of_a_bucket_are_no_files(tmp_path: Path, s3_bucket: str) -> None:
    """S3's console writes an empty object for each folder that a user creates."""
    client = boto3.client("s3")
    for name in ("raw/", "raw/cat/", "raw/empty/"):
        client.put_object(Bucket=s3_bucket, Key=name, Body=b"")
    client.put_object(Bucket=s3_bucket, Key="raw/cat/1.jpg", Body=b"x")
    for _ in range(2):
        copy_objects(f"s3://{s3_bucket}/raw", tmp_path / "raw")
    assert [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "raw").rglob("*")] == ["raw/cat", "raw/cat/1.jpg"]
    here, there = (Store(f"s3://{s3_bucket}/store", tmp_path / name) for name in ("here", "there"))
    files = write(here.folder("train/x"))
    here.push("train/x")
    client.put_object(Bucket=s3_bucket, Key="store/train/x/figures/", Body=b"")
    assert describe_folder(there.pull("train/x")) == files
    here.push("train/x")


def test_a_bucket_that_was_copied_is_brought_back_with_its_hashes(tmp_path: Path, s3_bucket: str) -> None:
    store = Store(f"s3://{s3_bucket}/store", tmp_path / "cache")
    files = write(store.folder("train/x"))
    store.push("train/x")
    client = boto3.client("s3")
    client.put_object(Bucket=s3_bucket, Key="weights.pth", Body=b"outside of folders")
    copy_objects(f"s3://{s3_bucket}", tmp_path / "copy")
    store.clear("train/x")
    client.delete_object(Bucket=s3_bucket, Key="weights.pth")
    assert store.changed_files(record(files)) == [file.name for file in files]
    for _ in range(2):
        push_objects(tmp_path / "copy", f"s3://{s3_bucket}")
    assert Store(f"s3://{s3_bucket}", tmp_path).read("weights.pth") == b"outside of folders"
    assert describe_folder(Store(f"s3://{s3_bucket}/store", tmp_path / "other").checked(record(files))) == files
    with pytest.raises(StoreError, match="no such folder"):
        push_objects(tmp_path / "nowhere", f"s3://{s3_bucket}")


# ---------------------------------------------------------------- cost of a check


def settled(folder: Path) -> Path:
    """Write the files of a packed dataset, dated an hour ago, and return the folder."""
    for name in ("dataset.json", "images.arrow", "manifest.parquet"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(name.encode())
        os.utime(folder / name, (time.time() - 3600,) * 2)
    return folder


def requests_of(store: Store) -> Counter[str]:
    """Count a store's S3 operations from now on, by name."""
    operations: Counter[str] = Counter()

    def count(model: Any, **_: Any) -> None:
        operations[model.name] += 1

    for client in map(store._client, tasks.storage.WAITS):
        client.meta.events.register("before-call.s3", count)
    return operations


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of times that each file was hashed."""
    names: Counter[str] = Counter()
    describe = tasks.storage.describe_file

    def counted(path: Path, name: str) -> Any:
        names[path.name] += 1
        return describe(path, name)

    monkeypatch.setattr(tasks.storage, "describe_file", counted)
    return names


def test_the_jobs_of_a_flow_hash_the_packed_dataset_once_and_ask_for_its_objects_once(
    tmp_path: Path, address: str, hashed: Counter[str]
) -> None:
    first, store, folder = Store(address, tmp_path / "cache"), Store(address, tmp_path / "cache"), settled(tmp_path / "packed")
    first.push("data/0", folder)
    hashed.clear()
    operations = requests_of(store)
    for _ in range(5):
        store.push("data/0", folder)
    assert set(hashed.values()) == {1}
    assert operations == {"ListObjectsV2": 5, "HeadObject": 3}


def test_a_file_is_sent_that_changed_with_its_size_and_name_as_before(tmp_path: Path, address: str) -> None:
    here, there, folder = Store(address, tmp_path / "here"), Store(address, tmp_path / "there"), settled(tmp_path / "packed")
    here.push("data/0", folder)
    now = time.time_ns()
    for content in (b"IMAGES.ARROW", b"images-arrow"):  # both within one tick of the clock
        (folder / "images.arrow").write_bytes(content)
        os.utime(folder / "images.arrow", ns=(now, now))
        here.push("data/0", folder)
        assert (there.pull("data/0") / "images.arrow").read_bytes() == content


def test_a_step_is_compared_by_one_list_and_an_object_that_was_replaced_is_seen(tmp_path: Path, address: str) -> None:
    store, client = Store(address, tmp_path / "cache"), boto3.client("s3")
    files = write(store.folder("train/x"))
    store.push("train/x")
    for asks, expected in ((store, {"ListObjectsV2": 4}), (Store(address, tmp_path / "cache"), {"ListObjectsV2": 4, "HeadObject": 2})):
        operations = requests_of(asks)
        for _ in range(4):
            assert asks.changed_files(record(files)) == []
        assert operations == expected, "the answer to a push has what a list does not"
    bucket, key = address.split("/")[2], "some/prefix/train/x/weights.pt"
    client.put_object(Bucket=bucket, Key=key, Body=b"another's", Metadata={"sha256": "0" * 64})
    assert store.changed_files(record(files)) == ["weights.pt"]
    client.put_object(Bucket=bucket, Key=key, Body=(store.folder("train/x") / "weights.pt").read_bytes())  # the same bytes, without a hash
    other = Store(address, tmp_path / "cache")
    assert other.changed_files(record(files)) == []
    assert store.version("train/x/weights.pt")[1] == ""
    other.push("train/x")
    assert store.version("train/x/weights.pt")[1] == {file.name: file.sha256 for file in files}["weights.pt"]


def without_hashes(address: str, bucket: str) -> None:
    """Copy every object to a new bucket, like a tool that does not copy metadata."""
    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    for name in Store(address, Path()).list_objects():
        key = f"some/prefix/{name}"
        client.put_object(Bucket=bucket, Key=key, Body=client.get_object(Bucket=address.split("/")[2], Key=key)["Body"].read())


def test_objects_of_a_bucket_copied_without_metadata_are_read_once_and_compared(tmp_path: Path, address: str) -> None:
    files = write(Store(address, tmp_path / "here").folder("train/x"))
    Store(address, tmp_path / "here").push("train/x")
    without_hashes(address, f"{address.split('/')[2]}-copy")
    copied = Store(f"s3://{address.split('/')[2]}-copy/some/prefix", tmp_path / "copied")
    operations = requests_of(copied)
    for _ in range(3):
        assert copied.changed_files(record(files)) == []
    assert operations == {"ListObjectsV2": 3, "HeadObject": 2, "GetObject": 2}
    assert describe_folder(copied.checked(record(files))) == files
    assert [*copied.list_objects("train/x")] == ["figures/curve.png", "weights.pt"], "sound objects stay"
    boto3.client("s3").put_object(Bucket=copied.address.split("/")[2], Key="some/prefix/train/x/weights.pt", Body=b"damaged")
    assert copied.changed_files(record(files)) == ["weights.pt"]
    operations.clear()
    assert describe_folder(copied.checked(record(files))) == files, "what is whole here is used"
    assert operations == {}
    with pytest.raises(StoreError, match=r"weights\.pt: changed or gone"):
        Store(copied.address, tmp_path / "elsewhere").checked(record(files))


def test_an_object_that_is_replaced_while_it_is_checked_is_seen_as_it_is_afterwards(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the list of the objects and the request for one's hash, another machine pushes; later the first version is back."""
    store, other = Store(address, tmp_path / "cache"), Store(address, tmp_path / "other")
    files, weights = write(store.folder("train/x")), store.folder("train/x") / "weights.pt"
    Store(address, tmp_path / "cache").push("train/x")
    write(other.folder("train/x"))
    listed, list_objects = store.list_objects("train/x"), store.list_objects
    other.push("train/x")
    monkeypatch.setattr(store, "list_objects", lambda key: listed)
    assert store.changed_files(record(files)) == ["weights.pt"]
    monkeypatch.setattr(store, "list_objects", list_objects)
    Store(address, tmp_path / "cache").push("train/x")
    assert weights.is_file()
    assert store.changed_files(record(files)) == []


def test_threads_share_the_clients_of_a_store(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client takes a tenth of a second to make, one after another."""
    made, make = [], tasks.storage._new_client
    monkeypatch.setattr(tasks.storage, "_new_client", lambda waits: made.append(waits) or make(waits))
    store = Store(address, tmp_path)
    with ThreadPoolExecutor(8) as pool:
        clients = [*pool.map(lambda _: store._client("soon"), range(8))]
    assert (made, len({*map(id, clients)})) == (["soon"], 1)


def test_a_large_file_travels_in_parts_and_has_its_hash(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.storage, "MULTIPART_BYTES", 5 << 20)  # the minimum of S3
    here, there = Store(address, tmp_path / "here"), Store(address, tmp_path / "there")
    here.folder("train/x").mkdir(parents=True)
    large = here.folder("train/x") / "weights.pt"
    large.write_bytes(os.urandom(11 << 20))
    operations, sent = requests_of(here), list[int]()
    here.push("train/x", sent=sent.append)
    assert (len(sent) > 3, sum(sent)) == (True, 11 << 20), "each part shows that an upload makes progress"
    assert operations == {"ListObjectsV2": 1, "CreateMultipartUpload": 1, "UploadPart": 3, "CompleteMultipartUpload": 1}
    operations.clear()
    here.push("train/x")
    assert operations == {"ListObjectsV2": 1, "HeadObject": 1}
    assert (there.pull("train/x") / "weights.pt").read_bytes() == large.read_bytes()
    assert [path.name for path in there.folder("train/x").iterdir()] == ["weights.pt"]
    assert (there.folder("train/x") / "weights.pt").stat().st_mode == large.stat().st_mode


def test_a_download_that_breaks_off_leaves_the_file_as_it_was(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write(tmp_path / "train/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", CutsBodies(1000).address)
    with pytest.raises(StoreError, match=r"download_fileobj failed \(5 read, but total bytes expected is 10.*\); check the bucket"):
        Store(address, tmp_path).download("x", tmp_path / "train/x/weights.pt")
    assert describe_folder(tmp_path / "train/x") == files
    assert sorted(path.name for path in (tmp_path / "train/x").iterdir()) == [".temporary", "figures", "weights.pt"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, address: str) -> None:
    """It ends the job at once; a worker's other errors start new workers."""
    write(Store(address, tmp_path).folder("train/x"))
    Store(address, tmp_path).push("train/x")
    with pytest.raises(StoreError, match=r"^/proc/dml/train/x/.*: cannot be written \(.*\); free space, or make the folder writable"):
        Store(address, Path("/proc/dml")).pull("train/x")


@pytest.mark.parametrize("endpoint", ["host:9000", "http://", "http://ho st:9000"])
def test_an_address_that_is_none_is_one_line(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 refuses it when a client is made."""
    login = {"endpoint_url": endpoint, "aws_access_key_id": "x", "aws_secret_access_key": "x"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    store = Store("s3://bucket", tmp_path)
    for ask in (
        store.check_writable,
        store.list_objects,
        partial(store.read, "x"),
        partial(store.version, "x"),
        partial(make_bucket, "b", login),
    ):
        with pytest.raises(StoreError, match=rf"failed \(Invalid endpoint: {endpoint}\); check the bucket, AWS_ENDPOINT_URL and"):
            ask()


def test_a_server_that_accepts_and_stays_silent_is_one_line_after_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after boto3's five attempts of 60 seconds; what a flow requests first has three of 10 seconds."""
    assert [tasks.storage.WAITS[waits]["read_timeout"] for waits in ("first", "soon")] == [10, 15]
    assert tasks.storage.WAITS["first"]["retries"]["total_max_attempts"] == 3
    monkeypatch.setitem(tasks.storage.WAITS["first"], "read_timeout", 0.2)
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda seconds: None))  # between attempts
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    login = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        store, began = Store("s3://bucket", tmp_path), time.monotonic()
        mirrored = partial(copy_objects, "s3://b/x", tmp_path)
        for ask in (store.check_writable, partial(make_bucket, "b", login), partial(find_images, "s3://b/x"), mirrored):
            with pytest.raises(StoreError, match=r"failed \(Read timeout on endpoint URL[^\n]*\); check the bucket"):
                ask()
        assert time.monotonic() - began < 45, "five attempts of 15 seconds are 75"
        monkeypatch.setitem(tasks.storage.WAITS["soon"], "read_timeout", 0.2)
        for ask in (store.list_objects, partial(store.version, "x")):
            with pytest.raises(StoreError, match="Read timeout on endpoint URL"):
                ask()


class RefusesFirst(BaseHTTPRequestHandler):
    """An S3 server with an empty bucket that answers `SlowDown` to the first twelve requests of each kind."""

    refused: Counter[str] = Counter()

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.refused[self.command] += 1
        is_refused = self.refused[self.command] <= 12
        body = b"<Error><Code>SlowDown</Code></Error>" if is_refused else b"<ListBucketResult/>"
        self.send_response(503 if is_refused else 200)
        for name, value in (("ETag", '"etag"'), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = _answer  # noqa: N815 - names of http.server

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_a_push_survives_a_bucket_that_refuses_a_dozen_requests_with_the_documented_settings(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/how-to/cluster.md, "Network outages": a checkpoint's push begins with a list."""
    with ThreadingHTTPServer(("127.0.0.1", 0), RefusesFirst) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "15", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # one of a test with another `os.environ` would read that
        monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda seconds: None))  # between attempts
        write((store := Store(address, tmp_path)).folder("train/x"))
        store.push("train/x")
        assert RefusesFirst.refused == {"GET": 13, "PUT": 14}
        server.shutdown()


class CutsBodies:
    """An HTTP server that ends the connection in the middle of the first bodies."""

    def __init__(self, num_cut: int) -> None:
        self._num_left, self._server = num_cut, socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            caller, _ = self._server.accept()
            with caller:
                head = b'HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\nETag: "etag"\r\nConnection: close\r\n\r\n'
                if caller.recv(65536).startswith(b"HEAD"):
                    caller.sendall(head)
                    continue
                caller.sendall(head + b"0123456789"[: 5 if self._num_left else 10])
                self._num_left -= 1


@pytest.mark.parametrize("num_cut", [1, 2])
def test_a_range_whose_body_ends_early_is_requested_once_more(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, num_cut: int
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", CutsBodies(num_cut).address)
    store = Store(address, tmp_path)
    if num_cut == 1:
        assert store.read_range("x", 20, 30, '"etag"') == b"0123456789"
    else:
        with pytest.raises(StoreError, match=r"get_object failed \(.*\); check the bucket"):
            store.read_range("x", 20, 30, '"etag"')


@pytest.mark.parametrize("num_cut", [1, 2])
def test_an_object_whose_body_ends_early_is_requested_once_more(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, num_cut: int
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", CutsBodies(num_cut).address)
    if num_cut == 1:
        assert Store(address, tmp_path).read("x") == b"0123456789"
    else:
        with pytest.raises(StoreError, match=r"get_object failed \(.*\); check the bucket"):
            Store(address, tmp_path).read("x")


def test_an_object_that_is_gone_is_told_from_a_bucket_that_cannot_be_read(tmp_path: Path, s3_bucket: str) -> None:
    with pytest.raises(DataError, match="gone/x is gone or archived"):
        Store(f"s3://{s3_bucket}", tmp_path).read("gone/x")
    with pytest.raises(StoreError, match=r"get_object failed \(.*NoSuchBucket"):
        Store("s3://no-such-bucket", tmp_path).read("x")
