"""Log a run's network in MLflow: a pyfunc with the code that it imports, tried before it is logged.

A network that MLflow has already, as of a run that is scored again, is linked to the new run instead.
"""

import hashlib
import io
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path, PurePosixPath

import mlflow
import numpy as np
import pandas as pd
import torch
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Run
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, Schema, TensorSpec
from PIL import Image
from torch import Tensor

import dml_core
from dml_core.config import parse
from dml_core.data.store.decode import decode_upright
from dml_core.data.store.splits import open_role
from dml_core.data.views.transforms import scale
from dml_core.errors import SavedNetworkError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.models.backbones import registry
from dml_core.models.embedder import Embedder, network_weights
from dml_core.network_description import WEIGHTS_FILE
from dml_core.trained import load_model, save_network
from dml_core.training.checkpoints.file import load_checkpoint, weights_of
from dml_core.training.config import TrainingConfig
from tasks.runs.identity import network_identity, source_files
from tasks.runs.records import RunReport
from tasks.tracking import packaged_model
from tasks.tracking.child_run import MLFLOW_TAGS, run_title
from tasks.tracking.registered import MODEL_TYPE, NETWORK
from tasks.tracking.tags import Tag

MODEL_REQUIREMENTS = ("mlflow", "torch", "torchvision", "numpy", "pandas", "pydantic", "pyyaml", "pyarrow", "pillow")
USAGE = "images (bytes of a JPEG, PNG, ... file, or these in base64) in the column `image`, float32 embeddings (N, D) out"


def log_model(uri: str, run_id: str, report: RunReport, checkpoint: Path, num_steps: int) -> str:
    """Log the trained network as a pyfunc (encoded images in, embeddings out) with the code that it imports and pinned requirements.

    If the run's experiment has a model with the same content, it is linked to the run. Return the model's id. Only MLflow's fluent
    interface logs models, so one thread of a process at a time may call this.

    Args:
        uri: MLflow's tracking address.
        run_id, report: the run that trained it.
        checkpoint: folder of its checkpoint.
        num_steps: number of training steps. MLflow links a run's metrics at the model's step to the model: the first ones if it is 0. No
            metric has this step; the final scores are linked when they are logged.

    Raises:
        SavedNetworkError: the network cannot be opened again, or gives other embeddings; nothing is logged then.
    """
    state = load_checkpoint(checkpoint)
    assert state is not None
    evaluation = parse(EvaluationConfig, report.parameters["evaluation"], "published run")
    weights, _ = weights_of(state, evaluation.epoch)
    training = parse(TrainingConfig, report.parameters["training"], "published run")
    dataset = open_role(Path(report.dataset.folder), "train", training.validation)
    mlflow.set_tracking_uri(uri)
    with tempfile.TemporaryDirectory() as folder, _without_trial(), mlflow.start_run(run_id=run_id, log_system_metrics=False) as run:
        network, code = Path(folder) / "network", Path(folder) / packaged_model.CODE
        description = save_network(
            network,
            report.parameters["training"],
            len(dataset.class_names),
            weights,
            network_identity(report.checkpoint.identity, evaluation.epoch),
            evaluation.metric,
            run_title(report.dataset.name, report.variant, report.seed),
        )
        image = dataset.raw_bytes(0)
        example = drawn_image(image)
        requirements = [f"{name}=={version(name)}" for name in _requirements(training.model.backbone.name)]
        pack_code(training.model.backbone.name, code)
        content = content_of(Path(folder), requirements, example)
        if (model_id := _link(MlflowClient(uri), run, content, network, num_steps)) is not None:
            return model_id
        check_opens(network, training, len(dataset.class_names), weights, image)
        info = mlflow.pyfunc.log_model(
            name=re.sub(r"[^\w-]", "-", f"{report.dataset.name}-{report.variant}-seed-{report.seed}"),
            python_model=packaged_model.__file__,
            artifacts={"network": str(network)},
            code_paths=[str(code)],
            pip_requirements=requirements,
            signature=ModelSignature(
                inputs=Schema([ColSpec("binary", packaged_model.COLUMN)]),
                outputs=Schema([TensorSpec(np.dtype("float32"), (-1, description.embedding_dim))]),
            ),
            input_example=pd.DataFrame({packaged_model.COLUMN: [example]}),
            model_type=MODEL_TYPE,
            tags=_tags(report) | {Tag.CONTENT: content},
            step=num_steps,
        )
    return str(info.model_id)


def content_of(folder: Path, requirements: Sequence[str], example: bytes) -> str:
    """Return a hash of a model: of its network's description, which has the weights' hash, its loader, code, requirements and example."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != WEIGHTS_FILE)
    parts = [part for path in files for part in (str(path.relative_to(folder)).encode(), path.read_bytes())]
    parts += [*(requirement.encode() for requirement in requirements), example, Path(packaged_model.__file__).read_bytes()]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _link(client: MlflowClient, run: Run, content: str, network: Path, num_steps: int) -> str | None:
    """Link a complete model with this content to the run and return its id; None if the run's experiment has none.

    A model whose files are missing or cut, compared with those in `network`, is not complete.
    """
    sizes = {path.name: path.stat().st_size for path in network.iterdir()}
    for model in client.search_logged_models([run.info.experiment_id], filter_string=f"tags.`{Tag.CONTENT}` = '{content}'"):
        files = mlflow.artifacts.list_artifacts(artifact_uri=f"{model.artifact_location}/{NETWORK}")
        if model.status == LoggedModelStatus.READY and {PurePosixPath(file.path).name: file.file_size for file in files} == sizes:
            client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, num_steps)])
            return str(model.model_id)
    return None


def _tags(report: RunReport) -> dict[str, str]:
    """Return description and source of a logged model."""
    note = f"Embedding network as a pyfunc: {USAGE}. The code that it needs travels with it."
    if report.parameters["training"].get("transform", {}).get("crop_to_box"):
        note += " It was trained on the contents of boxes, and takes no boxes: crop the images."
    source = {MLFLOW_TAGS["command"]: report.tags["command"]} if "command" in report.tags else {}
    return {Tag.NOTE: note, "mlflow.source.type": "LOCAL", **source}


def check_opens(folder: Path, training: TrainingConfig, num_classes: int, weights: Mapping[str, Tensor], image: bytes) -> None:
    """Open a network like a user of the published model, and compare its embedding of an image with the trained network's.

    Raises:
        SavedNetworkError: it cannot be opened, or gives another embedding.
    """
    try:
        opened = load_model(folder, "cpu")
    except Exception as error:
        raise SavedNetworkError(f"the saved network cannot be loaded: {error}; it was not published") from error
    trained = Embedder(training.without_weights().model, num_classes)
    trained.load_state_dict(network_weights(weights))
    with torch.no_grad():
        expected = trained.eval().embed(scale(opened.view(image)[None], training.transform.scaling)).numpy()
    embedding = opened.embed([image])
    if embedding.shape != expected.shape or not np.allclose(embedding, expected, rtol=1e-4, atol=1e-5):
        raise SavedNetworkError(f"{opened.title}: the saved network gives other embeddings than the trained one; it was not published")


def drawn_image(image: bytes) -> bytes:
    """Return a PNG of a grey gradient in the size of an image: a model's example input, which must not contain data of the dataset."""
    height, width = decode_upright(image).shape[1:]
    file = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).save(file, "PNG")
    return file.getvalue()


@contextmanager
def _without_trial() -> Iterator[None]:
    """Keep MLflow from trying the model (`check_opens` does): loading it changes `sys.path` and `sys.modules`, which other threads read."""
    trial = mlflow.models.utils._validate_serving_input
    mlflow.models.utils._validate_serving_input = lambda **_: None
    try:
        yield
    finally:
        mlflow.models.utils._validate_serving_input = trial


def pack_code(backbone: str, file: Path) -> None:
    """Write what the packaged model imports with this backbone, the package `dml_core`, as a zip file; the same code gives the same bytes.

    As files of their own they would be thirty of a run's fifty uploads.
    """
    modules = source_files(("tasks.tracking.packaged_model", registry.backbone_module(backbone)))
    source = Path(dml_core.__file__).parent
    # `source_files` omits the registry, a table of names, in which the model looks up its backbone.
    paths = {path for name, path in modules.items() if name.startswith("dml_core")} | {Path(registry.__file__)}
    packages = {parent / "__init__.py" for path in paths for parent in path.parents if parent.is_relative_to(source)}
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted(paths | {path for path in packages if path.exists()}):
            archive.writestr(zipfile.ZipInfo(path.relative_to(source.parent).as_posix()), path.read_bytes())


def _requirements(backbone: str) -> tuple[str, ...]:
    return (*MODEL_REQUIREMENTS, "timm") if backbone.startswith("timm:") else MODEL_REQUIREMENTS
