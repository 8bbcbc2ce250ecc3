"""The settings of a validation split and which classes it holds out (`splits.py` makes it); light to import."""

import hashlib
from collections.abc import Sequence

from pydantic import Field

from dml_core.config import Config
from dml_core.errors import ConfigError


class ValidationConfig(Config):
    """Training classes that are not trained on but kept for choosing settings, so that the test classes stay unseen.

    Attributes:
        share: of the training classes; at least two are held out and at least two left.
        seed: which ones.
    """

    share: float = Field(gt=0.0, lt=1.0)
    seed: int = Field(default=0, ge=0)


def held_out_classes(names: Sequence[str], config: ValidationConfig) -> set[str]:
    """The share of the training classes that is held out, at least two.

    The choice depends on the seed and the classes' names alone: they are ordered by a hash of both, and the first are held out.

    Raises:
        ConfigError: fewer than two classes would be left for training.
    """
    num_held_out = max(2, round(config.share * len(names)))
    if len(names) - num_held_out < 2:
        raise ConfigError(
            f"validation.share {config.share:g} of {len(names)} training classes leaves fewer than two to train; choose a smaller share"
        )
    return set(sorted(names, key=lambda name: hashlib.sha256(f"{config.seed} {name}".encode()).digest())[:num_held_out])
