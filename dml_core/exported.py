"""Networks as graphs: `torch.export`'s and ONNX's, which other programs run without this package, and how one is opened here.

A graph takes test views, uint8 (N, H, W, 3), RGB, and gives embeddings (N, D): scaling and the order of channels and axes are in it.
Decoding, resizing and cropping are outside: Pillow's and torchvision's antialiased resize of uint8 pixels has no exact counterpart in ONNX.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dml_core.errors import StoreError
from dml_core.trained import Forward, GraphFile

INPUT, OUTPUT = "pixels", "embeddings"


def open_graph(folder: Path, graph: GraphFile) -> Forward:
    """The exported network of a folder, as a function of test views, uint8 (N, 3, H, W).

    Raises:
        StoreError: its file is missing or damaged.
    """
    path = folder / graph.name
    try:
        run = _open_onnx(path) if graph.format == "onnx" else _open_program(path)
    except Exception as error:  # noqa: BLE001 - whatever the two libraries have against the file
        raise StoreError(f"{path}: not the exported network ({str(error).splitlines()[0]}); export it again") from None
    return lambda pixels: run(pixels.permute(0, 2, 3, 1).contiguous())


def _open_onnx(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(pixels: Tensor) -> NDArray[np.float32]:
        (rows,) = session.run([OUTPUT], {INPUT: pixels.numpy()})
        return np.asarray(rows, np.float32)

    return run


def _open_program(path: Path) -> Any:
    module = torch.export.load(path).module()

    @torch.no_grad()
    def run(pixels: Tensor) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = module(pixels).float().numpy()
        return rows

    return run
