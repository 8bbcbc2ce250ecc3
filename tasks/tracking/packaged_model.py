"""The model that MLflow logs, as code: encoded images in, embeddings out. MLflow copies this file and `dml_core` beside the weights.

Load it anywhere: `mlflow.pyfunc.load_model(uri).predict(pandas.DataFrame({"image": [open("a.jpg", "rb").read()]}))` gives float32 (N, D).
"""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import torch
from mlflow.models import set_model
from torch import Tensor

from dml_core.config import parse
from dml_core.data.store.decode import decode_rgb
from dml_core.data.views.transform_config import TransformConfig
from dml_core.data.views.transforms import test_view
from dml_core.errors import StoreError
from dml_core.models.config import ModelConfig
from dml_core.models.embedder import Embedder

COLUMN = "image"
DESCRIPTION_FILE, WEIGHTS_FILE = "network.json", "network.pt"
BATCH_SIZE = 64


class EmbeddingModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc, name-defined]
    """A trained embedding network behind MLflow's generic interface."""

    def load_context(self, context: Any) -> None:
        """Rebuild the network from its description and weights, on a GPU where there is one."""
        folder = Path(context.artifacts["network"])
        description = json.loads((folder / DESCRIPTION_FILE).read_text())
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.transform = parse(TransformConfig, description["transform"], DESCRIPTION_FILE)
        self.network = Embedder(parse(ModelConfig, description["model"], DESCRIPTION_FILE), description["num_classes"])
        data = (folder / WEIGHTS_FILE).read_bytes()
        if description.get("weights_sha256") not in (None, hashlib.sha256(data).hexdigest()):  # older models do not say
            raise StoreError(f"{folder / WEIGHTS_FILE}: the weights are damaged (SHA-256 differs); fetch or publish the model again")
        self.network.load_state_dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
        self.network.to(self.device).eval()

    @torch.no_grad()
    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> np.ndarray:
        """Embeddings (N, D) of the images in the column `image` (bytes of a JPEG, PNG, ... file each)."""
        views = [test_view(decode_rgb(data), self.transform) for data in model_input[COLUMN]]
        batches = [torch.stack(views[start : start + BATCH_SIZE]) for start in range(0, len(views), BATCH_SIZE)]
        return np.concatenate([self.network.embed(images.to(self.device)).float().cpu().numpy() for images in batches])


def save(folder: Path, training: dict[str, Any], num_classes: int, system_state: dict[str, Tensor]) -> dict[str, Any]:
    """Write a network's description and weights into `folder`; returns the description.

    Args:
        folder: an existing folder.
        training: the run's training configuration as plain values.
        num_classes: of the training set.
        system_state: a checkpoint's state dict of model and loss; the loss's part is left behind.
    """
    model = json.loads(json.dumps(training["model"]))
    model["backbone"]["weights"] = "none"  # they are in the state
    network = Embedder(parse(ModelConfig, model, "model"), num_classes)
    state = {name.removeprefix("model."): value for name, value in system_state.items() if name.startswith("model.")}
    network.load_state_dict(state)
    torch.save(state, folder / WEIGHTS_FILE)
    description = {
        "model": model,
        "transform": training["transform"],
        "num_classes": num_classes,
        "embedding_dim": int(network.head.embedding_dim),
        "weights_sha256": hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest(),
    }
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description, indent=1))
    return description


set_model(EmbeddingModel())
