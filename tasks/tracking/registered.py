"""Networks out of MLflow: of a version of its registry, and of a run that is known by the identity of its training."""

import json
import tempfile
from pathlib import Path
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from dml_core.config import merge
from dml_core.errors import ConfigError, TrackingError
from dml_core.trained import DESCRIPTION_FILE, WEIGHTS_FILE, write_folder
from tasks.locks import alone
from tasks.tracking.published import EXPERIMENT_PREFIX, TRAINED_TAG
from tasks.tracking.reading import all_runs, told_as_tracking_error

NETWORK = "artifacts/network"  # of a logged model, where `log_model` puts it
REGISTRY_PREFIX = "models:/"


def fetch_network(uri: str, address: str, cache: Path) -> Path:
    """The folder of a registered model's network, fetched once.

    Args:
        uri: MLflow's tracking address.
        address: `models:/name@alias`, `models:/name/version` or `models:/<model id>`.
        cache: where fetched networks are kept.

    Raises:
        ConfigError: the registry has no such model.
        TrackingError: MLflow cannot be asked, or has no network of ours there.
    """
    client = MlflowClient(uri, registry_uri=uri)
    with told_as_tracking_error(uri):
        return _fetch(client, uri, _model_id(client, address), cache)


def fetch_trained(uri: str, identity: str, cache: Path) -> Path | None:
    """The folder of the network that a training of this identity left, of any comparison or table; None where MLflow has no such run."""
    client = MlflowClient(uri, registry_uri=uri)
    with told_as_tracking_error(uri):
        experiments = client.search_experiments(filter_string=f"name LIKE '{EXPERIMENT_PREFIX}%'")
        runs = all_runs(client, [found.experiment_id for found in experiments], f"tags.`{TRAINED_TAG}` = '{identity}'")
        models = [output.model_id for run in runs for output in (run.outputs.model_outputs if run.outputs else ())]
        return _fetch(client, uri, models[0], cache, identity) if models else None


def _model_id(client: MlflowClient, address: str) -> str:
    name, at, alias = address.removeprefix(REGISTRY_PREFIX).partition("@")
    try:
        if at:
            version = client.get_model_version_by_alias(name, alias)
        elif "/" in name:
            name, _, number = name.partition("/")
            version = client.get_model_version(name, number)
        else:
            return name
    except MlflowException as error:
        raise ConfigError(f"{address}: not in MLflow's registry ({str(error).splitlines()[0]}); `dml models` lists what is") from None
    return str(version.model_id or str(version.source).removeprefix(REGISTRY_PREFIX))


def _fetch(client: MlflowClient, uri: str, model_id: str, cache: Path, identity: str | None = None) -> Path:
    folder = cache / f"mlflow-{model_id}"
    with alone(cache / ".lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory() as there:
                mlflow.set_tracking_uri(uri)
                try:
                    found = Path(mlflow.artifacts.download_artifacts(f"{REGISTRY_PREFIX}{model_id}/{NETWORK}", dst_path=there))
                    files = {name: (found / name).read_bytes() for name in (DESCRIPTION_FILE, WEIGHTS_FILE)}
                except (MlflowException, OSError) as error:
                    raise TrackingError(f"MLflow's model {model_id} has no network of ours ({str(error).splitlines()[0]})") from None
            said: dict[str, Any] = json.loads(files[DESCRIPTION_FILE])
            known = identity or _trained_identity(client, model_id)
            if known is not None:  # an earlier version of this package did not write it
                files[DESCRIPTION_FILE] = json.dumps(merge({"identity": known}, said)).encode()

            def write(beside: Path) -> None:
                for name, data in files.items():
                    (beside / name).write_bytes(data)

            write_folder(folder, write)
    return folder


def _trained_identity(client: MlflowClient, model_id: str) -> str | None:
    """Of the run that logged the model."""
    run_id = client.get_logged_model(model_id).source_run_id
    return client.get_run(run_id).data.tags.get(TRAINED_TAG) if run_id else None
