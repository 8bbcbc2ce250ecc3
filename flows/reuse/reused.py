"""Requests whose runs are all finished and published: answered without Prefect, Ray and torch, which take seconds to start.

With a Prefect server the flow runs all the same, because its pages list every flow run.
"""

from collections.abc import Sequence
from contextlib import closing

from dml_core.errors import DataError
from flows.backends import Backends
from flows.outcomes import Outcome
from flows.reports import Report, write_reports
from flows.reuse.planned import plan_runs
from flows.reuse.written_reports import record_reports, written_reports
from tasks.data import read_dataset, unchanged_dataset
from tasks.environment import Project, finished_records, prefect_server
from tasks.runs.identity import step_identities
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
    """Return the outcomes of runs, or None if one is not finished and published, or its dataset may have changed.

    That all have scores comes first: the files of finished runs take minutes to compare.
    """
    if prefect_server() is not None or any(spec.is_smoke for spec in runs):
        return None
    project, store, records = backends.project, backends.store, finished_records()
    datasets = dict.fromkeys(spec.dataset for spec in runs)
    try:
        there = {name: read_dataset(project, name) for name in datasets}
        if not all((records / step_identities(spec, there[spec.dataset])["evaluate"]).is_file() for spec in runs):
            return None
        prepared = {name: record for name in datasets if (record := unchanged_dataset(project, name)) is not None}
    except DataError:  # the flow reports it
        return None
    if len(prepared) < len(datasets):
        return None
    outcomes = []
    with closing(plan_runs(runs, prepared, project.state, store)) as each:
        for planned in each:
            spec = planned.spec
            if planned.records is None or not planned.is_in(backends.published(spec), store):
                return None
            ran = dict.fromkeys(("train", "embed", "evaluate"), False)
            outcomes.append(Outcome.of(spec, planned.records, ran, True, store, prepared[spec.dataset].digest))
    return outcomes
