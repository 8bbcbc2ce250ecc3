"""Write a model card: the network, its training and test data, its scores with their uncertainty, and its limits.

Every line is a fact of the run from MLflow. Unknown facts are marked as such.
"""

from dml_core.config import parse
from dml_core.evaluation.columns import table_columns
from dml_core.evaluation.statistics.confidence import mean_over_seeds
from dml_core.training.config import TrainingConfig
from tasks.tracking.child_run import SEED_TAG, TRAINED_TAG, VARIANT_TAG, plain_name
from tasks.tracking.registered import LoggedNetwork

NOT_KNOWN = "not known"
# Licences stated by the publishers, by the reader's name.
DATA_LICENCES = {
    "fashion-mnist": "MIT (Zalando SE)",
    "synthetic": "drawn by this package, Apache-2.0",
    "drawn": "drawn by this package, Apache-2.0",
}


def model_card(network: LoggedNetwork, recalls: dict[int, float], gate: str, reader: str | None) -> str:
    """Return the card as Markdown.

    Args:
        network: the run.
        recalls: Recall@1 of each test class.
        gate: reason why the network is in the registry.
        reader: reader of the dataset, if known.
    """
    training = parse(TrainingConfig, network.parameters["training"], "the published run")
    evaluation, data, tags = network.parameters["evaluation"], network.data, network.tags
    metrics = {plain_name(name): value for name, value in network.metrics.items()}
    mean, half_width = mean_over_seeds(list(recalls.values()))
    classes = "classes that it was not trained on" if evaluation["role"] == "test" else f"{evaluation['role']} classes"
    lines = [
        f"# {data['name']} / {tags[VARIANT_TAG]} / seed {tags[SEED_TAG]}",
        "",
        f"An image in, {_dimensions(training)} numbers out: images of one class lie close together by the {evaluation['metric']} metric.",
        "",
        "## What it is",
        "",
        f"- network: {training.model.backbone.name}, head {training.model.head.kind}, {_dimensions(training)} dimensions",
        f"- trained with: {training.loss.name}, {training.num_epochs} epochs, from {_start(training)}",
        f"- licence of the weights that it started from: {'none were taken' if training.model.backbone.weights == 'none' else NOT_KNOWN}",
        f"- identity of the training: `{tags.get(TRAINED_TAG, NOT_KNOWN)}`; code at git commit {tags.get('dml.git_commit', NOT_KNOWN)}",
        f"- weights of the {evaluation.get('epoch', 'last')} epoch",
        "",
        "## Data",
        "",
        f"- dataset: {data['name']}, content {data['digest']}; images: {', '.join(f'{n} {role}' for role, n in data['counts'].items())}",
        f"- licence of the images: {DATA_LICENCES.get(reader or '', NOT_KNOWN)}",
        f"- held out of training to choose settings: {_held_out(training)}",
        "",
        "## Scores",
        "",
        f"On {len(recalls)} {classes}, role `{evaluation['role']}`.",
        "",
        "| metric | value |",
        "|---|---|",
        *(f"| {name} | {metrics[name]:.4f} |" for name in table_columns(metrics)),
        f"| recall@1, mean of the classes | {mean:.4f}, 95 % interval [{mean - half_width:.4f}, {mean + half_width:.4f}] |",
        f"| worst class's recall@1 | {min(recalls.values()):.4f} |",
        "",
        "The interval is Student's t over the classes.",
        "",
        "## Why it is in the registry",
        "",
        gate,
        "",
        "## Limits",
        "",
        "- The scores are of images like those of the dataset; on others nothing was measured.",
        "- The interval says what other classes of the same kind would change, not what other cameras or another training seed would.",
        "- Nothing was measured of who or what is in the images: no use on people was looked at.",
        "",
    ]
    return "\n".join(lines)


def _dimensions(training: TrainingConfig) -> str:
    return str(training.model.head.embedding_dim or "as many as the backbone has features")


def _start(training: TrainingConfig) -> str:
    weights = training.model.backbone.weights
    return "random weights" if weights == "none" else "the published ImageNet weights" if weights == "imagenet" else f"`{weights}`"


def _held_out(training: TrainingConfig) -> str:
    if training.validation is None:
        return "nothing"
    found = training.validation.model_dump(mode="json")
    return ", ".join(f"{name} {value}" for name, value in found.items())
