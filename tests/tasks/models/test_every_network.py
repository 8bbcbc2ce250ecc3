"""Every distinct network of the tables gives the same rows when saved, opened, published, exported and indexed.

Weights are random and images small; backbone, pooling and head are the table's.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from numpy.typing import NDArray

from dml_core.config import merge, parse
from dml_core.data.views.transforms import scale
from dml_core.errors import SavedNetworkError, StoreError
from dml_core.exported import FILES, write_graph
from dml_core.index.index import Index
from dml_core.index.items import Item
from dml_core.index.writing import Batch, build_index
from dml_core.models.config import ModelConfig
from dml_core.models.embedder import Embedder
from dml_core.network_description import DESCRIPTION_FILE, FORMAT, GraphFile, NetworkDescription, read_description, write_description
from dml_core.trained import load_model, load_network, save_network
from tasks.environment import Project
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.specs import RunSpec
from tasks.storage import Store
from tasks.tables.choice import Choice
from tasks.tables.file import paper_tables
from tasks.tables.runs import chosen_runs
from tasks.tracking.registered import find_model
from tasks.tracking.tracker import Tracker
from tests.conftest import ROOT, SETTINGS
from tests.tasks.models.conftest import make_run

NUM_CLASSES = 5
SIDE = 64
SMALL = {"name": "small_cnn", "width": 8}


@cache
def networks() -> dict[str, dict[str, Any]]:
    """Return the distinct networks by their settings."""
    params = load_params(ROOT / "params.yaml")
    everything = Choice((), (), None, "paper", (0,), True, False, False)
    specs: list[RunSpec] = [spec for runs in chosen_runs(params, list(paper_tables()), everything).runs for spec in runs]
    specs += [spec for dataset in params.comparison.datasets for spec in comparison_runs(params, dataset)]
    models = [spec.training.model_dump(mode="json")["model"] for spec in specs]
    for model in models:
        model["backbone"] |= {"weights": "none", "weights_sha256": None}
    found = {json.dumps(model, sort_keys=True): model for model in models}
    assert len(found) > 30
    return found


def heads() -> dict[str, dict[str, Any]]:
    """Return the distinct heads and poolings, on a small backbone."""
    models = [model | {"backbone": SMALL, "freeze_batchnorm": "none", "batchnorm_momentum": None} for model in networks().values()]
    return {json.dumps(model, sort_keys=True): model for model in models}


class Trained:
    """A network with random weights and changed BatchNorm statistics, saved like that of a run."""

    def __init__(self, model: dict[str, Any], folder: Path) -> None:
        torch.manual_seed(0)
        self.training = merge(SETTINGS, {"transform": {"crop_size": SIDE}}) | {"model": model}
        self.network = Embedder(parse(ModelConfig, model, "model"), NUM_CLASSES)
        self.network.train()(torch.rand(4, 3, SIDE, SIDE))
        state = {f"model.{name}": value for name, value in self.network.state_dict().items()}
        save_network(folder, self.training, NUM_CLASSES, state, "ab" * 16)

    def rows(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
        with torch.no_grad():
            rows: NDArray[np.float32] = self.network.eval().embed(scale(pixels, "zero-one")).numpy()
        return rows


def images(number: int = 6) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (number, SIDE, SIDE, 3), dtype=np.uint8)


def check(folder: Path, trained: Trained, then: Callable[[Path, NDArray[np.float32]], None] | None = None) -> None:
    """Check that the folder's network, pyfunc's code and an index give the trained network's rows."""
    from tasks.tracking.packaged_model import EmbeddingModel

    expected = trained.rows(images())
    opened = load_model(folder, "cpu")
    np.testing.assert_allclose(opened.embed(images()), expected, rtol=1e-4, atol=1e-5)
    assert opened.num_dimensions == expected.shape[1]
    packaged = EmbeddingModel()
    packaged.load_context(SimpleNamespace(artifacts={"network": str(folder)}))
    np.testing.assert_allclose(packaged.model.embed(images()), expected, rtol=1e-4, atol=1e-4)
    build_index(folder.parent / "index", [Batch(opened.embed(images()), [Item(str(n)) for n in range(6)])], opened.identity)
    index = Index.open(folder.parent / "index")
    np.testing.assert_allclose(index.vectors_ND, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-4)
    np.testing.assert_allclose(index.search(expected, 1)[0], 1, atol=1e-4)
    if then is not None:
        then(folder, expected)


def check_exports(folder: Path, expected: NDArray[np.float32]) -> None:
    for graph_format, name in FILES.items():
        out = folder.parent / graph_format
        out.mkdir()
        graph = GraphFile(format=graph_format, name=name, precision="fp32")  # type: ignore[arg-type]
        description = read_description(folder)
        write_graph(out, load_network(folder, description), description.transform, graph)
        write_description(out, description.model_copy(update={"graph": graph}))
        np.testing.assert_allclose(load_model(out).embed(images()), expected, rtol=1e-3, atol=1e-4)


def test_every_head_of_the_tables_opens_again(tmp_path: Path) -> None:
    for number, model in enumerate(heads().values()):
        folder = tmp_path / str(number) / "network"
        check(folder, Trained(model, folder))


def test_a_description_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Every network's description keeps None as None."""
    for number, model in enumerate(networks().values()):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "network.pt").touch()
        description = parse(
            NetworkDescription,
            {"model": model, "transform": {}, "num_classes": 3, "embedding_dim": 2048, "identity": None, "metric": "euclidean"},
            "test",
        )
        write_description(tmp_path / str(number), description)
        found = read_description(tmp_path / str(number))
        assert found.model_copy(update={"file_sha256": None}) == description


@pytest.mark.slow
@pytest.mark.proof
def test_every_network_of_the_tables_is_opened_published_exported_and_indexed(tmp_path: Path) -> None:
    for number, model in enumerate(networks().values()):
        print(number, model)
        folder = tmp_path / str(number) / "network"
        check(folder, Trained(model, folder), check_exports)


def test_programs_from_before_an_export_s_hash_read_what_has_none_and_call_others_newer(tmp_path: Path) -> None:
    """They called the new key a wrong setting."""
    Trained(next(iter(heads().values())), tmp_path)
    description = read_description(tmp_path)
    for sha256, version in ((None, 2), ("0" * 64, 3)):
        graph = GraphFile(format="onnx", name="network.pt", precision="fp32", weights_sha256=sha256)
        write_description(tmp_path, description.model_copy(update={"graph": graph}))
        written = json.loads((tmp_path / DESCRIPTION_FILE).read_text())
        assert (written["format"], "weights_sha256" in written["graph"]) == (version, version == 3)
        assert read_description(tmp_path).graph == graph


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": FORMAT + 1}, r"written by a newer version \(format 4, this program reads up to 3\)"),
        ({"colour": "red"}, "SHA-256 differs"),
        ({"num_classes": 6}, "SHA-256 differs"),
    ],
)
def test_a_changed_description_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    Trained(next(iter(heads().values())), tmp_path / "network")
    path = tmp_path / "network" / DESCRIPTION_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(StoreError, match=rf"^[^\n]*{said}[^\n]*$"):
        load_model(tmp_path / "network")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["it does not open", pytest.param("other rows", marks=pytest.mark.proof)])
def test_a_network_that_does_not_open_is_not_published_and_fails_its_run(
    project: Project, mlflow_database: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow only warns; the run's flow fails, so that a smoke run of all tables reports it."""
    from tasks.tracking import models

    def damaged(folder: Path, *arguments: Any) -> NetworkDescription:
        description = save_network(folder, *arguments)
        if damage == "it does not open":
            (folder / DESCRIPTION_FILE).write_text("{}")
        else:
            state = torch.load(folder / "network.pt")
            torch.save({name: value * 0.5 if name.endswith("weight") else value for name, value in state.items()}, folder / "network.pt")
            write_description(folder, description)
        return description

    monkeypatch.setattr(models, "save_network", damaged)
    uri = f"sqlite:///{shutil.copy(mlflow_database, tmp_path)}"
    tracker = Tracker(uri, tmp_path, Store(project.store, project.state / "cache"))
    report = make_run(project, comparison_runs(load_params(project.params_file), "own")[0])
    with pytest.raises(SavedNetworkError, match=r"network\.json: damaged|other embeddings than the trained one; it was not published"):
        tracker.publish(report)
    client = MlflowClient(uri)
    [experiment] = [found for found in client.search_experiments() if found.name != "Default"]
    runs = client.search_runs([experiment.experiment_id], "tags.`mlflow.parentRunId` != ''")
    assert [find_model(client, run) for run in runs] == [None]
    monkeypatch.undo()
    assert tracker.publish(report) is not None
