"""Read and extend the results of tables. A damaged result is set aside and rebuilt from the store, except by `dml gc`."""

import logging
from collections.abc import Sequence
from pathlib import Path

from tasks.environment import Project
from tasks.locks import alone
from tasks.plans.rebuilding import rebuilt_runs
from tasks.sealed import DamagedError, move_damaged
from tasks.tables.result import FailedRun, MeasuredRun, TableResult, read_result, result_path, save_result

logger = logging.getLogger(__name__)


def load_result(project: Project, name: str) -> TableResult:
    """Return the measured runs of a table so far; an empty result if there are none.

    A damaged result is renamed and replaced by one rebuilt from the store's finished records; a warning is logged.

    Raises:
        NewerFormatError: a newer version of the program wrote it.
        StoreError: the result cannot be read, or the rebuilt one cannot be written.
    """
    try:
        return read_result(project, name)
    except DamagedError:
        with alone(_lock(project)):
            return _read_or_rebuild(project, name)


def add_runs(project: Project, name: str, runs: Sequence[MeasuredRun], failed: Sequence[FailedRun], made: str | None) -> None:
    """Add measured and failed runs to a table's result; other processes may add to it at the same time.

    Raises:
        NewerFormatError, StoreError: as in `load_result`, or the result cannot be written.
    """
    with alone(_lock(project)):
        save_result(project, _read_or_rebuild(project, name).updated(runs, failed, made))


def _lock(project: Project) -> Path:
    return project.state / "tables" / ".lock"


def _read_or_rebuild(project: Project, name: str) -> TableResult:
    """Return the result; a damaged one is set aside and rebuilt. The caller holds the lock."""
    try:
        return read_result(project, name)
    except DamagedError as error:
        aside = move_damaged(result_path(project, name))
        result = TableResult(name=name).updated(rebuilt_runs(project, name, aside), (), None)
        if result.runs:
            save_result(project, result)
        num_runs = f"{len(result.runs)} run{'' if len(result.runs) == 1 else 's'}"
        logger.warning("%s; kept as %s; rebuilt %s from the store; rerun dml reproduce to add the others", error, aside.name, num_runs)
        return result
