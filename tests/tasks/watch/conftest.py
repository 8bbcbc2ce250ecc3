"""A small project in git whose finished runs are made by the real steps in this process, without Ray or servers."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dml_core.config import merge
from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.errors import DmlError
from dml_core.training import loop
from flows.reuse.step_cache import SealedJSON
from tasks.environment import Project
from tasks.files import write_whole
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import ScoreRecord
from tasks.runs.specs import RunSpec
from tasks.watch import history, verifying
from tasks.watch.accepting import accept
from tasks.watch.fresh_runs import Workspace
from tasks.watch.records import Environment, Evidence, Reference, RowVerdict, Verdict
from tasks.watch.storage import reference_path
from tasks.watch.verifying import VerifyRequest, verify
from tasks.wording import Say
from tests.tasks.models.conftest import PARAMS, make_run

SEEDS = range(10)
OPTIONS = {"num_classes": 12, "images_per_class": 8, "image_size": 24, "num_modes": 1}
EPOCHS, STEPS = 3, 6  # of each run, small because most tests train one or two
SETTINGS = {
    "comparison": {"seeds": list(SEEDS), "protocol": {"num_epochs": EPOCHS, "sampler": {"batch_size": 8}}},
    "datasets": {"own": {"options": OPTIONS}},
}
ZERO = "0" * 64


def evidence(row: str, seed: int = 0, **more: Any) -> Evidence:
    """Return made-up evidence of a run."""
    inputs = {"settings": ZERO, "dataset": "", "initial_weights": ZERO, "batches": ZERO}
    environment = Environment(commit="0" * 40, python="3", packages={}, processor="", device="cpu", threads=1)
    other: dict[str, Any] = {"losses": (), "weights": ZERO, "scores": {}, "seconds": 1.0, "environment": environment}
    return Evidence(row=row, seed=seed, **inputs | other | more)


def reference(name: str, *rows: str, seeds: Sequence[int] = (0,)) -> Reference:
    """Return a made-up reference of rows."""
    runs = tuple(evidence(row, seed) for row in rows for seed in seeds)
    accepted_at = datetime(2026, 11, 1, tzinfo=UTC)
    return Reference(name=name, protocol=ZERO, who="a", why="b", commit="c", accepted_at=accepted_at, evidence=runs)


def make_finished_run(project: Project, spec: RunSpec, records: Path) -> None:
    """Train, embed and score a run, and write the records of its steps, as a flow does."""
    report = make_run(project, spec)
    scores = ScoreRecord(**report.scores.model_dump(include=set(ScoreRecord.model_fields)))
    for record in (report.checkpoint, report.embeddings, scores):
        write_whole(records / record.identity, json.dumps({"metadata": {}, "result": SealedJSON().dumps(record).decode()}))


def train_here(space: Workspace, specs: Sequence[RunSpec], until: float, say: Say) -> dict[tuple[str, int], str]:
    """Stand for `tasks.watch.fresh_runs.train`, in this process."""
    failed = {}
    for spec in specs:
        try:
            make_finished_run(space.project, spec, space.records)
        except DmlError as error:
            failed[spec.label, spec.seed] = str(error)
    return failed


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True)


def commit(root: Path, message: str) -> None:
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--allow-empty", "-m", message)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with finished runs of the variant `good`, seeds 0 to 9, whose records are in `records`."""
    root = tmp_path_factory.mktemp("watched")
    params = merge(PARAMS, SETTINGS)
    params["comparison"]["variants"] = {"good": PARAMS["comparison"]["variants"]["good"]}
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    (root / ".gitignore").write_text("/state\n/data\n/records\n")
    git(root, "init", "--quiet")
    git(root, "config", "user.name", "A Person")
    git(root, "config", "user.email", "person@example.invalid")
    commit(root, "project")
    state = root / "state"
    project = Project(root, state, str(state / "store"), f"sqlite:///{state / 'mlflow.db'}")
    materialise("synthetic", OPTIONS, root / "data/raw/own")
    prepare("synthetic", root / "data/raw/own", project.packed("own"), OPTIONS)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for spec in comparison_runs(load_params(project.params_file), "own", None, SEEDS):
        make_finished_run(project, spec, root / "records")
    torch.set_num_threads(before)
    return project


@pytest.fixture
def project(finished: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """The finished project; runs of a verification train in this process, no page has a picture, and what a test adds is removed."""
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_", "DML_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(finished.root / "records"))
    monkeypatch.setenv("DVC_STAGE", "tests")  # datasets are verified without starting DVC
    monkeypatch.setattr(verifying, "train", train_here)
    monkeypatch.setattr(history, "_picture", lambda *_: None)  # drawn for every verification, it would take a fifth of these tests' time
    before, (threads, head) = torch.get_num_threads(), (1, _head(finished.root))
    torch.set_num_threads(threads)
    yield finished
    torch.set_num_threads(before)
    git(finished.root, "reset", "--quiet", "--hard", head)
    git(finished.root, "clean", "--quiet", "--force", "-d")
    for path in (*(finished.state / "verifications").glob("*"), finished.state / "alarms.json"):
        path.unlink(missing_ok=True)


def say(line: str) -> None:
    print(line)


def verified(project: Project, *seeds: int) -> RowVerdict:
    """Verify one run, and return its verdict."""
    ((verification,), *_) = (verify(project, VerifyRequest(("own",), seeds=seeds or (3,)), say).verifications,)
    (row,) = verification.rows
    return row


@pytest.fixture(scope="session")
def texts_of_reference() -> dict[str, str]:
    """The accepted reference, made once."""
    return {}


@pytest.fixture
def accepted(project: Project, texts_of_reference: dict[str, str]) -> Project:
    """The project, its ten runs accepted and committed."""
    path = reference_path(project, "own")
    if not texts_of_reference:
        first = verified(project)
        assert (first.verdict, first.reason) == (Verdict.NEW, "identical to the finished run")
        accept(project, "own", "first results", (), say)
        texts_of_reference["text"] = path.read_text()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(texts_of_reference["text"])
    commit(project.root, "accept own")
    return project


def slightly_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the initial weights by a rounding error, as another order of sums changes a step."""

    def build(config: Any, system: Any) -> Any:
        with torch.no_grad():
            for parameter in system.parameters():
                parameter *= 1 + 1e-6
        return built(config, system)

    built = loop.build_optimiser
    monkeypatch.setattr(loop, "build_optimiser", build)


def _head(root: Path) -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
