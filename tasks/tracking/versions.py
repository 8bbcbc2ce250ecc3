"""Versions of the networks in MLflow's registry, read without importing MLflow where possible (`tasks.tracking.queries`)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tasks.tracking.connection import all_pages, one_line_errors
from tasks.tracking.queries import available_way, query_database, query_server
from tasks.tracking.tags import Tag

REGISTRY_PREFIX = "models:/"
FETCHED = "mlflow-"  # prefix of the folders of fetched networks, before the model's id
MODEL_PREFIX = "dml-"  # of this project's registered models
LOCK_SUFFIX = ".promotion"  # of the registered models that are locks (`Registry.promoting`)
DATABASE_VERSIONS = """
    SELECT name, version, source, run_id, value FROM model_versions
    LEFT JOIN (SELECT name, version, value FROM model_version_tags WHERE key = ?) USING (name, version)
    WHERE current_stage <> 'Deleted_Internal'
"""


@dataclass(frozen=True)
class Version:
    """A version of a registered model.

    Attributes:
        name, number: of the registered model, and of the version in it.
        aliases: aliases that point to the version, sorted.
        model_id, run_id: MLflow's ids of the logged model and of its run.
        gate: reason for the promotion; None without one.
    """

    name: str
    number: str
    aliases: tuple[str, ...]
    model_id: str
    run_id: str | None
    gate: str | None


def registered_name(dataset: str, role: str) -> str:
    """Return the name of the registered model of a dataset's comparison. No dataset's name has a point, so none is another's."""
    return f"{MODEL_PREFIX}{dataset}" if role == "test" else f"{MODEL_PREFIX}{dataset}.{role}"


def registered_versions(uri: str, dataset: str | None = None) -> list[Version]:
    """Return all versions of this project's registered models, or those of one dataset, of all roles, by name and number.

    Raises:
        TrackingError: MLflow cannot be queried.
    """
    names = None if dataset is None else {registered_name(dataset, role) for role in ("test", "validation", "train")}
    return [version for version in versions_of(uri, f"{MODEL_PREFIX}{dataset or ''}") if names is None or version.name in names]


def versions_of(uri: str, prefix: str) -> list[Version]:
    """Return all versions of registered models whose name begins with `prefix`, as `registered_versions`."""
    read = {"database": _read_database, "server": _query_server, "client": _query_client}[available_way(uri)]
    versions = [version for version in read(uri, prefix) if version.name.startswith(prefix) and not version.name.endswith(LOCK_SUFFIX)]
    return sorted(versions, key=lambda version: (version.name, int(version.number)))


def _read_database(uri: str, prefix: str) -> Iterator[Version]:
    aliases: dict[str, dict[str, Any]] = {}
    for name, alias, number in query_database(uri, "SELECT name, alias, version FROM registered_model_aliases"):
        aliases.setdefault(name, {})[alias] = number
    for name, number, source, run_id, gate in query_database(uri, DATABASE_VERSIONS, (Tag.GATE,)):
        yield _version(name, number, source, run_id, gate, aliases.get(name, {}))


def _query_server(uri: str, prefix: str) -> Iterator[Version]:
    for model in query_server(uri, "registered-models/search", "registered_models", "GET", filter=f"name LIKE '{prefix}%'"):
        name = model["name"]
        aliases = {entry["alias"]: entry["version"] for entry in model.get("aliases", [])}
        for version in query_server(uri, "model-versions/search", "model_versions", "GET", filter=f"name = '{name}'"):
            tags = {entry["key"]: entry["value"] for entry in version.get("tags", [])}
            yield _version(name, version["version"], version["source"], version.get("run_id"), tags.get(Tag.GATE), aliases)


def _query_client(uri: str, prefix: str) -> Iterator[Version]:
    with one_line_errors(uri):
        from mlflow import MlflowClient

        client = MlflowClient(uri, registry_uri=uri)
        for model in all_pages(partial(client.search_registered_models, filter_string=f"name LIKE '{prefix}%'")):
            for version in all_pages(partial(client.search_model_versions, filter_string=f"name = '{model.name}'")):
                yield _version(model.name, version.version, version.source, version.run_id, version.tags.get(Tag.GATE), model.aliases)


def _version(name: str, number: Any, source: Any, run_id: str | None, gate: str | None, aliases: Mapping[str, Any]) -> Version:
    pointing = tuple(sorted(alias for alias, pointed in aliases.items() if str(pointed) == str(number)))
    return Version(name, str(number), pointing, str(source).removeprefix(REGISTRY_PREFIX), run_id or None, gate)
