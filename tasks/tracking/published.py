"""The runs of a comparison as MLflow has them: read without importing MLflow where possible (`tasks.tracking.queries`), selected, averaged
over seeds and compared.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial

from dml_core.errors import TrackingError
from dml_core.evaluation.metric_info import table_columns
from dml_core.evaluation.statistics.comparing import Comparison, compare, tested_on
from dml_core.evaluation.statistics.over_seeds import Summary, summarise_seeds
from tasks.runs.best import VALIDATION
from tasks.runs.comparable import Today, named_seeds, scores_by_seed, select
from tasks.runs.finished import made_by_older_code
from tasks.tracking.child_run import DETAIL, PublishedRun, current_tags, experiment_name, metric_name, plain_name
from tasks.tracking.connection import EXPERIMENT_PREFIX, PROJECT_EXPERIMENTS, all_pages, one_line_errors, project_runs, runs_in, tag_filter
from tasks.tracking.queries import available_way, query_database, query_server
from tasks.tracking.tags import Tag

EDITED = (
    f"run %s in MLflow is left out: its tag {Tag.VARIANT} or {Tag.SEED} was deleted or edited; restore it, or delete the run there and run "
    "dml reproduce again"
)
logger = logging.getLogger(__name__)
CurrentRuns = dict[tuple[str, str], PublishedRun]  # by identity and variant
DATABASE_RUNS = """
    SELECT runs.run_uuid FROM runs JOIN experiments USING (experiment_id)
    JOIN tags part ON part.run_uuid = runs.run_uuid AND part.key = ? AND part.value = ?
    JOIN tags published ON published.run_uuid = runs.run_uuid AND published.key = ? AND published.value = 'true'
    WHERE experiments.name = ? AND runs.lifecycle_stage = 'active'
"""
DATABASE_TAGS = """
    SELECT tags.key, tags.value FROM tags JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id)
    WHERE experiments.name LIKE ? AND key IN (?, ?) AND experiments.lifecycle_stage = 'active' AND runs.lifecycle_stage = 'active'
"""
DATABASE_EXPERIMENTS = """
    SELECT name, experiments.experiment_id FROM experiments
    JOIN experiment_tags note ON note.experiment_id = experiments.experiment_id
    WHERE name LIKE ? AND note.key = ? AND lifecycle_stage = 'active'
"""


# ---------------------------------------------------------------- reading


def published_runs(uri: str, dataset: str, comparison: str) -> list[PublishedRun]:
    """Return the comparison's current runs, by variant and seed.

    Raises:
        TrackingError: MLflow cannot be reached.
    """
    read = {"database": _read_database, "server": _query_server, "client": search_published}[available_way(uri)]
    return in_order(read(uri, dataset, comparison))


def current_runs(uri: str, dataset: str, comparison: str) -> CurrentRuns:
    """Return (identity, variant) -> run, of the comparison's complete runs that are not marked as of older code.

    Empty if MLflow is unavailable.
    """
    try:
        runs = published_runs(uri, dataset, comparison)
    except TrackingError:
        return {}  # publishing tries again and reports it
    return {(run.tags.get(Tag.IDENTITY, ""), run.variant): run for run in runs if Tag.OLDER_CODE not in run.tags}


def search_published(uri: str, dataset: str, comparison: str) -> list[PublishedRun]:
    """Return the comparison's current runs through MLflow's client, which can log in and supports every kind of database."""
    with one_line_errors(uri):
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(experiment_name(dataset))
        ids = [] if experiment is None else [experiment.experiment_id]
        return [PublishedRun.of_mlflow(run) for run in runs_in(client, ids, current_tags(comparison))]


def published_as(uri: str) -> tuple[set[str], set[str]]:
    """Return the published identities (`dml.identity`) of all this project's runs that MLflow shows, and the titles of all comparisons.

    Raises:
        TrackingError: MLflow cannot be queried.
    """
    if available_way(uri) == "database":
        tags = query_database(uri, DATABASE_TAGS, (f"{EXPERIMENT_PREFIX}%", Tag.IDENTITY, Tag.PART))
    else:
        with one_line_errors(uri):
            from mlflow import MlflowClient

            tags = [tag for run in project_runs(MlflowClient(uri), {}) for tag in run.data.tags.items()]
    identities, comparisons = ({value for key, value in tags if key == name} for name in (Tag.IDENTITY, Tag.PART))
    return identities, comparisons


def standing_comparisons(uri: str) -> dict[str, str]:
    """Return dataset -> id of its experiment, of the datasets whose standing comparison MLflow shows.

    Raises:
        TrackingError: MLflow cannot be queried.
    """
    way = available_way(uri)
    if way == "database":
        names = dict(query_database(uri, DATABASE_EXPERIMENTS, (f"{EXPERIMENT_PREFIX}%", Tag.NOTE)))
    elif way == "server":
        experiments = query_server(uri, "experiments/search", "experiments", filter=PROJECT_EXPERIMENTS)
        described = [entry for entry in experiments if Tag.NOTE in {tag["key"] for tag in entry.get("tags", [])}]
        names = {entry["name"]: entry["experiment_id"] for entry in described}
    else:
        with one_line_errors(uri):
            from mlflow import MlflowClient

            all_experiments = all_pages(partial(MlflowClient(uri).search_experiments, filter_string=PROJECT_EXPERIMENTS))
        names = {entry.name: entry.experiment_id for entry in all_experiments if Tag.NOTE in entry.tags}
    return {name.removeprefix(EXPERIMENT_PREFIX): str(number) for name, number in names.items()}


def in_order(runs: Iterable[PublishedRun]) -> list[PublishedRun]:
    """Sort runs by variant and seed: the last bit of a mean depends on the order, and MLflow sorts by start time.

    Runs whose variant or seed was edited away in MLflow are left out with a warning.
    """
    valid = []
    for run in runs:
        if run.has_place:
            valid.append(run)
        else:
            logger.warning(EDITED, run.run_id)
    return sorted(valid, key=lambda run: (run.variant, run.seed))


def _read_database(uri: str, dataset: str, comparison: str) -> list[PublishedRun]:
    runs: dict[str, PublishedRun] = {}
    values = (Tag.PART, comparison, Tag.PUBLISHED, experiment_name(dataset))
    tags = f"SELECT run_uuid, experiment_id, key, value FROM tags JOIN runs USING (run_uuid) WHERE run_uuid IN ({DATABASE_RUNS})"
    for run_id, experiment, key, value in query_database(uri, tags, values):
        runs.setdefault(run_id, PublishedRun(run_id, experiment_id=str(experiment))).tags[key] = value
    scores = f"SELECT run_uuid, key, value FROM latest_metrics WHERE NOT is_nan AND run_uuid IN ({DATABASE_RUNS})"
    for run_id, key, value in query_database(uri, scores, values):
        if run_id in runs:  # else published since the first query
            runs[run_id].metrics[key] = value
    return list(runs.values())


def _query_server(uri: str, dataset: str, comparison: str) -> list[PublishedRun]:
    named = query_server(uri, "experiments/search", "experiments", filter=f"name = '{experiment_name(dataset)}'")
    experiments = [experiment["experiment_id"] for experiment in named]
    if not experiments:
        return []
    runs: list[PublishedRun] = []
    for run in query_server(uri, "runs/search", "runs", experiment_ids=experiments, filter=tag_filter(current_tags(comparison))):
        metrics, tags = ({entry["key"]: entry["value"] for entry in run["data"].get(part, [])} for part in ("metrics", "tags"))
        scores = {name: float(value) for name, value in metrics.items()}
        runs.append(PublishedRun(run["info"]["run_id"], scores, tags, run["info"]["experiment_id"]))
    return runs


# ---------------------------------------------------------------- means and differences


def comparable_runs(dataset: str, runs: Sequence[PublishedRun], today: Today) -> tuple[tuple[PublishedRun, ...], tuple[str, ...]]:
    """Return the published runs that may be averaged by variant and paired by seed, and a line for each variant's omitted runs.

    Raises:
        TrackingError: MLflow has two current runs of one variant and seed.
    """
    selected, left_out = select(runs, lambda run: run.facts(dataset), today)
    by_seed: dict[tuple[str, int], PublishedRun] = {}
    for run in selected:
        other = by_seed.setdefault((run.variant, run.seed), run)
        if other is not run:
            raise TrackingError(
                f"MLflow has two runs of {run.variant}, seed {run.seed} on {dataset} ({other.run_id} and {run.run_id}); delete one there"
            )
    return selected, left_out


def older_code_lines(dataset: str, runs: Sequence[PublishedRun]) -> list[str]:
    """Return a line for each variant with runs that other code made (`--code keep`): their seeds, and the files that differ."""
    lines = []
    for variant in dict.fromkeys(run.variant for run in runs):
        older = {run.seed: run.tags[Tag.OLDER_CODE].split(", ") for run in runs if run.variant == variant and Tag.OLDER_CODE in run.tags}
        if older:
            files = sorted({file for of_seed in older.values() for file in of_seed})
            lines.append(f"{variant} on {dataset}, {named_seeds(older)}: {made_by_older_code(files)}")
    return lines


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
            summaries[variant][name] = summarise_seeds(list(by_seed.values()))
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


def comparison_rows(runs: Sequence[PublishedRun], comparison: Comparison | None = None) -> list[list[str]]:
    """Return a header, then a row per variant, best first: its number of seeds, and mean and interval over them of each metric.

    With a `comparison` that has a confidence set of the best, the last column has differences.
    """
    names = _columns(runs)
    compared = comparison if comparison is not None and comparison.best_set else None
    heading = [compared.heading] if compared is not None else []
    rows = [["variant", "seeds", *map(plain_name, names), *heading]]
    for variant, metrics in summarise_published(runs).items():
        num_seeds = sum(run.variant == variant for run in runs)
        cells = [str(metrics[name]) if name in metrics else "-" for name in names]
        differences = [compared.difference_text(variant)] if compared is not None else []
        rows.append([variant, str(num_seeds), *cells, *differences])
    return rows
