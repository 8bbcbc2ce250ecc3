"""Models in MLflow: a run's network as a logged model, and a comparison's best as a version of a registered model."""

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import torch
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.types import ColSpec, Schema, TensorSpec
from torch import Tensor

import dml_core
from dml_core.config import parse
from dml_core.errors import SavedNetworkError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.training.checkpoints.file import load_checkpoint, weights_of
from dml_core.training.config import TrainingConfig
from tasks.runs.best import RULE
from tasks.runs.identity import source_files
from tasks.runs.records import RunReport
from tasks.tracking.pages import model_tags, run_title
from tasks.tracking.reading import all_pages

MODEL_REQUIREMENTS = ("mlflow", "torch", "torchvision", "numpy", "pandas", "pydantic", "pyyaml", "pyarrow", "pillow")
BEST = "best"


def find_model(client: MlflowClient, run: Any) -> str | None:
    """Return the id of the complete model that a run has logged, or None; incomplete models are deleted.

    Raises:
        MlflowException: MLflow cannot be queried.
    """
    for output in run.outputs.model_outputs if run.outputs else ():
        try:
            model = client.get_logged_model(output.model_id)
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise  # an error of the server says nothing about the model
            continue  # deleted
        if model.status == LoggedModelStatus.READY:
            return str(model.model_id)
        client.delete_logged_model(model.model_id)
    return None


def log_model(client: MlflowClient, uri: str, run_id: str, report: RunReport, checkpoint: Path, num_steps: int) -> str:
    """Log the trained network as a pyfunc (encoded images in, embeddings out) with the code that it imports and pinned requirements.

    Args:
        client: client of `uri`.
        uri: MLflow's tracking address; only the fluent interface logs models, so one thread of a process at a time may call this.
        run_id: the run that trained it.
        report: report of that run.
        checkpoint: folder of its checkpoint.
        num_steps: number of training steps. MLflow links a run's metrics at the model's step to the model: the first ones if it is 0. No
            metric has this step; the final scores are linked when they are logged.

    Returns:
        The model's id.

    Raises:
        SavedNetworkError: the network cannot be opened again, or gives other embeddings; nothing is logged then.
    """
    from dml_core.data.store.splits import open_role  # imported here: they import torchvision, which finding a run does not need
    from dml_core.trained import save_network
    from tasks.tracking import packaged_model

    state = load_checkpoint(checkpoint)
    assert state is not None
    evaluation = parse(EvaluationConfig, report.parameters["evaluation"], "published run")
    weights, _ = weights_of(state, evaluation.epoch)
    training = parse(TrainingConfig, report.parameters["training"], "published run")
    dataset = open_role(Path(report.dataset.folder), "train", training.validation)
    mlflow.set_tracking_uri(uri)
    with tempfile.TemporaryDirectory() as folder, _same_import_path(), mlflow.start_run(run_id=run_id, log_system_metrics=False):
        network, code = Path(folder) / "network", Path(folder) / "code"
        description = save_network(
            network,
            report.parameters["training"],
            len(dataset.class_names),
            weights,
            report.checkpoint.identity,
            evaluation.metric,
            run_title(report.dataset.name, report.variant, report.seed),
        )
        check_opens(network, training, len(dataset.class_names), weights, dataset.raw_bytes(0))
        info = mlflow.pyfunc.log_model(
            name=re.sub(r"[^\w-]", "-", f"{report.dataset.name}-{report.variant}-seed-{report.seed}"),
            python_model=packaged_model.__file__,
            artifacts={"network": str(network)},
            code_paths=[str(copy_code(training.model.backbone.name, code))],
            pip_requirements=[f"{name}=={version(name)}" for name in _requirements(training.model.backbone.name)],
            signature=ModelSignature(
                inputs=Schema([ColSpec("binary", packaged_model.COLUMN)]),
                outputs=Schema([TensorSpec(np.dtype("float32"), (-1, description.embedding_dim))]),
            ),
            input_example=pd.DataFrame({packaged_model.COLUMN: [dataset.raw_bytes(0)]}),
            model_type="embedding",
            tags=model_tags(report.tags),
            step=num_steps,
        )
    return str(info.model_id)


def check_opens(folder: Path, training: TrainingConfig, num_classes: int, weights: Mapping[str, Tensor], image: bytes) -> None:
    """Open a network like a user of the published model, and compare its embedding of an image with the trained network's.

    MLflow tries a model too, but only warns.

    Raises:
        SavedNetworkError: it cannot be opened, or gives another embedding.
    """
    from dml_core.data.views.transforms import scale
    from dml_core.models.embedder import Embedder
    from dml_core.trained import load_model

    try:
        opened = load_model(folder, "cpu")
    except Exception as error:
        raise SavedNetworkError(f"the saved network cannot be loaded: {error}; it was not published") from error
    backbone = training.model.backbone.model_copy(update={"weights": "none", "weights_sha256": None})
    trained = Embedder(training.model.model_copy(update={"backbone": backbone}), num_classes)
    trained.load_state_dict({name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")})
    with torch.no_grad():
        expected = trained.eval().embed(scale(opened.view(image)[None], training.transform.scaling)).numpy()
    found = opened.embed([image])
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-4, atol=1e-5):
        raise SavedNetworkError(f"{opened.title}: the saved network gives other embeddings than the trained one; it was not published")


@contextmanager
def _same_import_path() -> Iterator[None]:
    """Remove the folder of the model's code that MLflow adds to `sys.path` when it tries a model, and deletes afterwards.

    Otherwise every later package search reads all folders of all models that this process has logged.
    """
    before = sys.path
    try:
        yield
    finally:
        sys.path = before


def copy_code(backbone: str, folder: Path) -> Path:
    """Copy the files that the packaged model imports with this backbone into `folder`, as the package `dml_core`; return its path."""
    from dml_core.models.backbones import registry

    modules = source_files(("tasks.tracking.packaged_model", registry.backbone_module(backbone)))
    source = Path(dml_core.__file__).parent
    # `source_files` omits the registry, a table of names, in which the model looks up its backbone.
    paths = {path for name, path in modules.items() if name.startswith("dml_core")} | {Path(registry.__file__)}
    packages = {parent / "__init__.py" for path in paths for parent in path.parents if parent.is_relative_to(source)}
    for path in paths | {path for path in packages if path.exists()}:
        target = folder / source.name / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return folder / source.name


def _requirements(backbone: str) -> tuple[str, ...]:
    return (*MODEL_REQUIREMENTS, "timm") if backbone.startswith("timm:") else MODEL_REQUIREMENTS


def registered_name(dataset: str, role: str) -> str:
    """Return the name of the registered model of a dataset's comparison."""
    return f"dml-{dataset}" if role == "test" else f"dml-{dataset}-{role}"


def register_best(client: MlflowClient, name: str, run: Any, description: str) -> str:
    """Point the alias `best` of a registered model to a run's model; an existing version is reused.

    Returns:
        The version.
    """
    model_id = find_model(client, run)
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name, description=f"The alias `{BEST}` leads to the best run of the standing comparison: {RULE}.")
    search = partial(client.search_model_versions, filter_string=f"name = '{name}'")
    versions = {found.source: found.version for found in all_pages(search)}  # the search omits model_id
    found = versions.get(f"models:/{model_id}")
    if found is None:
        found = client.create_model_version(
            name, f"models:/{model_id}", run_id=run.info.run_id, model_id=model_id, description=description
        ).version
    if str(client.get_registered_model(name).aliases.get(BEST)) != str(found):
        client.set_registered_model_alias(name, BEST, str(found))
    return str(found)
