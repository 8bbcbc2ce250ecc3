"""The end-to-end flow: a comparison of variants over seeds, on one or several datasets.

    prepare each dataset (DVC) -> every run's chain (flows/run.py) -> report

It is what `dml reproduce`, the schedule, the Prefect UI and `dvc.yaml`'s comparison stages start.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from prefect import flow
from prefect.artifacts import create_link_artifact, create_markdown_artifact

from dml_core.errors import TrainingError
from flows.run import STEPS_AT_ONCE, Chain, Outcome, Services, comparison_title, prepare
from tasks.environment import Project, open_project
from tasks.reporting import write_report
from tasks.specs import comparison_runs, load_params


@dataclass(frozen=True)
class Comparison:
    """What a comparison on one dataset came to.

    Attributes:
        title: its parent run in MLflow has it.
        report: Markdown.
        folder: where the report and DVC's metrics are.
        ran, reused: how many times each step ran, and how many times a finished one was reused.
        num_undelivered: runs that wait in the outbox because MLflow did not take them.
    """

    title: str
    report: str
    folder: Path
    ran: dict[str, int]
    reused: dict[str, int]
    num_undelivered: int


@flow(name="reproduce", task_runner=STEPS_AT_ONCE)
def reproduce(
    datasets: list[str] | None = None, variants: list[str] | None = None, seeds: list[int] | None = None, force: bool = False
) -> list[Comparison]:
    """Run the standing comparison of `params.yaml`; steps that are done already are reused.

    Args:
        datasets: which of the comparison's datasets; the default ones when none is given.
        variants: which variants; all when none is given.
        seeds: which seeds; those of `params.yaml` when none is given.
        force: run every step again.
    """
    project = open_project()
    params = load_params(project.params_file)
    chosen = datasets or list(params.comparison.default_datasets)
    specs = {name: comparison_runs(params, name, tuple(variants or ()), tuple(seeds or ())) for name in chosen}
    with closing(Services(project, params.scale)) as services:
        prepared = {name: prepare(project, name) for name in chosen}
        published = {name: services.tracker.published(comparison_title(name, params.evaluation.role)) for name in chosen}
        chains = {name: [Chain(spec, prepared[name], services, force, published[name]) for spec in specs[name]] for name in chosen}
        errors = [error for name in chosen for chain in chains[name] if (error := chain.wait()) is not None]
    if errors:
        raise errors[0] if len(errors) == 1 else TrainingError(f"{len(errors)} runs failed, the others are done; the first: {errors[0]}")
    partial = bool(variants or seeds)
    return [_conclude(name, [chain.outcome() for chain in chains[name]], project, partial) for name in chosen]


def _conclude(dataset: str, outcomes: Sequence[Outcome], project: Project, partial: bool) -> Comparison:
    """Write the report, as files and as artifacts of the flow run. A part of the comparison is reported beside the whole one's report."""
    title = comparison_title(dataset, outcomes[0].spec.evaluation.role)
    folder = project.state / "reports" / dataset if partial else project.results(dataset)
    report = write_report(title, [(outcome.spec, outcome.scores) for outcome in outcomes], folder)
    create_markdown_artifact(report, key=f"comparison-{dataset}", description=title)
    if project.tracking_uri.startswith("http"):
        create_link_artifact(project.tracking_uri, "MLflow", key=f"mlflow-{dataset}", description=title)
    ran = Counter(step for outcome in outcomes for step, did_run in outcome.ran.items() if did_run)
    reused = Counter(step for outcome in outcomes for step, did_run in outcome.ran.items() if not did_run)
    return Comparison(title, report, folder, dict(ran), dict(reused), sum(not outcome.delivered for outcome in outcomes))
