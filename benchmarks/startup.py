"""Benchmark the cost of orchestration: whole runs through Prefect, Ray, MLflow and DVC against plain functions in one process.

Three measurements on the embedded dataset, with the parameters of `params.yaml` reduced:
  plain   training, embedding and evaluation of each run, called as functions in one process with one thread
  ray     a trivial two-worker TorchTrainer fit, started and ended
  flow    `dml reproduce` on a separate project: the first time (everything runs), with as many seeds more (steps run, only Ray is
          cold), and once more (everything is reused)
Prints seconds, the flow's cost per run beyond plain work and Ray's start, and each step's task time from Prefect's records (steps of
different runs overlap: a run is published while the next one trains).

    python benchmarks/pipeline.py            about 5 minutes on two cores
"""

import argparse
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from dml_core.config import merge, read_yaml
from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.packed import PackedDataset
from dml_core.training.history import read_history
from dml_core.training.loop import fit
from tasks.runs.specs import comparison_runs, load_params
from tasks.scores.evaluation import evaluate_run
from tasks.workers.embedding import extract

ROOT = Path(__file__).parents[1]
FIRST_SEEDS, MORE_SEEDS = [0, 1, 2], [0, 1, 2, 3, 4, 5]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        write_project(project, arguments.epochs, FIRST_SEEDS)
        plain = measure_plain(project)
        ray = measure_ray()
        first = measure_flow(project)
        write_project(project, arguments.epochs, MORE_SEEDS)
        more = measure_flow(project)
        steps = step_seconds(project)
        again = measure_flow(project)
    num_first, num_more = len(FIRST_SEEDS), len(MORE_SEEDS) - len(FIRST_SEEDS)
    print(f"plain functions, one process, {num_first} runs        {plain:7.1f} s   {plain / num_first:5.1f} s per run")
    print(f"trivial 2-worker TorchTrainer fit             {ray:7.1f} s")
    print(f"flow, nothing done before, {num_first} runs           {first:7.1f} s   {first / plain:5.1f} x plain")
    print(f"flow, {num_more} more runs                          {more:7.1f} s")
    print(f"flow, everything reused                       {again:7.1f} s")
    per_run = (more - again - ray - plain * num_more / num_first) / num_more
    print(f"our own part per run: (more - reused - ray - plain) / {num_more} = {per_run:.1f} s; Ray was started once for {num_more} runs")
    for step, (count, seconds) in steps.items():
        print(f"  {step:10} {count:2} tasks, {seconds / count:5.1f} s each")


def write_project(project: Path, num_epochs: int, seeds: list[int]) -> None:
    """Write a project of one variant, with a copy of the code."""
    params: dict[str, Any] = read_yaml(ROOT / "params.yaml")
    params["comparison"]["variants"] = {"softtriple": params["comparison"]["variants"]["softtriple"]}
    params["datasets"] = {"synthetic": params["datasets"]["synthetic"]}
    params["comparison"]["datasets"] = {"synthetic": {}}
    changes = {"comparison": {"seeds": seeds, "protocol": {"num_epochs": num_epochs}}, "scale": {"num_workers": 2}}
    (project / "params.yaml").write_text(yaml.safe_dump(merge(params, changes), sort_keys=False))
    if not (project / "dvc.yaml").exists():
        for name in ("dml_core", "tasks", "flows"):
            shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
        (project / ".dvc").mkdir()
        for name in ("dvc.yaml", ".dvc/config", ".gitignore"):
            shutil.copy(ROOT / name, project / name)
        subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)


def measure_plain(project: Path) -> float:
    """Return the seconds for train, embed and evaluate of the first runs as plain functions."""
    torch.set_num_threads(1)
    params = load_params(project / "params.yaml")
    spec = params.datasets["synthetic"]
    materialise(spec.reader, spec.options, project / "plain/raw")
    prepare(spec.reader, project / "plain/raw", project / "plain/packed", spec.options)
    started = time.perf_counter()
    for run in comparison_runs(params, "synthetic"):
        folder = project / f"plain/{run.seed}"
        system = fit(run.training, PackedDataset(project / "plain/packed", "train"), run.seed, folder / "train", torch.device("cpu"))
        roles = {"test": PackedDataset(project / "plain/packed", "test")}
        extract(system.model, run.training.transform, roles, folder / "embed", torch.device("cpu"))  # type: ignore[arg-type]
        history = read_history(folder / "train")
        evaluate_run(run.evaluation, run.seed, run.title, history, project / "plain/packed", folder / "embed", folder / "evaluate")
    return time.perf_counter() - started


def measure_ray() -> float:
    """Return the seconds for an empty two-worker fit, cluster start and end included."""
    code = (
        "import ray, ray.train.torch as t; from ray.train import ScalingConfig; ray.init(log_to_driver=False);"
        "t.TorchTrainer(print, train_loop_config={}, scaling_config=ScalingConfig(num_workers=2)).fit(); ray.shutdown()"
    )
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
    return time.perf_counter() - started


def measure_flow(project: Path) -> float:
    """Return the seconds for `dml reproduce` in the project, as a separate process."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "flows.cli", "reproduce"]
    started = time.perf_counter()
    subprocess.run(command, cwd=project, check=True, env=os.environ | {"PATH": path, "PYTHONPATH": str(project)}, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def step_seconds(project: Path) -> dict[str, tuple[int, float]]:
    """Return step -> number of tasks in the last flow run, and their total seconds, from Prefect's records."""
    with sqlite3.connect(project / "state/prefect/prefect.db") as database:
        rows = database.execute(
            "select name, julianday(end_time) - julianday(start_time) from task_run"
            " where flow_run_id = (select id from flow_run order by start_time desc limit 1) and state_name = 'Completed'"
        ).fetchall()
    found: dict[str, tuple[int, float]] = {}
    for name, days in rows:
        step = name.split(" ")[0].split("-")[0]
        count, seconds = found.get(step, (0, 0.0))
        found[step] = (count + 1, seconds + days * 86400)
    return found


if __name__ == "__main__":
    main()
