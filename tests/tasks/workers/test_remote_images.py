"""Training and embedding with images read from a bucket: the bytes of a run on whole datasets, within the cache's bound, also if killed."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dml_core.data.store.info import IMAGES_FILE
from dml_core.data.store.ranges import RANGES_FILE
from dml_core.errors import StoreError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.training import pulse
from dml_core.training.checkpoints import writing
from dml_core.training.checkpoints.file import CHECKPOINT_FILE, load_checkpoint
from dml_core.training.history import HISTORY_FILE
from flows import chain
from tasks.locks import alone, running
from tasks.remote_images.cache import LOCK
from tasks.remote_images.reading import CACHE_FOLDER, GB, push_ranges
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.storage import Store
from tasks.workers import work
from tasks.workers.jobs import Job
from tests.conftest import small_training
from tests.forked import forked

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
KEY, BOUND = "data/x", 10_000  # bytes; the dataset has 72 images of about 1,400
SPEC = RunSpec(dataset="d", variant="v", seed=0, training=small_training(), evaluation=EvaluationConfig())
VALIDATED = {"validation": {"share": 0.5}, "keep_epochs": ("best_validation",), "recall_every_epochs": 1}


@pytest.fixture
def job(packed: Path, tmp_path: Path, s3_bucket: str) -> Job:
    """A run in a bucket to which the driver has pushed its dataset, on a machine that has nothing yet."""
    address = f"s3://{s3_bucket}/store"
    driver = Store(address, tmp_path / "driver")
    driver.push(KEY, packed)
    push_ranges(driver, packed, KEY)
    return Job(
        "train",
        SPEC,
        KEY,
        str(packed),
        "train/x",
        "embed/x",
        address,
        str(tmp_path / "machine"),
        scale=ScaleSpec(image_cache_gb=BOUND / GB),
    )


def local(job: Job, folder: Path) -> Job:
    """Return the same run on a folder store, which reads the local dataset."""
    return replace(job, store=str(folder), scale=ScaleSpec())


def left_by(folder: Path, names: tuple[str, ...] = (CHECKPOINT_FILE, HISTORY_FILE)) -> list[bytes]:
    return [(folder / name).read_bytes() for name in names]


@contextmanager
def sampled(machine: Path) -> Iterator[list[int]]:
    """Collect the bytes of the cache during the body, and check that the whole images are never on the machine."""
    sizes, over = [], threading.Event()

    def sample() -> None:
        while not over.wait(0.001):
            files = [path for path in (machine / CACHE_FOLDER).glob("*/*") if path.name != LOCK]
            sizes.append(sum(path.stat().st_size for path in files))
            assert not list(machine.rglob(IMAGES_FILE))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield sizes
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("num_loader_workers", [0, 2])
def test_a_run_ends_in_the_bytes_of_one_on_whole_datasets_and_its_cache_stays_within_its_bound(
    job: Job, packed: Path, tmp_path: Path, num_loader_workers: int
) -> None:
    assert (packed / IMAGES_FILE).stat().st_size > 5 * BOUND
    spec = job.spec.model_copy(update={"training": small_training(**VALIDATED)})
    job = replace(job, spec=spec, num_loader_workers=num_loader_workers)
    with sampled(tmp_path / "machine") as sizes:
        work.train(job, CPU, lambda message: None)
        work.embed(job, CPU, lambda message: None)
    assert BOUND / 2 < max(sizes) <= BOUND
    work.train(local(job, tmp_path / "local"), CPU, lambda message: None)
    work.embed(local(job, tmp_path / "local"), CPU, lambda message: None)
    found = Store(job.store, tmp_path / "another")
    assert left_by(found.pull("train/x")) == left_by(tmp_path / "local/train/x")
    names = tuple(path.name for path in (tmp_path / "local/embed/x").iterdir())
    assert len(names) >= 3
    assert left_by(found.pull("embed/x"), names) == left_by(tmp_path / "local/embed/x", names)


def test_whole_images_of_an_earlier_run_give_their_room_back(job: Job, tmp_path: Path) -> None:
    work.train(replace(job, train_key="train/whole", scale=ScaleSpec()), CPU, lambda message: None)
    assert list((tmp_path / "machine").rglob(IMAGES_FILE))
    work.train(job, CPU, lambda message: None)
    assert not list((tmp_path / "machine").rglob(IMAGES_FILE))


def test_runs_that_start_together_on_a_machine_fetch_their_dataset_once(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    download = Store.download
    monkeypatch.setattr(Store, "download", lambda store, key, *more: (fetched.append(key), download(store, key, *more)))
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(work._dataset, replace(job, scale=ScaleSpec()), Store(job.store, tmp_path / "machine"), 0, CPU)
    assert fetched.count(f"{KEY}/{IMAGES_FILE}") == 1


def test_a_dataset_may_take_longer_to_fetch_than_workers_may_be_silent_and_what_a_killed_one_had_fetched_is_removed(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[bool] = []
    monkeypatch.setattr(pulse, "_listeners", [beats.append])
    left = tmp_path / "machine" / KEY / f".{IMAGES_FILE}.{'0' * 32}"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half of it")
    work._dataset(replace(job, scale=ScaleSpec()), Store(job.store, tmp_path / "machine"), 0, CPU)
    assert not left.exists()
    assert beats.count(True) > len(Store(job.store, tmp_path).list_objects(KEY)), "during the transfer of each file"
    del beats[:]
    with ThreadPoolExecutor(1) as pool, alone(left.parents[2] / ".locks/.data-x"):
        waiting = pool.submit(work._dataset, replace(job, scale=ScaleSpec()), Store(job.store, tmp_path / "machine"), 0, CPU)
        wait([waiting], 5 * work.LOCK_SECONDS)
        assert (waiting.done(), len(beats) > 1) == (False, True), "while another run fetches it"


def test_a_verification_shares_the_project_s_dataset_and_the_next_job_on_a_node_removes_its_other_files(
    job: Job, packed: Path, tmp_path: Path
) -> None:
    """Otherwise each night leaves a whole dataset on each node, in a separate cache with a separate limit."""
    name, state = "20261130T040000Z-1", tmp_path / "state"
    copy, address = state / "verify" / name, f"{job.store}/verify/{name}"
    services: Any = SimpleNamespace(store=Store(address, copy / "state/cache"), scale=job.scale)
    dataset: Any = SimpleNamespace(folder=str(packed), digest="x")
    of_copy = chain._job("train", SPEC, dataset, "train/x", "", services, SimpleNamespace(of=SimpleNamespace(sources=dict)))  # type: ignore[arg-type]
    work.WORK["train"](of_copy, CPU, lambda message: None, 0, None)
    assert {path.name for path in (state / "cache").glob("*/x")} == {"x"}
    assert [path.name for path in (state / "cache/images/x").iterdir()]
    assert {path.parent.name for path in copy.glob("state/cache/*/x")} == {"train"}
    assert {key.partition("/")[0] for key in Store(address, tmp_path).list_objects()} == {"train"}

    work.WORK["train"](replace(job, cache=str(state / "cache"), train_key="train/y"), CPU, lambda message: None, 0, None)
    assert copy.exists(), "its next job may begin"
    (state / "verify/of-the-flow").mkdir()
    (state / "verify/of-the-flow/.lock").touch()
    used = running(state / "verify/used/state/cache/.locks")
    for path in state.glob("verify/**"):
        os.utime(path, (0, 0))
    work.WORK["train"](replace(job, cache=str(state / "cache"), train_key="train/z"), CPU, lambda message: None, 0, None)
    assert {path.name for path in (state / "verify").iterdir()} == {"of-the-flow", "used"}
    used.release()


def test_only_one_worker_of_a_machine_pushes_its_embeddings_which_may_take_longer_than_workers_may_be_silent(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work.train(job, CPU, lambda message: None)
    beats, pushed, push = list[bool](), list[int](), Store.push

    def counted(*given: Any, **named: Any) -> None:
        before = len(beats)
        push(*given, **named)
        pushed.append(len(beats) - before)

    monkeypatch.setattr(pulse, "_listeners", [beats.append])
    monkeypatch.setattr(Store, "push", counted)
    for local_rank in (1, 0):
        work.embed(job, CPU, lambda message: None, local_rank)
        files = Store(job.store, tmp_path).list_objects("embed/x")
        assert (bool(files), pushed) == ((False, []) if local_rank else (True, [len(files)]))


def test_runs_that_start_together_push_their_dataset_once(packed: Path, tmp_path: Path, s3_bucket: str) -> None:
    store = Store(f"s3://{s3_bucket}/store", tmp_path / "driver")
    calls: list[str] = []
    call = store._call
    store._call = lambda operation, key, *more, **given: (calls.append(f"{operation} {key}"), call(operation, key, *more, **given))[1]
    services: Any = SimpleNamespace(store=store, scale=ScaleSpec(image_cache_gb=1))
    dataset: Any = SimpleNamespace(folder=str(packed), digest="x")
    lock: Any = SimpleNamespace(of=SimpleNamespace(sources=dict))
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(chain._job, "train", SPEC, dataset, "train/x", "", services, lock) for _ in range(4)]
    assert {job.result().dataset_key for job in jobs} == {KEY}
    assert [calls.count(f"put_object {KEY}/{name}") for name in (IMAGES_FILE, RANGES_FILE)] == [1, 1]


def test_an_image_that_is_damaged_in_the_bucket_ends_the_run_in_one_line_and_is_not_trained_on(
    job: Job, packed: Path, tmp_path: Path
) -> None:
    store, name = Store(job.store, tmp_path / "driver"), f"{KEY}/{IMAGES_FILE}"
    data = bytearray((packed / IMAGES_FILE).read_bytes())
    data[len(data) // 3] ^= 1
    store._call("put_object", name, Body=bytes(data), Metadata={"sha256": store.version(name)[1]})
    with pytest.raises(StoreError, match=r"image \d+ of data/x/images.arrow is damaged; remove the object and rerun") as raised:
        work.train(job, CPU, lambda message: None)
    assert "\n" not in str(raised.value)
    assert load_checkpoint(store.pull("train/x")) is None


def killed_after(job: Job, num_steps: int, environment: dict[str, str]) -> None:
    """Train until a step in the middle of an epoch, and end by kill -9."""
    os.environ.update(environment)
    asked: list[int] = []

    def stop_wanted() -> bool:
        asked.append(1)
        if len(asked) == num_steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    writing.LOOK_SECONDS = 0.0
    work.train(job, CPU, lambda message: None, stop_wanted=stop_wanted)


@pytest.mark.slow
def test_a_run_that_is_killed_in_the_middle_of_an_epoch_ends_in_the_same_bytes(job: Job, tmp_path: Path) -> None:
    job = replace(job, scale=job.scale.model_copy(update={"checkpoint_every_steps": 1}))
    assert forked(killed_after, job, 9, dict(os.environ)) == -signal.SIGKILL
    state = load_checkpoint(Store(job.store, tmp_path / "driver").pull("train/x"))
    assert state is not None
    assert (state["num_epochs_done"], len(state["under_way"]["rows"]) > 0) == (1, True)
    facts = work.train(job, CPU, lambda message: None)
    assert facts["taken_up"]
    work.train(local(job, tmp_path / "local"), CPU, lambda message: None)
    assert left_by(Store(job.store, tmp_path / "another").pull("train/x")) == left_by(tmp_path / "local/train/x")
