"""A table with everything that a page can show, its runs and their images: invented and never used as results."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dml_core.config import parse
from dml_core.figures.curves import plot_training_curves
from tasks.environment import Project
from tasks.runs.params.file import load_params
from tasks.runs.specs import Params
from tasks.tables.file import TableFile
from tasks.tables.present import spec_today
from tasks.tables.result import FailedRun, MeasuredRun, TableResult, TableRun, save_result
from tests.conftest import ROOT

NAME = "softtriple/table1"
HOSTILE = "<script>alert('label')</script> & \"SoftTriple\""
METRICS = ("recall@1", "recall@2", "recall@4", "recall@8", "nmi")
TABLE: dict[str, Any] = {
    "title": "Retrieval and clustering on CUB-200-2011 and Cars196, embeddings of 64 dimensions",
    "page": 7,
    "states": "SoftTriple is best; a normalised softmax, which samples nothing, already beats the systems before it.",
    "columns": [{"dataset": "cub200", "metrics": [*METRICS]}, {"dataset": "cars196", "metrics": ["recall@1"]}],
    "tolerance": {"value": 1.0, "reason": "assumed: the paper prints one run of each system"},
    "tolerances": {"nmi": {"value": 1.5, "reason": "assumed: k-means from another seed"}},
    "note": "Made up for a test: no figure on this page was measured.",
    "rows": {
        "semihard": {
            "label": "SemiHard",
            "kind": "quoted",
            "source": "the clustering paper <b>[23]</b>",
            "published": [42.6, 55, 66.4, 77.2, 55.4, 51.5],
        },
        "softmax-norm": {
            "label": "SoftMax_norm",
            "kind": "rerun",
            "published": [57.8, 70.0, 80.1, 87.9, 65.3, None],
            "variants": ["as_published", "as_released"],
            "training": {"loss": {"options": {"num_centres": 1, "margin": 0, "regulariser_weight": 0}}},
        },
        "softtriple": {
            "label": HOSTILE,
            "kind": "own",
            "published": [60.1, 71.9, 81.2, 88.5, 66.2, 78.6],
            "released": [60.9, None, None, None, None, None],
            "independent": [59.6, 71.1, None, None, None, None],
            "independent_source": "somebody, ResNet-50, 64-d",
            "variants": ["as_published", "as_released"],
            "note": "ten centres of each class, `num_centres: <10>`",
        },
        "one-day": {
            "label": "SoftTriple of one day",
            "kind": "own",
            "published": [61.0, None, None, None, None, None],
            "lacks": "a loss that nobody has written",
        },
        "later": {"label": "SoftTriple, later", "kind": "own", "published": [59, 70, 80, 88, 66, None], "variants": ["as_published"]},
    },
    "claims": [
        {
            "says": "Ten centres are better than one.",
            "row": "softtriple",
            "metric": "recall@1",
            "reference": "softmax-norm",
            "side": "above",
            "evidence": "Table 1: 60.1 against 57.8",
            "history": "First looked at with two seeds, and not shown.",
        },
        {"says": "Ten centres cluster worse.", "row": "softtriple", "metric": "nmi", "reference": "softmax-norm", "side": "below"},
        {"says": "R@8 is above 0.88.", "row": "softtriple", "metric": "recall@8", "reference": 0.88, "side": "above"},
        {"says": "And later.", "row": "later", "metric": "recall@1", "reference": "softmax-norm", "side": "above"},
    ],
}
MEANS = {
    ("softtriple", "as_published", "last"): (0.6030, 0.7010, 0.8300, 0.8860, 0.6650),
    ("softtriple", "as_published", "best_validation"): (0.6020, 0.7000, 0.8290, 0.8850, 0.6640),
    ("softtriple", "as_published", "oracle"): (0.6160, 0.7190, 0.8310, 0.8920, 0.6690),
    ("softmax-norm", "as_published", "last"): (0.5790, 0.7005, 0.7790, 0.8790, 0.6450),
}
SPREADS = (0.004, 0.003, 0.003, 0.012, 0.006)


def made_up_table() -> TableFile:
    """Return the table's file."""
    return parse(TableFile, TABLE, "table1.yaml")


def make_result(project: Project) -> TableResult:
    """Make runs over five seeds in which every verdict occurs, and one with a single seed; write their images into the store."""
    runs = [
        _run(
            project,
            row,
            variant,
            epoch,
            seed,
            [mean + spread * z for mean, spread, z in zip(means, SPREADS, _noise(row, seed), strict=True)],
        )
        for (row, variant, epoch), means in MEANS.items()
        for seed in range(5)
    ]
    runs.append(
        _run(
            project, "softtriple", "as_released", "last", 0, [0.609, 0.72, 0.815, 0.887, 0.667], older=("dml_core/losses/multi_centre.py",)
        )
    )
    runs.append(_run(project, "gone", "as_published", "last", 0, [0.5] * 5))
    reason = "the loss is not finite at step 17"
    failed = FailedRun(row="softmax-norm", variant="as_released", dataset="cub200", seed=0, reason=reason)
    result = TableResult(name=NAME, runs=tuple(runs), failed=(failed,), made="0123456789abcdef")
    save_result(project, result)
    return result


@cache
def _params() -> Params:
    return load_params(ROOT / "params.yaml")


def _noise(row: str, seed: int) -> list[float]:
    """Return noise from -1 to 1 for each metric: the same five values, in a different order for each row."""
    return [((seed * step + len(row)) % 5 - 2) / 2 for step in ((1, 2, 3, 4, 1) if row == "softtriple" else (3, 4, 1, 2, 2))]


def _run(project: Project, row: str, variant: str, epoch: Any, seed: int, values: list[float], older: tuple[str, ...] = ()) -> MeasuredRun:
    identity = f"{row}-{variant}-{epoch}-{seed}"
    table, place = made_up_table(), TableRun(row=row, variant=variant, dataset="cub200", seed=seed, epoch=epoch)
    today = spec_today(_params(), NAME, table, place)
    training, evaluation = ({}, {}) if today is None else today.model_dump(mode="json", include={"training", "evaluation"}).values()
    if older:
        training["num_epochs"] = 7
    if seed == 0 and row in table.rows:
        for name, data in pictures().items():
            picture = Path(project.store) / "evaluate" / identity / name
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(data)
    return MeasuredRun(
        row=row,
        variant=variant,
        dataset="cub200",
        project_dataset="cub200",
        seed=seed,
        identity=identity,
        scores=dict(zip(METRICS, values, strict=True)),
        figures=f"evaluate/{identity}",
        training=training,
        evaluation=evaluation,
        seconds=1234.5,
        epoch=epoch,
        older_code=older,
    )


@cache
def pictures() -> dict[str, bytes]:
    """Return the images of a run by their places: a curve, noise of a gallery's size, and one of a measurement."""
    epochs = np.linspace(0.1, 12, 60)
    pixels = np.random.default_rng(0).integers(0, 255, (30, 60, 3), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plot_training_curves({"loss": (epochs, 3 * np.exp(-epochs / 4) + 0.3)}, folder / "figures/curve.png", "a run that nobody made")
        Image.fromarray(pixels).resize((1440, 720), Image.Resampling.BICUBIC).save(folder / "figures/gallery.png")
        (folder / "measurements/unique_centres").mkdir(parents=True)
        Image.fromarray(pixels).resize((300, 150)).save(folder / "measurements/unique_centres/counts.png")
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.png")}
