"""Images read from a bucket over HTTP: the packed bytes in every process, fetched ahead, and no other bytes."""

import faulthandler
import os
import pickle
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import torch

from dml_core.data.store.info import IMAGES_FILE
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.ranges import RANGES_FILE
from dml_core.data.views.batches import Loader, TrainView
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import DataError, StoreError
from tasks.remote_images import reading
from tasks.remote_images.reading import CACHE_FOLDER, RemoteImages, push_ranges
from tasks.storage import Store
from tests.forked import forked

KEY = "data/x"
VIEW = TrainView(TransformConfig(crop="padded", padding=2, crop_size=24, flip=True), seed=1, epoch=2)
BATCHES = [*np.random.default_rng(0).permutation(36).reshape(9, 4), np.array([], dtype=np.int64), np.array([5, 5, 7])]
NOTHING, EVERYTHING = 1e-9, 1.0  # gigabytes


class Bucket:
    """A packed dataset in a bucket, the folder of a machine that reads it, and the requests that this process makes."""

    def __init__(self, packed: Path, address: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packed, self.address, self.store = packed, address, Store(address, cache)
        self.requests: list[tuple[int, int]] = []
        self.before_request: Callable[[], object] = lambda: None
        read_range = Store.read_range

        def counted(store: Store, key: str, start: int, stop: int, etag: str) -> bytes:
            self.requests.append((start, stop))
            self.before_request()
            return read_range(store, key, start, stop, etag)

        monkeypatch.setattr(Store, "read_range", counted)

    def push(self) -> None:
        driver = Store(self.address, self.packed.parent / "driver")
        driver.push(KEY, self.packed)
        push_ranges(driver, self.packed, KEY)

    def images(self, cache_gb: float = NOTHING) -> RemoteImages:
        self.store.pull(KEY, without=(IMAGES_FILE,))
        return RemoteImages(self.address, self.store.cache, KEY, cache_gb)

    def dataset(self, cache_gb: float = NOTHING) -> PackedDataset:
        images = self.images(cache_gb)
        return PackedDataset(self.store.folder(KEY), "train", source=images)

    def all_arrive(self, num_requests: int) -> bool:
        """Wait until so many requests were made; return whether they were."""
        until = time.monotonic() + 20
        while len(self.requests) < num_requests and time.monotonic() < until:
            time.sleep(0.01)
        return len(self.requests) >= num_requests

    def replace(self, data: bytes, keep_hash: bool = True) -> None:
        """Put other bytes under the name of the images, with the metadata of the present object."""
        name = {"Bucket": self.address.split("/")[2], "Key": f"store/{KEY}/{IMAGES_FILE}"}
        client = boto3.client("s3")
        metadata = client.head_object(**name)["Metadata"] if keep_hash else {}
        client.put_object(**name, Body=data, Metadata=metadata)


@pytest.fixture
def bucket(packed: Path, tmp_path: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    made = Bucket(packed, f"s3://{s3_bucket}/store", tmp_path / "machine", monkeypatch)
    made.push()
    return made


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read each image by its own request, as from a large dataset, whose drawn images are far from each other."""
    monkeypatch.setattr(reading, "GAP_BYTES", -1)


def batches_of(dataset: PackedDataset, num_loader_workers: int = 0) -> list[torch.Tensor]:
    loader = Loader(dataset, num_loader_workers)
    images = [pixels for pixels, _ in loader.batches(BATCHES, VIEW)]
    loader.close()
    return images


def fetching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("images of a bucket")]


def all_threads_end() -> bool:
    """Wait for them, longer than a request that is sent again takes; print where those are that remain."""
    until = time.monotonic() + 60
    while fetching_threads() and time.monotonic() < until:
        time.sleep(0.01)
    remaining = fetching_threads()
    if remaining:
        faulthandler.dump_traceback(2)
    return not remaining


@pytest.mark.parametrize(("num_loader_workers", "cache_gb"), [(0, NOTHING), (0, 5e-6), (0, EVERYTHING), (2, 5e-6), (2, EVERYTHING)])
def test_batches_are_those_of_the_local_file(bucket: Bucket, num_loader_workers: int, cache_gb: float) -> None:
    expected = batches_of(PackedDataset(bucket.packed, "train"))
    for _ in range(2):
        found = batches_of(bucket.dataset(cache_gb), num_loader_workers)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not (bucket.store.folder(KEY) / IMAGES_FILE).exists()
    assert all_threads_end()


def test_every_role_has_the_packed_bytes_and_pickles_small(bucket: Bucket) -> None:
    images = bucket.images()
    for role in ("train", "test"):
        here = PackedDataset(bucket.packed, role)
        there = PackedDataset(bucket.store.folder(KEY), role, source=images)
        there.expect(np.arange(len(there)))
        assert [there.raw_bytes(index) for index in range(len(there))] == [here.raw_bytes(index) for index in range(len(here))]
    assert len(pickle.dumps(there)) < 1500


def read_to(file: Path, dataset: PackedDataset, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    file.write_bytes(dataset.raw_bytes(3))


@pytest.mark.slow
def test_a_process_that_inherits_nothing_opens_its_own_connections(bucket: Bucket, tmp_path: Path) -> None:
    dataset = bucket.dataset()
    expected = dataset.raw_bytes(3)
    assert forked(read_to, tmp_path / "read", dataset, dict(os.environ)) == 0
    assert (tmp_path / "read").read_bytes() == expected


@pytest.mark.usefixtures("apart")
def test_a_forked_process_waits_for_no_request_of_its_parent(bucket: Bucket) -> None:
    images, parent, answered = bucket.images(), os.getpid(), threading.Event()
    bucket.before_request = lambda: os.getpid() != parent or answered.wait(60)
    images.expect([3])
    child = get_context("fork").Process(target=images.read, args=(3,))
    child.start()
    child.join(30)
    code = child.exitcode
    child.kill()
    answered.set()
    images.expect([])
    assert code == 0


def test_a_cached_image_is_requested_once_and_images_in_sequence_together(bucket: Bucket) -> None:
    images = bucket.images(EVERYTHING)
    images.expect(range(36))
    data = [images.read(position) for position in range(36)]
    assert len(bucket.requests) == 1
    images.expect(())
    again = bucket.images(EVERYTHING)
    again.expect(range(36))
    assert [again.read(position) for position in range(36)] == data
    assert len(bucket.requests) == 1


def test_requests_are_limited_in_size_and_gap(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    images = bucket.images()
    images.read(0)
    ((start, stop),) = bucket.requests
    monkeypatch.setattr(reading, "REQUEST_BYTES", 4 * (stop - start))
    images.expect(range(36))
    for position in range(36):
        images.read(position)
    assert max(stop - start for start, stop in bucket.requests) <= reading.REQUEST_BYTES
    monkeypatch.setattr(reading, "GAP_BYTES", 0)
    images.expect([])
    bucket.requests.clear()
    images.expect([0, 1, 5])
    images.read(5)
    images.expect([])
    assert len(bucket.requests) == 2


@pytest.mark.usefixtures("apart")
def test_following_batches_are_fetched_while_one_is_used(bucket: Bucket) -> None:
    loaded = Loader(bucket.dataset()).batches(BATCHES, VIEW)
    next(loaded)
    assert bucket.all_arrive(36), "all other batches are within the look-ahead, and nothing asked for them"
    bucket.requests.clear()
    assert len(list(loaded)) == len(BATCHES) - 1
    assert len(bucket.requests) <= 1, "image 0 gives an empty batch its shape, and may be forgotten by then"


@pytest.mark.usefixtures("apart")
def test_the_look_ahead_is_limited(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dml_core.data.views.batches._AHEAD_IMAGES", 9)
    loaded = Loader(bucket.dataset()).batches(BATCHES, VIEW)
    next(loaded)
    assert bucket.all_arrive(12), "the batch and two more of four images"
    time.sleep(0.2)
    assert len(bucket.requests) == 12


@pytest.mark.usefixtures("apart")
def test_an_iteration_that_ends_early_leaves_no_thread_and_starts_no_further_request(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "READS_AT_ONCE", 2)
    bucket.before_request = lambda: time.sleep(0.02)
    loader = Loader(bucket.dataset())
    loaded = loader.batches(BATCHES, VIEW)
    next(loaded)
    assert fetching_threads()
    loaded.close()  # type: ignore[attr-defined]
    num_requests = len(bucket.requests)
    assert all_threads_end()
    assert len(bucket.requests) <= num_requests + 2
    assert [indices.tolist() for _, indices in loader.batches(BATCHES[-1:], VIEW)] == [[5, 5, 7]]


# ---------------------------------------------------------------- faults


def test_a_dataset_that_was_pushed_without_ranges_gets_them(bucket: Bucket) -> None:
    name = {"Bucket": bucket.address.split("/")[2], "Key": f"store/{KEY}/{RANGES_FILE}"}
    boto3.client("s3").delete_object(**name)
    with pytest.raises(DataError, match=rf"{RANGES_FILE}: missing"):
        bucket.images().read(0)
    bucket.push()
    assert bucket.images().read(0) == PackedDataset(bucket.packed, "train").raw_bytes(0)
    push_ranges(bucket.store, Path("/nowhere"), KEY)  # nothing is read if they are there


@pytest.mark.parametrize(("fault", "num_loader_workers"), [("replaced", 0), ("cut", 0), ("removed", 0), ("removed", 2)])
def test_an_object_that_changes_during_an_epoch_ends_it_in_one_line(bucket: Bucket, fault: str, num_loader_workers: int) -> None:
    dataset = bucket.dataset()
    data = (bucket.packed / IMAGES_FILE).read_bytes()
    if fault == "removed":
        boto3.client("s3").delete_object(Bucket=bucket.address.split("/")[2], Key=f"store/{KEY}/{IMAGES_FILE}")
    else:
        bucket.replace(data[: len(data) // 2] if fault == "cut" else bytes(len(data)))
    loader = Loader(dataset, num_loader_workers)
    with pytest.raises(StoreError, match=rf"store s3://.*/{IMAGES_FILE} changed or gone; rerun the command") as raised:
        next(loader.batches(BATCHES, VIEW))
    assert "\n" not in str(raised.value)
    if num_loader_workers:
        loader._loader._iterator._shutdown_workers()  # garbage collection, in a later test, would wait 5 s for each process


@pytest.mark.parametrize("fault", ["other images", "cut", "one byte"])
def test_an_object_that_was_changed_before_is_not_read_although_its_metadata_fits(bucket: Bucket, fault: str) -> None:
    data = bytearray((bucket.packed / IMAGES_FILE).read_bytes())
    place = data.index(PackedDataset(bucket.packed, "train").raw_bytes(5))
    data[place + 40] ^= 1
    bucket.replace({"other images": bytes(len(data)), "cut": bytes(data[: place + 20]), "one byte": bytes(data)}[fault])
    images = bucket.images(EVERYTHING)
    with pytest.raises(StoreError, match="changed or gone" if fault == "cut" else "image 5 of .* is damaged; remove the object"):
        images.read(5)
    assert 5 not in images._reader()._cache
    if fault == "one byte":
        assert images.read(4) == PackedDataset(bucket.packed, "train").raw_bytes(4)


def test_an_object_with_another_hash_is_refused_at_the_start(bucket: Bucket) -> None:
    bucket.replace(b"another dataset", keep_hash=False)
    with pytest.raises(StoreError, match=rf"{IMAGES_FILE} is not the dataset's \(SHA-256 differs\); rerun the command"):
        bucket.images()
    bucket.push()
    assert bucket.images().read(0) == PackedDataset(bucket.packed, "train").raw_bytes(0)


def test_a_damaged_image_in_the_cache_is_fetched_again(bucket: Bucket) -> None:
    expected = bucket.images(EVERYTHING).read(5)
    file = bucket.store.cache / CACHE_FOLDER / "x" / "images"
    file.write_bytes(bytes(file.stat().st_size))
    images = bucket.images(EVERYTHING)
    assert images.read(5) == expected
    assert images.read(5) == expected
    assert len(bucket.requests) == 2


def test_bytes_that_are_damaged_on_their_way_are_requested_again(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    read_range = Store.read_range

    def damaged_once(*arguments: Any) -> bytes:
        data = read_range(*arguments)
        return bytes(len(data)) if len(bucket.requests) == 1 else data

    monkeypatch.setattr(Store, "read_range", damaged_once)
    assert bucket.images().read(5) == PackedDataset(bucket.packed, "train").raw_bytes(5)
    assert len(bucket.requests) == 2


def test_a_bucket_that_is_away_is_one_line(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = bucket.dataset()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StoreError, match=r"get_object failed .*; check the bucket") as raised:
        list(Loader(dataset).batches(BATCHES, VIEW))
    assert "\n" not in str(raised.value)
