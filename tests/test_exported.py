"""Networks exported as graphs give the network's outputs for any number of images, without this package."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from dml_core import exported as exported_module
from dml_core.errors import ConfigError, StoreError
from dml_core.exported import FILES, open_graph, write_graph
from dml_core.files import SEAL, sealed
from dml_core.network_description import GraphFile, NetworkDescription, write_description
from dml_core.trained import load_model, load_network, save_network
from dml_core.training.loop import build_system
from tests.conftest import MODEL, small_training
from tests.forked import forked_on_small_disk

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
Exported = Callable[[str, str, str], tuple[Path, Path]]


BN_HEAD = {"kind": "bn", "embedding_dim": 8}


def network_in(
    folder: Path, scaling: str = "zero-one", pooling: str = "average", head: dict[str, object] = BN_HEAD, **transform: object
) -> NetworkDescription:
    """Save an untrained network with changed BatchNorm statistics to a folder."""
    model = {"backbone": MODEL["backbone"], "pooling": {"kind": pooling}, "head": head}
    config = small_training(model=model, transform={"scaling": scaling} | transform)
    system = build_system(config, 4, 0, CPU)
    system.model(torch.rand(16, 3, 24, 24))
    return save_network(folder, config.model_dump(mode="json"), 4, system.state_dict(), "ab" * 16)


def exported(folder: Path, out: Path, graph_format: str, precision: str, sizes: Sequence[tuple[int, int]] = ((24, 24),)) -> GraphFile:
    description = load_model(folder, "cpu").description
    graph = GraphFile(format=graph_format, name=FILES[graph_format], precision=precision)  # type: ignore[arg-type]
    out.mkdir()
    drawn, number = np.random.default_rng(1), 32 // len(sizes)
    views = [torch.from_numpy(drawn.integers(0, 256, (3, *size), dtype=np.uint8)) for size in sizes for _ in range(number)]
    write_graph(out, load_network(folder, description), description.transform, graph, views)
    write_description(out, description.model_copy(update={"graph": graph}))
    return graph


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Return the folders of a network and of its export, by format, precision and scaling; each is exported once."""

    @cache
    def make(graph_format: str, precision: str, scaling: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("network")
        network_in(folder / "kept", scaling)
        exported(folder / "kept", folder / "out", graph_format, precision)
        return folder / "kept", folder / "out"

    return make


def fill_the_disk(folder: Path, graph_format: str) -> None:
    with pytest.raises(OSError, match="File too large"):
        exported(folder / "kept", folder / graph_format, graph_format, "fp32")


def test_a_disk_that_is_full_is_an_error_of_the_system(tmp_path: Path) -> None:
    """In another process: torch ended it."""
    network_in(tmp_path / "kept")
    for graph_format in FILES:
        assert forked_on_small_disk(1000, fill_the_disk, tmp_path, graph_format) == 0, graph_format


@pytest.mark.parametrize(
    ("graph_format", "precision", "scaling", "largest"),
    [
        ("onnx", "fp32", "bgr-caffe", 1e-5),  # the other scaling is tested with a trained network, in tests/tasks/models/test_export.py
        ("torch-export", "fp32", "bgr-caffe", 1e-6),
        pytest.param("onnx", "int8", "zero-one", 0.3, marks=pytest.mark.proof),
        pytest.param("onnx", "fp16", "zero-one", 0.02, marks=pytest.mark.proof),
        pytest.param("torch-export", "fp16", "zero-one", 0.02, marks=pytest.mark.proof),
    ],
)
def test_a_graph_gives_the_network_s_rows(graph_format: str, precision: str, scaling: str, largest: float, network: Exported) -> None:
    kept, out = network(graph_format, precision, scaling)
    own, found = load_model(kept, "cpu"), load_model(out)
    images = list(np.random.default_rng(0).integers(0, 256, (9, 24, 24, 3), dtype=np.uint8))
    expected = own.embed(images)
    for batch_size in (1, 4, 9):
        np.testing.assert_allclose(found.embed(images, batch_size), expected, atol=largest)
    identity = own.identity if precision == "fp32" else f"{own.identity}-{precision}"
    assert (found.identity, found.num_dimensions, found.metric) == (identity, 8, own.metric)
    assert np.abs(expected).max() > 0.1


def check_half_precision(folder: Path, graph_format: str, pooling: str, head: dict[str, object]) -> None:
    network_in(folder / "kept", pooling=pooling, head=head)
    exported(folder / "kept", folder / "out", graph_format, "fp16")
    images = list(np.random.default_rng(0).integers(0, 256, (3, 24, 24, 3), dtype=np.uint8))
    np.testing.assert_allclose(load_model(folder / "out").embed(images), load_model(folder / "kept", "cpu").embed(images), atol=0.02)


@pytest.mark.parametrize("graph_format", FILES)
def test_gem_is_exported_in_half_precision(graph_format: str, tmp_path: Path) -> None:
    """Its result is float32 also for half-precision maps."""
    check_half_precision(tmp_path, graph_format, "gem", {"kind": "bn_neck", "embedding_dim": 8})


HEADS: list[dict[str, object]] = [
    {"kind": "identity"},
    {"kind": "linear", "embedding_dim": 8},
    BN_HEAD,
    {"kind": "bn_neck", "embedding_dim": None},
    {"kind": "two_layer", "embedding_dim": 8},
    {"kind": "two_layer", "embedding_dim": 8, "batchnorm": True},
    {"kind": "two_layer", "embedding_dim": 8, "test_layer": "last"},
]


@pytest.mark.proof
@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("pooling", ["average", "max", "average_max", "gem"])
@pytest.mark.parametrize("graph_format", FILES)
def test_every_network_is_exported_in_half_precision(graph_format: str, pooling: str, head: dict[str, object], tmp_path: Path) -> None:
    check_half_precision(tmp_path, graph_format, pooling, head)


def test_a_network_without_a_size_is_quantised_with_views_of_any(tmp_path: Path) -> None:
    network_in(tmp_path / "kept", crop="none", crop_size=None, padding=0)
    exported(tmp_path / "kept", tmp_path / "out", "onnx", "int8", [(24, 24), (24, 32), (32, 24)])
    images = list(np.random.default_rng(0).integers(0, 256, (3, 24, 40, 3), dtype=np.uint8))
    own, found = load_model(tmp_path / "kept", "cpu"), load_model(tmp_path / "out")
    np.testing.assert_allclose(found.embed(images), own.embed(images), atol=0.3)
    assert found.identity == f"{own.identity}-int8"


@pytest.mark.proof
def test_a_network_without_a_size_takes_images_of_any(tmp_path: Path) -> None:
    network_in(tmp_path / "kept", crop="none", crop_size=None, padding=0)
    for graph_format in FILES:
        exported(tmp_path / "kept", tmp_path / graph_format, graph_format, "fp32")
        found, own = load_model(tmp_path / graph_format), load_model(tmp_path / "kept", "cpu")
        for height, width in ((24, 24), (40, 33)):
            images = list(np.random.default_rng(0).integers(0, 256, (3, height, width, 3), dtype=np.uint8))
            np.testing.assert_allclose(found.embed(images), own.embed(images), atol=1e-5)


def test_onnx_alone_runs_the_file_with_scaling_in_it(network: Exported, tmp_path: Path) -> None:
    kept, out = network("onnx", "fp32", "bgr-caffe")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 24, 24, 3), dtype=np.uint8)
    np.save(tmp_path / "pixels.npy", pixels)
    code = f"""
import numpy, onnxruntime, sys
session = onnxruntime.InferenceSession({str(out / "network.onnx")!r})
(rows,) = session.run(None, {{"pixels": numpy.load({str(tmp_path / "pixels.npy")!r})}})
numpy.save({str(tmp_path / "rows.npy")!r}, rows)
assert not {{"torch", "dml_core"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    description = load_model(kept, "cpu").description
    bgr = torch.from_numpy(pixels[..., ::-1].copy()).permute(0, 3, 1, 2).float() - torch.tensor([104.0, 117.0, 128.0])[:, None, None]
    expected = load_network(kept, description).embed(bgr).detach().numpy()
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy"), expected, atol=1e-5)


def test_what_cannot_be_exported_or_opened_is_one_line(tmp_path: Path) -> None:
    network_in(tmp_path / "kept")
    with pytest.raises(ConfigError, match="int8 is of ONNX"):
        exported(tmp_path / "kept", tmp_path / "out", "torch-export", "int8")
    values = json.loads((tmp_path / "kept" / "network.json").read_text())
    values |= {"graph": {"format": "onnx", "name": "network.onnx", "precision": "fp32"}, "file_sha256": sha256(b"nonsense").hexdigest()}
    (tmp_path / "out" / "network.json").write_text(sealed({name: value for name, value in values.items() if name != SEAL}))
    (tmp_path / "out" / "network.onnx").write_bytes(b"nonsense")
    with pytest.raises(StoreError, match=r"network\.onnx: not the exported network"):
        load_model(tmp_path / "out")


CUDA, ON_CPU = "CUDAExecutionProvider", ["CPUExecutionProvider"]


def on_gpu(index: int) -> list[object]:
    return [(CUDA, {"device_id": index, "use_tf32": 0}), *ON_CPU]


@pytest.mark.parametrize(
    ("device", "available", "has_gpu", "expected"),
    [
        (None, ON_CPU, False, ON_CPU),
        (None, ON_CPU, True, ON_CPU),
        (None, [CUDA, *ON_CPU], False, ON_CPU),
        (None, [CUDA, *ON_CPU], True, on_gpu(0)),
        ("cpu", [CUDA, *ON_CPU], True, ON_CPU),
        ("cuda", [CUDA, *ON_CPU], True, on_gpu(0)),
        ("cuda:1", [CUDA, *ON_CPU], True, on_gpu(1)),
    ],
)
def test_a_graph_takes_the_gpu_if_there_is_one_and_onnx_runtime_can(
    device: str | None, available: list[str], has_gpu: bool, expected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen without a GPU; nothing was run on one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert exported_module._providers(None if device is None else torch.device(device), available) == expected


@pytest.mark.filterwarnings("ignore:Specified provider 'CUDAExecutionProvider'")  # that this ONNX Runtime has no CUDA
def test_a_gpu_that_cannot_be_used_is_an_error_where_it_is_named_and_else_reported(
    network: Exported, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This ONNX Runtime is built for the CPU. Told that it is not, it falls back in silence, as with another version of CUDA."""
    _, folder = network("onnx", "fp32", "bgr-caffe")
    with pytest.raises(ConfigError, match=r"^device 'cuda': the installed ONNX Runtime has no CUDA; install onnxruntime-gpu [^\n]*$"):
        load_model(folder, "cuda")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, *ON_CPU])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"^device 'cuda:1': ONNX Runtime cannot use the GPU here for network\.onnx; [^\n]* name 'cpu'$"):
        load_model(folder, "cuda:1")
    caplog.clear()
    image = np.zeros((24, 24, 3), np.uint8)
    rows = load_model(folder).embed(image)
    messages = [message for name, _, message in caplog.record_tuples if name == "dml_core.exported"]
    assert messages == ["ONNX Runtime cannot use the GPU here for network.onnx; it runs on the CPU"]
    caplog.clear()
    np.testing.assert_array_equal(rows, load_model(folder, "cpu").embed(image))
    assert not caplog.records


@pytest.mark.parametrize(
    ("graph_format", "device", "problem"),
    [
        ("torch-export", "cuda", "exports run on the CPU, those of ONNX also on 'cuda'; name 'cpu'"),
        ("onnx", "mps", "exports run on the CPU, those of ONNX also on 'cuda'; name 'cpu'"),
        ("onnx", "nonsense", "name 'cpu' or 'cuda'"),
    ],
)
def test_a_device_that_no_export_runs_on_is_one_line(graph_format: str, device: str, problem: str, tmp_path: Path) -> None:
    graph = GraphFile(format=graph_format, name=FILES[graph_format], precision="fp32")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"^device '{device}' cannot be used[^\n]*{problem}$"):
        open_graph(tmp_path, graph, device)
