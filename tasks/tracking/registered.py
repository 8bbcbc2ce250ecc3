"""Networks in MLflow: those of runs, and those in its registry with the aliases `best` and `champion`.

A promotion holds a lock in the registry itself, because MLflow sets aliases without checking: two networks that were both compared with the
old champion could otherwise be promoted in turn, and the second need not be better than the first. The lock is a registered model with a
separate name, which the server creates only once; hosts that share an MLflow server need not share a disk with a lock's file.
"""

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

import mlflow
import yaml
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_ALREADY_EXISTS, RESOURCE_DOES_NOT_EXIST, ErrorCode

from dml_core.epochs import EPOCHS
from dml_core.errors import ConfigError, TrackingError
from dml_core.network_description import DESCRIPTION_FILE, WEIGHTS_FILE, intact_description
from dml_core.trained import write_folder
from tasks.environment import shown
from tasks.locks import alone
from tasks.runs.best import RULE
from tasks.runs.specs import FROZEN
from tasks.tracking.connection import SQLITE, all_pages, one_line_errors, project_runs
from tasks.tracking.tags import Tag
from tasks.tracking.versions import FETCHED, LOCK_SUFFIX, REGISTRY_PREFIX, Version, versions_of

NETWORK, MODEL_TYPE = "artifacts/network", "embedding"  # path in a logged model, and its type, set by `log_model`
BEST = "best"
LOCK_MINUTES, LOOK_SECONDS = 10, 0.5
CARD_FILE, VERSION_LETTERS = "model_card.md", 5000  # of a version's description on PostgreSQL
EMBEDDINGS = "steps/embed"
TEST_VIEW = ("crop_to_box", "test_resize", "interpolation", "crop_size", "scaling", "decoder")  # settings of a transform's test views
_UNKNOWN = {ErrorCode.Name(INVALID_PARAMETER_VALUE), ErrorCode.Name(RESOURCE_DOES_NOT_EXIST)}  # the first is for an alias or a number

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoggedNetwork:
    """A run's network in MLflow.

    Attributes:
        run_id, model_id: MLflow's ids.
        parameters: all settings of the run.
        tags, metrics: of the run.
        data: the run's dataset input in MLflow: name, digest, images of each role.
    """

    run_id: str
    model_id: str
    parameters: dict[str, Any]
    tags: dict[str, str]
    metrics: dict[str, float]
    data: dict[str, Any]

    @property
    def digest(self) -> str:
        """Digest of the dataset's content; MLflow's of its input for a run without the tag."""
        return self.tags.get(Tag.DIGEST) or str(self.data.get("digest", ""))

    @property
    def held_out(self) -> dict[str, Any] | None:
        """Split of the training classes, if the scored classes depend on it; each split numbers its classes from 0."""
        split = self.parameters["training"].get("validation")
        return None if self.parameters["evaluation"]["role"] == "test" else split


class Registry:
    """MLflow's registry and the runs behind it, at its tracking address."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._holder = uuid4().hex  # of the locks that this object takes

    @cached_property
    def _client(self) -> MlflowClient:
        """MLflow's client, created on first use, inside code that raises `TrackingError`: it opens a local database.

        Raises:
            TrackingError: there is no local database; the client would create one in place, which is damaged if that is cut off.
        """
        if self.uri.startswith(SQLITE) and not Path(self.uri.removeprefix(SQLITE)).exists():
            raise TrackingError(f"MLflow's database {shown(self.uri)} is missing; dml reproduce creates it, or correct MLFLOW_TRACKING_URI")
        return MlflowClient(self.uri, registry_uri=self.uri)

    # ------------------------------------------------------------ networks as folders

    def fetch(self, address: str, cache: Path) -> Path:
        """Return the folder, in `cache`, of a registered model's network, downloaded once.

        The address is `models:/name@alias`, `models:/name/version` or `models:/<model id>`.

        Raises:
            ConfigError: the registry has no such model.
            TrackingError: MLflow cannot be queried, or has no network of this project there.
        """
        with one_line_errors(self.uri):
            return self._fetch(self._model_and_run(address)[0], cache)

    def fetch_trained(self, identity: str, cache: Path) -> Path | None:
        """Return the folder, in `cache`, of a network from any comparison or table; None if MLflow has no run of it (`_of_network`)."""
        with one_line_errors(self.uri):
            model_id = next(filter(None, (find_model(self._client, run) for run in self._of_network(identity))), None)
            return self._fetch(model_id, cache) if model_id is not None else None

    def _model_and_run(self, address: str) -> tuple[str, str | None]:
        name, at, alias = address.removeprefix(REGISTRY_PREFIX).partition("@")
        try:
            if at:
                version = self._client.get_model_version_by_alias(name, alias)
            elif "/" in name:
                name, _, number = name.partition("/")
                version = self._client.get_model_version(name, number)
            else:
                return name, self._client.get_logged_model(name).source_run_id
        except MlflowException as error:
            if error.error_code not in _UNKNOWN:
                raise
            raise ConfigError(f"{address}: not in MLflow's registry ({str(error).splitlines()[0]}); `dml models` lists all") from None
        return str(version.model_id or str(version.source).removeprefix(REGISTRY_PREFIX)), version.run_id

    def _fetch(self, model_id: str, cache: Path) -> Path:
        folder = cache / f"{FETCHED}{model_id}"
        with alone(cache / ".lock"):
            if intact_description(folder) is None:
                model = self._client.get_logged_model(model_id)
                with tempfile.TemporaryDirectory() as temporary:
                    problem = f"model {model_id} has no network of this project"
                    network = self._download(f"{model.artifact_location}/{NETWORK}", temporary, problem)
                    files = {name: (network / name).read_bytes() for name in (DESCRIPTION_FILE, WEIGHTS_FILE)}

                def write(beside: Path) -> None:
                    for name, data in files.items():
                        (beside / name).write_bytes(data)

                write_folder(folder, write)
        return folder

    def _download(self, address: str, folder: str, problem: str) -> Path:
        mlflow.set_tracking_uri(self.uri)
        try:
            return Path(mlflow.artifacts.download_artifacts(address, dst_path=folder))
        except (MlflowException, OSError) as error:
            raise TrackingError(f"MLflow at {shown(self.uri)}: {problem} ({str(error).splitlines()[0]})") from None

    # ------------------------------------------------------------ runs

    def logged(self, tag: str, value: str, dataset: str | None = None) -> LoggedNetwork | None:
        """Return the complete run with this identity, of its network or as published, with its network; None if MLflow has none.

        The tag is `Tag.TRAINED` (the value is as in `_of_network`) or `Tag.IDENTITY`. The dataset matters, as two names of the same images
        have runs with equal identities; None is any.
        """
        with one_line_errors(self.uri):
            runs = self._of_network(value) if tag == Tag.TRAINED else self._runs(tag, value)
            return next((network for network in self._networks(runs) if dataset in (None, network.data.get("name"))), None)

    def frozen(self, network: LoggedNetwork) -> LoggedNetwork | None:
        """Return a run of a network's pretrained backbone without training, scored on the same views of the same images, or None."""
        with one_line_errors(self.uri):
            runs = self._runs(Tag.DIGEST, network.tags.get(Tag.DIGEST, ""))
            of_variant = [run for run in runs if run.data.tags.get(Tag.VARIANT, "").split()[:1] == [FROZEN]]
            return next((frozen for frozen in self._networks(of_variant) if _is_without_training(frozen, network)), None)

    def of_address(self, address: str) -> LoggedNetwork | None:
        """Return the run behind an address as in `fetch`, also a superseded one; None if it is gone."""
        with one_line_errors(self.uri):
            model_id, run_id = self._model_and_run(address)
            run = _if_exists(self._client.get_run, run_id) if run_id else None  # `mlflow gc` removes runs
            return self._logged(run, model_id) if run is not None else None

    def embeddings(self, network: LoggedNetwork, folder: Path) -> Path:
        """Download a run's embeddings of its test images into a folder."""
        with one_line_errors(self.uri):
            return self._download(f"runs:/{network.run_id}/{EMBEDDINGS}", str(folder), f"run {network.run_id} has no embeddings")

    def _networks(self, runs: Iterable[Any]) -> Iterator[LoggedNetwork]:
        """Yield the networks of those runs that have one."""
        for run in runs:
            if (model_id := find_model(self._client, run)) is not None:
                yield self._logged(run, model_id)

    def _logged(self, run: Any, model_id: str) -> LoggedNetwork:
        mlflow.set_tracking_uri(self.uri)
        text = mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/config.yaml")
        inputs = [entry.dataset for entry in run.inputs.dataset_inputs] if run.inputs else []
        data = {"name": inputs[0].name, "digest": inputs[0].digest, "counts": json.loads(inputs[0].profile or "{}")} if inputs else {}
        return LoggedNetwork(run.info.run_id, model_id, yaml.safe_load(text), dict(run.data.tags), dict(run.data.metrics), data)

    def _runs(self, tag: str, value: str) -> list[Any]:
        """Return complete runs only: `find_model` would take the model of a run that is being published for broken."""
        return project_runs(self._client, {tag: value, Tag.PUBLISHED: "true"})

    def _of_network(self, identity: str) -> list[Any]:
        """Return the complete runs of a network, the newest first.

        The identity of a training is that of its last epoch's network; if no run scores this epoch, it stands for the first of `EPOCHS`
        that a run scores.
        """
        trained, _, epoch = identity.partition("-")
        runs = self._runs(Tag.TRAINED, trained)
        by_epoch = ([run for run in runs if run.data.tags.get(Tag.EPOCH, "last") == name] for name in ([epoch] if epoch else EPOCHS))
        return next(filter(None, by_epoch), [])

    # ------------------------------------------------------------ versions

    def holder(self, name: str, alias: str) -> Version | None:
        """Return the version that an alias points to."""
        return next((version for version in versions_of(self.uri, name) if version.name == name and alias in version.aliases), None)

    def promote(self, name: str, alias: str, network: LoggedNetwork, gate: str, card: str) -> Version:
        """Point the alias to a network's version, created if missing, with its card and the reason. Call it only inside `promoting`.

        Raises:
            TrackingError: the lock was lost, or the registry cannot be used.
        """
        with one_line_errors(self.uri):
            client = self._client
            if not self._holds(f"{name}{LOCK_SUFFIX}"):
                limit = f"the comparison took longer than {LOCK_MINUTES} minutes, so its lock was removed"
                raise TrackingError(f"{name}: {limit}; nothing was promoted; run it again")
            number = register(client, name, network.run_id, network.model_id)
            client.update_model_version(name, number, description=card[:VERSION_LETTERS])
            client.set_model_version_tag(name, number, Tag.GATE, gate)
            client.log_text(network.run_id, card, CARD_FILE)
            client.set_registered_model_alias(name, alias, number)
            return Version(name, number, (alias,), network.model_id, network.run_id, gate)

    def count_attempt(self, name: str, alias: str) -> int:
        """Return the number of this attempt at an alias, from 1, stored with the registered model. Call it only inside `promoting`."""
        tag = f"{Tag.ATTEMPTS}.{alias}"
        with one_line_errors(self.uri):
            attempt = int(self._client.get_registered_model(name).tags.get(tag, "0")) + 1
            self._client.set_registered_model_tag(name, tag, str(attempt))
            return attempt

    @contextmanager
    def promoting(self, name: str) -> Iterator[None]:
        """Allow one promotion of a registered model at a time among all users of this registry; the others wait.

        A lock is removed by those who wait for it after ten minutes, as its process may have been killed; a slower promotion is refused.

        Raises:
            TrackingError: the registry cannot be queried.
        """
        lock = f"{name}{LOCK_SUFFIX}"
        with one_line_errors(self.uri):
            if not self._take(lock):
                how_long = f"at most {LOCK_MINUTES} minutes if it was killed"
                logger.warning("%s: another promotion is under way; this one waits for it, %s", name, how_long)
                while not self._take(lock):
                    time.sleep(LOOK_SECONDS)
        try:
            yield
        finally:
            with one_line_errors(self.uri):
                if self._holds(lock):
                    self._client.delete_registered_model(lock)

    def _take(self, lock: str) -> bool:
        try:
            self._client.create_registered_model(
                lock,
                tags={Tag.LOCKED_UNTIL: str(time.time() + 60 * LOCK_MINUTES), Tag.LOCKED_BY: self._holder},
                description="A promotion is under way; this goes with its end.",
            )
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
                raise
            self._break_if_old(lock)
            return False
        return True

    def _holds(self, lock: str) -> bool:
        """Return whether a lock exists and was taken by this object."""
        model = _if_exists(self._client.get_registered_model, lock)
        return model is not None and bool(model.tags.get(Tag.LOCKED_BY) == self._holder)

    def _break_if_old(self, lock: str) -> None:
        try:
            until = float(self._client.get_registered_model(lock).tags.get(Tag.LOCKED_UNTIL, "inf"))
            if not 0 <= until - time.time() <= 2 * 60 * LOCK_MINUTES:  # old, or written while a clock was wrong
                self._client.delete_registered_model(lock)
        except MlflowException:
            pass  # its holder has just released it


def _if_exists(query: Callable[[str], Any], name: str) -> Any:
    """Return what MLflow's client has by a name or id; None if there is nothing. Other errors of MLflow say nothing about it."""
    try:
        return query(name)
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            raise
        return None


def _is_without_training(candidate: LoggedNetwork, network: LoggedNetwork) -> bool:
    """Return whether a run was not trained, has a network's backbone, and was scored on the same views of the same classes."""
    ours, other = candidate.parameters, network.parameters
    same_backbone = ours["training"]["model"]["backbone"] == other["training"]["model"]["backbone"]
    same_role = ours["evaluation"]["role"] == other["evaluation"]["role"]
    same_images = same_role and candidate.held_out == network.held_out and _test_view(candidate) == _test_view(network)
    return not ours["training"]["num_epochs"] and same_backbone and same_images


def _test_view(network: LoggedNetwork) -> list[Any]:
    transform = network.parameters["training"]["transform"]
    return [transform.get(name) for name in TEST_VIEW]


def register(client: MlflowClient, name: str, run_id: str, model_id: str, description: str | None = None, about: str | None = None) -> str:
    """Return the version of a registered model that is a run's model; both are created if missing, with their descriptions.

    A run that is scored again gets a new version, which has the same model and other scores.
    """
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name, description=about)
    source = f"{REGISTRY_PREFIX}{model_id}"
    versions = all_pages(partial(client.search_model_versions, filter_string=f"name = '{name}'"))
    numbers = {(version.source, version.run_id): version.version for version in versions}  # the search omits model_id
    number = numbers.get((source, run_id))
    if number is None:
        number = client.create_model_version(name, source, run_id=run_id, model_id=model_id, description=description).version
    return str(number)


def register_best(client: MlflowClient, name: str, run: Any, description: str) -> str | None:
    """Point the alias `best` of a registered model to a run's model; return the version, which keeps its description afterwards.

    None if MLflow has no model of the run: a user has deleted it.
    """
    model_id = find_model(client, run)
    if model_id is None:
        return None
    about = f"The alias `{BEST}` leads to the best run of the standing comparison: {RULE}."
    number = register(client, name, run.info.run_id, model_id, f"Registered as the {description}", about)
    if str(client.get_registered_model(name).aliases.get(BEST)) != number:
        client.set_registered_model_alias(name, BEST, number)
    return number


def find_model(client: MlflowClient, run: Any) -> str | None:
    """Return the id of the complete network that was published with a run, or None; incomplete ones are deleted, models of users are not.

    Raises:
        MlflowException: MLflow cannot be queried.
    """
    for output in run.outputs.model_outputs if run.outputs else ():
        model = _if_exists(client.get_logged_model, output.model_id)
        if model is None or (Tag.CONTENT not in model.tags and model.model_type != MODEL_TYPE):
            continue  # deleted, or a user's
        if model.status == LoggedModelStatus.READY:
            return str(model.model_id)
        client.delete_logged_model(model.model_id)
    return None


def intact_model(client: MlflowClient, run: Any) -> str | None:
    """Return the id of a run's model whose network's files MLflow still has, or None; others are deleted, as a bucket's rule deletes files.

    Raises:
        MlflowException: MLflow cannot be queried.
    """
    while (model_id := find_model(client, run)) is not None and not has_network(client, model_id):
        client.delete_logged_model(model_id)
    return model_id


def has_network(client: MlflowClient, model_id: str) -> bool:
    """Return whether MLflow has the files of a model's network."""
    files = {PurePosixPath(file.path).name for file in client.list_logged_model_artifacts(model_id, NETWORK)}
    return files >= {DESCRIPTION_FILE, WEIGHTS_FILE}
