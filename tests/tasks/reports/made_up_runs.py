"""A project with untrained runs: embeddings drawn around class centres, scored by the real evaluator, and stored like those of a run.
They are invented and never used as results."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from dml_core.data.prepare import prepare
from dml_core.data.store.packed import PackedDataset
from tasks.data import read_dataset
from tasks.environment import Project
from tasks.runs.embeddings import MANIFEST_FILE
from tasks.runs.identity import step_identities
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.specs import Params, RunSpec
from tasks.scores.drawing import Drawing, titled
from tasks.scores.evaluation import evaluate_run
from tests.conftest import MODEL, SETTINGS

HOSTILE = "<img src=x onerror=\"document.title='owned'\"> & </script>"
TRIPLET = "triplet-hard-and-co"
NOISE = {"softmax": 1.1, "proxy_nca": 0.7, TRIPLET: 1.6}
SEEDS = (0, 1, 2)
NUM_CLASSES, PER_CLASS, NUM_DIMENSIONS = 9, 12, 6


def make_project(root: Path, roles: tuple[str, ...] = ("test",)) -> tuple[Project, Params]:
    """Make a project with the dataset `photos`, whose images have these roles, and a finished run for each variant and seed."""
    raw = root / "raw"
    raw.mkdir(parents=True)
    _draw_images(raw, roles)
    losses = {"softmax": "softmax", "proxy_nca": "proxy_nca", TRIPLET: "triplet_semi_hard"}
    protocol = SETTINGS | {"model": MODEL}
    comparison: dict[str, Any] = {
        "default_datasets": ["photos"],
        "seeds": list(SEEDS),
        "reference": "softmax",
        "protocol": protocol,
        "datasets": {"photos": {}},
        "variants": {name: {"loss": {"name": loss}} for name, loss in losses.items()},
    }
    params = {"datasets": {"photos": {"reader": "manifest", "raw": "raw"}}, "comparison": comparison}
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    project = Project(root, root / "state", str(root / "store"), f"sqlite:///{root}/mlflow.db")
    prepare("manifest", raw, project.packed("photos"), {})
    loaded = load_params(project.params_file)
    for spec in comparison_runs(loaded, "photos"):
        finish_run(project, spec, roles)
    return project, loaded


def finish_run(project: Project, spec: RunSpec, roles: tuple[str, ...] = ("test",)) -> None:
    """Write embeddings and scores of a run into the store; one run has its figures."""
    record = read_dataset(project, spec.dataset)
    embedded = Path(project.store) / "embed" / step_identities(spec, record)["embed"]
    scored = Path(project.store) / "evaluate" / step_identities(spec, record)["evaluate"]
    embedded.mkdir(parents=True)
    generator = np.random.default_rng([spec.seed, len(spec.variant)])
    centres = generator.standard_normal((NUM_CLASSES, NUM_DIMENSIONS))
    manifest = {}
    for role in roles:
        labels = PackedDataset(Path(record.folder), role).labels
        noise = NOISE[spec.variant] * generator.standard_normal((len(labels), NUM_DIMENSIONS))
        rows = (centres[labels] + noise).astype(np.float32)
        rows[5], rows[20] = rows[60], rows[60]  # ties of different classes
        np.save(embedded / f"{role}.npy", rows)
        np.save(embedded / f"{role}-labels.npy", labels)
        manifest[role] = {"rows": len(rows), "dimensions": NUM_DIMENSIONS, "shards": [f"{role}.npy"], "labels": f"{role}-labels.npy"}
    (embedded / MANIFEST_FILE).write_text(json.dumps(manifest))
    history = [{"epoch": step // 4, "step": step, "loss": 2.0 / (1 + step)} for step in range(12)]
    metrics = evaluate_run(spec.evaluation, spec.seed, history, embedded, scored)
    if (spec.variant, spec.seed) == ("softmax", 2):
        title = titled(spec.subject, metrics, spec.evaluation.recall_at)
        Drawing(title, spec.evaluation.metric, spec.seed, history, Path(record.folder), embedded).draw(scored)


def _draw_images(raw: Path, roles: tuple[str, ...]) -> None:
    """Draw images with one colour per class and one shade per image; `train` has other classes."""
    rows = []
    for role in ("train", *roles):
        for label in range(NUM_CLASSES):
            for number in range(PER_CLASS):
                pixels = np.full((20, 20, 3), [25 * label, 20 * number, 200 if role == "query" else 80], dtype=np.uint8)
                name = f"{role}-{label}-{number}.png"
                Image.fromarray(pixels).save(raw / name)
                rows.append({"path": name, "label": f"train {label}" if role == "train" else _class_name(label), "role": role})
    with (raw / "manifest.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["path", "label", "role"])
        writer.writeheader()
        writer.writerows(rows)


def _class_name(label: int) -> str:
    return HOSTILE if label == 0 else f"kind {label}"
