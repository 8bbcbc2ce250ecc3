"""The GPU benchmark: with a few small images on the CPU, and its checks on a GPU if there is one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu

ROOT = Path(__file__).parents[2]
# Packages that a machine used only for its GPU may not have.
BLOCKED = (
    "ray",
    "prefect",
    "mlflow",
    "faiss",
    "dvc",
    "boto3",
    "optuna",
    "typer",
    "rich",
    "pytorch_metric_learning",
    "matplotlib",
    "psutil",
)


@pytest.mark.slow
@pytest.mark.proof
def test_it_needs_no_service_checks_measures_and_prints(tmp_path: Path) -> None:
    for name in BLOCKED:
        (tmp_path / f"blocked/{name}").mkdir(parents=True)
        (tmp_path / f"blocked/{name}/__init__.py").write_text(f"raise ImportError('{name} is not here')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "blocked"), str(ROOT)])}
    found_file = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--device", "cpu", "--loaders", "1", "--json", str(found_file)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(found_file.read_text())
    assert len(found["checks"]) == 7
    assert all(verdict.startswith("passed") for verdict in found["checks"].values()), found["checks"]
    speeds = found["training"]["small network"]
    assert min(speeds["images_per_second"], speeds["bare"], speeds["image_folder"], *speeds["milliseconds"].values()) > 0
    assert found["evaluation"]["largest_difference_of_recall"] < 1e-6
    assert found_file.read_text().strip() in done.stdout
    assert "| small network |" in done.stdout


def test_without_a_gpu_only_the_tiny_sizes_are_gone_through() -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--tiny --device cpu goes through the same steps with small sizes")


def test_a_check_that_fails_says_by_how_much() -> None:
    one, other = {"a": torch.ones(4)}, {"a": torch.full((4,), 1.5)}
    assert gpu.verdict(lambda: gpu.farthest(one, one, 0.0)).startswith("passed: 0.0e+00")
    assert gpu.verdict(lambda: gpu.farthest(one, other, 0.1)) == "failed: AssertionError: a is 3.3e-01 of its length off, allowed 1e-01"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "check", [name for name in vars(gpu) if name.startswith("check_") and name not in ("check_batch", "check_compiled")]
)
def test_the_gpu_passes(check: str) -> None:
    getattr(gpu, check)(torch.device("cuda"))


@pytest.mark.gpu
def test_the_gpu_passes_compiled() -> None:
    gpu.check_compiled(torch.device("cuda"), "inductor")
