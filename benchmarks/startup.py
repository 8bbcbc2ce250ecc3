"""Benchmark where the time of `dml reproduce` goes: its phases, next to the bare parts of its libraries in the same run.

For each number of runs (one variant with as many seeds, on drawn images, with few epochs) the command runs in a separate project: the
first time; again, when everything is reused; and after `recall_at` has changed, when everything is scored and published again. Phases
are read from the lines that it prints, steps from Prefect's records of tasks and from the records of training. The peers, each in a
separate process:
  functions  training, embedding and evaluation of the same runs as plain functions with one thread
  Ray        a TorchTrainer fit of an empty function with one worker, Ray's start and end included
  Prefect    a flow with one empty task, the start and end of its server included
  MLflow     a client that publishes the same files and scores of one run, in a new local database and once more

Other commands are timed in the project of the first number of runs, `dml serve` until its answer to one image.

    python benchmarks/startup.py                                           # 1 and 11 runs
    python benchmarks/startup.py --runs 1 11 132 --timeline startup.png    # with a picture of all phases and steps
"""

import argparse
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import requests
import torch
import yaml
from measuring import PREFECT_FILE, ROOT, address_in, copy_project, environment_of

from dml_core.config import merge, read_yaml
from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.packed import PackedDataset
from dml_core.figures.canvas import COLOURS, new_figure, style_axes, write_png
from dml_core.training.history import read_history
from dml_core.training.loop import fit
from tasks.data import read_dataset
from tasks.environment import Project
from tasks.runs.finished import read_finished
from tasks.runs.identity import step_identities
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.scores.drawing import Drawing, titled
from tasks.scores.evaluation import evaluate_run
from tasks.workers.embedding import extract

VARIANT = "softtriple"
STEPS = ("train", "embed", "evaluate", "publish")
PHASES = {  # phase -> the line with which it begins; the first begins with the process
    "loading the command": None,
    "checking parameters": r"dml reproduce: ",
    "starting Prefect": r"starting Prefect",
    "preparing the data": r"starting Ray|preparing ",
    "runs": r"\d+ of \d+ runs? to train",
    "reports": r"writing the reports",
    "printing and ending": r"# ",  # of the report, on standard output
}
BARE_RAY = """
import ray, ray.train.torch
from ray.train import ScalingConfig
ray.init(log_to_driver=False, include_dashboard=False)
ray.train.torch.TorchTrainer(lambda config: None, train_loop_config={}, scaling_config=ScalingConfig(num_workers=1)).fit()
ray.shutdown()
"""
BARE_PREFECT = """
from prefect import flow, task
@task
def nothing(): pass
@flow
def bare(): nothing.submit().wait()
bare()
"""
BARE_MLFLOW = """
import json, sys, time
from mlflow import MlflowClient
from mlflow.entities import Metric
database, scores, *folders = sys.argv[1:]
for _ in range(2):
    began = time.perf_counter()
    client = MlflowClient(f"sqlite:///{database}/mlflow.db")
    found = client.get_experiment_by_name("e")
    experiment = found.experiment_id if found else client.create_experiment("e", f"{database}/artifacts")
    run = client.create_run(experiment).info.run_id
    client.log_batch(run, [Metric(name.replace("@", "_"), value, 0, 0) for name, value in json.load(open(scores)).items()])
    for number, folder in enumerate(folders):
        client.log_artifacts(run, folder, str(number))
    client.set_terminated(run)
    print(time.perf_counter() - began)
"""


@dataclass(frozen=True)
class Bar:
    """A step of a run, in seconds since the command began."""

    run: int
    step: str
    begin: float
    end: float


@dataclass(frozen=True)
class Measured:
    """One call of the command.

    Attributes:
        phases: phase -> when it began and ended, in seconds since the command began.
        bars: steps of its runs; empty if all are reused.
    """

    phases: dict[str, tuple[float, float]]
    bars: list[Bar]

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end of the command."""
        return max(end for _, end in self.phases.values())

    @property
    def workers_ready(self) -> float:
        """When the first training began."""
        return min(bar.begin for bar in self.bars if bar.step == "train")

    def seconds_of(self, step: str) -> list[float]:
        """Return the seconds of a step in each run that did it, in the order in which they ended."""
        bars = sorted((bar for bar in self.bars if bar.step == step), key=lambda bar: bar.end)
        return [bar.end - bar.begin for bar in bars]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 11], help="numbers of runs, each measured in a new project")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=15, help="images of each of the 120 classes")
    parser.add_argument("--timeline", type=Path, help="PNG with the phases and steps of each number of runs")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {Path('/proc/loadavg').read_text().split()[0]}; seconds", flush=True)
    measured = {}
    for num_runs in arguments.runs:
        with tempfile.TemporaryDirectory() as folder:
            project = Path(folder)
            write_project(project, num_runs, arguments.epochs, arguments.images)
            functions = measure_functions(project)
            first, again = measure_command(project), measure_command(project)
            change_scores(project)
            print_phases(num_runs, first, again, measure_command(project))
            measured[num_runs] = first
            print_parts(num_runs, first, functions, measure_mlflow(project))
            if num_runs == arguments.runs[0]:
                print_other_commands(project)
    if arguments.timeline is not None:
        draw_timeline(measured, arguments.timeline)


# ---------------------------------------------------------------- the project and the command


def write_project(project: Path, num_runs: int, num_epochs: int, images_per_class: int) -> None:
    """Write a project of one variant with this many seeds, and a copy of the code, which DVC watches."""
    params: dict[str, Any] = read_yaml(ROOT / "params.yaml")
    params["comparison"] |= {"variants": {VARIANT: params["comparison"]["variants"][VARIANT]}, "reference": VARIANT}
    params["datasets"] = {"synthetic": params["datasets"]["synthetic"]}
    params["comparison"]["datasets"] = {"synthetic": {}}
    protocol = {"num_epochs": num_epochs, "recall_every_epochs": None}
    changes = {
        "datasets": {"synthetic": {"options": {"images_per_class": images_per_class}}},
        "comparison": {"seeds": list(range(num_runs)), "num_default_seeds": num_runs, "protocol": protocol},
    }
    copy_project(project)
    (project / "params.yaml").write_text(yaml.safe_dump(merge(params, changes), sort_keys=False))


def change_scores(project: Path) -> None:
    """Change `recall_at` in the project's parameters, on which only scores depend."""
    path = project / "params.yaml"
    path.write_text(yaml.safe_dump(merge(read_yaml(path), {"evaluation": {"recall_at": [1, 2]}}), sort_keys=False))


def start_command(project: Path, *words: str) -> "subprocess.Popen[str]":
    """Start `dml` with these words in the project, as a separate process."""
    command, environment = [sys.executable, "-m", "flows.cli", *words], environment_of(project)
    return subprocess.Popen(command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def measure_command(project: Path) -> Measured:
    """Run `dml reproduce` in the project and measure its phases and steps."""
    began = time.time()
    lines: list[tuple[float, str]] = []
    with start_command(project, "reproduce") as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.time() - began, line))
    if process.returncode:
        raise SystemExit("".join(line for _, line in lines))
    return Measured(phases_of(lines, time.time() - began), list(read_bars(project, began)))


def phases_of(lines: Sequence[tuple[float, str]], ended: float) -> dict[str, tuple[float, float]]:
    """Return phase -> when it began and ended, by the lines and the times at which they were printed; phases without a line are omitted."""
    begins = {"loading the command": 0.0}
    for seconds, line in lines:
        begins |= {phase: seconds for phase, mark in PHASES.items() if mark and phase not in begins and re.match(mark, line)}
    ordered = [*sorted(begins.items(), key=lambda item: item[1]), ("", ended)]
    return {phase: (begin, end) for (phase, begin), (_, end) in pairwise(ordered)}


def read_bars(project: Path, began: float) -> Iterator[Bar]:
    """Yield the steps that the project's runs did since `began` (seconds since the epoch).

    Prefect's times of a training and an embedding include the wait for free workers; the workers' own seconds are in the steps' records.
    """
    with closing(sqlite3.connect(project / PREFECT_FILE)) as database:
        rows = database.execute("SELECT name, start_time, end_time FROM task_run WHERE state_name = 'Completed'").fetchall()
    times = {name: tuple(datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp() - began for when in when_) for name, *when_ in rows}
    packed = read_dataset(Project(project, project / "state", "", ""), "synthetic")
    for number, spec in enumerate(comparison_runs(load_params(project / "params.yaml"), "synthetic")):
        identities = step_identities(spec, packed)
        for step in STEPS:
            begin, end = times.get(f"{step} {spec.short}", (-1.0, -1.0))
            record = read_finished(project / "state/prefect/storage", step, identities[step]) if step in ("train", "embed") else None
            if record is not None:
                begin = end - record.facts["seconds"]
            if begin >= 0:
                yield Bar(number, step, begin, end)


def measure_words(project: Path, *words: str) -> float:
    """Return the seconds of another command."""
    began = time.perf_counter()
    with start_command(project, *words) as process:
        printed, _ = process.communicate()
    if process.returncode:
        raise SystemExit(printed)
    return time.perf_counter() - began


def measure_serve(project: Path) -> float:
    """Return the seconds from the start of `dml serve` to its answer to one image."""
    image = next((project / "data/raw/synthetic").rglob("*.jpg")).read_bytes()
    began = time.perf_counter()
    with start_command(project, "serve", f"synthetic/{VARIANT}", "--port", "0") as service:
        assert service.stdout is not None
        try:
            requests.post(f"{address_in(service.stdout)}/v1/embed", files={"image": image}, timeout=60).raise_for_status()
            return time.perf_counter() - began
        finally:
            service.terminate()


# ---------------------------------------------------------------- the peers


def measure_functions(project: Path) -> float:
    """Return the seconds for training, embedding and evaluation of the first run as plain functions."""
    torch.set_num_threads(1)
    params = load_params(project / "params.yaml")
    spec, run = params.datasets["synthetic"], comparison_runs(params, "synthetic")[0]
    materialise(spec.reader, spec.options, project / "plain/raw")
    folder, packed = project / "plain", project / "plain/packed"
    prepare(spec.reader, project / "plain/raw", packed, spec.options)
    began = time.perf_counter()
    system = fit(run.training, PackedDataset(packed, "train"), run.seed, folder / "train", torch.device("cpu"))
    roles = {"test": PackedDataset(packed, "test")}
    extract(system.model, run.training.transform, roles, folder / "embed", torch.device("cpu"))  # type: ignore[arg-type]
    history = read_history(folder / "train")
    metrics = evaluate_run(run.evaluation, run.seed, history, folder / "embed", folder / "evaluate")
    title = titled(run.title, metrics, run.evaluation.recall_at)
    Drawing(title, run.evaluation.metric, run.seed, history, packed, folder / "embed").draw(folder / "evaluate")
    return time.perf_counter() - began


def measure_bare(code: str, *arguments: str) -> tuple[float, str]:
    """Return the seconds of a process that runs this code, and what it prints."""
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {
            "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PREFECT_HOME": home, "PREFECT_LOGGING_LEVEL": "CRITICAL",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
            "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "ERROR",
        }  # fmt: skip
        began = time.perf_counter()
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=home)
        return time.perf_counter() - began, done.stdout


def measure_mlflow(project: Path) -> list[float]:
    """Return the seconds in which MLflow's client publishes a run's files: into a new database, and once more."""
    folders = [next((project / "state/store" / step).glob("[0-9a-f]*")) for step in ("train", "embed", "evaluate")]
    with tempfile.TemporaryDirectory() as database:
        _, printed = measure_bare(BARE_MLFLOW, database, str(folders[-1] / "metrics.json"), *map(str, folders))
    return [float(line) for line in printed.split()]


# ---------------------------------------------------------------- what is printed


def print_phases(num_runs: int, *calls: Measured) -> None:
    """Print the phases of a first call, of one that reuses everything, and of one that scores and publishes everything again."""
    print(f"\n{num_runs} {'run' if num_runs == 1 else 'runs'}")
    print(f"{'phase':40} {'first':>8} {'reused':>8} {'scored':>8}")
    for phase in PHASES:
        cells = [f"{end - begin:8.1f}" for begin, end in (call.phases.get(phase, (0.0, 0.0)) for call in calls)]
        print(f"{phase:40} {' '.join(cells)}")
    print(f"{'all':40} {' '.join(f'{call.seconds:8.1f}' for call in calls)}", flush=True)


def print_parts(num_runs: int, first: Measured, functions: float, mlflow: Sequence[float]) -> None:
    """Print each part of a first call next to its peer, with the ratio of both."""
    ray, _ = measure_bare(BARE_RAY)
    prefect, _ = measure_bare(BARE_PREFECT)
    begin, end = first.phases["starting Prefect"]
    work = sum(sum(first.seconds_of(step)) for step in ("train", "embed", "evaluate"))
    published, *others = first.seconds_of("publish")
    parts = {
        "starting Prefect and libraries": (end - begin, prefect),
        "from Ray's start to the first training": (first.workers_ready - end, ray),
        "training to evaluation, each run": (work / num_runs, functions),
        "publishing the first run": (published, mlflow[0]),
        **({"publishing each other run": (fmean(others), mlflow[1])} if others else {}),
        "all, each run": (first.seconds / num_runs, (ray + prefect) / num_runs + functions + mlflow[1]),
    }
    print(f"{'part':40} {'here':>8} {'bare':>8} {'ratio':>8}")
    for part, (here, bare) in parts.items():
        print(f"{part:40} {here:8.1f} {bare:8.1f} {here / bare:8.1f}", flush=True)


def print_other_commands(project: Path) -> None:
    """Print the seconds of commands that read finished runs."""
    for words in (["models"], ["compare", "synthetic"], ["report"]):
        print(f"{'dml ' + ' '.join(words):40} {measure_words(project, *words):8.1f}", flush=True)
    print(f"{f'dml serve synthetic/{VARIANT}':40} {measure_serve(project):8.1f}", flush=True)


def draw_timeline(calls: dict[int, Measured], path: Path) -> None:
    """Draw for each number of runs the phases of its first call, and below them each run's steps."""
    figure = new_figure(9.0, 1.0 + sum(_height(num_runs) for num_runs in calls))
    panels = figure.subplots(len(calls), 1, squeeze=False, height_ratios=[_height(num_runs) for num_runs in calls]).ravel()
    for axes, (num_runs, call) in zip(panels, calls.items(), strict=True):
        lane = max(1.0, num_runs / 8)
        for number, (begin, end) in enumerate(call.phases.values()):
            axes.barh(-lane, end - begin, lane, left=begin, color="#BBBBBB" if number % 2 else "#DDDDDD", align="edge")
        for phase, (begin, end) in call.phases.items():
            if end - begin > 0.08 * call.seconds:
                axes.text((begin + end) / 2, -lane / 2, phase, ha="center", va="center", fontsize=7)
        for step, colour in zip(STEPS, COLOURS, strict=False):
            bars = [bar for bar in call.bars if bar.step == step]
            widths, lefts = [bar.end - bar.begin for bar in bars], [bar.begin for bar in bars]
            axes.barh([bar.run for bar in bars], widths, 0.8, left=lefts, color=colour, align="edge", label=step)
        axes.invert_yaxis()
        axes.set(title=f"{num_runs} {'run' if num_runs == 1 else 'runs'}: {call.seconds:.0f} s", ylabel="run", yticks=[], xlim=(0, None))
        style_axes(axes)
    panels[-1].set_xlabel("seconds since the command began")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(STEPS), fontsize=8, frameon=False)
    write_png(figure, path)


def _height(num_runs: int) -> float:
    return 1.2 + min(0.16 * num_runs, 4.0)


if __name__ == "__main__":
    main()
