"""Read a comparison from MLflow without importing it.

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
from pathlib import Path
from typing import Any

from dml_core.errors import TrackingError
from tasks.environment import shown, without_secrets
from tasks.tracking.availability import check_available
from tasks.tracking.names import PART_TAG, PUBLISHED_TAG, PublishedRun, current_runs_filter, experiment_name

PAGE_SIZE = 1000
TIMEOUT_SECONDS = 10
# With one of these in the environment the client must authenticate; only MLflow's own client supports all of them.
LOGIN_VARIABLES = re.compile(r"MLFLOW_TRACKING_(?!URI$)\w+")


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
