"""Description of a trained network, `network.json` in its folder: everything that determines its embeddings, except the weights."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from dml_core.config import Config, parse
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import ConfigError, StoreError
from dml_core.files import file_sha256, read_regular, sealed, unsealed
from dml_core.models.config import ModelConfig

DESCRIPTION_FILE, WEIGHTS_FILE = "network.json", "network.pt"
FORMAT, WITHOUT_HASH = 3, 2  # of the description; the earlier one has no hash of the weights from which an export was made
REMEDY = "make the folder again"
logger = logging.getLogger(__name__)
Metric = Literal["cosine", "euclidean"]  # same values as in `EvaluationConfig`, whose code is not in MLflow's copy
Precision = Literal["fp32", "fp16", "int8"]
Forward = Callable[[Tensor], NDArray[np.float32]]


class GraphFile(Config):
    """The file of an exported network.

    Attributes:
        format: runtime of the graph.
        name: file name, in the description's folder.
        precision: precision of weights and arithmetic.
        weights_sha256: hash of the weights from which it was made; None in exports of before 30 November 2026.
    """

    format: Literal["onnx", "torch-export"]
    name: str = Field(pattern=r"^\w[\w.-]*$")
    precision: Precision
    weights_sha256: str | None = None


class NetworkDescription(Config):
    """Description of a trained network: everything that determines its embeddings, except the weights.

    Attributes:
        model: the network; its weights are in a separate file.
        transform: the protocol's views, of which the test view is used.
        num_classes: number of training classes; some heads have a layer of that size.
        embedding_dim: D.
        identity: identity of the training step; None if the network was saved without one.
        metric: metric with which the run compares embeddings.
        title: display name.
        graph: file of an exported network; None for a state dict.
        file_sha256: hash of the weights or graph file; None before it is written.
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


def read_description(folder: Path) -> NetworkDescription:
    """Read the description of a folder's network.

    Raises:
        StoreError: the description is damaged or of another format.
        ConfigError: it does not describe a valid network.
    """
    path = folder / DESCRIPTION_FILE
    try:
        data = read_regular(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror or error}); {REMEDY}") from None
    values = unsealed(data, path, FORMAT, REMEDY)
    del values["format"]
    return parse(NetworkDescription, values, str(path))


def intact_description(folder: Path) -> NetworkDescription | None:
    """Return the description of a folder's network; None if there is no folder, or with a warning if one of its files is damaged."""
    if not folder.exists():
        return None
    try:
        description = read_description(folder)
        check_file(folder, description)
    except (ConfigError, StoreError) as error:
        logger.warning("%s", error)
        return None
    return description


def check_file(folder: Path, description: NetworkDescription) -> None:
    """Compare the file of a network with its hash.

    Raises:
        StoreError: the file is missing or damaged.
    """
    path = folder / description.file
    try:
        actual = file_sha256(path)
    except FileNotFoundError:
        raise StoreError(f"{path}: the network's file is gone; {REMEDY}") from None
    except OSError as error:
        raise StoreError(f"{path}: the network's file cannot be read ({error.strerror or error}); {REMEDY}") from None
    if description.file_sha256 != actual:
        raise StoreError(f"{path}: the network's file is damaged (SHA-256 differs); {REMEDY}")


def write_description(folder: Path, description: NetworkDescription) -> None:
    """Write `network.json` with the hash of the weights or graph file, which must exist already."""
    description = description.model_copy(update={"file_sha256": file_sha256(folder / description.file)})
    has_hash = description.graph is not None and description.graph.weights_sha256 is not None
    values = description.model_dump(mode="json", exclude=None if has_hash else {"graph": {"weights_sha256"}})
    (folder / DESCRIPTION_FILE).write_text(sealed({"format": FORMAT if has_hash else WITHOUT_HASH, **values}))
