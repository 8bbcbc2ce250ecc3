"""Reading runs through MLflow's own client, and telling in one line what goes wrong on the way to it."""

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
from tasks.tracking.published import EXPERIMENT_PREFIX, IDENTITY_TAG, PART_TAG, PublishedRun, current_runs_filter, experiment_name


def search_published(uri: str, dataset: str, comparison: str) -> list[PublishedRun]:
    """`tasks.tracking.published.published_runs` by MLflow's own client, which can log in and knows every kind of database."""
    with told_as_tracking_error(uri):
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(experiment_name(dataset))
        found = all_runs(client, [experiment.experiment_id], current_runs_filter(comparison)) if experiment else []
    return [as_published(run) for run in found]


def published_as(uri: str) -> tuple[set[str], set[str]]:
    """What every run of ours that MLflow shows is published as (`dml.identity`), and the titles of all comparisons.

    Raises:
        TrackingError: MLflow cannot be asked.
    """
    with told_as_tracking_error(uri):
        client = MlflowClient(uri)
        search = partial(client.search_experiments, filter_string=f"name LIKE '{EXPERIMENT_PREFIX}%'")
        ours = [experiment.experiment_id for experiment in all_pages(search)]
        tags = [run.data.tags for run in all_runs(client, ours, "")]
    return {found[IDENTITY_TAG] for found in tags if IDENTITY_TAG in found}, {found[PART_TAG] for found in tags if PART_TAG in found}


def all_runs(client: MlflowClient, experiments: list[str], filter_string: str, view: int = ViewType.ACTIVE_ONLY) -> list[Any]:
    """All runs of the experiments that the filter finds, page after page."""
    return all_pages(partial(client.search_runs, experiments, filter_string, view)) if experiments else []


def all_pages(search: Callable[..., Any]) -> list[Any]:
    """All that one of MLflow's searches finds; it gives 1000 at most at a time."""
    found: list[Any] = []
    token = None
    while True:
        page = search(max_results=1000, page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def as_published(run: Any) -> PublishedRun:
    """One of MLflow's runs as the rest of the project reads it."""
    return PublishedRun(run.info.run_id, dict(run.data.metrics), dict(run.data.tags))


@contextmanager
def told_as_tracking_error(uri: str) -> Iterator[None]:
    """Raise whatever goes wrong on the way to MLflow as one line, at once where nobody answers.

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
