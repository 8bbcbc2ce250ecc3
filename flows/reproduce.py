"""The end-to-end flow: a comparison of variants over seeds, on one or several datasets.

    prepare each dataset (DVC) -> every run's chain (flows/run.py) -> report

`dml reproduce`, the schedule, the Prefect UI and `dvc.yaml`'s comparison stages start it.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prefect import flow, runtime
from prefect.artifacts import create_link_artifact, create_markdown_artifact

from flows.choices import DatasetName, VariantName
from flows.outcomes import Failure, Outcome, RunsFailedError, measured_run
from flows.resolving import run_until_resolved
from flows.run import STEPS_AT_ONCE, prepare_checked, run_chains
from flows.services import Services
from flows.step_cache import forget_failure
from tasks.checks import check_before, check_parts
from tasks.data import changed_datasets
from tasks.environment import Project, open_project, shown
from tasks.files import write_whole
from tasks.locks import alone
from tasks.plans.results import add_runs
from tasks.reports.compare import REPORT_FILE, write_report
from tasks.runs.best import VALIDATION, best_run, said_best
from tasks.runs.comparable import scores_by_seed, standing_today
from tasks.runs.finished import Code
from tasks.runs.records import ComparisonReport
from tasks.runs.specs import Params, RunSpec, changes_results, is_whole, load_params, row_name, standing_runs
from tasks.runs.tuned import STANDING
from tasks.tables.file import STANDING_VARIANT
from tasks.tables.seeds_auto import checked_resolve

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison on one dataset.

    Attributes:
        title: title of its parent run in MLflow.
        report: Markdown; failed runs are listed below the table.
        folder: folder of the report and DVC's metrics.
        best: the best of these runs (`tasks.runs.best`), with its folders; None if no run has a validation score.
        best_line: which run is best and by which rule, or why there is none.
        ran, reused: how many times each step ran, and how many times a finished one was reused.
        num_undelivered: records that wait in the outbox because MLflow did not accept them.
    """

    title: str
    report: str
    folder: Path
    best: Outcome | None
    best_line: str
    ran: dict[str, int]
    reused: dict[str, int]
    num_undelivered: int


def _flow_run_name() -> str:
    """Return the name of a flow run in Prefect's pages: what it runs."""
    asked = runtime.flow_run.parameters
    datasets = asked.get("datasets") or load_params(open_project().params_file).comparison.default_datasets
    if asked.get("changed_only"):
        return f"changed datasets among {' and '.join(datasets)}"
    parts = [", ".join(asked[name]) for name in ("variants", "overrides") if asked.get(name)]
    seeds = [f"seeds {', '.join(map(str, asked['seeds']))}"] if asked.get("seeds") else []
    parts += ["all variants and seeds"] if asked.get("whole") and not (parts or seeds) else []
    return ", ".join([f"comparison on {' and '.join(datasets)}", *parts, *seeds])


@flow(name="reproduce", flow_run_name=_flow_run_name, task_runner=STEPS_AT_ONCE, on_failure=[forget_failure])
def reproduce(
    datasets: list[DatasetName] | None = None,
    variants: list[VariantName] | None = None,
    seeds: list[int] | None = None,
    force: bool = False,
    fail_fast: bool = False,
    overrides: list[str] | None = None,
    code: Code = "strict",
    resolve: float | None = None,
    max_seeds: int | None = None,
    changed_only: bool = False,
    whole: bool = False,
) -> list[Comparison]:
    """Run the standing comparison of `params.yaml`; finished steps are reused.

    Args:
        datasets: datasets of the comparison; by default its default ones.
        variants: variants; by default its default ones.
        seeds: seeds; by default its default ones.
        force: run every step again.
        fail_fast: stop when a run fails; otherwise the others continue.
        overrides: settings that override `params.yaml` for these runs, each `dotted.path=value`.
        code: "strict" to rerun what changed code made, "keep" to reuse and mark it.
        resolve: instead of seeds: add seeds until half of the 95 % interval of each variant's difference to the best is at most this many
            points of the first Recall@K; reported separately from the standing comparison, whose seeds are those of `params.yaml`.
        max_seeds: maximum number of seeds for `resolve`.
        changed_only: skip datasets that DVC finds unchanged since they were prepared; schedules use it to react to changes.
        whole: all variants and seeds of `params.yaml` if none are given, as reported in `results/`.
    """
    project = open_project()
    params = load_params(project.params_file, overrides or ())
    runs = standing_runs(params, datasets, variants, seeds if resolve is None else [0], overrides or (), whole)
    if changed_only:
        changed = changed_datasets(project, params, list(runs))
        logger.info("changed since they were prepared: %s", ", ".join(changed) or "none")
        runs = {name: runs[name] for name in changed}
        if not runs:
            return []
    for found in runs.values():
        check_parts(found, check_before(project, params, found))
    with closing(Services(project, params.scale)) as services:
        prepared = {name: prepare_checked(found, params, services) for name, found in runs.items()}
        run = partial(run_chains, prepared=prepared, services=services, force=force, fail_fast=fail_fast, code=code)
        every = [spec for found in runs.values() for spec in found]
        if resolve is None:
            outcomes, failures = run(every)
        else:
            outcomes, failures = run_until_resolved(
                every, checked_resolve(resolve, max_seeds), partial(_looked_at, params), run, services.display.say, fail_fast
            )
        services.display.say("writing the report")
    by_dataset = {name: [outcome for outcome in outcomes if outcome.spec.dataset == name] for name in runs}
    failed = {name: [failure for failure in failures if failure.spec.dataset == name] for name in runs}
    if not any(changes_results(override) for override in overrides or ()):
        _keep(outcomes, failures, services)
    comparisons = [_conclude(by_dataset[name], failed[name], services, params) for name in runs if by_dataset[name]]
    if failures:
        raise RunsFailedError(failures, max(len(every), len(outcomes) + len(failures)), comparisons)
    return comparisons


def _looked_at(params: Params, spec: RunSpec) -> tuple[str, str | None]:
    """Return the first Recall@K, and the comparison's reference."""
    return f"recall@{spec.evaluation.recall_at[0]}", params.comparison.reference


def _keep(outcomes: Sequence[Outcome], failures: Sequence[Failure], services: Services) -> None:
    """Add the measured runs to the result of the standing comparison's table, which has pages like every table."""
    runs = tuple(measured_run(outcome, row_name(outcome.spec.variant), STANDING_VARIANT, outcome.spec.dataset) for outcome in outcomes)
    failed = {
        f"{row_name(failure.spec.variant)} {STANDING_VARIANT}, {failure.spec.dataset}, seed {failure.spec.seed}": failure.reason
        for failure in failures
    }
    add_runs(services.project, STANDING, runs, failed, services.tags.get("git_commit"))


def report_folder(project: Project, runs: Sequence[RunSpec], is_part: bool) -> Path:
    """Return a comparison's report folder: `results/<dataset>` for the whole standing comparison, else a folder for the selection.

    Different selections of variants, seeds or settings have different folders, and equal ones the same.
    """
    first = runs[0]
    if not is_part and not first.overrides:
        return project.results(first.dataset)
    chosen = {kind: sorted({getattr(spec, kind) for spec in runs}) for kind in ("variant", "seed")}
    identity = hashlib.sha256(json.dumps([chosen, first.comparison]).encode()).hexdigest()[:8]
    variants, seeds = chosen["variant"], chosen["seed"]
    named = variants[0] if len(variants) == 1 else f"{len(variants)}-variants"
    counted = f"seed-{seeds[0]}" if len(seeds) == 1 else f"{len(seeds)}-seeds"
    return project.state / "reports" / first.dataset / f"{row_name(named)[:40]}-{counted}-{identity}"


def _conclude(outcomes: Sequence[Outcome], failures: Sequence[Failure], services: Services, params: Params) -> Comparison:
    """Write the report: files, artifacts of the flow run, MLflow.

    Only a whole standing comparison is reported in `results/`; a part of one, or one with other settings, has a separate folder.
    """
    spec, project, reference = outcomes[0].spec, services.project, params.comparison.reference
    is_part = bool(failures) or not is_whole(params, (outcome.spec for outcome in outcomes))
    folder = report_folder(project, [*(one.spec for one in outcomes), *(one.spec for one in failures)], is_part)
    older_code = {outcome.spec.variant: outcome.older_code for outcome in outcomes if outcome.older_code}
    with alone(project.state / "reports" / f".{folder.parent.name}-{folder.name}.lock"):  # another shell may report the same selection now
        report = write_report(spec.comparison, [(outcome.spec, outcome.scores) for outcome in outcomes], folder, older_code, reference)
        if failures:
            report += "\n".join(["", "Not in the table:", "", *(f"- {failure.line}" for failure in failures), ""])
            write_whole(folder / REPORT_FILE, report)
    today = standing_today(params, spec.dataset, outcomes[0].digest, spec.overrides)
    summary = ComparisonReport(
        comparison=spec.comparison,
        dataset=spec.dataset,
        role=spec.evaluation.role,
        folder=None if is_part else str(folder),
        tags=services.tags,
        reference=reference,
        digest=outcomes[0].digest,
        settings={variant: settings for (_, variant), settings in today.settings.items()},
        is_one_protocol=today.is_one_protocol,
    )
    num_undelivered = sum(not outcome.delivered for outcome in outcomes) + (services.tracker.publish(summary) is None)
    create_markdown_artifact(report, key=f"comparison-{spec.dataset}", description=spec.comparison)
    if project.tracking_uri.startswith("http"):
        create_link_artifact(shown(project.tracking_uri), "MLflow", key=f"mlflow-{spec.dataset}", description=spec.comparison)
    ran = Counter(step for outcome in outcomes for step, did_run in outcome.ran.items() if did_run)
    reused = Counter(step for outcome in outcomes for step, did_run in outcome.ran.items() if not did_run)
    best, best_line = _best(outcomes)
    return Comparison(spec.comparison, report, folder, best, best_line, dict(ran), dict(reused), num_undelivered)


def _best(outcomes: Sequence[Outcome]) -> tuple[Outcome | None, str]:
    """Return the best of these runs, and the line about it."""
    scored = [outcome for outcome in outcomes if VALIDATION in outcome.scores.metrics]
    scores = scores_by_seed((one.spec.variant, one.spec.seed, one.scores.metrics[VALIDATION]) for one in scored)
    found = best_run(scores)
    best = next((one for one in scored if found is not None and (one.spec.variant, one.spec.seed) == (found.variant, found.seed)), None)
    return best, said_best(scores)
