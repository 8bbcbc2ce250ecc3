"""Export networks as graphs of `torch.export` or ONNX, which other programs run without this package, and open them.

A graph maps test views, uint8 (N, H, W, 3), RGB, any N, to embeddings, float32 (N, D); it includes scaling and the order of channels and
axes. It excludes decoding, resizing and cropping: the antialiased resize of uint8 pixels has no exact counterpart in ONNX, and the images
of a batch have the same size only after it.
"""

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dml_core.data.views.transform_config import TransformConfig
from dml_core.data.views.transforms import scale
from dml_core.errors import ConfigError, StoreError, first_line
from dml_core.extras import require
from dml_core.models.embedder import Embedder
from dml_core.network_description import Forward, GraphFile, Precision

INPUT, OUTPUT = "pixels", "embeddings"
FILES = {"onnx": "network.onnx", "torch-export": "network.pt2"}
OPSET = 20
CALIBRATION_BATCH = 16
CPU_PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"
logger = logging.getLogger(__name__)


class Graph(nn.Module):
    """The exported module, from uint8 pixels to float32 embeddings, for any precision of the network.

    Args:
        network: ready to embed; converted in place to the precision.
        transform: the network's views, for their scaling.
        precision: "fp16" keeps weights and computes in half precision; scaling is always in single precision.
    """

    def __init__(self, network: Embedder, transform: TransformConfig, precision: Precision) -> None:
        super().__init__()
        self.network = network.half() if precision == "fp16" else network
        if precision == "fp16":  # GeM's result is float32; the head's weights are float16
            network.pooling.register_forward_hook(lambda _module, _maps, pooled_NC: pooled_NC.half())
        self.scaling = transform.scaling
        scale(torch.zeros((1, 3, 1, 1), dtype=torch.uint8), self.scaling)  # caches constants before a tracer can create them
        self.dtype = torch.float16 if precision == "fp16" else torch.float32

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the embeddings (N, D) of uint8 pixels (N, H, W, 3)."""
        images = scale(pixels.permute(0, 3, 1, 2), self.scaling)
        return self.network.embed(images.to(self.dtype)).float()


def write_graph(
    folder: Path, network: Embedder, transform: TransformConfig, graph: GraphFile, calibration: Sequence[Tensor] | None = None
) -> None:
    """Write a network as a graph.

    Args:
        folder: output folder.
        network: ready to embed, on the CPU; do not use it afterwards.
        transform: the network's views.
        graph: format, precision and file name.
        calibration: test views of training images, uint8 (3, H, W), for estimating the ranges of activations for int8.

    Raises:
        ConfigError: the format does not support int8.
        MissingPackageError: the format is ONNX, which is not installed.
        OSError: the folder cannot be written.
    """
    if graph.precision == "int8" and graph.format != "onnx":
        raise ConfigError("--precision int8 is of ONNX: torch's quantiser is in another package; use --format onnx")
    if graph.format == "onnx":
        require("onnx", "onnxscript", *(("onnxruntime",) if graph.precision == "int8" else ()))
    path = folder / graph.name
    with _quiet():
        program = _program(Graph(network, transform, graph.precision).eval(), transform)
        if graph.format == "torch-export":
            data = io.BytesIO()  # written by torch to a full disk, the file would end the process
            torch.export.save(program, data)
            path.write_bytes(data.getbuffer())
            return
        exported = torch.onnx.export(program, dynamo=True, input_names=[INPUT], output_names=[OUTPUT], opset_version=OPSET, verbose=False)
        assert exported is not None
        exported.save(path, external_data=False)
        if graph.precision == "int8":
            assert calibration, "int8 needs images"
            _quantise(path, calibration)


def open_graph(folder: Path, graph: GraphFile, device: str | torch.device | None = None) -> Forward:
    """Return the exported network of a folder as a function of test views, uint8 (N, 3, H, W), on the CPU.

    Args:
        folder: the folder.
        graph: format, precision and file name.
        device: where the graph runs. None is the GPU if there is one and ONNX Runtime can use it, else the CPU; graphs of `torch.export`
            run on the CPU.

    Raises:
        ConfigError: the graph cannot run on the device.
        StoreError: the file is missing or damaged.
        MissingPackageError: the graph is of ONNX, whose runtime is not installed.
    """
    if graph.format == "onnx":
        require("onnxruntime")
    path, chosen = folder / graph.name, _device_of(graph, device)
    try:
        run = _open_onnx(path, chosen) if graph.format == "onnx" else _open_program(path)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - either library may raise anything
        raise StoreError(f"{path}: not the exported network ({first_line(error)}); export it again") from None
    return lambda pixels: run(pixels.permute(0, 2, 3, 1).contiguous())


def _program(graph: Graph, transform: TransformConfig) -> Any:
    """Return the traced graph, for any number of images; the image size is fixed if all views have the same size."""
    fixed = (transform.crop_size, transform.crop_size) if transform.crop_size else transform.test_resize
    height, width = fixed if isinstance(fixed, tuple) else (96, 128)
    assert height is not None
    assert width is not None
    batch: Any = torch.export.Dim("batch", min=1)
    sizes: Any = {} if isinstance(fixed, tuple) else {1: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    pixels = torch.zeros((2, height, width, 3), dtype=torch.uint8)
    with torch.no_grad():
        return torch.export.export(graph, (pixels,), dynamic_shapes={"pixels": {0: batch} | sizes})


def _device_of(graph: GraphFile, device: str | torch.device | None) -> torch.device | None:
    """Return the requested device; reject one on which the graph cannot run."""
    try:
        chosen = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device '{device}' cannot be used ({first_line(error)}); name 'cpu' or 'cuda'") from None
    if chosen is not None and chosen.type != "cpu" and (chosen.type != "cuda" or graph.format != "onnx"):
        raise ConfigError(f"device '{device}' cannot be used: exports run on the CPU, those of ONNX also on 'cuda'; name 'cpu'")
    return chosen


def _open_onnx(path: Path, device: torch.device | None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    providers = _providers(device, onnxruntime.get_available_providers())
    session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    if len(providers) > 1 and CUDA_PROVIDER not in session.get_providers():  # ONNX Runtime falls back to the CPU without an error
        failure = f"ONNX Runtime cannot use the GPU here for {path.name}"
        if device is not None:
            raise ConfigError(f"device '{device}': {failure}; install the CUDA and cuDNN that onnxruntime-gpu needs, or name 'cpu'")
        logger.warning("%s; it runs on the CPU", failure)
    session.disable_fallback()  # a later failure of the GPU is an error, too

    def run(pixels: Tensor) -> NDArray[np.float32]:
        (rows,) = session.run([OUTPUT], {INPUT: pixels.numpy()})
        return np.asarray(rows, np.float32)

    return run


def _providers(device: torch.device | None, available: Sequence[str]) -> list[Any]:
    """Return ONNX Runtime's providers for a device, in order of preference.

    Raises:
        ConfigError: the device is a GPU, and the installed ONNX Runtime is built for the CPU only.
    """
    on_gpu = torch.cuda.is_available() and CUDA_PROVIDER in available if device is None else device.type == "cuda"
    if not on_gpu:
        return [CPU_PROVIDER]
    if CUDA_PROVIDER not in available:
        raise ConfigError(f"device '{device}': the installed ONNX Runtime has no CUDA; install onnxruntime-gpu in place of onnxruntime")
    index = 0 if device is None or device.index is None else device.index
    # TF32, ONNX Runtime's default, would give other embeddings than the network's own.
    return [(CUDA_PROVIDER, {"device_id": index, "use_tf32": 0}), CPU_PROVIDER]


def _open_program(path: Path) -> Any:
    module = torch.export.load(path).module()

    @torch.no_grad()
    def run(pixels: Tensor) -> NDArray[np.float32]:
        return module(pixels).numpy()

    return run


def _quantise(path: Path, views: Sequence[Tensor]) -> None:
    """Quantise weights and activations to 8 bits, in place: weights per channel, activation ranges from the views."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    batches = ({INPUT: torch.stack(batch).permute(0, 2, 3, 1).contiguous().numpy()} for batch in _calibration_batches(views))

    class Batches(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, NDArray[np.uint8]] | None:
            return next(batches, None)

    prepared = path.with_suffix(".prepared.onnx")
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    quantize_static(
        str(prepared),
        str(path),
        Batches(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=["Conv", "Gemm", "MatMul"],
    )
    prepared.unlink()


def _calibration_batches(views: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield batches of at most CALIBRATION_BATCH consecutive views of the same size."""
    for _, same_size in groupby(views, key=lambda view: view.shape):
        while batch := list(islice(same_size, CALIBRATION_BATCH)):
            yield batch


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and log messages of the exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
