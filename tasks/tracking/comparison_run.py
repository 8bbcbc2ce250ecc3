"""Content of a comparison in MLflow: its parent run, its registered model, and its dataset's experiment with a saved view."""

import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from dml_core.config import parse
from dml_core.errors import ConfigError
from dml_core.evaluation.metric_info import TABLE_METRICS
from dml_core.evaluation.statistics.comparing import BOLD, Comparison, Scores
from dml_core.evaluation.statistics.over_seeds import Summary
from dml_core.evaluation.statistics.paired import MIN_SEEDS
from tasks.runs.best import best_run, best_seed, said_best
from tasks.runs.comparable import Today
from tasks.runs.identity import identity_in, step_identities
from tasks.runs.records import ComparisonReport, RunReport
from tasks.runs.specs import RunSpec, comparison_title
from tasks.tracking.alarm_marks import ALARM_LETTERS, MOST_LETTERS, with_alarm
from tasks.tracking.child_run import (
    SUPERSEDED,
    VIEW,
    PublishedRun,
    has_ended,
    metric_name,
    mlflow_tags,
    page_query,
    plain_name,
    published_tags,
    run_link,
    split_settings,
    view_link,
)
from tasks.tracking.connection import log_metrics, runs_in, set_tags, tag_filter
from tasks.tracking.published import (
    comparable_runs,
    compare_published,
    comparison_rows,
    in_order,
    older_code_lines,
    summarise_published,
    validation_scores,
)
from tasks.tracking.tags import Tag
from tasks.tracking.versions import registered_name

NUM_SEEDS = "num_seeds"
UNKNOWN_FILES = "files not recorded"  # value of Tag.OLDER_CODE
NOTE_LETTERS = MOST_LETTERS - ALARM_LETTERS - 100  # of a description: an alarm may come before it
RUN_NAME = "attributes.`Run Name`"  # column of MLflow's table
VIEW_METRICS = tuple(map(metric_name, ("recall@1", *TABLE_METRICS)))


def publish_comparison(client: MlflowClient, parent: str, report: ComparisonReport) -> None:
    """Update a parent run from its current runs: description, report, registered model. Adds what has changed.

    The parent has no metrics, of which its page would draw charts of one bar: the runs that the saved view shows have them.
    """
    experiment = client.get_run(parent).info.experiment_id
    for run in runs_in(client, [experiment], {Tag.PART: report.comparison}):
        if run.info.status == "RUNNING" and has_ended(run.data.tags.get(Tag.PROCESS, "")):
            client.set_terminated(run.info.run_id, "KILLED")  # the same command resumes it
    if report.is_search:
        _describe_parent(client, parent, report, report.about or "")
        return
    digests = {} if report.digest is None else {report.dataset: report.digest}
    settings = {(report.dataset, variant): settings for variant, settings in report.settings.items()}
    published = in_order(_current_runs(client, experiment, report.comparison))
    runs, left_out = comparable_runs(report.dataset, published, Today(digests, settings, report.is_one_protocol))
    summaries = summarise_published(runs)
    # a table's own conclusions, at its judged epoch and with its reference, are in `about`
    comparison = compare_published(report.dataset, runs, report.reference) if report.about is None else None
    validation = validation_scores(runs)
    model = _register(client, report, runs, validation)
    remarks = [*left_out, *older_code_lines(report.dataset, runs)]
    note = describe_comparison(report, experiment, parent, runs, summaries, comparison, validation, model, remarks)
    _describe_parent(client, parent, report, note)
    if report.comparison == comparison_title(report.dataset, "test"):
        _publish_variants(client, experiment, report.comparison, summaries)
        links = run_link(experiment, parent), view_link(experiment)
        note = describe_experiment(*links, summaries, said_best(validation), comparison)
        tags = client.get_experiment(experiment).tags
        for tag, value in {Tag.NOTE: note, **experiment_tags(report.comparison)}.items():
            if tags.get(tag) != value:
                client.set_experiment_tag(experiment, tag, value)


def _current_runs(client: MlflowClient, experiment: str, comparison: str) -> list[PublishedRun]:
    """Return a comparison's current runs: of each variant and seed the one that was published last.

    Others, and superseded ones, are there again after an experiment was deleted and restored in MLflow; they are deleted.
    """
    complete = runs_in(client, [experiment], {Tag.PART: comparison, Tag.PUBLISHED: None})
    runs: dict[tuple[str, ...], PublishedRun] = {}
    for run in sorted(complete, key=lambda run: run.info.end_time or 0, reverse=True):
        new = PublishedRun.of_mlflow(run)
        place = (new.variant, str(new.seed)) if new.has_place else (new.run_id,)
        if new.tags[Tag.PUBLISHED] != SUPERSEDED and runs.setdefault(place, new) is new:
            continue
        if run.info.status != "FINISHED":
            continue  # superseded, but it runs again
        with suppress(MlflowException):  # another thread or process has deleted it meanwhile
            client.set_tag(new.run_id, Tag.PUBLISHED, SUPERSEDED)
            client.delete_run(new.run_id)
    return [*runs.values()]


def mark_older_code(client: MlflowClient, experiment: str, report: RunReport) -> bool:
    """Mark those of a variant's runs with other seeds that have the data and settings of `report` and were made by other code.

    They stay in the variant's mean until they run again. A mark of a run that the present code made is removed. Return False, without a
    change, if the report itself is of older code.
    """
    place = {"dataset": report.dataset.name, "variant": report.variant}

    def identity(seed: int) -> str:
        spec = parse(RunSpec, {**place, **report.parameters, "seed": seed}, "run")
        scored = step_identities(spec, report.dataset)["evaluate"]
        return scored if report.identity == report.scores.identity else identity_in(report.comparison, scored)

    try:
        is_present = identity(report.seed) == report.identity
        expected = published_tags(report, "")
        parameters, defaults = split_settings(**place, seed=report.seed, settings=report.parameters)
    except ConfigError:
        return False  # a report that waited; today's code does not have its settings
    of_variant = {Tag.PART: report.comparison, Tag.VARIANT: report.variant}
    runs = runs_in(client, [experiment], of_variant) if is_present else []
    placed = [entry for entry in runs if PublishedRun.of_mlflow(entry).has_place]
    for run in (entry for entry in placed if entry.data.tags[Tag.SEED] != str(report.seed)):
        tags, seed = run.data.tags, run.data.tags[Tag.SEED]
        has_tags = all(tags.get(tag) == expected[tag] for tag in (Tag.DIGEST, Tag.SETTINGS))
        ours = {name: value for name, value in run.data.params.items() if name in parameters.keys() | defaults.keys()}  # not a user's
        is_alike = has_tags and ours == parameters | {"seed": seed}  # one on another device has another identity for that alone
        is_older = tags.get(Tag.IDENTITY) != identity(int(seed))
        with suppress(MlflowException):  # another thread or process has superseded it meanwhile
            if not is_older and Tag.OLDER_CODE in tags:
                client.delete_tag(run.info.run_id, Tag.OLDER_CODE)
            elif is_alike and is_older and Tag.OLDER_CODE not in tags:
                client.set_tag(run.info.run_id, Tag.OLDER_CODE, UNKNOWN_FILES)
    return is_present


def _log_means(client: MlflowClient, run_id: str, means: dict[str, float]) -> None:
    """Log the metrics that have changed; one without a value becomes NaN, since MLflow deletes none.

    Of two values MLflow shows the later one: they are later than those logged before, also if those were by a host whose clock is ahead.
    """
    data = client.get_run(run_id).data
    logged, latest = data.metrics, max((metric.timestamp for metric in data.to_proto().metrics), default=0)
    now = max(int(time.time() * 1000), latest + 1)
    gone = {name: math.nan for name, value in logged.items() if name not in means and not math.isnan(value)}
    changed = {name: mean for name, mean in means.items() if logged.get(name) != mean}
    log_metrics(client, run_id, [Metric(name, value, now, 0) for name, value in (changed | gone).items()])


def _publish_variants(client: MlflowClient, experiment: str, comparison: str, summaries: dict[str, dict[str, Summary]]) -> None:
    """Keep one run per variant with its means, for the saved view; delete those of variants without means."""
    shown: dict[str, str] = {}
    for run in runs_in(client, [experiment], {Tag.SUMMARY: comparison}):  # newest first; a user may have restored another one
        variant, run_id = run.data.tags.get(Tag.VARIANT, ""), run.info.run_id
        if variant not in summaries or shown.setdefault(variant, run_id) != run_id:
            client.delete_run(run_id)
    for variant, metrics in summaries.items():
        if (run_id := shown.get(variant, "")) == "":
            tags = {Tag.SUMMARY: comparison, Tag.VARIANT: variant}
            run_id = client.create_run(experiment, run_name=f"{variant}, mean over seeds", tags=tags).info.run_id
            client.set_terminated(run_id, "FINISHED")
        num_seeds = max(summary.num_seeds for summary in metrics.values())
        _log_means(client, run_id, {name: summary.mean for name, summary in metrics.items()} | {NUM_SEEDS: float(num_seeds)})


def _describe_parent(client: MlflowClient, parent: str, report: ComparisonReport, note: str) -> None:
    """Set description, tags and files of a parent run; its alarm stays."""
    run = client.get_run(parent)
    note = with_alarm(note, run.data.tags.get(Tag.ALARM, ""))
    named = {f"dml.{name}": report.tags[name] for name in ("paper", "table", "row") if name in report.tags}
    if run.data.tags.get(Tag.NOTE) != note or not named.items() <= run.data.tags.items():
        set_tags(client, parent, mlflow_tags(report.tags) | named | {Tag.NOTE: note})
    if report.folder is not None and Path(report.folder).is_dir():
        client.log_artifacts(parent, report.folder)
    for path in report.files:
        if Path(path).is_file():
            client.log_artifact(parent, path)


def _register(client: MlflowClient, report: ComparisonReport, runs: Sequence[PublishedRun], validation: Scores) -> str:
    """Register the model of the best run by validation scores; return the line about it.

    Only the standing comparison registers a model (one with other settings is a trial), and only if classes are held out.
    """
    best = best_run(validation)
    if best is None or report.comparison != comparison_title(report.dataset, report.role):
        why = "" if best is None else " (only the standing comparison registers its model)"
        return f"Model: {said_best(validation)}{why}"
    from tasks.tracking.registered import register_best  # imports torch, which a flow that reuses everything does not need

    run_id = next(run.run_id for run in runs if (run.variant, run.seed) == (best.variant, best.seed))
    name = registered_name(report.dataset, report.role)
    version = register_best(client, name, client.get_run(run_id), str(best))
    if version is None:
        return f"Model: MLflow has no model of the {best}. To publish it again, delete that run in MLflow, then `dml reproduce`"
    link = f"#/models/{name}/versions/{version}?{page_query()}"
    best_says = said_best(validation)
    return f"Model: [{name}, version {version}]({link}), `models:/{name}@best`. {best_says[0].upper()}{best_says[1:]}"


def describe_comparison(
    report: ComparisonReport,
    experiment_id: str,
    run_id: str,
    runs: Sequence[PublishedRun],
    summaries: dict[str, dict[str, Summary]],
    comparison: Comparison | None,
    validation: Scores,
    model: str,
    remarks: Sequence[str],
) -> str:
    """Return the description of a comparison's parent run, in Markdown.

    It begins with the sentence that names the best variant, or with the description of a table (`report.about`). A Markdown table of all
    variants follows, or of those that fit into MLflow's limit: highest mean first, the confidence set of the best bold, a link to one run
    for each variant (its best by validation scores (`tasks.runs.best`), else its lowest seed). Then follow the other statements about the
    variants, links to the report and the model, and remarks: on omitted runs, and those that other code made.
    """
    bold = comparison.best_set if comparison is not None else frozenset()
    (_, _, *names), *rows = comparison_rows(runs)
    head = ["variant", *names, "seeds", "run"]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---' for _ in head)}|"]
    for variant, num_seeds, *scores in rows:
        run_ids = {run.seed: run.run_id for run in runs if run.variant == variant}
        seed = best_seed(run_ids, validation.get(variant, {}))
        link = f"[seed {seed}]({run_link(experiment_id, run_ids[seed])})"
        name = f"**{variant}**" if variant in bold else variant
        lines.append(f"| {' | '.join([name, *scores, num_seeds, link])} |")
    best, stop, others = say_best(report.role, summaries, comparison).partition(". ") if report.about is None else (report.about, "", "")
    caption = f"{report.comparison}: per cent on {report.role} images, mean over the seeds ± half of the 95 % interval"
    bold_says = f" {BOLD}" if bold else ""
    if report.about is None:
        files = "`report.md` and its figure, of the runs of the last command,"
        views = [f"[Variants side by side]({view_link(experiment_id)}): means over seeds, best first"]
    else:
        files, views = "the table's page, Markdown and JSON", []
    notes = [*views, f"Report: {files} among this run's [artifacts]({run_link(experiment_id, run_id, '/artifacts')})", model, *remarks]
    first = f"{best}{stop}".strip()
    after = [others, f"{caption} (from {MIN_SEEDS} seeds on).{bold_says}", "\n".join(f"- {note}" for note in notes)]
    table = _first_lines(lines, NOTE_LETTERS - sum(map(len, [first, *after])))
    return "\n\n".join(section for section in [first, table, *after] if section)


def _first_lines(table: Sequence[str], num_letters: int) -> str:
    """Return as many lines of a Markdown table as fit; a last row has the number of the others."""
    ends = accumulate(len(line) + 1 for line in table)
    lines = [line for line, end in zip(table, ends, strict=True) if end <= num_letters]
    missing = [f"| {len(table) - len(lines)} more, see the report |"] if len(lines) < len(table) else []
    return "\n".join([*lines, *missing])


def say_best(role: str, summaries: dict[str, dict[str, Summary]], comparison: Comparison | None) -> str:
    """Return the sentences that name the best variant and compare the others with it. MLflow's lists show them unformatted."""
    if comparison is not None:
        return comparison.sentence
    if not summaries:
        return "No run has the present data and settings."
    variant, metrics = next(iter(summaries.items()))
    name, score = next(iter(metrics.items()))
    return f"The only variant is {variant}: {plain_name(name)} {score} per cent on the {role} classes."


def describe_experiment(run: str, view: str, summaries: dict[str, dict[str, Summary]], best: str, comparison: Comparison | None) -> str:
    """Return the line above an experiment's runs that names the best loss, in Markdown; `run` and `view` are links in it."""
    links = f"[Side by side]({view}) · [table and report]({run})"
    best_sentence = f"{best[0].upper()}{best[1:]}. " if summaries else ""
    return f"{say_best('test', summaries, comparison)} {best_sentence}{links}"


def experiment_tags(comparison: str) -> dict[str, str]:
    """Return the tags of an experiment's page: its kind, its first metric, and a saved view of variants side by side.

    The view shows one run for each variant of the standing comparison, which has the variant's means as metrics (`Tag.SUMMARY`). MLflow
    itself averages only the 100 runs that its page has loaded, and those of every comparison.

    MLflow's table shows no metric by default, sorts columns by name and keeps their choice in the browser; its charts begin with metrics
    that have a prefix. A saved view ("Views" above the table) is a tag of the experiment, in the format of MLflow 3.17's page.
    """
    columns = [f"metrics.`{name}`" for name in (VIEW_METRICS[0], NUM_SEEDS, *VIEW_METRICS[1:])]
    section = {"uuid": VIEW, "name": "Model metrics", "display": True, "isReordered": False, "deleted": False, "isGenerated": True}
    chart = {"type": "BAR", "runsCountToCompare": 100, "metricSectionId": VIEW, "deleted": False, "isGenerated": True}
    state = {
        "selectedColumns": columns,
        "columnOrder": [RUN_NAME, *columns],
        "columnWidths": {RUN_NAME: 260} | dict.fromkeys(columns, 120),
        "searchFilter": tag_filter({Tag.SUMMARY: comparison}),
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
