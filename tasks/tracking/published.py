"""Read a comparison from MLflow without importing it, and define the names used there.

`dml compare` answers in a second or two; the import of MLflow alone takes five seconds of CPU. So a server is queried over its REST
interface, and a local database is read as an SQLite file. If a server requires a login, or results are in another database, MLflow's own
client is used.
"""

import os
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dml_core.errors import TrackingError
from tasks.environment import shown, without_secrets
from tasks.runs.comparable import Facts
from tasks.tracking.availability import check_available

EXPERIMENT_PREFIX = "dml-repro/"
PARENT_TAG, IDENTITY_TAG, PUBLISHED_TAG, COMPARISON_TAG, PART_TAG, VARIANT_TAG, SEED_TAG, PROCESS_TAG = (
    "mlflow.parentRunId",
    "dml.identity",
    "dml.published",
    "dml.comparison",
    "dml.part_of",
    "dml.variant",
    "dml.seed",
    "dml.process",
)
OLDER_CODE_TAG = "dml.older_code"
SETTINGS_TAG, DIGEST_TAG = "dml.settings", "dml.dataset_digest"  # which runs may be averaged and compared (`tasks.runs.comparable`)
SUMMARY_TAG = "dml.summary_of"  # comparison whose means over seeds a variant's run has
TRAINED_TAG = "dml.trained"  # identity of the training, which runs of several comparisons may share
DETAIL = "detail/"  # prefix of metrics that explain the others
OUTBOX = "outbox"
PAGE_SIZE = 1000
TIMEOUT_SECONDS = 10
# With one of these in the environment the client must authenticate; only MLflow's own client supports all of them.
LOGIN_VARIABLES = re.compile(r"MLFLOW_TRACKING_(?!URI$)\w+")


@dataclass
class PublishedRun:
    """A run in MLflow: its last metrics and its tags."""

    run_id: str
    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def variant(self) -> str:
        """Variant of the comparison."""
        return self.tags[VARIANT_TAG]

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.tags[SEED_TAG])

    def facts(self, dataset: str) -> Facts:
        """Return the facts that decide which other runs on the dataset it may be averaged and compared with."""
        return Facts(dataset, self.variant, self.seed, self.tags.get(DIGEST_TAG), self.tags.get(SETTINGS_TAG))


def experiment_name(dataset: str) -> str:
    """Return the MLflow experiment of a dataset; the prefix marks this project's experiments on a shared server."""
    return f"{EXPERIMENT_PREFIX}{dataset}"


def metric_name(name: str) -> str:
    """Return a metric's name in MLflow, which allows no @."""
    return name.replace("@", "_at_")


def plain_name(name: str) -> str:
    """Return a metric's own name from its name in MLflow."""
    return name.replace("_at_", "@")


def current_runs_filter(comparison: str) -> str:
    """Return MLflow's filter for the comparison's complete runs; superseded runs are deleted there and not found."""
    return f"tags.`{PART_TAG}` = '{comparison}' and tags.`{PUBLISHED_TAG}` = 'true'"


def published_runs(uri: str, dataset: str, comparison: str) -> list[PublishedRun]:
    """Return the comparison's current runs, by variant and seed.

    Raises:
        TrackingError: MLflow cannot be reached, or has no such runs.
    """
    check_available(uri)
    if uri.startswith("sqlite:///"):
        runs = _read_database(Path(uri.removeprefix("sqlite:///")), dataset, comparison)
    elif uri.startswith("http") and not any(LOGIN_VARIABLES.fullmatch(name) for name in os.environ):
        runs = _ask_server(uri.rstrip("/"), dataset, comparison)
    else:
        from tasks.tracking.reading import search_published

        runs = search_published(uri, dataset, comparison)
    if not runs:
        raise TrackingError(f"MLflow at {shown(uri)} has no runs of '{comparison}'; run dml reproduce --dataset {dataset} first")
    return in_order(runs)


def in_order(runs: Iterable[PublishedRun]) -> list[PublishedRun]:
    """Sort runs by variant and seed: the last bit of a mean depends on the order, and MLflow sorts by start time."""
    return sorted(runs, key=lambda run: (run.variant, run.seed))


def _read_database(path: Path, dataset: str, comparison: str) -> list[PublishedRun]:
    found: dict[str, PublishedRun] = {}
    chosen = """
        SELECT runs.run_uuid FROM runs JOIN experiments USING (experiment_id)
        JOIN tags part ON part.run_uuid = runs.run_uuid AND part.key = :part_tag AND part.value = :comparison
        JOIN tags whole ON whole.run_uuid = runs.run_uuid AND whole.key = :published_tag AND whole.value = 'true'
        WHERE experiments.name = :experiment AND runs.lifecycle_stage = 'active'
    """
    values = {"part_tag": PART_TAG, "comparison": comparison, "published_tag": PUBLISHED_TAG, "experiment": experiment_name(dataset)}
    if not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=TIMEOUT_SECONDS)) as database:
            for run_id, key, value in database.execute(f"SELECT run_uuid, key, value FROM tags WHERE run_uuid IN ({chosen})", values):
                found.setdefault(run_id, PublishedRun(run_id)).tags[key] = value
            scores = f"SELECT run_uuid, key, value FROM latest_metrics WHERE NOT is_nan AND run_uuid IN ({chosen})"
            for run_id, key, value in database.execute(scores, values):
                found[run_id].metrics[key] = value
    except sqlite3.Error as error:
        raise TrackingError(f"MLflow's database {path} cannot be read: {error}") from None
    return list(found.values())


def _ask_server(uri: str, dataset: str, comparison: str) -> list[PublishedRun]:
    experiments = _post(uri, "experiments/search", filter=f"name = '{experiment_name(dataset)}'", max_results=1).get("experiments", [])
    query: dict[str, Any] = {
        "experiment_ids": [experiment["experiment_id"] for experiment in experiments],
        "filter": current_runs_filter(comparison),
        "max_results": PAGE_SIZE,
    }
    runs: list[PublishedRun] = []
    while experiments:
        page = _post(uri, "runs/search", **query)
        runs += [_from_json(run) for run in page.get("runs", [])]
        if not page.get("next_page_token"):
            break
        query["page_token"] = page["next_page_token"]
    return runs


def _from_json(run: dict[str, Any]) -> PublishedRun:
    data: defaultdict[str, list[dict[str, Any]]] = defaultdict(list, run["data"])
    metrics = {metric["key"]: float(metric["value"]) for metric in data["metrics"]}
    return PublishedRun(run["info"]["run_id"], metrics, {tag["key"]: tag["value"] for tag in data["tags"]})


def _post(uri: str, call: str, **body: Any) -> dict[str, Any]:
    import requests

    try:
        answer = requests.post(f"{uri}/api/2.0/mlflow/{call}", json=body, timeout=TIMEOUT_SECONDS)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
    except (requests.ConnectionError, requests.Timeout):
        raise TrackingError(f"MLflow at {shown(uri)} cannot be used: no answer") from None
    except (requests.RequestException, ValueError) as error:
        raise TrackingError(f"MLflow at {shown(uri)} cannot be used: {without_secrets(str(error)).splitlines()[0][:200]}") from None
    return found
