"""Choose the champion of MLflow's registry: a network becomes champion by beating the current one on the same test images.

The comparison is of Recall@1 per class: both networks get the same queries, and the results of each class are paired. The test is a
one-sided Student's t test over these differences, because the test classes represent all classes the network will meet, and images of one
class succeed and fail together. It compares these two networks; whether other seeds of the systems differ is a separate question (`dml
compare` answers it).

Repeated attempts would eventually succeed by chance. So attempt k at a place is tested at LEVEL * 6 / (pi k)^2, and these levels add up to
LEVEL over all future attempts: without a true gain, the champion is replaced at all in at most 5 of 100 such histories. This is alpha
spending (Foster and Stine, JRSS B 2008) without earning any back.

A network that was trained from pretrained weights must first beat the pretrained network itself (the variant `frozen`), by the same test at
LEVEL: fine-tuning on few classes can make retrieval of new ones worse.
"""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from dml_core.config import parse
from dml_core.errors import ConfigError, EvaluationError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import ClassRecall, EmbeddingShard, recall_by_class
from dml_core.evaluation.statistics.paired import MIN_CLASSES, least_deviation
from tasks.data import dataset_if_intact
from tasks.environment import Project, shown
from tasks.models.card import model_card
from tasks.models.lookup import find_run
from tasks.runs.embeddings import load_embeddings, query_and_gallery
from tasks.runs.identity import NETWORK_IDENTITY
from tasks.runs.params.file import load_params
from tasks.runs.specs import FROZEN
from tasks.tracking.registered import BEST, LoggedNetwork, Registry
from tasks.tracking.tags import Tag
from tasks.tracking.versions import REGISTRY_PREFIX, Version, registered_name
from tasks.wording import significant

CHAMPION = "champion"
LEVEL = 0.05  # over all attempts at one place
ClassRecalls = dict[int, ClassRecall]


class Promotion(NamedTuple):
    """The version that an alias points to now, and why it may hold the alias, as one line."""

    version: Version
    reason: str


@dataclass(frozen=True)
class Gain:
    """Gain of a network's Recall@1 over another's: mean of the classes' differences, and their standard deviation or its larger floor."""

    mean: float
    deviation: float
    num_classes: int

    def at_least(self, level: float) -> float:
        """Return the lower end of the one-sided interval at confidence 1 - level."""
        return self.mean - float(stdtrit(self.num_classes - 1, 1 - level)) * self.deviation / math.sqrt(self.num_classes)

    def describe(self, level: float) -> str:
        """Return the mean and the lower end at a level, in words."""
        ends = f"{100 * self.mean:+.1f} points, at least {significant(100 * self.at_least(level), 3, '+')}"
        return f"Recall@1 {ends} by a one-sided test at level {level:.2g}"


def promote(project: Project, text: str, alias: str = CHAMPION, forced_because: str | None = None) -> Promotion:
    """Point an alias of the registry to a run's network, if it is better than the current one.

    Args:
        project: project of the run, which must be published in MLflow.
        text: the run, as `tasks.models.lookup.find_run` takes it, the identity of its training or network, or a version's address
            `models:/name/version`, as of a former champion.
        forced_because: promote without a comparison, for this reason, which is stored with the version.

    Raises:
        ConfigError: the alias is `best`, MLflow has no such run, its epoch was chosen on the test classes, or the current network, or the
            pretrained one that it was trained from, is not known to be worse; the message gives the interval.
        TrackingError: MLflow cannot be used.
    """
    if alias == BEST:
        raise ConfigError(f"--alias {BEST}: every comparison points it to its best run; name another alias")
    registry = Registry(project.tracking_uri)
    network = _published(project, registry, text)
    evaluation = network.parameters["evaluation"]
    if forced_because is None and (evaluation["role"], evaluation.get("epoch")) == ("test", "oracle"):
        why = "its epoch was chosen on the test classes, so a comparison on them proves nothing"
        raise ConfigError(f"{text}: {why}; name the network of another epoch, or --force with --reason")
    name = registered_name(network.data["name"], str(evaluation["role"]))
    with registry.promoting(name):
        recalls = class_recalls(registry, network)
        holder = registry.holder(name, alias)
        if holder is not None and holder.model_id == network.model_id:
            return Promotion(holder, f"{text} is the {alias} of {name} already (version {holder.number})")
        if forced_because is not None:
            reason = f"forced, without comparison: {forced_because}"
        else:
            min_gain = load_params(project.params_file).promotion.min_gain
            gained = _fine_tuned(registry, network, recalls)
            reason = _compared(registry, network, recalls, holder, alias, min_gain) + gained
        card = model_card(network, {label: of_class.recall for label, of_class in recalls.items()}, reason, _reader(project, network))
        return Promotion(registry.promote(name, alias, network, reason, card), reason)


def level_of(attempt: int) -> float:
    """Return the level of the test of an attempt, counted from 1."""
    return LEVEL * 6 / (math.pi * attempt) ** 2


def gain_by_class(recalls: ClassRecalls, references: ClassRecalls) -> Gain:
    """Compare the Recall@1 of two networks class by class.

    Differences over few queries are often equal by accident, so their spread has a floor: the binomial variance that the classes' own
    differences imply (`statistics.least_deviation`), averaged over the classes.

    Raises:
        ConfigError: the classes or queries differ, or there are fewer than MIN_CLASSES classes.
    """
    if recalls.keys() != references.keys():
        raise ConfigError(f"{len(recalls)} and {len(references)} test classes cannot be paired; --force with --reason skips the comparison")
    if len(recalls) < MIN_CLASSES:
        raise ConfigError(f"too few test classes for a comparison: {len(recalls)} (minimum: {MIN_CLASSES}); --force with --reason skips it")
    differences = np.array([recalls[label].recall - references[label].recall for label in recalls])
    floors = [least_deviation(d, of_class.num_queries) for d, of_class in zip(differences.tolist(), recalls.values(), strict=True)]
    deviation = max(float(differences.std(ddof=1)), float(np.mean(np.square(floors))) ** 0.5)
    return Gain(float(differences.mean()), deviation, len(differences))


def class_recalls(registry: Registry, network: LoggedNetwork) -> ClassRecalls:
    """Return Recall@1 of each test class that has a query with a positive, by label, from the run's embeddings."""
    config = parse(EvaluationConfig, network.parameters["evaluation"], "the published run").model_copy(update={"device": "cpu"})

    def shard(role: str) -> EmbeddingShard:
        rows, labels = load_embeddings(embeddings, role)
        return EmbeddingShard(lambda: rows, np.asarray(labels))

    with tempfile.TemporaryDirectory() as folder:
        embeddings = registry.embeddings(network, Path(folder))
        query_role, gallery_role = query_and_gallery(embeddings)
        queries, gallery = None if query_role == gallery_role else shard(query_role), shard(gallery_role)
    try:
        return recall_by_class(gallery, config, queries)
    except EvaluationError as error:
        raise ConfigError(f"the run's embeddings cannot be compared: {error}") from None


def _fine_tuned(registry: Registry, network: LoggedNetwork, recalls: ClassRecalls) -> str:
    """Return what a network's training gained over its pretrained weights, as the end of a line; empty if it had none, or no training."""
    training = network.parameters["training"]
    if not training["num_epochs"] or training["model"]["backbone"].get("weights", "none") == "none":
        return ""
    frozen = registry.frozen(network)
    if frozen is None:
        raise ConfigError(
            f"no run of '{FROZEN}' has scored its pretrained weights on the same views of the same images, so the gain of its training is "
            f"unknown; dml reproduce --dataset {network.data['name']} --variant {FROZEN}, or a table's row of that name, with the same "
            "--set; or --force with --reason"
        )
    gain = gain_by_class(recalls, class_recalls(registry, frozen))
    reason = f"{gain.describe(LEVEL)}, against the pretrained network without training"
    if gain.at_least(LEVEL) <= 0:
        raise ConfigError(f"training is not known to have gained anything: {reason}; --force with --reason promotes it anyway")
    return f"; {reason}"


def _compared(
    registry: Registry, network: LoggedNetwork, recalls: ClassRecalls, holder: Version | None, alias: str, min_gain: float
) -> str:
    """Return why the network may replace the current one; if it may not, a ConfigError has the reason."""
    if holder is None:
        return "the first; there was nothing to compare with"
    current = registry.of_address(f"{REGISTRY_PREFIX}{holder.name}/{holder.number}")
    what = f"version {holder.number} of {holder.name}"
    if current is None:
        raise ConfigError(f"{what}: its run is no longer in MLflow, so it cannot be compared; --force with --reason skips the comparison")
    for where, old, new in (("images", current.digest, network.digest), ("held-out classes", current.held_out, network.held_out)):
        if old != new:
            differ = f"was tested on other {where} ({old}, this one {new}), so it cannot be compared"
            raise ConfigError(f"{what}: {differ}; --force with --reason skips the comparison")
    gain = gain_by_class(recalls, class_recalls(registry, current))
    attempt = registry.count_attempt(holder.name, alias)
    level = level_of(attempt)
    system = ", seed ".join(current.tags.get(tag, "unknown") for tag in (Tag.VARIANT, Tag.SEED))
    how = f"(attempt {attempt}), paired by {gain.num_classes} test classes, against {what} ({system})"
    reason = f"{gain.describe(level)} {how}"
    if 100 * gain.at_least(level) <= min_gain:
        raise ConfigError(f"no significant gain of {min_gain:g} points or more: {reason}; --force with --reason promotes it anyway")
    return f"better by {min_gain:g} points or more: {reason}"


def _published(project: Project, registry: Registry, text: str) -> LoggedNetwork:
    if text.startswith(REGISTRY_PREFIX):
        network = registry.of_address(text)
    elif NETWORK_IDENTITY.fullmatch(text):
        network = registry.logged(Tag.TRAINED, text)
    else:
        run = find_run(project, text)
        network = None if run.scored is None else registry.logged(Tag.IDENTITY, run.scored, run.spec.dataset)
    if network is None:
        where = f"MLflow at {shown(registry.uri)}"
        raise ConfigError(f"{text}: {where} has no such run with a network; dml reproduce publishes it, or dml sync")
    return network


def _reader(project: Project, network: LoggedNetwork) -> str | None:
    """Return the reader of the dataset, or None if the dataset is not prepared here as the run used it."""
    record = dataset_if_intact(project, network.data["name"])
    return record.source if record is not None and record.digest == network.tags.get(Tag.DIGEST) else None
