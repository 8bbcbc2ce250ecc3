"""Where finished work is kept: a folder, or an S3 bucket that all machines share. The only module that knows object stores.

A step writes into `folder(key)` on its machine and then calls `push(key)`; whoever reads calls `pull(key)` first. For a folder store both
do nothing; for S3 `folder(key)` is a cache, and files travel with their SHA-256 so that a pull fetches only what differs. Before a step
runs anew, `clear(key)` takes away what an earlier one left; before its files are used, `checked(record)` compares them with the record.
"""

import hashlib
import logging
import tempfile
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from dml_core.data.readers.shared.archives import Progress, download
from dml_core.errors import DataError, StoreError
from tasks.runs.records import FileRecord, StepRecord, changed_file, describe_file, describe_folder, visible_files

CHUNK_BYTES = 1 << 20
SET_ASIDE_PREFIX = ".damaged-"
logger = logging.getLogger(__name__)


class DamagedObjectError(StoreError):
    """An object of a remote store whose bytes are not those that were pushed."""


class Store:
    """A store by its address.

    Args:
        address: a folder, or `s3://bucket/prefix` (endpoint and credentials are the AWS environment's, `AWS_ENDPOINT_URL` included).
        cache: where the files of an S3 store are kept on this machine; unused for a folder.
    """

    def __init__(self, address: str, cache: Path) -> None:
        self.address = address
        self.cache = cache

    def folder(self, key: str) -> Path:
        """The folder of `key` on this machine, whether or not it holds anything yet."""
        return (self.cache if self.is_remote else Path(self.address)) / key

    @property
    def is_remote(self) -> bool:
        """Whether files must travel to be seen by other machines."""
        return self.address.startswith("s3://")

    def check_writable(self) -> None:
        """Write and remove a small file.

        Raises:
            StoreError: the store cannot be written; said before any work is done.
        """
        if self.is_remote:
            self._call("put_object", Key=self._object_key(".writable"), Body=b"")
            self._call("delete_object", Key=self._object_key(".writable"))
            return
        try:
            Path(self.address).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.address):
                pass
        except OSError as error:
            raise StoreError(
                f"store {self.address}: not writable ({error.strerror}); set DML_STORE to a folder or s3:// address that is"
            ) from None

    def push(self, key: str) -> None:
        """Make the files in `folder(key)` visible to all machines."""
        if self.is_remote:
            self.push_folder(self.folder(key), key)

    def push_folder(self, folder: Path, key: str) -> None:
        """Bring the files of any folder to a remote store, under `key`; those that are there already are not sent again."""
        there = self._remote_hashes(key)
        for file in describe_folder(folder):
            if there.get(file.name) != file.sha256:
                with (folder / file.name).open("rb") as body:
                    self._call("put_object", Key=self._object_key(f"{key}/{file.name}"), Body=body, Metadata={"sha256": file.sha256})

    def pull(self, key: str) -> Path:
        """Make `folder(key)` hold what the store has under `key`, and nothing else, and return it.

        An object whose bytes do not fit its hash is set aside in the store and left out, with a warning.
        """
        folder = self.folder(key)
        if not self.is_remote:
            return folder
        there = self._remote_hashes(key)
        for file in visible_files(folder):
            if file.relative_to(folder).as_posix() not in there:
                file.unlink(missing_ok=True)
        for name, sha256 in there.items():
            path = folder / name
            if not path.exists() or describe_file(path, name).sha256 != sha256:
                self._fetch_whole(f"{key}/{name}", path, sha256)
        return folder

    def changed_files(self, record: StepRecord) -> list[str]:
        """Names of the record's files that the store has not, or not with the bytes that were recorded."""
        if self.is_remote:
            there = self._remote_hashes(record.key)
            return [file.name for file in record.files if there.get(file.name) != file.sha256]
        return [file.name for file in record.files if not _same_file(self.folder(record.key), file)]

    def checked(self, record: StepRecord) -> Path:
        """The folder of a finished step on this machine, every file with the bytes that were recorded.

        Raises:
            StoreError: one is not; the same command started again runs the step anew.
        """
        folder = self.pull(record.key)
        for file in record.files:
            if not _same_file(folder, file):
                raise changed_file(folder / file.name)
        return folder

    def clear(self, key: str, keep: Collection[str] = ()) -> None:
        """Take away what is under `key`, here and in a remote store, but for the files named in `keep` and what was set aside.

        Raises:
            StoreError: it cannot be removed.
        """
        folder = self.folder(key)
        try:
            for path in sorted(folder.rglob("*"), reverse=True):  # what is in a folder comes before the folder
                if path.is_dir() and not path.is_symlink():
                    if not any(path.iterdir()):
                        path.rmdir()
                elif path.relative_to(folder).as_posix() not in keep and not path.name.startswith(SET_ASIDE_PREFIX):
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be cleared ({error.strerror or error})") from None
        if self.is_remote:
            for name in [name for name in self.list_objects(key) if name not in keep]:
                self._call("delete_object", Key=self._object_key(f"{key}/{name}"))

    # ------------------------------------------------------------ S3

    @cached_property
    def _client(self) -> Any:
        import boto3

        return boto3.client("s3")

    @property
    def _bucket(self) -> str:
        return self.address.removeprefix("s3://").partition("/")[0]

    def _object_key(self, key: str) -> str:
        prefix = self.address.removeprefix("s3://").partition("/")[2].strip("/")
        return "/".join(part for part in (prefix, key) if part)

    def _call(self, operation: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client, operation)(Bucket=self._bucket, **arguments)
        except (BotoCoreError, ClientError) as error:
            raise StoreError(
                f"store {self.address}: {operation} failed ({error}); check the bucket, AWS_ENDPOINT_URL and credentials"
            ) from None

    def list_objects(self, key: str = "") -> Iterator[str]:
        """Name below `key` of every object there."""
        prefix = f"{self._object_key(key)}/".removeprefix("/")
        token: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=prefix, **token)
            for entry in page.get("Contents", []):
                yield entry["Key"].removeprefix(prefix)
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def fetch(self, key: str, path: Path, progress: Progress | None = None) -> None:
        """Fetch one large object by a signed link; an interrupted fetch goes on where it stopped.

        Raises:
            StoreError: it cannot be read, or ends before all of it has come; the part that has come is kept.
        """
        arguments = {"Bucket": self._bucket, "Key": self._object_key(key)}
        link = self._client.generate_presigned_url("get_object", Params=arguments)
        try:
            download(link, path, progress)
        except DataError as error:
            raise StoreError(str(error).replace(link, f"{self.address}/{key}")) from None

    def read(self, key: str) -> bytes:
        """One small object.

        Raises:
            StoreError: it cannot be read.
        """
        data: bytes = self._call("get_object", Key=self._object_key(key))["Body"].read()
        return data

    def download(self, key: str, path: Path, sha256: str | None = None) -> None:
        """Fetch one object beside `path`, check its hash where it is known, and rename it into place.

        Raises:
            DamagedObjectError: its bytes are not those of the hash.
            StoreError: it cannot be read.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        found = self._call("get_object", Key=self._object_key(key))
        digest = hashlib.sha256()
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".pull-", delete=False) as file:
            for chunk in iter(lambda: found["Body"].read(CHUNK_BYTES), b""):
                digest.update(chunk)
                file.write(chunk)
        if sha256 not in (None, digest.hexdigest()):
            Path(file.name).unlink()
            raise DamagedObjectError(f"store {self.address}: {key} arrived damaged (SHA-256 differs)")
        Path(file.name).replace(path)

    def _fetch_whole(self, key: str, path: Path, sha256: str) -> None:
        """Fetch one object; one that arrives damaged twice is damaged in the store, and set aside there, for a step to make it anew."""
        for _ in range(2):
            try:
                return self.download(key, path, sha256)
            except DamagedObjectError as error:
                found = error
        folder, _, name = key.rpartition("/")
        aside = f"{folder}/{SET_ASIDE_PREFIX}{name}"
        source = {"Bucket": self._bucket, "Key": self._object_key(key)}
        self._call("copy_object", Key=self._object_key(aside), CopySource=source)
        self._call("delete_object", Key=self._object_key(key))
        path.unlink(missing_ok=True)
        logger.warning("%s; kept as %s", found, aside)
        return None

    def _remote_hashes(self, key: str) -> dict[str, str]:
        """File name below `key` -> SHA-256 as it was pushed; what was set aside is left out."""
        names = [name for name in self.list_objects(key) if not name.rpartition("/")[2].startswith(SET_ASIDE_PREFIX)]
        heads = {name: self._call("head_object", Key=self._object_key(f"{key}/{name}")) for name in names}
        return {name: head["Metadata"].get("sha256", "") for name, head in heads.items()}


def copy_objects(address: str, folder: Path, progress: Progress | None = None) -> None:
    """Copy every object below `s3://bucket/prefix` that `folder` does not have; what is there stays, an interrupted copy goes on.

    Args:
        address: the prefix; object names below it become paths below `folder`.
        folder: made where it is missing.
        progress: called with (bytes done, bytes in all) of each object.

    Raises:
        StoreError: the bucket cannot be read, or an object's name leads out of the folder.
    """
    source = Store(address, folder)
    for name in source.list_objects():
        path = folder / name
        if path.is_file():
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise StoreError(f"{address}: refused, object '{name}' would be written outside {folder}")
        source.fetch(name, path, progress)


def make_bucket(name: str, login: dict[str, str]) -> None:
    """Make a bucket on a server of one's own, where it is missing.

    Args:
        name: of the bucket.
        login: `endpoint_url`, `aws_access_key_id` and `aws_secret_access_key`.

    Raises:
        StoreError: the server does not make it.
    """
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client = boto3.client("s3", region_name="us-east-1", **login)
        if name not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=name)
    except (BotoCoreError, ClientError) as error:
        raise StoreError(f"bucket {name} cannot be made at {login['endpoint_url']}: {error}") from None


def enable_s3_weights() -> None:
    """Let a backbone's `weights: s3://bucket/key` work in this process; every process that builds a network calls it."""
    from dml_core.models.backbones.weights import DOWNLOADERS

    def fetch(address: str, path: Path) -> None:
        bucket, _, key = address.removeprefix("s3://").rpartition("/")[0].partition("/")
        Store(f"s3://{bucket}/{key}", path.parent).download(address.rpartition("/")[2], path)

    DOWNLOADERS["s3"] = fetch


def _same_file(folder: Path, file: FileRecord) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.num_bytes and describe_file(path, file.name).sha256 == file.sha256
