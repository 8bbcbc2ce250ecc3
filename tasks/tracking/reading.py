"""Read runs through MLflow's own client, and report its errors in one line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from alembic.util.exc import CommandError
from mlflow import MlflowClient
from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from dml_core.errors import TrackingError
from tasks.environment import shown, without_secrets
from tasks.tracking.availability import check_available
from tasks.tracking.names import EXPERIMENT_PREFIX, IDENTITY_TAG, PART_TAG, PublishedRun, current_runs_filter, experiment_name


def search_published(uri: str, dataset: str, comparison: str) -> list[PublishedRun]:
    """Return `tasks.tracking.published.published_runs` through MLflow's client, which can log in and supports every kind of database."""
    with told_as_tracking_error(uri):
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(experiment_name(dataset))
        found = all_runs(client, [experiment.experiment_id], current_runs_filter(comparison)) if experiment else []
    return [as_published(run) for run in found]


def published_as(uri: str) -> tuple[set[str], set[str]]:
    """Return the published identities (`dml.identity`) of all this project's runs that MLflow shows, and the titles of all comparisons.

    Raises:
        TrackingError: MLflow cannot be queried.
    """
    with told_as_tracking_error(uri):
        client = MlflowClient(uri)
        search = partial(client.search_experiments, filter_string=f"name LIKE '{EXPERIMENT_PREFIX}%'")
        ours = [experiment.experiment_id for experiment in all_pages(search)]
        tags = [run.data.tags for run in all_runs(client, ours, "")]
    return {found[IDENTITY_TAG] for found in tags if IDENTITY_TAG in found}, {found[PART_TAG] for found in tags if PART_TAG in found}


def all_runs(client: MlflowClient, experiments: list[str], filter_string: str, view: int = ViewType.ACTIVE_ONLY) -> list[Any]:
    """Return all runs of the experiments that match the filter."""
    return all_pages(partial(client.search_runs, experiments, filter_string, view)) if experiments else []


def all_pages(search: Callable[..., Any]) -> list[Any]:
    """Return all results of one of MLflow's searches, which returns at most 1000 at a time."""
    found: list[Any] = []
    token = None
    while True:
        page = search(max_results=1000, page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def as_published(run: Any) -> PublishedRun:
    """Convert one of MLflow's runs to a `PublishedRun`."""
    return PublishedRun(run.info.run_id, dict(run.data.metrics), dict(run.data.tags))


@contextmanager
def told_as_tracking_error(uri: str) -> Iterator[None]:
    """Raise every error of MLflow in one line, at once if no server answers.

    Raises:
        TrackingError: that line.
    """
    check_available(uri)
    try:
        yield
    except (MlflowException, SQLAlchemyError, CommandError, OSError) as error:
        first_line = (without_secrets(str(error)).strip() or type(error).__name__).splitlines()[0]
        reason = "no answer" if "Max retries exceeded" in first_line else first_line[:200]
        raise TrackingError(f"MLflow at {shown(uri)} cannot be used: {reason}") from None
