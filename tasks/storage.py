"""Store of finished work: a folder, or an S3 bucket that all machines share. No other module accesses object stores.

A step writes into `folder(key)` on its machine and then calls `push(key)`; a reader calls `pull(key)` first. For a folder store both do
nothing; for S3 `folder(key)` is a cache, and files are stored with their SHA-256 so that a pull fetches only what differs. Before a step
runs again, `clear(key)` removes the earlier files; before its files are used, `checked(record)` compares them with the record.

A store hashes a file again only when its size, time or inode changed, and asks for an object's hash, or reads one without it, only when its
ETag changed: all runs of a flow check the same dataset and networks.
"""

import hashlib
import logging
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

from dml_core.data.readers.shared.archives import Progress
from dml_core.errors import DataError, StoreError
from dml_core.files import SET_ASIDE, write_errors, writing
from dml_core.training.pulse import beat
from tasks.environment import Project, ray_cluster, without_secrets
from tasks.runs.records import StepRecord, changed_file, describe_file, visible_files

MULTIPART_BYTES = 64 << 20  # an upload or download in one piece is limited to 5 GiB and restarts from its first byte
HEADS_AT_ONCE, READS_AT_ONCE = 8, 32  # requests for hashes in a call; requests for byte ranges, of a process
WAITS: dict[str, dict[str, Any]] = {
    "first": {"read_timeout": 10, "retries": {"total_max_attempts": 3}},  # of a flow's first request: half a minute at most
    "soon": {"read_timeout": 15},  # of lists, hashes and byte ranges: five times less than after which silent workers are replaced
    "long": {},  # boto3's 60 s are for copies
}
GONE = ("PreconditionFailed", "NoSuchKey", "InvalidRange", "InvalidObjectState", "404", "412", "416")  # codes of one object, not of a store
SETTLED_SECONDS = 2.0  # a file written within a clock tick of its hashing may change without a new time
_CREATION = Lock()
logger = logging.getLogger(__name__)


class DamagedObjectError(StoreError):
    """An object of a bucket whose bytes are not those that were pushed."""


class Store:
    """A store, given by its address.

    Args:
        address: a folder, or `s3://bucket/prefix` (endpoint and credentials come from the AWS environment, `AWS_ENDPOINT_URL` included).
        cache: folder for the files of an S3 store on this machine; unused for a folder store.
    """

    def __init__(self, address: str, cache: Path) -> None:
        self.address, self.cache = address, cache
        self.is_remote = address.startswith("s3://")  # files must be pushed for other machines to see them
        self.locks = self.folder(".locks")  # of steps and flows on this machine
        self._bucket, _, self._prefix = address.removeprefix("s3://").partition("/")
        self._clients: dict[str, Any] = {}  # of boto3, by the name of their WAITS
        self._file_hashes: dict[tuple[Path, int, int, int], str] = {}  # (path, size, time, inode) -> SHA-256
        self._object_hashes: dict[tuple[str, str, bool], str] = {}  # (object key, ETag, `reads` of `_object_hash`) -> SHA-256

    @property
    def is_for_nodes(self) -> bool:
        """True for a folder that other machines have to reach: those of a Ray cluster, by its address."""
        address = ray_cluster()
        return not (self.is_remote or address is None or address.startswith(("127.", "localhost", "auto")))

    def folder(self, key: str) -> Path:
        """Return the folder of `key` on this machine, which need not exist yet."""
        return (self.cache if self.is_remote else Path(self.address)) / key

    def step_lock(self, step: str, identity: str) -> Path:
        """Return the file of the lock that a step holds from before its first file until its record is stored."""
        return self.locks / f".{step}-{identity}"

    def check_writable(self) -> None:
        """Write and remove a small file.

        Raises:
            StoreError: the store is not writable; raised before any work is done.
        """
        if self.is_remote:
            self._call("put_object", ".writable", "first", Body=b"")
            return self._call("delete_object", ".writable", "first")
        try:
            Path(self.address).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.address):
                pass
        except OSError as error:
            raise StoreError(f"store {self.address}: not writable ({error.strerror}); set DML_STORE to a writable place") from None

    def push(self, key: str, folder: Path | None = None, sent: Callable[[int], None] = lambda _: None) -> None:
        """Make the files of `folder`, by default `folder(key)`, visible to all machines; those there with their hash are skipped.

        An empty key is the whole store. `sent` is called during the transfer, for each file once at least.
        """
        if not self.is_remote:
            return
        there = self._remote_hashes(key, reads=False)
        for path in visible_files(folder := folder or self.folder(key)):
            name, sha256 = path.relative_to(folder).as_posix(), self._file_hash(path)
            if there.get(name) != sha256:
                self._upload(f"{key}/{name}".removeprefix("/"), path, sha256, sent)
            sent(0)

    def _upload(self, key: str, path: Path, sha256: str, sent: Callable[[int], None]) -> None:
        """Upload one file with its hash; a small one in one request, whose answer has the ETag under which it will be listed."""
        metadata = {"sha256": sha256}
        if path.stat().st_size >= MULTIPART_BYTES:
            self._call("upload_file", key, Filename=str(path), ExtraArgs={"Metadata": metadata}, Callback=sent, Config=_transfers())
            return
        with path.open("rb") as file:
            etag = self._call("put_object", key, Body=file, Metadata=metadata)["ETag"]
        self._object_hashes |= {(key, etag, reads): sha256 for reads in (False, True)}

    def pull(self, key: str, without: Collection[str] = ()) -> Path:
        """Make `folder(key)` hold exactly what the store has under `key`, except the files named in `without`, and return it.

        An object whose bytes do not match its hash is set aside in the store and skipped, with a warning.
        """
        folder = self.folder(key)
        if not self.is_remote:
            return folder
        there = {name: sha256 for name, sha256 in self._remote_hashes(key).items() if name not in without}
        for file in visible_files(folder):
            if file.relative_to(folder).as_posix() not in there:
                file.unlink(missing_ok=True)
        for name, sha256 in there.items():
            path = folder / name
            if not path.exists() or self._file_hash(path) != sha256:
                self._fetch_whole(f"{key}/{name}", path, sha256)
        return folder

    def changed_files(self, record: StepRecord) -> list[str]:
        """Return the names of the record's files that the store lacks or holds with other bytes than recorded."""
        if self.is_remote:
            there = self._remote_hashes(record.key)
            return [file.name for file in record.files if there.get(file.name) != file.sha256]
        return self._changed_here(record)

    def checked(self, record: StepRecord) -> Path:
        """Return the folder of a finished step on this machine, verified against the record; if it differs, a bucket is asked first.

        Raises:
            StoreError: a file differs; the same command started again reruns the step.
        """
        folder = self.folder(record.key)
        here = [path.relative_to(folder).as_posix() for path in visible_files(folder)]
        if self.is_remote and (sorted(here) != sorted(file.name for file in record.files) or self._changed_here(record)):
            self.pull(record.key)
        for name in self._changed_here(record):
            raise changed_file(folder / name)
        return folder

    def _changed_here(self, record: StepRecord) -> list[str]:
        """Return the names of the record's files that are missing or differ in its folder on this machine."""
        paths = {file: self.folder(record.key) / file.name for file in record.files}
        return [file.name for file, path in paths.items() if not path.is_file() or self._file_hash(path) != file.sha256]

    def clear(self, key: str, keep: Collection[str] = ()) -> None:
        """Remove everything under `key`, here and in a remote store, except the files named in `keep` and damaged files set aside.

        Raises:
            StoreError: it cannot be removed.
        """
        folder = self.folder(key)
        try:
            for path in sorted(folder.rglob("*"), reverse=True):  # contents before their folder
                if path.is_dir() and not path.is_symlink():
                    if not any(path.iterdir()):
                        path.rmdir()
                elif path.relative_to(folder).as_posix() not in keep and SET_ASIDE not in path.name:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be cleared ({error.strerror or error})") from None
        for name in self.list_objects(key) if self.is_remote else ():
            if name not in keep and SET_ASIDE not in name:
                self._call("delete_object", f"{key}/{name}")

    def _file_hash(self, path: Path) -> str:
        """Return the SHA-256 of a file's current content."""
        status = path.stat()
        version = path, status.st_size, status.st_mtime_ns, status.st_ino
        sha256 = self._file_hashes.get(version) or describe_file(path, path.name).sha256
        if time.time() - status.st_mtime > SETTLED_SECONDS:
            self._file_hashes[version] = sha256
        return sha256

    def _client(self, waits: str) -> Any:
        """Return the client with these of the WAITS, which is created on first use, so that a new store can be sent to other machines."""
        if waits not in self._clients:
            with _CREATION:  # boto3 makes no clients in several threads at once
                self._clients[waits] = self._clients.get(waits) or _new_client(waits)
        return self._clients[waits]

    def _object_key(self, key: str) -> str:
        return "/".join(part for part in (self._prefix.strip("/"), key) if part)

    @contextmanager
    def _one_line(self, operation: str) -> Iterator[None]:
        """Turn boto3's errors into one line each."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
        from s3transfer.exceptions import RetriesExceededError

        try:
            yield
        except (Boto3Error, BotoCoreError, ClientError, RetriesExceededError, ValueError) as error:  # ValueError: of an address
            reason = without_secrets(str(getattr(error, "last_exception", error)))
            remedy = "check the bucket, AWS_ENDPOINT_URL and credentials"
            raise StoreError(f"store {self.address}: {operation} failed ({reason}); {remedy}") from None

    def _call(self, operation: str, key: str, waits: str = "long", **arguments: Any) -> Any:
        with self._one_line(operation):
            return getattr(self._client(waits), operation)(Bucket=self._bucket, Key=self._object_key(key), **arguments)

    def list_objects(self, key: str = "", is_first: bool = False) -> dict[str, str]:
        """Return name -> ETag of every object below `key`, also as a command's first request. Folder markers ("NAME/") are skipped."""
        prefix = f"{self._object_key(key)}/".removeprefix("/")
        with self._one_line("list_objects_v2"):
            if is_first:
                self._client("first").list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=1)
            pages = self._client("soon").get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            entries = [entry for page in pages for entry in page.get("Contents", []) if not entry["Key"].endswith("/")]
            return {entry["Key"].removeprefix(prefix): entry["ETag"] for entry in entries}

    def fetch(self, key: str, path: Path, progress: Progress) -> None:
        """Fetch one large object; an interrupted fetch resumes where it stopped, and starts again if the object was replaced meanwhile.

        Raises:
            StoreError: it cannot be read, or ends early; the part received is kept.
        """
        etag, total = map(self._call("head_object", key, "soon").get, ("ETag", "ContentLength"))
        received = path.with_name(f".{hashlib.sha256(f'{path.name} {etag}'.encode()).hexdigest()}.partial")  # however long the name is
        received.parent.mkdir(parents=True, exist_ok=True)
        with received.open("ab") as file, self._one_line("get_object"):
            if file.tell() < total:
                answer = self._call("get_object", key, IfMatch=etag, Range=f"bytes={file.tell()}-")
                for part in answer["Body"].iter_chunks(2**20):
                    file.write(part)
                    progress(file.tell(), total)
        received.replace(path)

    def read(self, key: str) -> bytes:
        """Return the bytes of one small object.

        Raises:
            DataError: the object was removed, or is archived.
            StoreError: the bucket cannot be read.
        """
        if (data := self._body(key)) is None:
            raise DataError(f"store {self.address}: {key} is gone or archived; restore it")
        return data

    def version(self, key: str) -> tuple[str, str]:
        """Return the ETag of one object, and the SHA-256 that it was pushed with, empty if it has none.

        Raises:
            StoreError: it cannot be read.
        """
        head = self._call("head_object", key, "soon")
        return str(head["ETag"]), str(head["Metadata"].get("sha256", ""))

    def read_range(self, key: str, start: int, stop: int, etag: str) -> bytes:
        """Return the bytes from `start` to before `stop` of one object, of the version that has this ETag. Threads may share the store.

        Raises:
            StoreError: it cannot be read, or was replaced, cut or removed.
        """
        data = self._body(key, Range=f"bytes={start}-{stop - 1}", IfMatch=etag) or b""
        if len(data) != stop - start:
            raise StoreError(f"store {self.address}: {key} changed or gone; rerun the command, which pushes it again")
        return data

    def _body(self, key: str, **given: Any) -> bytes | None:
        """Return the body of one object or of its range; None if the object was replaced, cut, removed or archived."""
        from botocore.exceptions import BotoCoreError, ClientError

        with self._one_line("get_object"):
            get = partial(self._client("soon").get_object, Bucket=self._bucket, Key=self._object_key(key), **given)
            try:
                body = get()["Body"]
                with suppress(BotoCoreError):  # boto3 retries a request, but not a body that ends early
                    return bytes(body.read())
                return bytes(get()["Body"].read())
            except ClientError as error:
                if error.response["Error"]["Code"] not in GONE:
                    raise
                return None

    def download(self, key: str, path: Path, sha256: str | None = None) -> None:
        """Fetch one object into `path`, which is replaced once the object is complete and matches its hash, if that is known.

        Raises:
            DamagedObjectError: its bytes do not match the hash.
            StoreError: it cannot be read, or `path` cannot be written.
        """
        with write_errors(f"{path}:", "free space, or make the folder writable"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with writing(path) as file:
                self._call("download_fileobj", key, Fileobj=file, Callback=lambda _: beat(patience=True), Config=_transfers())
                file.seek(0)
                if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:  # type: ignore[arg-type]
                    raise DamagedObjectError(f"store {self.address}: {key} arrived damaged (SHA-256 differs)")

    def _fetch_whole(self, key: str, path: Path, sha256: str) -> None:
        """Fetch one object, or what replaces it meanwhile. What arrives damaged twice is set aside in the store: a step makes it again."""
        damaged: list[str] = []  # hashes of versions whose bytes were others
        while damaged.count(sha256) < 2:
            try:
                return self.download(key, path, sha256)
            except DamagedObjectError as error:
                damage, damaged = error, [*damaged, sha256]
            sha256 = self.version(key)[1] or sha256
        folder, _, name = key.rpartition("/")
        aside = next(f"{folder}/{new}" for number in count(1) if (new := f".{name}{SET_ASIDE}{number}") not in self.list_objects(folder))
        self._call("copy", aside, CopySource={"Bucket": self._bucket, "Key": self._object_key(key)}, Config=_transfers())
        self._call("delete_object", key)
        path.unlink(missing_ok=True)
        return logger.warning("%s; kept as %s", damage, aside)

    def _remote_hashes(self, key: str, reads: bool = True) -> dict[str, str]:
        """Return name -> SHA-256 (`_object_hash`) of each object below `key`; those set aside are omitted."""
        start = f"{key}/".removeprefix("/")
        versions = {name: (start + name, etag) for name, etag in self.list_objects(key).items() if SET_ASIDE not in name}
        with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
            return dict(zip(versions, pool.map(partial(self._object_hash, reads=reads), versions.values()), strict=True))

    def _object_hash(self, version: tuple[str, str], reads: bool) -> str:
        """Return the SHA-256 an object, given by key and ETag, was pushed with: it is not in a list of objects, and costs a request.

        After a copy without metadata: that of its content if `reads`; otherwise empty, and a push of the same bytes adds it.
        """
        if sha256 := self._object_hashes.get((*version, reads)):
            return sha256
        etag, sha256 = self.version(version[0])
        if reads and not sha256:
            body = self._call("get_object", version[0], IfMatch=etag)["Body"]
            with self._one_line("get_object"):
                sha256 = hashlib.file_digest(body, "sha256").hexdigest()
        self._object_hashes[version[0], etag, reads] = sha256  # not of the listed version if it was replaced meanwhile
        return sha256


def open_store(project: Project) -> Store:
    """Return the project's store; copies of a bucket's folders are kept in the state folder."""
    return Store(project.store, project.state / "cache")


def _new_client(waits: str, **given: Any) -> Any:
    """Return boto3's client with these of the WAITS, settings of botocore's `Config`."""
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(max_pool_connections=READS_AT_ONCE, connect_timeout=5, **WAITS[waits]), **given)


def _transfers() -> Any:
    """Return the transfer settings: large files in parts, so that only a lost part is sent again."""
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(multipart_threshold=MULTIPART_BYTES, multipart_chunksize=MULTIPART_BYTES)


def push_objects(folder: Path, address: str) -> None:
    """Upload what `copy_objects` copied to `s3://bucket/prefix`, each file with its hash; unchanged files are skipped.

    Raises:
        StoreError: the bucket cannot be written, or the folder is missing.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder}: no such folder")
    Store(address, folder).push("", folder)


def make_bucket(name: str, login: dict[str, str]) -> None:
    """Create a bucket on the project's own server, if missing; `login` has boto3's `endpoint_url`, access key and secret key.

    Raises:
        StoreError: the server does not create it.
    """
    with Store(f"s3://{name}", Path())._one_line("create_bucket"):
        client = _new_client("first", region_name="us-east-1", **login)
        if name not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=name)


def enable_s3_weights() -> None:
    """Enable a backbone's `weights: s3://bucket/key` in this process; every process that builds a network calls it."""
    from dml_core.models.backbones.weights import DOWNLOADERS

    def fetch(address: str, path: Path) -> None:
        folder, _, name = address.rpartition("/")
        Store(folder, path.parent).download(name, path)

    DOWNLOADERS["s3"] = fetch
