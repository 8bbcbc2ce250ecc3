"""The model that MLflow logs, as code: encoded images in, embeddings out. MLflow keeps this file and a zip of `dml_core` with the weights.

Load it anywhere: `mlflow.pyfunc.load_model(uri).predict(pandas.DataFrame({"image": [open("a.jpg", "rb").read()]}))` gives float32 (N, D).
"""

import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.models import set_model

CODE = "dml_core.zip"
COLUMN = "image"
if (code := Path(__file__).with_name("code") / CODE).exists():  # this file is a logged model's
    sys.path.insert(0, str(code))

from dml_core.trained import load_model  # noqa: E402 - from the model's code


class EmbeddingModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc, name-defined]
    """A trained embedding network behind MLflow's generic interface."""

    def load_context(self, context: Any) -> None:
        """Load the network, on a GPU if there is one."""
        self.model = load_model(context.artifacts["network"])

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> np.ndarray:
        """Return the embeddings (N, D) of the images in the column `image` (each the bytes of a JPEG, PNG, ... file)."""
        return self.model.embed(list(model_input[COLUMN]))


set_model(EmbeddingModel())
