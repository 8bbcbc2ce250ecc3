"""Shards on a real Ray: the same bytes, also if a process dies."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dml_core import load_model
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import DataError
from tasks.environment import Project
from tasks.models.embed import embed_images, embed_on_cluster
from tasks.models.lookup import resolve_model
from tasks.models.sources import find_images
from tasks.workers.connection import connect, stop_ray
from tasks.workers.distribution import spread
from tests.tasks.workers.conftest import ray_settings  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.proof]


@pytest.fixture(scope="module")
def folder(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dataset = PackedDataset(project.packed("own"), "test")
    root = tmp_path_factory.mktemp("images")
    for index in range(60):
        path = root / f"class {dataset.labels[index]:02d}" / f"{index:03d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(dataset.raw_bytes(index))
    return root


@pytest.fixture
def ray_here(ray_settings: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: F811
    ray_settings.delenv("RAY_ADDRESS", raising=False)
    connect()
    yield
    stop_ray()


def rows_in(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.npy")}


def test_a_cluster_writes_the_bytes_of_this_process(project: Project, folder: Path, ray_here: None, tmp_path: Path) -> None:
    network = resolve_model("own/good/0", project)
    model, images = load_model(network, "cpu"), find_images(str(folder))
    embed_images(model, images, tmp_path / "here", shard_rows=16)
    embed_images(model, images, tmp_path / "there", shard_rows=16, spread=partial(embed_on_cluster, network, 64))
    assert len(rows_in(tmp_path / "there")) == 5
    assert rows_in(tmp_path / "there") == rows_in(tmp_path / "here")
    connect()
    gone = replace(images, root=str(tmp_path / "elsewhere"))
    with pytest.raises(DataError, match=r"elsewhere is missing on .*; on a cluster the images must be in S3"):
        embed_images(model, gone, tmp_path / "gone", spread=partial(embed_on_cluster, network, 64))


def die_once(folder: Path, number: int) -> int:
    """Kill the process of one part the first time."""
    if number == 3 and not (folder / "died").exists():
        (folder / "died").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_a_part_whose_process_dies_is_done_again(ray_here: None, tmp_path: Path) -> None:
    assert list(spread(die_once, tmp_path, range(20))) == [number * number for number in range(20)]
    assert (tmp_path / "died").exists()
