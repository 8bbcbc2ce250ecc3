"""The model that MLflow logs, as code: encoded images in, embeddings out. MLflow keeps this file and a zip of `dml_core` with the weights.

Load it anywhere: `mlflow.pyfunc.load_model(uri).predict(pandas.DataFrame({"image": [open("a.jpg", "rb").read()]}))` gives float32 (N, D).
"""

import base64
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.models import set_model

CODE = "dml_core.zip"
COLUMN = "image"
_modules: dict[str, ModuleType] = {}  # of the model's code


@contextmanager
def _code_of_model() -> Iterator[None]:
    """Import `dml_core` from the model's code: a process may have that of another model, or an installed one, and has it again afterwards.

    Load models in one thread at a time. They import nothing later, when they predict.
    """
    code = Path(__file__).with_name("code") / CODE
    if not code.exists():  # this file is not a logged model's
        yield
        return
    others = _take_modules()
    sys.modules.update(_modules)
    sys.path.insert(0, str(code))
    try:
        yield
    finally:
        sys.path.remove(str(code))
        _modules.update(_take_modules())
        sys.modules.update(others)


def _take_modules() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "dml_core"}


with _code_of_model():
    from dml_core.trained import load_model


class EmbeddingModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc, name-defined]
    """A trained embedding network behind MLflow's generic interface."""

    def load_context(self, context: Any) -> None:
        """Load the network, on a GPU if there is one."""
        with _code_of_model():
            self.model = load_model(context.artifacts["network"])

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> np.ndarray:
        """Return the embeddings (N, D) of the images in the column `image`: each the bytes of a JPEG, PNG, ... file, or these in base64."""
        return self.model.embed([_image_bytes(image) for image in model_input[COLUMN]])


def _image_bytes(image: Any) -> bytes:
    """Return the bytes of an image. A text is base64 and never a path: a client of a server would read the server's files."""
    if isinstance(image, str):
        return base64.b64decode("".join(image.split()), validate=True)  # programs break its lines
    if not isinstance(image, bytes | bytearray):
        raise TypeError(f"column {COLUMN}: expected the bytes of an image file, or these in base64, found {type(image).__name__}")
    return bytes(image)


set_model(EmbeddingModel())
