"""The runs of a comparison as MLflow has them: read without importing MLflow, selected, averaged over seeds and compared.

`dml compare` answers in 1.4 s; with MLflow's client it takes 4 s, 3 of CPU. So a server is queried over its REST interface, and a local
database is read as an SQLite file of exactly the installed MLflow's tables (`check_database`). If a server requires a login, or results are
in another database, MLflow's own client is used.
"""

import os
import re
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dml_core.errors import TrackingError
from dml_core.evaluation.metric_info import table_columns
from dml_core.evaluation.statistics.comparing import Comparison, compare, tested_on
from dml_core.evaluation.statistics.confidence import Summary, summarise
from tasks.environment import shown, without_secrets
from tasks.runs.best import VALIDATION
from tasks.runs.comparable import Selection, Today, scores_by_seed, select
from tasks.tracking.child_run import (
    DETAIL,
    IDENTITY_TAG,
    NOTE_TAG,
    PART_TAG,
    PUBLISHED_TAG,
    PublishedRun,
    current_tags,
    experiment_name,
    metric_name,
    plain_name,
)
from tasks.tracking.connection import (
    EXPERIMENT_PREFIX,
    SQLITE,
    all_pages,
    check_available,
    one_line_errors,
    open_database,
    project_runs,
    tag_filter,
)

if TYPE_CHECKING:
    from rich.table import Table

PAGE_SIZE = 1000
TIMEOUT_SECONDS = 10
# With one of these in the environment the client must authenticate; only MLflow's own client supports all of them.
LOGIN_VARIABLES = re.compile(r"MLFLOW_TRACKING_(?!URI$)\w+")
DATABASE_RUNS = """
    SELECT runs.run_uuid FROM runs JOIN experiments USING (experiment_id)
    JOIN tags part ON part.run_uuid = runs.run_uuid AND part.key = ? AND part.value = ?
    JOIN tags published ON published.run_uuid = runs.run_uuid AND published.key = ? AND published.value = 'true'
    WHERE experiments.name = ? AND runs.lifecycle_stage = 'active'
"""
PROJECT_EXPERIMENTS = f"name LIKE '{EXPERIMENT_PREFIX}%'"
DATABASE_EXPERIMENTS = """
    SELECT name, experiments.experiment_id FROM experiments
    JOIN experiment_tags note ON note.experiment_id = experiments.experiment_id
    WHERE name LIKE ? AND note.key = ? AND lifecycle_stage = 'active'
"""


# ---------------------------------------------------------------- reading


def published_runs(uri: str, dataset: str, comparison: str) -> list[PublishedRun]:
    """Return the comparison's current runs, by variant and seed.

    Raises:
        TrackingError: MLflow cannot be reached, or has no such runs.
    """
    check_available(uri)
    if uri.startswith(SQLITE):
        runs = _read_database(Path(uri.removeprefix(SQLITE)), dataset, comparison)
    elif _needs_no_client(uri):
        runs = _query_server(uri.rstrip("/"), dataset, comparison)
    else:
        runs = search_published(uri, comparison)
    if not runs:
        raise TrackingError(f"MLflow at {shown(uri)} has no runs of '{comparison}'; run dml reproduce --dataset {dataset} first")
    return in_order(runs)


def search_published(uri: str, comparison: str) -> list[PublishedRun]:
    """Return the comparison's current runs through MLflow's client, which can log in and supports every kind of database."""
    with one_line_errors(uri):
        from mlflow import MlflowClient

        return [PublishedRun.of_mlflow(run) for run in project_runs(MlflowClient(uri), current_tags(comparison))]


def published_as(uri: str) -> tuple[set[str], set[str]]:
    """Return the published identities (`dml.identity`) of all this project's runs that MLflow shows, and the titles of all comparisons.

    Raises:
        TrackingError: MLflow cannot be queried.
    """
    with one_line_errors(uri):
        from mlflow import MlflowClient

        tags = [run.data.tags for run in project_runs(MlflowClient(uri), {})]
    return {run[IDENTITY_TAG] for run in tags if IDENTITY_TAG in run}, {run[PART_TAG] for run in tags if PART_TAG in run}


def standing_comparisons(uri: str) -> dict[str, str]:
    """Return dataset -> id of its experiment, of the datasets whose standing comparison MLflow shows.

    Raises:
        TrackingError: MLflow cannot be queried.
    """
    check_available(uri)
    if uri.startswith(SQLITE):
        names = _experiments_of_database(Path(uri.removeprefix(SQLITE)))
    elif _needs_no_client(uri):
        found = _post(uri.rstrip("/"), "experiments/search", filter=PROJECT_EXPERIMENTS, max_results=PAGE_SIZE).get("experiments", [])
        described = [entry for entry in found if NOTE_TAG in {tag["key"] for tag in entry.get("tags", [])}]
        names = {entry["name"]: entry["experiment_id"] for entry in described}
    else:
        with one_line_errors(uri):
            from mlflow import MlflowClient

            found = all_pages(partial(MlflowClient(uri).search_experiments, filter_string=PROJECT_EXPERIMENTS))
        names = {entry.name: entry.experiment_id for entry in found if NOTE_TAG in entry.tags}
    return {name.removeprefix(EXPERIMENT_PREFIX): str(number) for name, number in names.items()}


def _needs_no_client(uri: str) -> bool:
    return uri.startswith("http") and not any(LOGIN_VARIABLES.fullmatch(name) for name in os.environ)


def in_order(runs: Iterable[PublishedRun]) -> list[PublishedRun]:
    """Sort runs by variant and seed: the last bit of a mean depends on the order, and MLflow sorts by start time."""
    return sorted(runs, key=lambda run: (run.variant, run.seed))


def _read_database(path: Path, dataset: str, comparison: str) -> list[PublishedRun]:
    runs: dict[str, PublishedRun] = {}
    values = (PART_TAG, comparison, PUBLISHED_TAG, experiment_name(dataset))
    if not path.exists():
        return []
    try:
        with closing(open_database(path)) as database:
            experiments = dict(database.execute("SELECT name, experiment_id FROM experiments"))
            experiment = str(experiments.get(experiment_name(dataset), ""))
            for run_id, key, value in database.execute(
                f"SELECT run_uuid, key, value FROM tags WHERE run_uuid IN ({DATABASE_RUNS})", values
            ):
                runs.setdefault(run_id, PublishedRun(run_id, experiment_id=experiment)).tags[key] = value
            scores = f"SELECT run_uuid, key, value FROM latest_metrics WHERE NOT is_nan AND run_uuid IN ({DATABASE_RUNS})"
            for run_id, key, value in database.execute(scores, values):
                runs[run_id].metrics[key] = value
    except sqlite3.Error as error:
        raise TrackingError(f"MLflow's database {path} cannot be read: {error}") from None
    return list(runs.values())


def _experiments_of_database(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        with closing(open_database(path)) as database:
            return dict(database.execute(DATABASE_EXPERIMENTS, (f"{EXPERIMENT_PREFIX}%", NOTE_TAG)))
    except sqlite3.Error as error:
        raise TrackingError(f"MLflow's database {path} cannot be read: {error}") from None


def _query_server(uri: str, dataset: str, comparison: str) -> list[PublishedRun]:
    experiments = _post(uri, "experiments/search", filter=f"name = '{experiment_name(dataset)}'", max_results=1).get("experiments", [])
    query: dict[str, Any] = {
        "experiment_ids": [experiment["experiment_id"] for experiment in experiments],
        "filter": tag_filter(current_tags(comparison)),
        "max_results": PAGE_SIZE,
    }
    runs: list[PublishedRun] = []
    while experiments:
        page = _post(uri, "runs/search", **query)
        for run in page.get("runs", []):
            metrics, tags = ({entry["key"]: entry["value"] for entry in run["data"].get(part, [])} for part in ("metrics", "tags"))
            scores = {name: float(value) for name, value in metrics.items()}
            runs.append(PublishedRun(run["info"]["run_id"], scores, tags, run["info"]["experiment_id"]))
        if not page.get("next_page_token"):
            break
        query["page_token"] = page["next_page_token"]
    return runs


def _post(uri: str, call: str, **body: Any) -> dict[str, Any]:
    import requests

    try:
        answer = requests.post(f"{uri}/api/2.0/mlflow/{call}", json=body, timeout=TIMEOUT_SECONDS)
        answer.raise_for_status()
        return dict(answer.json())
    except (requests.ConnectionError, requests.Timeout):
        raise TrackingError(f"MLflow at {shown(uri)} cannot be used: no answer") from None
    except (requests.RequestException, ValueError) as error:
        raise TrackingError(f"MLflow at {shown(uri)} cannot be used: {without_secrets(str(error)).splitlines()[0][:200]}") from None


# ---------------------------------------------------------------- means and differences


def comparable_runs(dataset: str, runs: Sequence[PublishedRun], today: Today) -> Selection[PublishedRun]:
    """Return the published runs that may be averaged by variant and paired by seed, and a line for each variant's omitted runs.

    Raises:
        TrackingError: MLflow has two current runs of one variant and seed.
    """
    selection = select(runs, lambda run: run.facts(dataset), today)
    by_seed: dict[tuple[str, int], PublishedRun] = {}
    for run in selection.runs:
        other = by_seed.setdefault((run.variant, run.seed), run)
        if other is not run:
            raise TrackingError(
                f"MLflow has two runs of {run.variant}, seed {run.seed} on {dataset} ({other.run_id} and {run.run_id}); delete one there"
            )
    return selection


def validation_scores(runs: Sequence[PublishedRun]) -> dict[str, dict[int, float]]:
    """Return variant -> seed -> validation Recall@1 (`tasks.runs.best`), of the runs that have one."""
    return _scores(runs, f"{DETAIL}{metric_name(VALIDATION)}")


def summarise_published(runs: Sequence[PublishedRun]) -> dict[str, dict[str, Summary]]:
    """Return variant -> metric (by its MLflow name) -> summary over the variant's seeds; best Recall@1 first.

    The metrics are every Recall@K by ascending K, then MAP@R, R-precision and NMI; one that a seed lacks is summarised over the others.
    """
    columns = _columns(runs)
    summaries: dict[str, dict[str, Summary]] = {run.variant: {} for run in runs}
    for name in columns:
        for variant, by_seed in _scores(runs, name).items():
            summaries[variant][name] = summarise(list(by_seed.values()))
    first = columns[0] if columns else ""
    return dict(sorted(summaries.items(), key=lambda item: -item[1][first].mean if first in item[1] else 1.0))


def compare_published(dataset: str, runs: Sequence[PublishedRun], reference: str | None = None) -> Comparison | None:
    """Compare the variants of a comparison by their first metric, in per cent, paired by seed; return None for one variant."""
    columns = _columns(runs)
    if not columns:
        return None
    counts = {plain_name(name.removeprefix(DETAIL)): value for name, value in runs[0].metrics.items()}
    return compare(dataset, plain_name(columns[0]), _scores(runs, columns[0], 100), reference, **tested_on(counts))


def _columns(runs: Sequence[PublishedRun]) -> list[str]:
    """Return the MLflow names of the metrics that compare losses, in a table's order."""
    return [metric_name(name) for name in table_columns(plain_name(name) for run in runs for name in run.metrics)]


def _scores(runs: Sequence[PublishedRun], name: str, factor: float = 1) -> dict[str, dict[int, float]]:
    """Return variant -> seed -> a metric, of the runs that have it."""
    return scores_by_seed((run.variant, run.seed, factor * run.metrics[name]) for run in runs if name in run.metrics)


def comparison_table(title: str, runs: Sequence[PublishedRun], comparison: Comparison | None = None) -> "Table":
    """Return a comparison's published runs as a terminal table: a row per variant, best first, mean and interval over its seeds.

    With a `comparison`, the confidence set of the best is bold, and a last column has differences.
    """
    from rich.table import Column, Table

    summaries = summarise_published(runs)
    names = list(dict.fromkeys(name for metrics in summaries.values() for name in metrics))
    if comparison is not None and not comparison.best_set:
        comparison = None
    heading = [comparison.heading] if comparison is not None else []
    table = Table(
        Column("variant", min_width=max(map(len, summaries))), "seeds", *(plain_name(name) for name in names), *heading, title=title
    )
    for variant, metrics in summaries.items():
        num_seeds = sum(run.variant == variant for run in runs)
        cells = [str(metrics[name]) if name in metrics else "-" for name in names]
        is_bold = comparison is not None and variant in comparison.best_set
        differences = [comparison.beside(variant)] if comparison is not None else []
        table.add_row(variant, str(num_seeds), *cells, *differences, style="bold" if is_bold else None)
    return table
