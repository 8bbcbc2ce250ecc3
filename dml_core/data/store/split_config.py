"""Settings of a validation split and its choice of held-out classes (`splits.py` creates the split); light to import."""

import hashlib
from collections.abc import Sequence
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from dml_core.config import Config
from dml_core.errors import ConfigError


class ValidationConfig(Config):
    """Training classes held out for choosing settings, so that the test classes stay unseen.

    Either a share of the classes, or one of several folds, is held out.

    Attributes:
        share: share of the training classes; at least two are held out and at least two kept.
        folds: number of disjoint parts of the training classes, each of at least two classes; sizes differ by at most one.
        fold: index of the held-out part, from 0.
        seed: seed of the choice of classes or of the partition into folds.
    """

    share: float | None = Field(default=None, gt=0.0, lt=1.0)
    folds: int | None = Field(default=None, ge=2)
    fold: int | None = Field(default=None, ge=0)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _one_way(self) -> "ValidationConfig":
        if (self.share is None) == (self.folds is None) or (self.folds is None) != (self.fold is None):
            raise ValueError("classes are held out in one way: set share (0.2), or folds and fold, and the others to null")
        if self.folds is not None and self.fold is not None and self.fold >= self.folds:
            raise ValueError(f"fold {self.fold} of {self.folds} is not there; they are counted from 0")
        return self

    @model_serializer(mode="wrap")
    def _the_way_alone(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit unset options, so that a share is serialised, and hashed into identities, as before folds existed."""
        return {name: value for name, value in serialise(self).items() if value is not None}


def held_out_classes(names: Sequence[str], config: ValidationConfig) -> set[str]:
    """Return the held-out training classes, at least two.

    The choice depends only on the seed and the class names: they are ordered by a hash of both; the first ones are held out for a share,
    every `folds`-th for a fold.

    Raises:
        ConfigError: fewer than two classes would remain for training, or be in a fold.
    """
    ordered = sorted(names, key=lambda name: hashlib.sha256(f"{config.seed} {name}".encode()).digest())
    if config.folds is not None:
        check_folds(config.folds, len(names))
        return set(ordered[config.fold :: config.folds])
    held_out = num_held_out(config, len(names))
    if len(names) < 4:
        raise ConfigError(f"{len(names)} training classes are too few to hold two out and train on two others; leave validation out")
    if len(names) - held_out < 2:
        raise ConfigError(
            f"validation.share {config.share:g} of {len(names)} training classes leaves fewer than two to train; choose a smaller share"
        )
    return set(ordered[:held_out])


def num_held_out(config: ValidationConfig, num_classes: int) -> int:
    """Return the number of held-out classes; with folds, that of the largest fold."""
    if config.folds is not None:
        return -(-num_classes // config.folds)
    assert config.share is not None
    return max(2, round(config.share * num_classes))


def check_folds(folds: int, num_classes: int) -> None:
    """Reject folds with fewer than two classes, in which there is no other class to distinguish an image from.

    Raises:
        ConfigError: too many folds, or too few classes for any.
    """
    if num_classes < 4:
        raise ConfigError(f"{num_classes} training classes cannot be dealt to folds of two classes each; four are needed")
    if 2 * folds > num_classes:
        raise ConfigError(f"{folds} folds of {num_classes} training classes leave some with fewer than two; at most {num_classes // 2}")
