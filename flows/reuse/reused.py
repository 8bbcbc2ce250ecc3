"""Requests whose runs are all finished and published: answered without Prefect, Ray and torch, which take seconds to start.

With a Prefect server the flow runs all the same, because its pages list every flow run.
"""

from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any

from dml_core.errors import DataError
from flows.backends import Backends
from flows.outcomes import Outcome
from flows.reports import Report, write_reports
from flows.reuse.planned import plan_run
from flows.reuse.written_reports import record_reports, written_reports
from tasks.data import unchanged_dataset
from tasks.environment import Project, prefect_server
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import Params, RunSpec


def reused_reports(project: Project, params: Params, runs: Sequence[RunSpec]) -> list[Report] | None:
    """Return the reports of finished runs, written if needed, or None if anything has to be prepared, run or published.

    Raises:
        StoreError: the store cannot be written, or a newer version of the program wrote the state.
    """
    with closing(Backends(project)) as backends:
        outcomes = _finished(runs, backends)
        if outcomes is None:
            return None
        reports = written_reports(outcomes, params, backends)
        if reports is None:
            reports = write_reports(runs, outcomes, (), params, backends)
            record_reports(reports, outcomes, params, backends)
        return reports


def reused_run(project: Project, run: RunSpec) -> Outcome | None:
    """Return the outcome of a finished run, or None if anything has to be prepared, run or published.

    Raises:
        StoreError: as `reused_reports`.
    """
    with closing(Backends(project)) as backends:
        outcomes = _finished([run], backends)
        return None if outcomes is None else outcomes[0]


def _finished(runs: Sequence[RunSpec], backends: Backends) -> list[Outcome] | None:
    """Return the outcomes of runs, or None at the first that is not finished and published, or whose dataset may have changed."""
    if prefect_server() is not None:
        return None
    project, store = backends.project, backends.store
    datasets: dict[str, DatasetRecord | None] = {}
    known: dict[str, Any] = {}
    outcomes = []
    for spec in runs:
        if spec.dataset not in datasets:
            with suppress(DataError):  # the flow reports it
                datasets[spec.dataset] = None if spec.is_smoke else unchanged_dataset(project, spec.dataset)
        if (dataset := datasets.get(spec.dataset)) is None:
            return None
        planned = plan_run(spec, dataset, project.state, store, known=known)
        if planned.records is None or not planned.is_in(backends.published(spec), store):
            return None
        known |= {step.of.identity: step.record for step in planned.steps}
        ran = dict.fromkeys(("train", "embed", "evaluate"), False)
        outcomes.append(Outcome.of(spec, planned.records, ran, True, store, dataset.digest))
    return outcomes
