"""Fixtures of tests with real Ray workers: jobs long enough to be disturbed midway, and Ray's settings during a module."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from dml_core.config import merge, parse
from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.evaluation.config import EvaluationConfig
from dml_core.training.config import TrainingConfig
from dml_core.training.history import Progress
from tasks.environment import Project, set_environment
from tasks.runs.specs import RunSpec
from tasks.start_times import StartTimes
from tasks.workers.jobs import Job
from tests.conftest import small_training

OPTIONS = {"num_classes": 8, "images_per_class": 320, "image_size": 24, "num_modes": 2}
EPOCHS, STEPS = 2, 320  # 1,280 training images in batches of 4: over a second per epoch, so that the middle of the second can be detected
TRAINING = parse(
    TrainingConfig,
    merge(
        small_training("heated_up_softmax").model_dump(),
        {"num_epochs": EPOCHS, "sampler": {"batch_size": 4}, "average": {"decay": 0.9, "after": 0.2}},
    ),
    "test",
)


@dataclass
class Disturbance:
    """An action that is performed once, in the middle of an epoch."""

    deed: Callable[[], None]
    at: Progress | None = None

    def __call__(self, message: Progress) -> None:
        if self.at is None and message.epoch >= 1 and 0 < message.step < message.num_steps:
            self.at = message
            self.deed()


@pytest.fixture(scope="session")
def many_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many-images")
    materialise("synthetic", OPTIONS, folder / "raw")
    prepare("synthetic", folder / "raw", folder / "packed", OPTIONS)
    return folder / "packed"


@pytest.fixture(scope="session")
def starts(tmp_path_factory: pytest.TempPathFactory) -> StartTimes:
    return StartTimes(tmp_path_factory.mktemp("starts"), lambda text: None)


@pytest.fixture(scope="module")
def ray_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """The environment that a flow gives Ray, without its token: Ray reads it only once, and may be loaded already."""
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        set_environment(Project(root=state, state=state, store=str(state / "store"), tracking_uri=f"sqlite:///{state}/mlflow.db"))
        yield patch


def job(packed: Path, state: Path, name: str, num_epochs: int = EPOCHS, **changes: object) -> Job:
    training = TRAINING.model_copy(update={"num_epochs": num_epochs})
    spec = RunSpec(dataset="d", variant=name, seed=0, training=training, evaluation=EvaluationConfig())
    made = Job("train", spec, "", str(packed), f"train/{name}", f"embed/{name}", str(state / "store"), str(state / "cache"), 0)
    return replace(made, **changes)  # type: ignore[arg-type]


def processes(part: str) -> list[psutil.Process]:
    """Return this process's descendants whose name contains `part`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(part in word for word in process.cmdline()[:1]) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.pid)


def threads_of_groups() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("worker-group", "workers-timed")]
