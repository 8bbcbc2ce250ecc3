"""A small project with trained runs in its store, made by the real steps without Ray or servers."""

from pathlib import Path

import pytest
import torch
import yaml

from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.data.store.packed import PackedDataset
from dml_core.training.history import read_history
from dml_core.training.loop import fit
from dml_core.training.validation import ScoredImages, scorers
from tasks.data import read_dataset
from tasks.environment import Project
from tasks.runs.identity import embed_step, evaluate_step, train_step
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import CheckpointRecord, EmbeddingRecord, RunReport, ScoreRecord, describe_folder, read_scores
from tasks.runs.specs import RunSpec
from tasks.scores.evaluation import evaluate_run
from tasks.scores.measuring import load_system
from tasks.storage import Store
from tasks.workers.embedding import extract

OPTIONS = {"num_classes": 32, "images_per_class": 15, "image_size": 24, "num_modes": 1}
PROTOCOL = {
    "model": {"backbone": {"name": "small_cnn", "width": 8}, "pooling": {"kind": "max"}, "head": {"kind": "bn", "embedding_dim": 16}},
    "sampler": {"kind": "shuffled", "batch_size": 24},
    "transform": {"crop": "padded", "crop_size": 24, "padding": 2, "flip": True, "scaling": "zero-one"},
    "optimiser": {"name": "adam", "learning_rate": 3e-3, "groups": {"loss": {"learning_rate": 1e-2}}},
    "schedule": {"kind": "cosine", "warmup_epochs": 1.0},
    "num_epochs": 10,
}
PARAMS = {
    "datasets": {"own": {"reader": "synthetic", "raw": "data/raw/own", "options": OPTIONS}},
    "comparison": {
        "default_datasets": ["own"],
        "seeds": [0, 1],
        "protocol": PROTOCOL,
        "datasets": {"own": {}},
        "variants": {"good": {"loss": {"name": "normalised_softmax"}}, "untrained": {"loss": {"name": "softmax"}, "num_epochs": 0}},
    },
}
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with two variants of two seeds; `untrained/1` has not run."""
    root = tmp_path_factory.mktemp("project")
    (root / "params.yaml").write_text(yaml.safe_dump(PARAMS))
    state = root / "state"
    project = Project(root, state, str(state / "store"), f"sqlite:///{state / 'mlflow.db'}")
    materialise("synthetic", OPTIONS, root / "data/raw/own")
    prepare("synthetic", root / "data/raw/own", project.packed("own"), OPTIONS)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads would only wait for each other on so small a network
    for spec in comparison_runs(load_params(project.params_file), "own")[:3]:
        make_run(project, spec)
    torch.set_num_threads(before)
    return project


def make_run(project: Project, spec: RunSpec) -> RunReport:
    """Train, embed and score a run in the store, and return its report."""
    record = read_dataset(project, spec.dataset)
    packed, store = Path(record.folder), Store(project.store, project.state / "cache")
    trained = train_step(spec, record).identity
    embedded = embed_step(spec, trained).identity
    scored = evaluate_step(spec, embedded).identity
    keys = {step: f"{step}/{identity}" for step, identity in (("train", trained), ("embed", embedded), ("evaluate", scored))}
    folders = {step: store.folder(key) for step, key in keys.items()}
    if not folders["evaluate"].exists():
        score_test = scorers(packed, spec.training, ScoredImages(CPU))[1]
        fit(spec.training, PackedDataset(packed, "train"), spec.seed, folders["train"], CPU, identity=trained, score_test=score_test)
        system = load_system(spec.training, spec.seed, packed, folders["train"], spec.evaluation.epoch)
        extract(system.model, spec.training.transform, {"test": PackedDataset(packed, "test")}, folders["embed"], CPU)
        history = read_history(folders["train"])
        evaluate_run(spec.evaluation, spec.seed, history, folders["embed"], folders["evaluate"])
    files = {step: describe_folder(folder) for step, folder in folders.items()}
    scores = ScoreRecord(step="evaluate", identity=scored, key=keys["evaluate"], files=files["evaluate"])
    return RunReport(
        comparison=spec.comparison,
        identity=scored,
        dataset=record,
        variant=spec.label,
        seed=spec.seed,
        parameters=spec.model_dump(mode="json", include={"training", "evaluation"}),
        tags={},
        dvc_digest=None,
        checkpoint=CheckpointRecord(step="train", identity=trained, key=keys["train"], files=files["train"]),
        embeddings=EmbeddingRecord(step="embed", identity=embedded, key=keys["embed"], files=files["embed"]),
        scores=read_scores(scores, folders["evaluate"]),
    )
