"""Smoke runs: a table's systems, through the whole pipeline, on a few drawn images.

The images are in the dataset's official layout, or in that of CUB-200-2011 if none is known (`LAYOUTS`).

Backbone, head, loss, sampler, schedule and transforms are kept; images, classes, steps and trained weights are not. The results show that
the pipeline works and nothing else, and are never compared with published values.
"""

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from dml_core.overrides import parse_overridden
from dml_core.training.config import TrainingConfig
from tasks.environment import Project
from tasks.locks import alone
from tasks.runs.specs import SMOKE, RunSpec

OTHER_LAYOUT = "cub200"
LAYOUTS = {"cars196": "cars-annos", "drawn-cars196": "cars-annos", "sop": "sop", "inshop": "inshop", "mnist": "idx", "fashion_mnist": "idx"}
DIGITS = {"image_size": 28}
IMAGES = {"num_classes": 8, "images_per_class": 4, "image_size": 64, "num_modes": 1}
CHANGES = {
    "num_epochs": 1,
    "sampler": {"batch_size": 4, "num_classes_per_batch": 2, "num_samples_per_class": 2},
    "model": {"backbone": {"weights": "none", "weights_sha256": None}},
}
RECALL_AT = (1, 2)


def make_small(spec: RunSpec) -> RunSpec:
    """Return the run on the drawn images, for one epoch of small batches, from random weights."""
    training = parse_overridden(TrainingConfig, spec.where, spec.training.model_dump(mode="json"), CHANGES)
    evaluation = spec.evaluation.model_copy(update={"recall_at": RECALL_AT})
    changes = {"dataset": f"{spec.dataset}-{SMOKE}", "is_smoke": True, "training": training, "evaluation": evaluation}
    return spec.model_copy(update=changes)


def one_of_each_table(runs: Sequence[Sequence[RunSpec]]) -> list[list[RunSpec]]:
    """Return, for every table, the smoke run whose network most of all the runs share; the first of equals."""
    networks = [((spec.dataset, spec.training.model_dump_json()), spec) for specs in runs for spec in specs]
    num_users = Counter(network for network, _ in networks)
    by_table: dict[str | None, list[tuple[int, RunSpec]]] = {}
    for network, spec in networks:
        by_table.setdefault(spec.table, []).append((num_users[network], spec))
    return [[max(candidates, key=itemgetter(0))[1]] for candidates in by_table.values()]


def draw_for_smoke(project: Project, dataset: str) -> Path:
    """Draw a few images in a dataset's layout, pack them below the project's state folder, and return their folder.

    Raises:
        DataError, StoreError: as `prepare`.
    """
    from dml_core.data.prepare import prepare
    from dml_core.data.registry import materialise

    layout = LAYOUTS.get(dataset, OTHER_LAYOUT)
    folder, options = project.state / "smoke" / dataset, {**IMAGES, **(DIGITS if layout == "idx" else {}), "layout": layout}
    with alone(folder.with_suffix(".lock")):  # a smoke run in another shell may draw the same
        materialise("synthetic", options, folder / "raw")
        prepare("synthetic", folder / "raw", folder / "packed", options)
    return folder / "packed"
