"""A table's runs made small: the same systems, through the whole chain, on a few drawn images in the dataset's official layout.

Backbone, head, loss, sampler, schedule and transforms stay; images, classes, steps and trained weights do not. What comes of it says that
the chain works and nothing else, and is never shown beside a published figure.
"""

from dml_core.config import merge, parse
from dml_core.errors import ConfigError
from dml_core.training.config import TrainingConfig
from tasks.environment import Project
from tasks.locks import alone
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import RunSpec

SMOKE, SUFFIX = "smoke", "-smoke"
LAYOUTS = {
    **{"cub200": "cub200", "cars196": "cars-annos", "sop": "sop", "inshop": "inshop", "mnist": "idx", "fashion_mnist": "idx"},
    **{"drawn-80": "cub200", "drawn-cub200": "cub200", "drawn-cars196": "cars-annos"},  # what stands in for them in some tables
}
DIGITS = {"image_size": 28}
IMAGES = {"num_classes": 8, "images_per_class": 4, "image_size": 64, "num_modes": 1}
CHANGES = {
    "num_epochs": 1,
    "sampler": {"batch_size": 4, "num_classes_per_batch": 2, "num_samples_per_class": 2},
    "model": {"backbone": {"weights": "none", "weights_sha256": None}},
}
RECALL_AT = (1, 2)


def make_small(spec: RunSpec) -> RunSpec:
    """The run on the drawn images, for one epoch of small batches, from random weights.

    Smoke runs are of one table of their own, `smoke`, whichever table asks: what two tables share is trained and published once, and
    nothing of it stands beside a published figure.

    Raises:
        ConfigError: nothing is drawn in the layout of its dataset.
    """
    if spec.dataset not in LAYOUTS:
        raise ConfigError(f"--smoke is of the papers' tables: it draws no images in the layout of '{spec.dataset}'")
    training = parse(TrainingConfig, merge(spec.training.model_dump(mode="json"), CHANGES), spec.where)
    evaluation = spec.evaluation.model_copy(update={"recall_at": RECALL_AT})
    called = {"dataset": f"{spec.dataset}{SUFFIX}", "variant": f"{spec.table} {spec.variant}", "table": SMOKE}
    return spec.model_copy(update={**called, "training": training, "evaluation": evaluation})


def table_of(spec: RunSpec) -> str:
    """The table that a run was asked for by; of a smoke run it is in its label."""
    return spec.variant.partition(" ")[0] if spec.table == SMOKE else str(spec.table)


def draw_for_smoke(project: Project, dataset: str) -> DatasetRecord:
    """A few drawn images in a dataset's official layout, packed below the project's state.

    Raises:
        DataError, StoreError: as `prepare`.
    """
    from dml_core.data.prepare import prepare
    from dml_core.data.registry import materialise

    layout = LAYOUTS[dataset]
    folder, options = project.state / "smoke" / dataset, {**IMAGES, **(DIGITS if layout == "idx" else {}), "layout": layout}
    with alone(folder.with_suffix(".lock")):  # another shell's smoke may draw the same
        materialise("synthetic", options, folder / "raw")
        info = prepare("synthetic", folder / "raw", folder / "packed", options)
    counts = {role: entry.num_images for role, entry in info.roles.items()}
    return DatasetRecord(name=f"{dataset}{SUFFIX}", folder=str(folder / "packed"), digest=info.fingerprint, counts=counts, source=info.name)
