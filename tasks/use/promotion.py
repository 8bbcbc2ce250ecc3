"""Who is the champion of MLflow's registry: a network gets there by being better than the one that is there, on the same test images.

Better is said of Recall@1, class by class: both networks are asked the same queries, and what one class's queries found is compared with
what they found with the other network. The interval is Student's t over those differences, because the test classes stand for all the
classes that the network will meet, and images of one class succeed and fail together. The two networks are what they are: other seeds of
the same systems would be another question (`dml compare` answers it).
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dml_core.config import parse
from dml_core.errors import ConfigError, DataError, EvaluationError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import EmbeddingShard, recall_by_class
from dml_core.evaluation.statistics import PairedDifference, paired_difference
from tasks.data import read_dataset
from tasks.environment import Project
from tasks.runs.embeddings import load_embeddings, query_and_gallery
from tasks.tracking.models import registered_name
from tasks.tracking.published import IDENTITY_TAG, TRAINED_TAG, VARIANT_TAG
from tasks.tracking.registered import LoggedNetwork, Registry, Version
from tasks.use.card import model_card
from tasks.use.models import IDENTITY, find_run

CHAMPION = "champion"


@dataclass(frozen=True)
class Promotion:
    """What became of a promotion.

    Attributes:
        version: that the alias leads to now.
        said: why, in one line.
    """

    version: Version
    said: str


def promote(project: Project, text: str, alias: str = CHAMPION, forced_because: str | None = None) -> Promotion:
    """Have an alias of the registry lead to a run's network, if it is better than the one that is there.

    Args:
        project: whose run it is; MLflow has it published.
        text: the run, as `tasks.use.models.find_run` takes it, or the identity of its training.
        alias: which.
        forced_because: do it whatever the comparison says, for this reason, which is kept with the version.

    Raises:
        ConfigError: no such run in MLflow, or the network there is not known to be worse; the line gives the interval.
        TrackingError: MLflow cannot be used.
    """
    registry = Registry(project.tracking_uri)
    network = _published(project, registry, text)
    name = registered_name(network.data["name"], str(network.parameters["evaluation"]["role"]))
    with tempfile.TemporaryDirectory() as folder, registry.promoting(name):
        recalls = class_recalls(registry, network, Path(folder) / "new")
        holder = registry.holder(name, alias)
        if holder is not None and holder.model_id == network.model_id:
            return Promotion(holder, f"{text} is the {alias} of {name} already (version {holder.number})")
        said = _compared(registry, network, recalls, holder, Path(folder) / "old") if forced_because is None else ""
        if forced_because is not None:
            said = f"forced, without comparison: {forced_because}"
        card = model_card(network, recalls, said, _reader(project, network))
        return Promotion(registry.promote(name, alias, network, said, card), said)


def difference_by_class(recalls: dict[int, float], references: dict[int, float]) -> PairedDifference:
    """How much higher the one's Recall@1 is, over the classes.

    Raises:
        ConfigError: not the same classes, or fewer than two.
    """
    if recalls.keys() != references.keys() or len(recalls) < 2:
        raise ConfigError(f"{len(recalls)} and {len(references)} test classes cannot be paired; --force with --reason goes without")
    return paired_difference(list(recalls.values()), [references[label] for label in recalls])


def class_recalls(registry: Registry, network: LoggedNetwork, folder: Path) -> dict[int, float]:
    """Recall@1 of each test class that has a query with a positive, by its label, from the embeddings that the run left."""
    folder.mkdir()
    embeddings = registry.embeddings(network, folder)
    query_role, gallery_role = query_and_gallery(embeddings)
    config = parse(EvaluationConfig, network.parameters["evaluation"], "the published run").model_copy(update={"device": "cpu"})

    def shard(role: str) -> EmbeddingShard:
        rows, labels = load_embeddings(embeddings, role)
        return EmbeddingShard(lambda: rows, np.asarray(labels))

    try:
        return recall_by_class(shard(gallery_role), config, None if query_role == gallery_role else shard(query_role))
    except EvaluationError as error:
        raise ConfigError(f"the run's embeddings cannot be compared: {error}") from None


def _compared(registry: Registry, network: LoggedNetwork, recalls: dict[int, float], holder: Version | None, folder: Path) -> str:
    """Why the network may take the holder's place.

    Raises:
        ConfigError: it may not.
    """
    if holder is None:
        return "the first; there was nothing to compare with"
    there = registry.of_version(holder)
    what = f"version {holder.number} of {holder.name}"
    if there is None:
        raise ConfigError(f"{what}: its run is no longer in MLflow, so nothing can be compared; --force with --reason goes without")
    if there.data["digest"] != network.data["digest"]:
        raise ConfigError(
            f"{what} was tested on other images ({there.data['digest']}, this one {network.data['digest']}); "
            "run its variant on these, or --force with --reason"
        )
    found = difference_by_class(recalls, class_recalls(registry, there, folder))
    interval = (
        f"Recall@1 {100 * found.mean:+.1f} points, 95 % interval [{100 * (found.mean - found.half_width):.1f}, "
        f"{100 * (found.mean + found.half_width):.1f}], paired by {found.num_seeds} test classes, against {what} ({_label(there)})"
    )
    if found.mean - found.half_width <= 0:
        raise ConfigError(f"not known to be better: {interval}; --force with --reason promotes it all the same")
    return f"better: {interval}"


def _published(project: Project, registry: Registry, text: str) -> LoggedNetwork:
    tag, value = (TRAINED_TAG, text) if IDENTITY.fullmatch(text) else (IDENTITY_TAG, find_run(project, text).scored)
    network = registry.logged(tag, value) if value is not None else None
    if network is None:
        raise ConfigError(f"{text}: MLflow at {registry.uri} has no such run with a network; dml reproduce publishes it, or dml sync")
    return network


def _reader(project: Project, network: LoggedNetwork) -> str | None:
    """Of the dataset, where it is prepared here as the run had it."""
    try:
        record = read_dataset(project, network.data["name"])
    except DataError:
        return None
    return record.source if record.digest == network.tags.get("dml.dataset_digest") else None


def _label(network: LoggedNetwork) -> str:
    return f"{network.tags[VARIANT_TAG]}, seed {network.tags['dml.seed']}"
