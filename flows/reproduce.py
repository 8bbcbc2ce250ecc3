"""The flow that starts many runs, of the standing comparison or of tables, with one start of Ray for all; and the flow of a single run.

    prepare each dataset (DVC; drawn for a smoke run) -> every run's chain (flows/chain.py), once for all tables that show it -> reports

`dml reproduce`, the schedules, the Prefect UI and `dvc.yaml`'s comparison stages start it.
"""

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from prefect import flow, runtime
from prefect.artifacts import create_link_artifact, create_markdown_artifact

from dml_core.errors import DataError
from flows.chain import STEPS_AT_ONCE, prepare, run_chains, runs_to_train
from flows.outcomes import Failure, Outcome, RunsFailedError
from flows.reports import Report, add_ended, write_reports
from flows.request import REQUEST, DatasetName, Request, VariantName, requested_runs
from flows.resolving import run_until_resolved
from flows.reuse.step_cache import forget_failure
from flows.reuse.written_reports import record_reports
from flows.services import Services, if_server_answers
from tasks.checks import check_parts, check_settings, is_at_hand, prepare_machine
from tasks.data import read_dataset, read_packed
from tasks.environment import Project, open_project, shown
from tasks.plans.needs import search_notes
from tasks.runs.finished import Code, made_by_older_code
from tasks.runs.params.file import load_params
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import Params, RunSpec
from tasks.tables.file import load_table
from tasks.tables.judging import compared_columns, compared_epoch
from tasks.tables.runs import paper_protocol
from tasks.tables.smoke import draw_for_smoke

logger = logging.getLogger(__name__)


def flow_run_name(request: Request) -> str:
    """Return the name of a flow run on Prefect's pages: what it runs."""
    seeds = [f"seeds {', '.join(map(str, request.seeds))}"] if request.seeds else []
    if not request.is_standing:
        first = "all tables" if request.tables[0] == "*" else request.tables[0]
        what = first if len(request.tables) == 1 else f"{len(request.tables)} tables ({first} ...)"
        parts = [
            *request.rows,
            *request.datasets,
            request.variant,
            "common track" if request.track == "common" else None,
            *seeds,
            "smoke" if request.smoke else None,
            "on what is prepared" if request.prepared_only else None,
        ]
        text = ", ".join(part for part in parts if part)
        return f"{what}: {text}" if text else what
    datasets = " and ".join(request.datasets or load_params(open_project().params_file).comparison.default_datasets)
    if request.changed_only:
        return f"changed datasets among {datasets}"
    details = [", ".join(names) for names in (request.variants, request.overrides) if names]
    details += ["all variants and seeds"] if request.whole and not (details or seeds) else []
    return ", ".join([f"comparison on {datasets}", *details, *seeds])


def _flow_run_name() -> str:
    return flow_run_name(REQUEST.validate_python(runtime.flow_run.parameters.get("request") or {}))


@flow(name="reproduce", flow_run_name=_flow_run_name, task_runner=STEPS_AT_ONCE, on_failure=[forget_failure])
def reproduce(request: Request = Request()) -> list[Report]:  # noqa: B008  frozen, and Prefect's form shows the defaults
    """Run the requested runs and report them; finished steps are reused, and what several tables show runs once.

    Args:
        request: which runs, and how.
    """
    project = open_project()
    params, runs = requested_runs(project, request, logger.info)
    if not runs:
        return []
    with closing(Services(project, params.scale, _is_forced(request.force), request.fail_fast, request.code)) as services:
        unprepared: dict[str, DataError] = {}
        prepared = _prepare_all(runs, params, services, None if request.fail_fast else unprepared)
        run_all = partial(_run_prepared, prepared=prepared, unprepared=unprepared, services=services)
        if request.until is None:
            outcomes, failures = run_all(runs)
        else:
            compared = partial(_compared, params, runs)
            outcomes, failures = run_until_resolved(runs, request.until, compared, run_all, services.display.say, request.fail_fast)
        services.display.say("writing the reports")
    with services.meter.phase("reports"):
        reports = write_reports(runs, outcomes, failures, params, services)
        record_reports(reports, outcomes, params, services)
    _say_times(outcomes, services)
    with if_server_answers("its page has not all reports"):
        for report in reports:
            create_markdown_artifact(report.page, key=report.key, description=report.title)
        if project.tracking_uri.startswith("http"):
            create_link_artifact(shown(project.tracking_uri), "MLflow", key="mlflow")
    if failures:
        raise RunsFailedError(failures, max(len(runs), len(outcomes) + len(failures)), reports)
    return reports


def _is_forced(force: bool) -> bool:
    """Return whether every step runs again: not in a retry of the flow run, which would discard what its earlier attempts have done."""
    if force and runtime.flow_run.run_count > 1:
        logger.warning("retried without force: what had begun resumes; force the runs that had not begun in another flow run")
        return False
    return force


def _say_times(outcomes: Sequence[Outcome], services: Services) -> None:
    """Print where the time went, unless every step was reused."""
    if any(any(outcome.ran.values()) for outcome in outcomes):
        services.display.say(services.meter.line())


def _compared(params: Params, runs: Sequence[RunSpec], spec: RunSpec) -> tuple[str, str | None] | None:
    """Return the metric by which a run is compared with others of its table on its dataset, and the reference's label, if it is run.

    None if the metrics have no best value, or if other epochs than the run's are compared.
    """
    if spec.table is None:
        return f"recall@{spec.evaluation.recall_at[0]}", params.comparison.reference
    table = load_table(spec.table)
    first = compared_columns(table.flat_columns).get(str(spec.column))
    epochs = {other.evaluation.epoch for other in runs if other.table == spec.table}
    if first is None or spec.evaluation.epoch != compared_epoch(paper_protocol(spec.table).prints, epochs):
        return None
    alike = [run for run in runs if (run.table, run.column, run.evaluation.epoch) == (spec.table, spec.column, spec.evaluation.epoch)]
    reference = next((run.label for run in alike if run.row == table.reference), None)
    return table.flat_columns[first].metric, reference


def _run_prepared(
    runs: Sequence[RunSpec], prepared: Mapping[str, DatasetRecord], unprepared: Mapping[str, DataError], services: Services
) -> tuple[list[Outcome], list[Failure]]:
    """Run those of the runs whose dataset is prepared (`run_chains`), and add each to its table as it ends; the others have failed."""
    add = partial(add_ended, backends=services)
    outcomes, failures = run_chains([spec for spec in runs if spec.dataset not in unprepared], prepared, services, add)
    return outcomes, [Failure.of(spec, unprepared[spec.dataset]) for spec in runs if spec.dataset in unprepared] + failures


def _prepare_all(
    runs: Sequence[RunSpec], params: Params, services: Services, unprepared: dict[str, DataError] | None = None
) -> dict[str, DatasetRecord]:
    """Update the datasets of all runs. Ray starts meanwhile, but not before weights and datasets that may be missing are there.

    Args:
        unprepared: receives the error of each dataset that cannot be prepared, if others can; None to raise it.
    """
    by_dataset = {name: [spec for spec in runs if spec.dataset == name] for name in dict.fromkeys(spec.dataset for spec in runs)}
    errors: dict[str, DataError] = {} if unprepared is None else unprepared

    def prepare_each(names: Collection[str]) -> dict[str, DatasetRecord]:
        records = {}
        for name in names:
            try:
                records[name] = _prepare(by_dataset[name], params, services)
            except DataError as error:
                errors[name] = error
                if unprepared is None or len(errors) == len(by_dataset):
                    raise
                services.display.say(f"{name} cannot be prepared, so its runs fail: {error}")
        return records

    with services.meter.phase("prepare"):
        to_train = runs_to_train(runs, _prepared_before(runs, services), services)
        prepare_machine(to_train, services.scale, services.display.say)
        here = [name for name, specs in by_dataset.items() if specs[0].is_smoke or is_at_hand(services.project, params, name)]
        prepared = prepare_each([name for name in by_dataset if name not in here])
        num_to_train = sum(spec.dataset not in errors for spec in to_train)
        services.workers.expect(num_to_train)
        services.start_workers_early(num_to_train, {name for run in runs for name in run.measurements})
        prepared |= prepare_each(here)
    for line in search_notes(params, runs, prepared):
        services.display.say(f"note: {line}")
    return prepared


def _prepared_before(runs: Sequence[RunSpec], services: Services) -> dict[str, DatasetRecord]:
    """Return the records of the runs' datasets as they are before DVC updates them; none of those that are not prepared."""
    prepared: dict[str, DatasetRecord] = {}
    for dataset in {spec.dataset for spec in runs if not spec.is_smoke}:
        with suppress(DataError):
            prepared[dataset] = read_dataset(services.project, dataset)
    return prepared


def _prepare(runs: Sequence[RunSpec], params: Params, services: Services) -> DatasetRecord:
    """Update the dataset of these runs, or draw it, then check the runs against it before any worker starts."""
    spec = runs[0]
    if spec.is_smoke:
        services.display.say(f"generating a few images in the layout of {spec.column}")
        record = read_packed(draw_for_smoke(services.project, str(spec.column)), spec.dataset)
    else:
        if "DVC_STAGE" not in os.environ:
            services.display.say(f"preparing {spec.dataset}: bringing it up to date through DVC")
        record = prepare(services, spec.dataset)
    check_settings(runs, params.scale, Path(record.folder))
    check_parts(runs, Path(record.folder))
    return record


@flow(name="run", flow_run_name="{dataset} / {variant} / seed {seed}", task_runner=STEPS_AT_ONCE, on_failure=[forget_failure])
def run(
    dataset: DatasetName,
    variant: VariantName,
    seed: int = 0,
    force: bool = False,
    overrides: list[str] | None = None,
    code: Code = "strict",
) -> Outcome:
    """Run one run of the standing comparison.

    Args:
        dataset: a dataset of the comparison.
        variant: one of its variants.
        seed: any seed.
        force: run every step again.
        overrides: settings that override `params.yaml` for this run, each `dotted.path=value`.
        code: "strict" to rerun what changed code made, "keep" to reuse and mark it.
    """
    project = open_project()
    request = Request(datasets=(dataset,), variants=(variant,), seeds=(seed,), overrides=tuple(overrides or ()), force=force, code=code)
    params, runs = requested_runs(project, request, logger.info)
    with closing(Services(project, params.scale, _is_forced(force), code=code)) as services:
        outcomes, failures = run_chains(runs, _prepare_all(runs, params, services), services)
    _say_times(outcomes, services)
    if failures:
        raise RunsFailedError(failures, 1, ())
    with if_server_answers("its page has no scores"):
        create_markdown_artifact(_page(outcomes[0], project), key="run", description=runs[0].title)
    return outcomes[0]


def _page(outcome: Outcome, project: Project) -> str:
    """Return a run's scores and folders as Markdown for its page in Prefect."""
    scores = [f"| {name} | {value:.4f} |" for name, value in outcome.scores.metrics.items()]
    steps = ", ".join(f"{step} {'ran' if did_run else 'reused'}" for step, did_run in outcome.ran.items())
    places = [f"- network: `{outcome.network}`", f"- scores and figures: `{outcome.figures}`", f"- MLflow: {shown(project.tracking_uri)}"]
    older = [made_by_older_code(outcome.older_code), ""] if outcome.older_code else []
    return "\n".join([f"# {outcome.spec.title}", "", steps, "", *older, "| metric | value |", "|---|---|", *scores, "", *places, ""])
