"""The GPU benchmark: with a few small images on the CPU, and its checks on a GPU if there is one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu
from dml_core.config import parse
from dml_core.training.config import TrainingConfig

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


def test_without_a_gpu_only_the_tiny_sizes_are_gone_through(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "cpu"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert capsys.readouterr().err.endswith("--tiny --device cpu goes through the same steps with small sizes\n")


def test_a_check_that_fails_says_by_how_much() -> None:
    one, other = {"a": torch.ones(4)}, {"a": torch.full((4,), 1.5)}
    assert gpu.verdict(lambda: gpu.farthest(one, one, 0.0)).startswith("passed: 0.0e+00")
    assert gpu.verdict(lambda: gpu.farthest(one, other, 0.1)) == "failed: AssertionError: a is 3.3e-01 of its length off, allowed 1e-01"


def counted(model: str) -> gpu.Step:
    config = parse(TrainingConfig, gpu.settings_of(gpu.FULL.models[model], gpu.FULL), "test")
    return gpu.count_step(gpu.build_system(config, gpu.FULL.num_classes, 0, gpu.META).train(), gpu.FULL.batch_size, gpu.FULL.side)


def test_the_model_of_a_card_gives_published_operations_and_speeds() -> None:
    """4.09 billion multiplications of ResNet-50 (torchvision's documentation): twice that forward, three times with the backward pass."""
    step = counted("ResNet-50")
    assert step.flops / gpu.FULL.batch_size == pytest.approx(3 * 2 * 4.09e9, rel=0.02)
    for card, published in (("A100", 2470), ("V100", 1200)):  # of 1,000 classes, which add 1 % of the operations
        assert gpu.FULL.batch_size / step.seconds(gpu.CARDS[card]) == pytest.approx(published, rel=0.15)
    assert gpu.card_of("cuda (NVIDIA A100-SXM4-80GB)") is gpu.CARDS["A100"]
    assert gpu.card_of("cpu (x86_64)") is None


def test_operations_and_bytes_of_a_small_step_are_those_by_hand() -> None:
    class Layer(torch.nn.Linear):
        def compute(self, rows: torch.Tensor, labels: torch.Tensor, generator: None) -> SimpleNamespace:
            return SimpleNamespace(total=self(rows.flatten(1)).sum())

    system = SimpleNamespace(model=torch.nn.Identity(), loss=Layer(12, 5, bias=False, device="meta"))
    system.parameters = system.loss.parameters
    step = gpu.count_step(system, batch_size=7, side=2)
    assert step.flops == 2 * (7 * 12 * 5) * 2, "the output and the gradient of the weight: the images have none"
    assert step.weight_bytes == 4 * 12 * 5
    assert step.saved_bytes == 2 * 7 * 12, "the layer's input"
    products = 2 * (7 * 12 + 12 * 5 + 7 * 5) * 2  # three matrices of each product, in 16 bits
    assert products <= step.moved_bytes <= products + 2 * 4 * 7 * 5, "and the sum with its gradient"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "check", [name for name in vars(gpu) if name.startswith("check_") and name not in ("check_batch", "check_compiled")]
)
def test_the_gpu_passes(check: str) -> None:
    getattr(gpu, check)(torch.device("cuda"))


@pytest.mark.gpu
def test_the_gpu_passes_compiled() -> None:
    gpu.check_compiled(torch.device("cuda"), "inductor")
