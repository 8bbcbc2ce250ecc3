"""`dml models export`: a folder that loads, with measurements of its differences and speed."""

import itertools
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch

from dml_core import load_model
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import ConfigError, StoreError
from dml_core.index.items import Item
from dml_core.index.writing import Batch, add_items, build_index
from flows.cli.search import open_index_model
from tasks.environment import Project
from tasks.models.export import MEASURED_FILE, Measured, export
from tasks.models.lookup import find_run, resolve_model
from tasks.runs.embeddings import load_embeddings
from tasks.storage import Store

pytestmark = pytest.mark.slow
Exported = Callable[[str, str], tuple[Measured, Path]]


@pytest.fixture(scope="module")
def exported(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Return what exporting a run's network in a format and a precision gives, and its folder; each is exported once.

    The folder was empty, or for int8 held another export. In place of time, calls of the clock are counted.
    """

    @cache
    def make(graph_format: str, precision: str) -> tuple[Measured, Path]:
        out = tmp_path_factory.mktemp("exported") / "out"
        if precision == "int8":
            shutil.copytree(make(graph_format, "fp32")[1], out)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tasks.models.export.time", SimpleNamespace(perf_counter=itertools.count().__next__))
            return export(project, "own/good/1", graph_format, precision, out), out

    return make


def test_an_export_has_the_run_s_rows_and_recall(project: Project, exported: Exported) -> None:
    run = find_run(project, "own/good/1")
    store = Store(project.store, project.state)
    rows, _ = load_embeddings(store.folder(f"embed/{run.embedded}"), "test")
    recall = json.loads((store.folder(f"evaluate/{run.scored}") / "metrics.json").read_text())["recall@1"]
    dataset = PackedDataset(project.packed("own"), "test")
    for graph_format in ("onnx", "torch-export"):
        found, out = exported(graph_format, "fp32")
        assert (found.recall_at_1, found.recall_at_1_of_run, found.num_images) == (recall, recall, 240)
        assert found.largest_difference < 1e-4
        assert json.loads((out / MEASURED_FILE).read_text())["recall_at_1"] == recall
        model = load_model(out)
        np.testing.assert_allclose(model.embed([dataset.raw_bytes(index) for index in range(240)]), rows, atol=1e-4)
        assert model.identity == run.trained


def test_int8_is_measured_and_replaces_an_older_export(exported: Exported) -> None:
    found, out = exported("onnx", "int8")
    assert (found.milliseconds, found.milliseconds_of_run) == (1000 * 4 / 240,) * 2, "240 images in four batches of a second"
    assert found.largest_difference > 1e-4
    assert abs(found.recall_at_1 - found.recall_at_1_of_run) < 0.1
    kinds = [tensor.data_type for tensor in onnx.load(out / "network.onnx").graph.initializer if len(tensor.dims) == 4]
    assert kinds
    assert set(kinds) == {onnx.TensorProto.INT8}  # the weights of every convolution
    assert sorted(path.name for path in out.iterdir()) == [MEASURED_FILE, "network.json", "network.onnx"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_export_cannot_be_exported(project: Project, exported: Exported, tmp_path: Path, precision: str) -> None:
    _, out = exported("onnx", precision)
    with pytest.raises(ConfigError, match=f"{out}: is an export already, and only a run's network can be exported; name the run"):
        export(project, str(out), "torch-export", "fp32", tmp_path / "other")


def test_an_index_and_its_queries_are_of_one_precision(
    project: Project, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pair of precisions, for queries and for added items; outside of the run's project an index of an export finds that export."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")  # not that of tests that publish the same run
    run = find_run(project, "own/good/1")
    dataset = PackedDataset(project.packed("own"), "test")
    images = [dataset.raw_bytes(index) for index in range(4)]
    exports = {precision: exported("onnx", precision)[1] for precision in ("fp32", "fp16", "int8")}
    places = {"own": resolve_model("own/good/1", project)} | exports
    models = {name: load_model(place, "cpu") for name, place in places.items()}
    assert {name: model.identity for name, model in models.items()} == {
        "own": run.trained,
        "fp32": run.trained,
        "fp16": f"{run.trained}-fp16",
        "int8": f"{run.trained}-int8",
    }
    for name, model in models.items():
        rows = model.embed(images)
        items = [Item(f"{number}.jpg", None, None) for number in range(4)]
        index = build_index(tmp_path / f"{name}.index", [Batch(rows, items)], model.identity, model_source=str(places[name]))
        _, opened = open_index_model(index, None)
        assert opened.description.graph == model.description.graph
        np.testing.assert_allclose(opened.embed(images), rows, rtol=0, atol=1e-4)
        for other, queries in models.items():
            added = [Batch(queries.embed(images[:1]), [Item(f"by {other}.jpg", None, None)])]
            if {name, other} <= {"own", "fp32"} or name == other:
                assert open_index_model(index, str(places[other]))[1].identity == index.model_identity
                add_items(index.folder, added, queries.identity)
            else:
                with pytest.raises(ConfigError, match=f"embeddings of model {queries.identity} do not compare with it"):
                    open_index_model(index, str(places[other]))
                with pytest.raises(ConfigError, match=f"embeddings of model {queries.identity} do not compare with it"):
                    add_items(index.folder, added, queries.identity)


@pytest.mark.parametrize("name", ["", "network.json"])
def test_an_index_has_no_program_opened_that_nobody_named(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An index that was sent may name a folder that was sent with it."""
    place = exported("torch-export", "fp32")[1] / name
    batch = Batch(np.ones((1, 8), np.float32), [Item("0.jpg", None, None)])
    index = build_index(tmp_path / "index", [batch], "f" * 32, model_source=str(place))
    monkeypatch.setattr(torch.export, "load", lambda *_: pytest.fail("the program was opened"))
    with pytest.raises(StoreError, match=f"its model {place} may execute any code when opened; if you trust it, give it with --model"):
        open_index_model(index, None)


def test_an_export_is_refused_where_its_network_was_trained_again(project: Project, exported: Exported, tmp_path: Path) -> None:
    image = PackedDataset(project.packed("own"), "test").raw_bytes(0)
    own = load_model(resolve_model("own/good/1", project), "cpu")
    for precision in ("fp32", "int8"):
        model = load_model(exported("onnx", precision)[1])
        assert model.weights_sha256 == own.weights_sha256
        batch = Batch(model.embed(image), [Item("0.jpg", None, None)])
        index = build_index(tmp_path / precision, [batch], model.identity, weights_sha256="0" * 64)
        with pytest.raises(ConfigError, match="it was trained again since"):
            open_index_model(index, str(exported("onnx", precision)[1]))


def test_what_cannot_be_written_is_refused_before_work(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="expected onnx or torch-export, and fp32, fp16 or int8"):
        export(project, "own/good", "tflite", "fp32", tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="mine: already exists and is not an exported network"):
        export(project, "own/good", "onnx", "fp32", tmp_path / "mine")
    (tmp_path / "export").mkdir()
    for name in (MEASURED_FILE, "network.json", "network.onnx", "client.py"):
        (tmp_path / "export" / name).write_text("")
    with pytest.raises(ConfigError, match=r"export: already exists and is not an exported network \(client\.py\); name a new folder"):
        export(project, "own/good", "onnx", "fp32", tmp_path / "export")
    assert len(list((tmp_path / "export").iterdir())) == 4
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: already exists and is not an exported network"):
        export(project, "own/good", "onnx", "fp32", tmp_path / "file")
    monkeypatch.setattr("tasks.models.export.run_of", lambda project, identity: None)
    (tmp_path / "export/client.py").rename(tmp_path / "export/.nfs0000001a")  # on NFS, a former graph that a service has open
    for name in ("out", "export"):
        with pytest.raises(ConfigError, match=r"^own/good: no run of the standing comparison with test images on this machine, "):
            export(project, "own/good", "onnx", "fp32", tmp_path / name)
