"""A small network, images and an index of them, and the real service on them: `dml serve` as a user starts it, queried over HTTP."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from dml_core.config import parse
from dml_core.index.items import Item
from dml_core.index.writing import Batch, build_index
from dml_core.models.config import ModelConfig
from dml_core.models.embedder import Embedder
from dml_core.trained import TrainedModel, load_model, save_network
from tests.conftest import MODEL, ROOT, SETTINGS

IDENTITY = "0123456789abcdef0123456789abcdef"
NUM_IMAGES = 40
LONG_POSITION, LONG_NAME = 33, "Photograph_2026-11-25_" + "withoutanyplacetobreak" * 3
START_SECONDS = 600  # reached only when nothing happens any more


@dataclass(frozen=True)
class Made:
    """Folders of a network and of an index, and the image files in the index's order."""

    model: Path
    index: Path
    files: list[Path]
    project: Path

    def load(self) -> TrainedModel:
        return load_model(self.model, "cpu")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A network with random weights, and noise images of different brightness and colours so that no two are alike."""
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(7)
    network = Embedder(parse(ModelConfig, MODEL, "test"), 4)
    state = {f"model.{name}": value for name, value in network.state_dict().items()}
    model = folder / "model"
    save_network(model, {"model": MODEL, "transform": SETTINGS["transform"]}, 4, state, IDENTITY, title="small on noise")
    rng = np.random.default_rng(3)
    files = []
    for number in range(NUM_IMAGES):
        height, width = rng.integers(24, 90, 2)
        coarse = rng.integers(0, 256, (4, 4, 3)).astype(np.uint8)
        path = folder / f"{LONG_NAME if number == LONG_POSITION else f'{number:02d}'}.{'png' if number % 2 else 'jpg'}"
        Image.fromarray(coarse).resize((int(width), int(height)), Image.Resampling.BICUBIC).save(path)
        files.append(path)
    items = []
    for number, path in enumerate(files):
        thumbnail = folder / "thumbnail.webp"
        Image.open(path).convert("RGB").resize((48, 48)).save(thumbnail)
        items.append(Item(path.name, f"class_{number % 5:03d}", thumbnail.read_bytes()))
    build_index(folder / "index", [Batch(load_model(model, "cpu").embed(files), items)], IDENTITY, model_source=str(model))
    (folder / "project").mkdir()
    (folder / "project" / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    return Made(model, folder / "index", files, folder / "project")


class Service:
    """A running `dml serve`."""

    def __init__(self, made: Made, *arguments: str, token: str | None = None, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PREFECT_", "DML_"))}
        environment = kept | {"PYTHONPATH": str(ROOT), **({"DML_SERVE_TOKEN": token} if token else {})} | environment
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "serve", *arguments],
            cwd=made.project,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_answer_signals,
        )
        self.lines: list[str] = []
        assert self.process.stdout is not None
        timer = threading.Timer(START_SECONDS, self.process.terminate)
        timer.start()
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("listening at "):
                break
        timer.cancel()
        found = re.search(r"http://\S+?:(\d+)(?=;)", "".join(self.lines))
        if found is None:
            assert self.process.stderr is not None
            pytest.fail(f"dml serve did not start: {self.lines} {self.process.stderr.read()}")
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def replicas(self) -> list[psutil.Process]:
        found = []
        for process in self.descendants():
            try:
                if "ServeReplica" in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Stop the service; return its exit code and last output."""
        self.client.close()
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


def _answer_signals() -> None:
    """Reset signal handlers to those of a terminal: tests in the background ignore these signals."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture(scope="session")
def start(made: Made) -> Iterator[Callable[..., Service]]:
    """Return a function that starts services, which end with the tests."""
    started: list[Service] = []

    def start_one(*arguments: str, token: str | None = None, **environment: str) -> Service:
        started.append(Service(made, *arguments, "--port", "0", token=token, **environment))
        return started[-1]

    yield start_one
    for service in started:
        if service.process.poll() is None:
            service.end()


@pytest.fixture(scope="session")
def service(made: Made, start: Callable[..., Service]) -> Service:
    """The index, with one replica in the server's process."""
    return start(str(made.index))


@pytest.fixture(scope="session")
def ray_service(made: Made, start: Callable[..., Service]) -> Service:
    """Two replicas on Ray."""
    return start(str(made.index), "--replicas", "2")


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition became true in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.1)
    return condition()
