"""Composition of the global batches: seeded and independent of the number of workers.

A sampler knows neither workers nor images: it returns the index arrays of one epoch's global batches, and each worker takes its contiguous
shard of each (`training.parallel.shard_sizes`). Draws derive only from (seed, epoch), so a resumed run sees the same batches.
"""

from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from dml_core.config import Config
from dml_core.errors import ConfigError

if TYPE_CHECKING:
    from dml_core.losses.contract import Needs  # imports torch

Indices = NDArray[np.int64]


class SamplerConfig(Config):
    """Options.

    Attributes:
        kind: "shuffled", "k_by_n": k classes with n images of each in every batch, or "mined_triplets": an image, another of its class
            and one of its nearest of other classes by the embeddings at the epoch's start (`training.mining`).
        batch_size: images of a shuffled global batch; mined triplets fill it with as many whole triplets as fit.
        drop_last: omit the incomplete last batch of a shuffled epoch; a last batch of one image is always omitted.
        num_classes_per_batch: k.
        num_samples_per_class: n.
        class_frequency: for "k_by_n": "equal", every class appears about equally often; or "by_size", as often as it has groups of n
            images, as in fast-reid's NaiveIdentitySampler (SGSL's released code).
    """

    kind: Literal["shuffled", "k_by_n", "mined_triplets"] = "shuffled"
    batch_size: int = Field(default=32, ge=1)
    drop_last: bool = False
    num_classes_per_batch: int = Field(default=32, ge=2)
    num_samples_per_class: int = Field(default=8, ge=2)
    class_frequency: Literal["equal", "by_size"] = "equal"

    @property
    def without_effect(self) -> frozenset[str]:
        """Names of the options that only other kinds of sampler read."""
        return frozenset({"batch_size"} if self.kind == "k_by_n" else {"num_classes_per_batch", "num_samples_per_class"})

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.class_frequency != "equal" and self.kind != "k_by_n":
            raise ValueError(f"kind is '{self.kind}', so class_frequency has no place: set it to null")
        if self.drop_last and self.kind != "shuffled":
            raise ValueError(f"kind is '{self.kind}', so drop_last has no place: set it to null")
        return self


def epoch_batches(config: SamplerConfig, labels_N: Indices, seed: int, epoch: int, negatives_Nk: Indices | None = None) -> list[Indices]:
    """Return the global batches of one epoch.

    Args:
        config, labels_N, seed, epoch: determine the batches.
        negatives_Nk: for mined triplets, the hard negatives of each image.

    Raises:
        ConfigError: a "k_by_n" sampler over fewer than k classes, a shuffled one that would drop every image, or mined triplets if no
            class has two images.
    """
    if config.kind == "mined_triplets":
        assert negatives_Nk is not None
        return triplet_batches(labels_N, negatives_Nk, config.batch_size, seed, epoch)
    if config.kind == "shuffled":
        return shuffled_batches(len(labels_N), config.batch_size, seed, epoch, config.drop_last)
    draw = class_balanced_batches if config.class_frequency == "equal" else size_weighted_batches
    return draw(labels_N, config.num_classes_per_batch, config.num_samples_per_class, seed, epoch)


def shuffled_batches(num_samples: int, batch_size: int, seed: int, epoch: int, drop_last: bool) -> list[Indices]:
    """Return every image once, in random order; an incomplete last batch is shorter, or omitted if `drop_last`.

    A last batch of a single image is always omitted: BatchNorm cannot normalise it, and it has nothing to be compared with. The rule uses
    the global batch, so it does not depend on the number of workers.

    Raises:
        ConfigError: `drop_last` with fewer images than one batch holds.
    """
    _check_drop_last(num_samples, batch_size, drop_last)
    order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    batches = np.split(order, range(batch_size, num_samples, batch_size))
    is_left_out = len(batches) > 1 and (len(batches[-1]) < batch_size if drop_last else len(batches[-1]) < min(2, batch_size))
    return batches[:-1] if is_left_out else batches


def class_balanced_batches(
    labels_N: Indices, num_classes_per_batch: int, num_samples_per_class: int, seed: int, epoch: int
) -> list[Indices]:
    """Return batches of k classes with n images of each, the images of a class in adjacent positions.

    Rules: an epoch has round(num_samples / (k n)) batches, at least one, as long as a shuffled epoch. Classes are taken
    from shuffled rounds over all classes, so that no class repeats before all have appeared once, except that a class already in a
    batch is deferred to the next one. Images of a class are drawn without replacement; a class with fewer than n images repeats them,
    each floor(n / size) or ceil(n / size) times.

    Raises:
        ConfigError: fewer than k classes.
    """
    random = np.random.default_rng((seed, epoch))
    members = _members(labels_N, num_classes_per_batch)
    num_batches = max(1, round(len(labels_N) / (num_classes_per_batch * num_samples_per_class)))
    waiting: list[int] = []
    batches = []
    for _ in range(num_batches):
        chosen = _next_classes(waiting, len(members), num_classes_per_batch, random)
        batches.append(np.concatenate([_draw(members[c], num_samples_per_class, random) for c in chosen]))
    return batches


def size_weighted_batches(
    labels_N: Indices, num_classes_per_batch: int, num_samples_per_class: int, seed: int, epoch: int
) -> list[Indices]:
    """Return batches of k classes with n images of each, drawn without replacement in rounds, as in fast-reid's NaiveIdentitySampler.

    Rules: a round splits each class's images, shuffled, into groups of n and omits the rest; a class with fewer than n images is one
    group of n draws with replacement. A batch takes a group of each of k classes drawn from those that have one left; a round ends when
    fewer than k have. An epoch has floor(num_samples / (k n)) batches, at least one, and starts a new round.

    Raises:
        ConfigError: fewer than k classes.
    """
    random = np.random.default_rng((seed, epoch))
    members = _members(labels_N, num_classes_per_batch)
    num_batches = max(1, len(labels_N) // (num_classes_per_batch * num_samples_per_class))
    batches: list[Indices] = []
    while len(batches) < num_batches:
        batches += _round(members, num_classes_per_batch, num_samples_per_class, random)
    return batches[:num_batches]


def triplet_batches(labels_N: Indices, negatives_Nk: Indices, batch_size: int, seed: int, epoch: int) -> list[Indices]:
    """Return batches of whole triplets in sequence: an image, another of its class, one of its negatives.

    Every image of a class of two or more is the anchor of one triplet, in random order; its positive and its negative are drawn at random.
    The last batch holds the remaining triplets.

    Args:
        labels_N: class indices.
        negatives_Nk: negatives of each image.
        batch_size: a batch has batch_size // 3 triplets, at least one.
        seed, epoch: seed the draws.

    Raises:
        ConfigError: no class has two images.
    """
    random = np.random.default_rng((seed, epoch))
    _, class_N, counts = np.unique(labels_N, return_inverse=True, return_counts=True)
    members = _members(labels_N, 1)
    anchors = random.permutation(np.flatnonzero(counts[class_N] > 1))
    if len(anchors) == 0:
        raise ConfigError(
            "sampler: mined_triplets needs a class with two images, the training set has none: add images or choose 'shuffled'"
        )
    negatives = negatives_Nk[anchors, random.integers(0, negatives_Nk.shape[1], len(anchors))]
    positives = [random.choice(members[class_N[anchor]][members[class_N[anchor]] != anchor]) for anchor in anchors]
    triplets_T3 = np.stack([anchors, np.array(positives, dtype=np.int64), negatives], axis=1)
    per_batch = max(1, batch_size // 3)
    return [part.reshape(-1) for part in np.split(triplets_T3, range(per_batch, len(anchors), per_batch))]


def check_sampler(config: SamplerConfig, needs: "Needs", loss_name: str) -> None:
    """Reject a sampler that cannot provide the batches that a loss needs; called before training.

    Raises:
        ConfigError: the loss compares images of one class and the sampler does not put several into a batch.
    """
    if needs.sampler == "k_by_n" and config.kind == "shuffled":
        raise ConfigError(f"loss '{loss_name}' needs several images of a class in a batch, sampler.kind is '{config.kind}': set 'k_by_n'")


def first_batch_size(config: SamplerConfig, num_samples: int, num_classes: int) -> int:
    """Return the size of an epoch's first global batch, which is its largest, without drawing it.

    Raises:
        ConfigError: as for `epoch_batches`.
    """
    if config.kind == "shuffled":
        _check_drop_last(num_samples, config.batch_size, config.drop_last)
        return min(num_samples, config.batch_size)
    if config.kind == "mined_triplets":
        return 3 * min(num_samples, max(1, config.batch_size // 3))
    _check_num_classes(num_classes, config.num_classes_per_batch)
    return config.num_classes_per_batch * config.num_samples_per_class


def _check_drop_last(num_samples: int, batch_size: int, drop_last: bool) -> None:
    if drop_last and num_samples < batch_size:
        raise ConfigError(f"sampler: drop_last with batch_size {batch_size} drops all {num_samples} images: lower batch_size")


def _check_num_classes(num_classes: int, num_classes_per_batch: int) -> None:
    if num_classes < num_classes_per_batch:
        raise ConfigError(
            f"sampler: num_classes_per_batch is {num_classes_per_batch}, the training set has {num_classes} classes: lower it"
        )


def _members(labels_N: Indices, num_classes_per_batch: int) -> list[Indices]:
    """Return the image indices of each class."""
    classes, counts = np.unique(labels_N, return_counts=True)
    _check_num_classes(len(classes), num_classes_per_batch)
    return np.split(np.argsort(labels_N, kind="stable"), np.cumsum(counts)[:-1])


def _round(members: list[Indices], num_classes_per_batch: int, num_samples_per_class: int, random: np.random.Generator) -> list[Indices]:
    """Return one round of `size_weighted_batches`, at least one batch."""
    n = num_samples_per_class
    queues = [random.permutation(own if len(own) >= n else random.choice(own, n)) for own in members]
    num_groups = np.array([len(queue) // n for queue in queues])
    num_taken = np.zeros_like(num_groups)
    batches = []
    while np.count_nonzero(num_taken < num_groups) >= num_classes_per_batch:
        chosen = random.choice(np.flatnonzero(num_taken < num_groups), num_classes_per_batch, replace=False)
        batches.append(np.concatenate([queues[c][num_taken[c] * n : (num_taken[c] + 1) * n] for c in chosen]))
        num_taken[chosen] += 1
    return batches


def _next_classes(waiting: list[int], num_classes: int, num_wanted: int, random: np.random.Generator) -> list[int]:
    """Take the first distinct classes from the queue, which is refilled round by round; deferred ones stay at its head."""
    if len(waiting) < num_wanted:
        waiting.extend(random.permutation(num_classes).tolist())
    chosen: dict[int, None] = {}
    put_off: list[int] = []
    for number in waiting:
        if len(chosen) == num_wanted:
            break
        if number in chosen:
            put_off.append(number)
        else:
            chosen[number] = None
    waiting[: len(chosen) + len(put_off)] = put_off
    return list(chosen)


def _draw(members: Indices, num_wanted: int, random: np.random.Generator) -> Indices:
    rounds = [random.permutation(members) for _ in range(-(-num_wanted // len(members)))]
    return np.concatenate(rounds)[:num_wanted]
