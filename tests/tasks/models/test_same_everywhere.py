"""One network gives the same rows for the same image files in every form: in process, over HTTP, exported, from MLflow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dml_core import load_model
from dml_core.data.store.packed import PackedDataset
from dml_core.data.views.transforms import scale
from dml_core.network_description import read_description
from dml_core.trained import load_network
from tasks.environment import Project
from tasks.models.export import MEASURED_FILE, export
from tasks.models.lookup import find_run, resolve_model
from tasks.models.promotion import promote
from tasks.runs.embeddings import load_embeddings
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.storage import Store
from tasks.tracking.tracker import Tracker
from tests.tasks.models.conftest import make_run
from tests.tasks.serving.conftest import Made, Service

RUN = "own/good/0"
WITHIN = 1e-5
PRECISIONS = [("onnx", "fp32"), ("torch-export", "fp32"), ("onnx", "fp16"), ("torch-export", "fp16"), ("onnx", "int8")]
PYFUNC = """
import sys
import mlflow, numpy, pandas
uri, out, *files = sys.argv[1:]
mlflow.set_tracking_uri(uri)
model = mlflow.pyfunc.load_model("models:/dml-own@champion")
numpy.save(out, model.predict(pandas.DataFrame({"image": [open(file, "rb").read() for file in files]})))
code = type(model.unwrap_python_model().model).embed.__code__.co_filename
assert "dml_core.zip" in code, code
"""


@pytest.fixture(scope="module")
def files(project: Project, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The run's test images as their original files."""
    folder = tmp_path_factory.mktemp("files")
    dataset = PackedDataset(project.packed("own"), "test")
    paths = [folder / f"{index:03d}.jpg" for index in range(len(dataset))]
    for index, path in enumerate(paths):
        path.write_bytes(dataset.raw_bytes(index))
    return paths


def over_http(project: Project, files: list[Path]) -> NDArray[np.float32]:
    """Embed with `dml serve` of the run, alternating requests of one and of many images."""
    service = Service(Made(Path(), Path(), files, project.root), RUN, "--port", "0")
    rows: list[list[float]] = []
    try:
        while len(rows) < len(files):
            chosen = files[len(rows) : len(rows) + (1 if len(rows) % 2 else 60)]
            answer = service.client.post("/v1/embed", files=[("image", path.read_bytes()) for path in chosen])
            rows += answer.raise_for_status().json()["embeddings"]
    finally:
        service.end()
    return np.array(rows, np.float32)


def from_mlflow(project: Project, files: list[Path], folder: Path) -> NDArray[np.float32]:
    """Embed with MLflow's pyfunc of the registry's champion, in a process and folder without this project."""
    tracker = Tracker(project.tracking_uri, project.state, Store(project.store, project.state / "cache"))
    spec = comparison_runs(load_params(project.params_file), "own")[0]
    assert tracker.publish(make_run(project, spec)) is not None
    promote(project, RUN)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", PYFUNC, project.tracking_uri, folder / "rows.npy", *files]
    subprocess.run([str(word) for word in command], cwd=folder, env=environment, check=True)
    rows: NDArray[np.float32] = np.load(folder / "rows.npy")
    return rows


def in_double_precision(folder: Path, files: list[Path]) -> NDArray[np.float64]:
    """Return the network's rows without rounding."""
    model, description = load_model(folder, "cpu"), read_description(folder)
    views = torch.stack([model.view(path) for path in files])
    with torch.no_grad():
        rows: NDArray[np.float64] = (
            load_network(folder, description).double().embed(scale(views, description.transform.scaling).double()).numpy()
        )
    return rows


@pytest.mark.slow
@pytest.mark.proof
def test_one_network_gives_one_set_of_rows(project: Project, files: list[Path], tmp_path: Path) -> None:
    """Float32 forms agree within 1e-5; reduced precisions within the difference that their export measured, which exceeds rounding.

    torch's GroupNorm rounds a nearly constant patch by up to 2e-5 in the rows; ONNX's does not. ONNX is therefore compared with the
    rows in double precision, and every form that runs torch with those of the process, each to 1e-5.
    """
    folder = resolve_model(RUN, project)
    expected = load_model(folder, "cpu").embed(files)
    exact = in_double_precision(folder, files)
    kept, _ = load_embeddings(Store(project.store, project.state).folder(f"embed/{find_run(project, RUN).embedded}"), "test")
    found = {"the run itself": kept, "HTTP": over_http(project, files), "MLflow": from_mlflow(project, files, tmp_path)}
    bounds = dict.fromkeys(found, WITHIN)
    for graph_format, precision in PRECISIONS:
        name = f"{graph_format} {precision}"
        export(project, RUN, graph_format, precision, tmp_path / name)
        found[name] = load_model(tmp_path / name).embed(files)
        measured = json.loads((tmp_path / name / MEASURED_FILE).read_text())["largest_difference"]
        bounds[name] = WITHIN if precision == "fp32" else measured + WITHIN  # measured in batches of another size
    differences = {name: float(np.abs(rows - (exact if name == "onnx fp32" else expected)).max()) for name, rows in found.items()}
    rounded = float(np.abs(expected - exact).max())
    apart_N = np.abs(found["onnx fp32"] - expected).max(axis=1)
    print({name: f"{difference:.1e}" for name, difference in differences.items()}, f"torch's own rounding {rounded:.1e}")
    print(f"ONNX from the process {apart_N.max():.1e}, more than {WITHIN} in {(apart_N > WITHIN).sum()} of {len(files)}")
    assert len(files) == 240
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-6)
    assert {name for name, difference in differences.items() if not difference <= bounds[name]} == set()
    np.testing.assert_allclose(found["onnx fp32"], expected, rtol=0, atol=rounded + WITHIN)
    assert all(bounds[f"{graph_format} {precision}"] > 1e-4 for graph_format, precision in PRECISIONS if precision != "fp32")
