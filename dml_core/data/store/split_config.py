"""The settings of a validation split and which classes it holds out (`splits.py` makes it); light to import."""

import hashlib
from collections.abc import Sequence
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from dml_core.config import Config
from dml_core.errors import ConfigError


class ValidationConfig(Config):
    """Training classes that are not trained on but kept for choosing settings, so that the test classes stay unseen.

    They are a share of the classes, or one of the folds that the classes are dealt to.

    Attributes:
        share: of the training classes; at least two are held out and at least two left.
        folds: into how many disjoint parts the training classes are dealt, each of two classes at least; sizes differ by one at most.
        fold: which of these is held out, from 0.
        seed: which ones; of folds, how they are dealt.
    """

    share: float | None = Field(default=None, gt=0.0, lt=1.0)
    folds: int | None = Field(default=None, ge=2)
    fold: int | None = Field(default=None, ge=0)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _one_way(self) -> "ValidationConfig":
        if (self.share is None) == (self.folds is None) or (self.folds is None) != (self.fold is None):
            raise ValueError("classes are held out in one way: a share of them, or folds and which fold; set share: 0.2")
        if self.folds is not None and self.fold is not None and self.fold >= self.folds:
            raise ValueError(f"fold {self.fold} of {self.folds} is not there; they are counted from 0")
        return self

    @model_serializer(mode="wrap")
    def _the_way_alone(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the way that is not taken: a share is written, and hashed into identities, as it was before there were folds."""
        return {name: value for name, value in serialise(self).items() if value is not None}


def held_out_classes(names: Sequence[str], config: ValidationConfig) -> set[str]:
    """The training classes that are held out, at least two.

    The choice depends on the seed and the classes' names alone: they are ordered by a hash of both; of a share the first are held out, of
    folds every n-th.

    Raises:
        ConfigError: fewer than two classes would be left for training, or be in a fold.
    """
    ordered = sorted(names, key=lambda name: hashlib.sha256(f"{config.seed} {name}".encode()).digest())
    if config.folds is not None:
        check_folds(config.folds, len(names))
        return set(ordered[config.fold :: config.folds])
    held_out = num_held_out(config, len(names))
    if len(names) - held_out < 2:
        raise ConfigError(
            f"validation.share {config.share:g} of {len(names)} training classes leaves fewer than two to train; choose a smaller share"
        )
    return set(ordered[:held_out])


def num_held_out(config: ValidationConfig, num_classes: int) -> int:
    """How many of so many training classes are held out; of folds those of the largest."""
    if config.folds is not None:
        return -(-num_classes // config.folds)
    assert config.share is not None
    return max(2, round(config.share * num_classes))


def check_folds(folds: int, num_classes: int) -> None:
    """Refuse more folds than leave each two classes: an image has to be told from one of another class.

    Raises:
        ConfigError: too many, or too few classes for any.
    """
    if num_classes < 4:
        raise ConfigError(f"{num_classes} training classes cannot be dealt to folds of two classes each; four are needed")
    if 2 * folds > num_classes:
        raise ConfigError(f"{folds} folds of {num_classes} training classes leave some with fewer than two; at most {num_classes // 2}")
