"""Content of MLflow's pages: names, parameters, curves, descriptions, saved views. Uses MLflow's tags, not its library."""

import getpass
import json
import os
import shlex
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dml_core.config import flatten, parse
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.metric_info import TABLE_METRICS, table_columns
from dml_core.evaluation.statistics.comparing import Comparison, Scores
from dml_core.evaluation.statistics.confidence import Summary
from dml_core.training.config import TrainingConfig
from tasks.runs.best import best_seed
from tasks.tracking.names import DETAIL, SUMMARY_TAG, PublishedRun, metric_name

NOTE_TAG, SOURCE_TAG, COMMIT_TAG, USER_TAG = "mlflow.note.content", "mlflow.source.name", "mlflow.source.git.commit", "mlflow.user"
KIND_TAG, PRIMARY_METRIC_TAG, VIEW_TAG = "mlflow.experimentKind", "mlflow.experiment.primaryMetric.name", "mlflow.sharedViewState."
VIEW = "variants"
VIEW_METRICS = tuple(map(metric_name, ("recall@1", *TABLE_METRICS)))
NUM_SEEDS = "num_seeds"
WORKFLOW = "workflowType=machine_learning"  # else the page's menu shows agents and prompts
DEFAULTS_TAG = "dml.defaults"
ORACLE_NOTE = "**Oracle**: its weights are those of the epoch that is best on the very classes it is scored on, as papers print it.\n\n"
SOURCE_FACTS = ("command", "user")  # MLflow shows them from its own tags


def run_title(dataset: str, variant: str, seed: int) -> str:
    """Return the name of a run, in MLflow and on screen."""
    return f"{dataset} / {variant} / seed {seed}"


def split_parameters(parameters: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return a run's settings as (those that differ from the defaults, those that do not), each flat, by dotted name.

    Args:
        parameters: training and evaluation as plain values; training's names get no prefix.
    """
    training = parse(TrainingConfig, parameters["training"], "training")
    evaluation = parse(EvaluationConfig, parameters["evaluation"], "evaluation")
    everything = _flat(training.model_dump(mode="json"), evaluation.model_dump(mode="json"))
    changed = _flat(training.model_dump(mode="json", exclude_defaults=True), evaluation.model_dump(mode="json", exclude_defaults=True))
    return changed, {name: value for name, value in everything.items() if name not in changed}


def _flat(training: dict[str, Any], evaluation: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in flatten(training | {"evaluation": evaluation}).items()}


def one_line(settings: dict[str, str]) -> str:
    """Return settings as one tag, searchable with `LIKE '%sampler.kind=shuffled;%'`: fifty separate tags would clutter a run's page."""
    return " ".join(f"{name}={value};" for name, value in settings.items())


def source_tags() -> dict[str, str]:
    """Return the publishing user and the command."""
    program = Path(sys.argv[0])
    name = "dml" if program.parts[-3:-1] == ("flows", "cli") or program.parts[-2:] == ("cli", "__main__.py") else program.name
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"  # a container's user without an entry in the password file
    return {"command": shlex.join([name, *sys.argv[1:]]), "user": user}


def process_tag() -> str:
    """Return the tag that marks a run as being trained by this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def has_ended(process: str) -> bool:
    """Return whether the process of such a tag ran on this machine and has ended."""
    host, _, pid = process.rpartition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def curve_points(history: list[dict[str, float]]) -> Iterator[tuple[str, float, int]]:
    """Yield (metric, value, step or epoch) of a training history: each step's loss and its parts, and their means over each epoch."""
    sums: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for row in history:
        for name, value in row.items():
            if name in ("epoch", "step"):
                continue
            yield f"train/{name}", value, int(row["step"])
            if name != "learning_rate_factor":
                sums[name, int(row["epoch"])].append(value)
    for (name, epoch), values in sums.items():
        yield f"epoch/{name}", sum(values) / len(values), epoch


def score_metrics(metrics: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return final scores by their MLflow names: (those that compare losses, those that explain).

    The latter have the prefix `detail/`, so that lists by name begin with the former and charts have a section for each.
    """
    main = table_columns(metrics)
    detail = {f"{DETAIL}{metric_name(name)}": value for name, value in metrics.items() if name not in main}
    return {metric_name(name): metrics[name] for name in main}, detail


def summary_metrics(summaries: dict[str, dict[str, Summary]]) -> dict[str, float]:
    """Return the means of a comparison as metrics of its parent run, named `recall_at_1/softtriple` so that a chart shows one metric."""
    return {f"{name}/{variant}": summary.mean for variant, metrics in summaries.items() for name, summary in metrics.items()}


def describe_run(dataset: str, variant: str, seed: int, parent_link: str, epoch: str = "last") -> str:
    """Return the description of one run, in Markdown."""
    return (
        f"{ORACLE_NOTE if epoch == 'oracle' else ''}"
        f"**{variant}** trained on *{dataset}* with seed {seed}; "
        f"part of the [{dataset} comparison]({parent_link}).\n\n"
        "Artifacts: `figures/` (curve, similarities, gallery), `metrics.json`, `config.yaml` (every setting), "
        "`steps/` (checkpoint and embeddings). Parameters are the settings that differ from the defaults; the others are in the tag "
        f"`{DEFAULTS_TAG}`."
    )


def describe_comparison(
    title: str,
    role: str,
    experiment_id: str,
    run_id: str,
    summaries: dict[str, dict[str, Summary]],
    runs: Sequence[PublishedRun],
    model: str,
    about: str | None = None,
    found: Comparison | None = None,
    validation: Scores | None = None,
    left_out: Sequence[str] = (),
) -> str:
    """Return the description of a comparison's parent run: a table, highest mean first, a link to one run per variant, and the model.

    A paper's table begins with its description and results (`about`); its report is its page. A statistical statement about the variants
    (`found`) follows; variants in the confidence set of the best are bold. The run of a variant is its best by validation scores
    (`tasks.runs.best`), else its lowest seed. Omitted runs are listed at the end (`left_out`).
    """
    bold = found.best_set if found is not None else frozenset()
    names = list(dict.fromkeys(name for metrics in summaries.values() for name in metrics))
    head = ["variant", *(name.replace("_at_", "@") for name in names), "seeds", "run"]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---' for _ in head)}|"]
    for variant, metrics in summaries.items():
        seeds = {run.seed: run for run in runs if run.variant == variant}
        seed = best_seed(seeds, (validation or {}).get(variant, {}))
        link = f"[seed {seed}]({run_link(experiment_id, seeds[seed].run_id)})"
        name = f"**{variant}**" if variant in bold else variant
        lines.append(
            f"| {name} | {' | '.join(str(metrics[metric]) if metric in metrics else '-' for metric in names)} | {len(seeds)} | {link} |"
        )
    files = "`report.md` and its figure" if about is None else "the table's page, Markdown and JSON"
    return "\n".join(
        [
            *([about, ""] if about is not None else []),
            *([found.sentence, ""] if found is not None else []),
            f"**{title}**: per cent on {role} images; mean ± half of the 95 % interval over the seeds, best first.",
            "",
            *lines,
            "",
            *(f"- {line}" for line in left_out),
            *([f"- [Variants side by side]({view_link(experiment_id)}): a row a variant, mean over its seeds"] if about is None else []),
            f"- Report: {files} among this run's [artifacts]({run_link(experiment_id, run_id)}/artifacts)",
            f"- {model}",
        ]
    )


def run_link(experiment_id: str, run_id: str) -> str:
    """Return the link to a run's page, relative to the UI's address."""
    return f"#/experiments/{experiment_id}/runs/{run_id}"


def view_link(experiment_id: str) -> str:
    """Return the link to the page with the saved view."""
    return f"#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}&{WORKFLOW}"


def describe_experiment(run: str, view: str, summaries: dict[str, dict[str, Summary]], best: str, found: Comparison | None = None) -> str:
    """Return the line above an experiment's runs that names the best loss, in Markdown; `run` and `view` are links in it."""
    links = f"[Side by side]({view}) · [table and report]({run})"
    if not summaries:
        return f"No run has the present data and settings. {links}"
    told = f"{found.sentence} " if found is not None else ""
    highest, metrics = next(iter(summaries.items()))
    score = next(iter(metrics.values()))
    return (
        f"Highest mean Recall@1 on the test classes: **{highest}**, {score} per cent over {score.num_seeds} "
        f"seed{'s' if score.num_seeds > 1 else ''}, of {len(summaries)} variants. {told}{best[0].upper()}{best[1:]}. {links}"
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
        "searchFilter": f"tags.`{SUMMARY_TAG}` = '{comparison}'",
        "orderByKey": "metrics.`recall_at_1`",
        "orderByAsc": False,
        "isAccordionReordered": True,
        "compareRunSections": [section],
        "compareRunCharts": [chart | {"uuid": name, "metricKey": name, "displayName": name} for name in VIEW_METRICS],
    }
    view = {"name": "Variants, mean over seeds", "createdAt": 0, "updatedAt": 0, "state": json.dumps(state)}
    return {KIND_TAG: "custom_model_development", PRIMARY_METRIC_TAG: "recall_at_1", VIEW_TAG + VIEW: json.dumps(view)}


def model_tags(report_tags: dict[str, str]) -> dict[str, str]:
    """Return description and source of a logged model, as tags."""
    usage = "images (bytes of a JPEG, PNG, ... file) in the column `image`, float32 embeddings (N, D) out"
    tags = {NOTE_TAG: f"Embedding network as a pyfunc: {usage}. The code that it needs travels with it.", "mlflow.source.type": "LOCAL"}
    return tags | ({SOURCE_TAG: report_tags["command"]} if "command" in report_tags else {})
