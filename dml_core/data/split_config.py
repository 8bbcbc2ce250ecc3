"""The settings of a validation split (`splits.py` makes it); light to import."""

from pydantic import Field

from dml_core.config import Config


class ValidationConfig(Config):
    """Training classes that are not trained on but kept for choosing settings, so that the test classes stay unseen.

    Attributes:
        share: of the training classes; at least two are held out and at least two left.
        seed: which ones.
    """

    share: float = Field(gt=0.0, lt=1.0)
    seed: int = Field(default=0, ge=0)
