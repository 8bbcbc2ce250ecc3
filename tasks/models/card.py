"""Write a model card: the network, its training and test data, its scores with their uncertainty, and its limits.

Every line is a fact of the run from MLflow. Unknown facts are marked as such.
"""

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from dml_core.config import parse
from dml_core.evaluation.metric_info import table_columns
from dml_core.evaluation.statistics.confidence import interval_over_units
from dml_core.models.config import READ_BY_KIND, HeadConfig
from dml_core.training.config import TrainingConfig
from tasks.environment import shown
from tasks.tracking.child_run import plain_name
from tasks.tracking.registered import LoggedNetwork
from tasks.tracking.tags import Tag

NOT_KNOWN = "not known"
# Licences stated by the publishers, by the reader's name.
DATA_LICENCES = {
    "fashion_mnist": "MIT (Zalando SE)",
    "synthetic": "drawn by this package, Apache-2.0",
}
STARTS = {"none": "random weights", "imagenet": "the published ImageNet weights"}


def model_card(network: LoggedNetwork, recalls: dict[int, float], gate: str, reader: str | None) -> str:
    """Return the card of a run's network as Markdown (`templates/card.md`).

    `recalls` is label -> Recall@1 of each test class, `gate` the reason why the network is in the registry, `reader` that of the dataset,
    if known.
    """
    training = parse(TrainingConfig, network.parameters["training"], "the published run")
    metrics = {plain_name(name): value for name, value in network.metrics.items()}
    of_classes = np.array([*recalls.values()])[:, None]
    low, high = (float(end[0]) for end in interval_over_units(of_classes, np.arange(len(recalls))))
    weights = training.model.backbone.weights
    held_out = {} if training.validation is None else training.validation.model_dump(mode="json")
    environment = Environment(  # no escapes: the card is Markdown
        loader=PackageLoader("tasks.models"), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template("card.md").render(
        data=network.data,
        evaluation=network.parameters["evaluation"],
        training=training,
        variant=network.tags.get(Tag.VARIANT, NOT_KNOWN),
        seed=network.tags.get(Tag.SEED, NOT_KNOWN),
        trained=network.tags.get(Tag.TRAINED, NOT_KNOWN),
        commit=network.tags.get("dml.git_commit", NOT_KNOWN),
        size=_size(training.model.head),
        start=STARTS.get(weights, f"`{shown(weights)}`"),
        licence=DATA_LICENCES.get(reader or "", NOT_KNOWN),
        held_out=", ".join(f"{name} {value}" for name, value in held_out.items()) or "nothing",
        metrics=[(name, metrics[name]) for name in table_columns(metrics)],
        recalls=recalls,
        mean=float(of_classes.mean()),
        interval=(low, high) if low < high else None,  # NaN for one class, or classes with the same recall
        gate=gate,
    )


def _size(head: HeadConfig) -> str:
    """Return of how many numbers an embedding consists."""
    if head.kind == "two_layer" and head.test_layer == "last":
        return "as many numbers as there are training classes"
    if head.embedding_dim is None or "embedding_dim" not in READ_BY_KIND[head.kind]:
        return "as many numbers as the backbone has features"
    return f"{head.embedding_dim} numbers"
