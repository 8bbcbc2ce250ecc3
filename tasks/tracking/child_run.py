"""Content of one run in MLflow, a child of its comparison's parent run: its tags, parameters, metrics, dataset, artifacts and text.

Everything is plain values: `tasks.tracking.tracker` sends them, `tasks.tracking.published` reads them back. Imports no MLflow.

| shown | from |
|---|---|
| tags when the training begins | `first_tags` |
| parameters; the settings with their default value as the tag `dml.defaults` | `split_settings` |
| tags and description when the run is published | `published_tags` |
| curves | `curve_points` |
| final scores | `score_metrics` |
| costs | `cost_metrics` |
| dataset | `dataset_input` |
| artifacts | `config.yaml`, and the files of the steps in `artifact_steps` |
"""

import getpass
import json
import math
import os
import re
import shlex
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from dml_core.config import flatten, parse
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.metric_info import table_columns
from dml_core.training.config import TrainingConfig
from tasks.runs.comparable import Facts, settings_identity
from tasks.runs.costs import FACT, costs_of, total_cost
from tasks.runs.records import RunReport, StepRecord
from tasks.runs.surroundings import SURROUNDINGS
from tasks.tracking.connection import EXPERIMENT_PREFIX
from tasks.tracking.tags import Tag

MAX_POINTS = 500  # of a curve over steps: MLflow writes and reads each as an object, some ten thousand a run without this limit
MLFLOW_TAGS = {"command": "mlflow.source.name", "user": "mlflow.user", "git_commit": "mlflow.source.git.commit"}  # of a report's tags
REFUSED = re.compile(r"[^\w.\- :/]|(?<![^/])\.{0,2}(?![^/])")  # letters, and parts of a path, that MLflow refuses in a metric's name
SUPERSEDED = "superseded"  # a deleted run's Tag.PUBLISHED, so that it is completed and made current when it is restored
NAME_LETTERS = 250  # of a run's name: PostgreSQL refuses a longer one
DETAIL = "detail/"  # prefix of metrics that explain the others
ORACLE_NOTE = "Oracle: its weights are those of the epoch that is best on the very classes it is scored on, as papers print it.\n\n"
WORKFLOW = "workflowType=machine_learning"  # in a link: without it MLflow's menu is that of agents and prompts
VIEW = "variants"  # saved view of an experiment


@dataclass
class PublishedRun:
    """A run in MLflow: its last metrics, without those that are NaN, and its tags."""

    run_id: str
    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    experiment_id: str = ""

    def __post_init__(self) -> None:
        self.metrics = {name: value for name, value in self.metrics.items() if not math.isnan(value)}

    @classmethod
    def of_mlflow(cls, run: Any) -> "PublishedRun":
        """Convert one of MLflow's runs."""
        return cls(run.info.run_id, dict(run.data.metrics), dict(run.data.tags), str(run.info.experiment_id))

    @property
    def variant(self) -> str:
        """Variant of the comparison."""
        return self.tags[Tag.VARIANT]

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.tags[Tag.SEED])

    @property
    def has_place(self) -> bool:
        """True if its variant and seed can be read: a user can edit and delete tags in MLflow."""
        return bool(self.tags.get(Tag.VARIANT)) and self.tags.get(Tag.SEED, "").isdecimal()

    def has_scores(self, metrics: Mapping[str, float]) -> bool:
        """Return whether no score differs from the run's in MLflow; names that only one of them has do not count."""
        main, detail = score_metrics(metrics)
        scores = {name: value for name, value in (main | detail).items() if name in self.metrics and math.isfinite(value)}
        return all(math.isclose(value, self.metrics[name]) for name, value in scores.items())

    def facts(self, dataset: str) -> Facts:
        """Return the facts that decide which other runs on the dataset it may be averaged and compared with."""
        return Facts(dataset, self.variant, self.seed, self.tags.get(Tag.DIGEST), self.tags.get(Tag.SETTINGS))


# ---------------------------------------------------------------- names


def experiment_name(dataset: str) -> str:
    """Return the MLflow experiment of a dataset."""
    return f"{EXPERIMENT_PREFIX}{dataset}"


def run_title(dataset: str, variant: str, seed: int) -> str:
    """Return the name of a run, in MLflow and on screen."""
    return f"{dataset} / {variant} / seed {seed}"


def run_link(experiment_id: str, run_id: str, tab: str = "") -> str:
    """Return the link to a run's page or a tab of it ("/artifacts"), relative to the UI's address."""
    return f"#/experiments/{experiment_id}/runs/{run_id}{tab}?{page_query()}"


def view_link(experiment_id: str) -> str:
    """Return the link to the saved view of a dataset's standing comparison: a row for each variant, best first."""
    return f"#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}&{page_query()}"


def page_query() -> str:
    """Return the end of a link to a page of MLflow, which opens it in the project's workspace."""
    workspace = os.environ.get("MLFLOW_WORKSPACE")
    return f"{WORKFLOW}&workspace={quote(workspace)}" if workspace else WORKFLOW


def metric_name(name: str) -> str:
    """Return a metric's name in MLflow, which allows no @; what else it refuses, as in a part of a loss, becomes `_25_`, here for a %."""
    return REFUSED.sub(lambda refused: f"_{''.join(f'{ord(letter):x}_' for letter in refused[0])}", name.replace("@", "_at_"))


def plain_name(name: str) -> str:
    """Return a metric's own name from its name in MLflow."""
    return name.replace("_at_", "@")


def current_tags(comparison: str) -> dict[str, str]:
    """Return the tags of the comparison's complete runs; superseded runs are deleted in MLflow and not found."""
    return {Tag.PART: comparison, Tag.PUBLISHED: "true"}


# ---------------------------------------------------------------- tags and parameters


def first_tags(parent: str, comparison: str, identity: str, variant: str, seed: int, defaults: dict[str, str]) -> dict[str, str]:
    """Return the tags with which a run is created.

    The settings with their default value are one tag, searchable with `LIKE '%sampler.kind=shuffled;%'`: fifty would clutter the page.
    """
    places = {Tag.PARENT: parent, Tag.PART: comparison, Tag.IDENTITY: identity, Tag.VARIANT: variant, Tag.SEED: str(seed)}
    one_line = " ".join(f"{name}={value};" for name, value in defaults.items())
    return places | {Tag.DEFAULTS: one_line, Tag.PROCESS: process_tag()} | mlflow_tags(source_tags())


def split_settings(dataset: str, variant: str, seed: int, settings: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return a run's parameters, which are its settings that differ from the defaults, and its other settings, flat, by dotted name.

    `settings` has training, whose names get no prefix, and evaluation as plain values. Dataset, variant and seed are parameters too.
    """
    training = parse(TrainingConfig, settings["training"], "training")
    evaluation = parse(EvaluationConfig, settings["evaluation"], "evaluation")

    def flat(exclude_defaults: bool) -> dict[str, str]:
        of_training, of_evaluation = (
            config.model_dump(mode="json", exclude_defaults=exclude_defaults) for config in (training, evaluation)
        )
        return {name: str(value) for name, value in flatten(of_training | {"evaluation": of_evaluation}).items()}

    changed = flat(exclude_defaults=True)
    defaults = {name: value for name, value in flat(exclude_defaults=False).items() if name not in changed}
    return {"dataset": dataset, "variant": variant, "seed": str(seed)} | changed, defaults


def published_tags(report: RunReport, parent_link: str) -> dict[str, str]:
    """Return the tags of a published run: the report's, facts of its steps, what it may be compared with, and its description."""
    facts = {f"{record.step}.{name}": value for record in (report.checkpoint, report.embeddings) for name, value in record.facts.items()}
    facts = {name: value for name, value in facts.items() if not name.endswith((f".{FACT}", f".{SURROUNDINGS}"))}  # metrics: `cost_metrics`
    epoch = str(report.parameters["evaluation"].get("epoch", "last"))
    fields = report.tags | facts | {"epoch": epoch, "dvc_digest": report.dvc_digest or "none"}
    digest, settings = report.dataset.digest, report.parameters
    return {f"dml.{name}": str(value) for name, value in fields.items() if name not in ("command", "user")} | {
        Tag.TRAINED: report.checkpoint.identity,
        Tag.DIGEST: digest,
        Tag.FOLDER: report.dataset.folder,
        Tag.SETTINGS: settings_identity(settings["training"], settings["evaluation"], digest, settings.get("measurements", {})),
        Tag.NOTE: describe_run(report.dataset.name, report.variant, report.seed, parent_link, epoch, report.scores_only),
        **mlflow_tags(report.tags),
    }


def mlflow_tags(tags: dict[str, str]) -> dict[str, str]:
    """Return command, user and commit under the tags that MLflow's pages read."""
    return {"mlflow.source.type": "LOCAL"} | {name: tags[key] for key, name in MLFLOW_TAGS.items() if key in tags}


def source_tags() -> dict[str, str]:
    """Return the publishing user and the command."""
    program = Path(sys.argv[0])
    name = "dml" if program.parts[-3:-1] == ("flows", "cli") or program.parts[-2:] == ("cli", "__main__.py") else program.name
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"  # a container's user without an entry in the password file
    return {"command": shlex.join([name, *sys.argv[1:]]), "user": user}


def process_tag(pid: int | None = None) -> str:
    """Return the tag that marks a run as being trained by a process, by default this one: `host:boot:namespace:pid:start`.

    Numbers of processes are used again, and each container counts its own: `boot` is the start of the kernel, `namespace` that of the
    numbers, `start` the time of the process's (proc_pid_stat(5)), empty without such a process.
    """
    pid, boot, namespace, start = os.getpid() if pid is None else pid, "", "", ""
    with suppress(OSError):
        boot, namespace = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(Path("/proc/self/ns/pid").stat().st_ino)
        start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()}:{boot}:{namespace}:{pid}:{start}"


def has_ended(process: str) -> bool:
    """Return whether the process of such a tag ran on this machine and has ended, at the latest when the machine was started again."""
    parts = process.split(":")
    if len(parts) != 5 or not parts[3].isdecimal():
        return False
    host, boot, namespace, _, start = process_tag(int(parts[3])).split(":")
    return parts[0] == host and (parts[1] != boot or (parts[2] == namespace and parts[4] != start))


def describe_run(dataset: str, variant: str, seed: int, parent_link: str, epoch: str, scores_only: bool) -> str:
    """Return the description of one run, in Markdown. Its beginning has no marks: MLflow's lists show it unformatted."""
    return (
        f"{ORACLE_NOTE if epoch == 'oracle' else ''}"
        f"{variant} trained on {dataset} with seed {seed}; "
        f"part of the [{dataset} comparison]({parent_link}).\n\n"
        "Artifacts: `figures/` (curve, similarities, gallery), `metrics.json`, `config.yaml` (every setting)"
        f"{'' if scores_only else ', `steps/` (checkpoint and embeddings)'}. "
        f"Parameters are the settings that differ from the defaults; the others are in the tag `{Tag.DEFAULTS}`."
    )


# ---------------------------------------------------------------- metrics, dataset, artifacts


def curve_points(history: list[dict[str, float]]) -> Iterator[tuple[str, float, int]]:
    """Yield (metric, value, step or epochs done) of a training history: loss and its parts at steps, and their means over each epoch.

    Of a curve with more than `MAX_POINTS` steps every k-th is yielded, so that the last is one of them; the history itself has all.
    """
    curves: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    sums: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for row in history:
        for name, value in row.items():
            if name in ("epoch", "step"):
                continue
            curves[name].append((value, int(row["step"])))
            if name != "learning_rate_factor":
                sums[name, int(row["epoch"])].append(value)
    for name, points in curves.items():
        every = math.ceil(len(points) / MAX_POINTS)
        yield from ((f"train/{metric_name(name)}", value, step) for value, step in points[::-every])
    for (name, epoch), values in sums.items():
        yield f"epoch/{metric_name(name)}", sum(values) / len(values), epoch + 1


def score_metrics(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return final scores by their MLflow names: (those that compare losses, those that explain).

    The latter have the prefix `detail/`, so that lists by name begin with the former and charts have a section for each.
    """
    main = table_columns(metrics)
    detail = {f"{DETAIL}{metric_name(name)}": value for name, value in metrics.items() if name not in main}
    return {metric_name(name): metrics[name] for name in main}, detail


def cost_metrics(report: RunReport) -> dict[str, float]:
    """Return what a run cost, as `cost_total/wall_seconds`, `cost_train/wall_seconds`; they are no scores, and no list compares them."""
    costs = costs_of((report.checkpoint, report.embeddings, report.scores))
    shown = ({"total": total_cost(costs.values())} | costs) if costs else {}
    return {f"cost_{step}/{name}": float(value) for step, cost in shown.items() for name, value in cost if value is not None}


def dataset_input(report: RunReport) -> dict[str, str]:
    """Return the fields of MLflow's dataset."""
    dataset = report.dataset
    return {
        "name": dataset.name,
        "digest": dataset.digest,
        "source_type": "local",
        "source": json.dumps({"uri": dataset.folder}),
        "profile": json.dumps(dataset.counts),
    }


def artifact_steps(report: RunReport) -> list[tuple[StepRecord, str]]:
    """Return the steps whose files are artifacts, each with the folder of the artifacts that has them."""
    steps = [] if report.scores_only else [report.checkpoint, report.embeddings]
    return [(report.scores, ""), *((record, f"steps/{record.step}") for record in steps)]


def artifact_files(report: RunReport) -> Iterator[tuple[StepRecord, str, str]]:
    """Yield each file of these steps: its step's record, its name there, and its path among the artifacts."""
    for record, below in artifact_steps(report):
        for file in record.files:
            yield record, file.name, str(PurePosixPath(below) / file.name)
