"""Description of a trained network, `network.json` in its folder: everything that determines its embeddings, except the weights."""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from dml_core.config import Config
from dml_core.data.views.transform_config import TransformConfig
from dml_core.models.config import ModelConfig

DESCRIPTION_FILE, WEIGHTS_FILE = "network.json", "network.pt"
FORMAT = 2  # of the description; format 1 had no format number and no hash, and omitted None values
Metric = Literal["cosine", "euclidean"]  # same values as in `EvaluationConfig`, whose code is not in MLflow's copy
Precision = Literal["fp32", "fp16", "int8"]
Forward = Callable[[Tensor], NDArray[np.float32]]


class GraphFile(Config):
    """The file of an exported network.

    Attributes:
        format: runtime of the graph.
        name: file name, in the description's folder.
        precision: precision of weights and arithmetic.
    """

    format: Literal["onnx", "torch-export"]
    name: str = Field(pattern=r"^\w[\w.-]*$")
    precision: Precision


class NetworkDescription(Config):
    """Description of a trained network: everything that determines its embeddings, except the weights.

    Attributes:
        model: the network; its weights are in a separate file.
        transform: the protocol's views, of which the test view is used.
        num_classes: number of training classes; some heads have a layer of that size.
        embedding_dim: D.
        identity: identity of the training step; None in older descriptions.
        metric: metric with which the run compares embeddings.
        title: display name.
        graph: file of an exported network; None for a state dict.
        file_sha256: hash of the weights or graph file; None in older descriptions.
    """

    model: ModelConfig
    transform: TransformConfig
    num_classes: int
    embedding_dim: int
    identity: str | None = None
    metric: Metric = "cosine"
    title: str = ""
    graph: GraphFile | None = None
    file_sha256: str | None = None

    @property
    def file(self) -> str:
        """Name of the file with the weights or the graph, in the description's folder."""
        return WEIGHTS_FILE if self.graph is None else self.graph.name
