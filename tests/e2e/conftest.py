"""A small project in a separate folder, driven through the real `dml` and `dvc` commands."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dml_core.config import merge, read_yaml
from tests.conftest import ROOT

COPIED = ("dml_core", "tasks", "flows", "dvc.yaml", "params.yaml", ".dvc/config", ".gitignore", ".dvcignore")
HANGS_SECONDS = 7200  # of a command that does not end; one of a minute takes 20 with forty other busy processes
UNUSUAL = "a b ü#%41"  # characters of a folder's name that are special or not allowed in URLs
SMALL: dict[str, Any] = {
    "datasets": {
        "synthetic": {"options": {"num_classes": 8, "images_per_class": 10, "image_size": 24, "num_modes": 2}},
        "fashion-mnist": {"options": {"images_per_class": 12}},
    },
    "comparison": {
        "seeds": [0],
        "protocol": {
            "model": {"backbone": {"width": 8}, "head": {"embedding_dim": 8}},
            "sampler": {"batch_size": 16},
            "transform": {"crop_size": 24},
            "num_epochs": 2,
        },
        "datasets": {
            "synthetic": {"tuned": False, "validation": None, "transform": {"crop_size": 24}},  # four training classes
            "fashion-mnist": {"transform": {"crop_size": 28}, "num_epochs": 2},
        },
    },
    "scale": {"num_workers": 2, "concurrent_runs": 1},
}


@dataclass
class Project:
    """A checkout with small parameters, in which commands run as for a user."""

    root: Path
    environment: dict[str, str]

    def run(self, *command: str, code: int = 0, **environment: str) -> str:
        """Run a command and return its output, which must show no traceback unless a Prefect server, which logs them, is used."""
        process = self.start(*command, **environment)
        printed, _ = process.communicate(timeout=HANGS_SECONDS)
        assert process.returncode == code, printed
        assert "PREFECT_API_URL" in environment or "Traceback" not in printed, printed
        return printed

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command."""
        words = [sys.executable, "-m", {"dml": "flows.cli", "dvc": "dvc"}[command[0]], *command[1:]]
        environment = self.environment | environment
        return subprocess.Popen(words, cwd=self.root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def git(self, *arguments: str) -> None:
        """Run a git command."""
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid", *arguments], cwd=self.root, check=True)

    def commit(self, message: str) -> None:
        """Commit everything that git does not ignore."""
        self.git("add", ".")
        self.git("commit", "--quiet", "-m", message)

    def change(self, **changes: object) -> None:
        """Override settings in params.yaml."""
        path = self.root / "params.yaml"
        path.write_text(yaml.safe_dump(merge(read_yaml(path), changes), sort_keys=False))


def steps_run(printed: str) -> dict[str, int]:
    """Return how many times each step ran, from the output of `dml reproduce` (one line per dataset)."""
    counts: dict[str, int] = {}
    for line in re.findall(r"steps run: (.*?); reused", printed):
        for step, count in re.findall(r"(\w+) (\d+)", line):
            counts[step] = counts.get(step, 0) + int(count)
    return counts


def report_of(printed: str, dataset: str) -> str:
    """Return the report of a dataset's comparison, from the output of `dml reproduce`."""
    return printed[printed.index(f"# comparison on {dataset}") :].partition("\nsteps run: ")[0]


def make_project(root: Path, variants: tuple[str, ...]) -> Project:
    """Copy the code to `root`, keep only the named variants, make everything small, and commit."""
    for name in COPIED:
        source, target = ROOT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.pyc.*"))  # with what Python has compiled
        else:
            shutil.copy(source, target)
    params = merge(read_yaml(root / "params.yaml"), SMALL)
    comparison = params["comparison"]
    comparison["variants"] = {name: merge(comparison["variants"][name], {"by_default": True}) for name in variants}
    comparison |= {"reference": None, "num_default_seeds": None}  # the reference may not be among the variants
    params["datasets"] = {name: params["datasets"][name] for name in ("synthetic", "fashion-mnist")}
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PREFECT_", "DML_", "RAY_", "DVC_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    project = Project(root, kept | {"PYTHONPATH": str(root), "PATH": path, "PYTHONUNBUFFERED": "1"})
    project.git("init", "--quiet")
    project.commit("project")
    return project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with two variants, with one worker per run to start faster, at a path with unusual characters."""
    made = make_project(tmp_path_factory.mktemp(UNUSUAL), ("untrained", "softtriple"))
    made.change(scale={"num_workers": 1})
    return made
