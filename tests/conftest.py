"""Fixtures of several test modules: a small packed dataset, made by the real generator and `prepare`, and small training settings.

What they need is imported in them: xdist's controller loads this file, but runs no test.
"""

import contextlib
import gc
import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.skips import pytest_configure, pytest_sessionfinish, pytest_terminal_summary  # noqa: F401 - hooks of every run

if TYPE_CHECKING:
    from dml_core.training.config import TrainingConfig


def _forget_exit_handlers() -> None:
    """Keep only the handler that ends thread pools, for which a forked process would wait.

    A forked process exits with code 1 if a flow has run in its parent: Prefect's exit handlers expect threads that it does not have.
    """
    handlers = threading._threading_atexits  # type: ignore[attr-defined]
    handlers[:] = [handler for handler in handlers if handler.func.__module__ == "concurrent.futures.thread"]


os.register_at_fork(after_in_child=_forget_exit_handlers)
gc.disable()  # until all tests are collected: what imports and parameters allocate stays, and looking through it took a sixth of their time

# moto's server would otherwise write all its requests to the stderr of the test with the first one, which is closed in the next test.
logging.getLogger("werkzeug").addHandler(logging.NullHandler())

os.environ.pop("XDG_CACHE_HOME", None)  # tests that set HOME would use this user's caches

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # they import each other as scripts of one folder
SYNTHETIC_OPTIONS = {"num_classes": 8, "images_per_class": 9, "image_size": 24, "num_modes": 2}
LAST_BATCHES: dict[str, dict[str, Any]] = {  # half of the classes are for training
    "four": {},
    "eight": {"images_per_class": 8},
    "one": {"num_classes": 6, "images_per_class": 11},
}
MODEL: dict[str, Any] = {"backbone": {"name": "small_cnn", "width": 8}, "head": {"kind": "linear", "embedding_dim": 8}}
SETTINGS: dict[str, Any] = {
    "sampler": {"kind": "shuffled", "batch_size": 8},
    "transform": {"crop": "padded", "crop_size": 24, "padding": 2, "flip": True, "scaling": "zero-one"},
    "optimiser": {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9, "groups": {"loss": {"learning_rate": 0.5}}},
    "schedule": {"kind": "cosine", "warmup_epochs": 1.0},
    "num_epochs": 3,
}

settings.register_profile("untimed", deadline=None)  # no test has a deadline: imports during its first draw may take seconds
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order whole runs first, then files with slow tests, so that no worker is idle at the end; skip GPU tests without a GPU."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: ("e2e" not in item.path.parts, item.path not in slow))
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="no GPU here"))


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but do not look again through what the collection of tests has made."""
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="module")
def same_environment_of_modules() -> Iterator[None]:
    """Undo changes of the environment by a module's fixtures: another module's tests would find them, on some of pytest's workers."""
    with _undone():
        yield


@pytest.fixture(autouse=True)
def same_environment(same_environment_of_modules: None) -> Iterator[None]:
    """Undo changes of the environment by a test or a library (such as MLflow, which sets its server's address)."""
    with _undone():
        yield


@pytest.fixture(scope="session")
def packed_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a packed synthetic dataset by its last batch of 8 training images, a key of LAST_BATCHES; each is made once."""
    from dml_core.data.prepare import prepare
    from dml_core.data.registry import materialise

    @cache
    def make(last_batch: str) -> Path:
        folder = tmp_path_factory.mktemp("dataset")
        options = SYNTHETIC_OPTIONS | LAST_BATCHES[last_batch]
        materialise("synthetic", options, folder / "raw")
        prepare("synthetic", folder / "raw", folder / "packed", options)
        return folder / "packed"

    return make


@pytest.fixture(scope="session")
def packed(packed_with: Callable[[str], Path]) -> Path:
    """A packed synthetic dataset: 36 training images of 4 classes (the last batch of 8 is short), 36 test images of 4 others."""
    return packed_with("four")


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new MLflow database, which takes seconds to create but none to copy."""
    from tasks.tracking.connection import create_database

    folder = tmp_path_factory.mktemp("mlflow")
    create_database(folder / "mlflow.db", folder / "lock")
    return folder / "mlflow.db"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Address of an S3 server on this machine, over HTTP."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_bucket(s3_server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a new bucket on that server, which the AWS environment variables select."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:32]
    boto3.client("s3").create_bucket(Bucket=name)
    return name


def small_training(loss: str = "normalised_softmax", model: dict[str, Any] = MODEL, **changes: Any) -> "TrainingConfig":
    """Return the small settings for a loss and a model, overridden by `changes`."""
    from dml_core.config import merge, parse
    from dml_core.training.config import TrainingConfig

    return parse(TrainingConfig, merge(SETTINGS, changes) | {"loss": {"name": loss}, "model": model}, "test settings")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: these networks are so small that more would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
