"""What MLflow shows of a comparison: its parent run, and its dataset's experiment with a saved view.

Plain values and Markdown, which `tasks.tracking.tracker` sends. Imports no MLflow.
"""

import json
from collections.abc import Sequence

from dml_core.evaluation.columns import SHOWN
from dml_core.evaluation.statistics.comparing import Comparison, Scores
from dml_core.evaluation.statistics.confidence import Summary
from tasks.runs.best import best_seed
from tasks.runs.records import ComparisonReport
from tasks.tracking.child_run import PublishedRun, metric_name, run_link
from tasks.tracking.connection import tag_filter

SUMMARY_TAG = "dml.summary_of"  # comparison whose means over seeds a variant's run has
NUM_SEEDS = "num_seeds"
VIEW = "variants"
VIEW_METRICS = tuple(map(metric_name, ("recall@1", *SHOWN)))


def summary_metrics(summaries: dict[str, dict[str, Summary]]) -> dict[str, float]:
    """Return the means of a comparison as metrics of its parent run, named `recall_at_1/softtriple` so that a chart shows one metric."""
    return {f"{name}/{variant}": summary.mean for variant, metrics in summaries.items() for name, summary in metrics.items()}


def describe_comparison(
    report: ComparisonReport,
    experiment_id: str,
    run_id: str,
    runs: Sequence[PublishedRun],
    summaries: dict[str, dict[str, Summary]],
    comparison: Comparison | None,
    validation: Scores,
    model: str,
    left_out: Sequence[str],
) -> str:
    """Return the description of a comparison's parent run: a table, highest mean first, a link to one run per variant, and the model.

    A paper's table begins with its description and results (`report.about`); its report is its page. A statistical statement about the
    variants (`comparison`) follows; variants in the confidence set of the best are bold. The run of a variant is its best by validation
    scores (`tasks.runs.best`), else its lowest seed. Omitted runs are listed at the end (`left_out`).
    """
    bold = comparison.best_set if comparison is not None else frozenset()
    names = list(dict.fromkeys(name for metrics in summaries.values() for name in metrics))
    head = ["variant", *(name.replace("_at_", "@") for name in names), "seeds", "run"]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---' for _ in head)}|"]
    for variant, metrics in summaries.items():
        seeds = {run.seed: run for run in runs if run.variant == variant}
        seed = best_seed(seeds, validation.get(variant, {}))
        link = f"[seed {seed}]({run_link(experiment_id, seeds[seed].run_id)})"
        name = f"**{variant}**" if variant in bold else variant
        scores = [str(metrics[metric]) if metric in metrics else "-" for metric in names]
        lines.append(f"| {' | '.join([name, *scores, str(len(seeds)), link])} |")
    is_table = report.about is not None
    files = "the table's page, Markdown and JSON" if is_table else "`report.md` and its figure"
    return "\n".join(
        [
            *([report.about, ""] if report.about is not None else []),
            *([comparison.sentence, ""] if comparison is not None else []),
            f"**{report.comparison}**: per cent on {report.role} images; mean ± half of the 95 % interval over the seeds, best first.",
            "",
            *lines,
            "",
            *(f"- {line}" for line in left_out),
            *([] if is_table else [f"- [Variants side by side]({view_link(experiment_id)}): a row a variant, mean over its seeds"]),
            f"- Report: {files} among this run's [artifacts]({run_link(experiment_id, run_id)}/artifacts)",
            f"- {model}",
        ]
    )


def view_link(experiment_id: str) -> str:
    """Return the link to the page with the saved view. Without the workflow in it the page's menu shows agents and prompts."""
    return f"#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}&workflowType=machine_learning"


def describe_experiment(run: str, view: str, summaries: dict[str, dict[str, Summary]], best: str, comparison: Comparison | None) -> str:
    """Return the line above an experiment's runs that names the best loss, in Markdown; `run` and `view` are links in it."""
    links = f"[Side by side]({view}) · [table and report]({run})"
    if not summaries:
        return f"No run has the present data and settings. {links}"
    differences = f"{comparison.sentence} " if comparison is not None else ""
    highest, metrics = next(iter(summaries.items()))
    score = next(iter(metrics.values()))
    return (
        f"Highest mean Recall@1 on the test classes: **{highest}**, {score} per cent over {score.num_seeds} "
        f"seed{'s' if score.num_seeds > 1 else ''}, of {len(summaries)} variants. {differences}{best[0].upper()}{best[1:]}. {links}"
    )


def experiment_tags(comparison: str) -> dict[str, str]:
    """Return the tags of an experiment's page: its kind, its first metric, and a saved view of variants side by side.

    The view shows one run for each variant of the standing comparison, which has the variant's means as metrics (`SUMMARY_TAG`). MLflow
    itself averages only the 100 runs that its page has loaded, and those of every comparison.

    MLflow's table shows no metric by default and keeps the choice of columns in the browser; its charts begin with metrics that have a
    prefix. A saved view ("Views" above the table) is a tag of the experiment, in the format of MLflow 3.17's page.
    """
    section = {"uuid": VIEW, "name": "Model metrics", "display": True, "isReordered": False, "deleted": False, "isGenerated": True}
    chart = {"type": "BAR", "runsCountToCompare": 100, "metricSectionId": VIEW, "deleted": False, "isGenerated": True}
    state = {
        "selectedColumns": [f"metrics.`{name}`" for name in (*VIEW_METRICS, NUM_SEEDS)],
        "searchFilter": tag_filter({SUMMARY_TAG: comparison}),
        "orderByKey": "metrics.`recall_at_1`",
        "orderByAsc": False,
        "isAccordionReordered": True,
        "compareRunSections": [section],
        "compareRunCharts": [chart | {"uuid": name, "metricKey": name, "displayName": name} for name in VIEW_METRICS],
    }
    view = {"name": "Variants, mean over seeds", "createdAt": 0, "updatedAt": 0, "state": json.dumps(state)}
    return {
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.experiment.primaryMetric.name": "recall_at_1",
        f"mlflow.sharedViewState.{VIEW}": json.dumps(view),
    }
