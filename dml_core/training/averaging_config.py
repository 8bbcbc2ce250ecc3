"""The settings of an average of the weights (`averaging.py` computes one); light to import."""

from pydantic import Field

from dml_core.config import Config


class AverageConfig(Config):
    """Which steps are averaged, and how far back the average looks.

    Attributes:
        decay: what stays of the average after a step; it looks about 1 / (1 - decay) steps back.
        after: share of the epochs after which it begins, from the weights of then.
    """

    decay: float = Field(gt=0.0, lt=1.0)
    after: float = Field(default=0.5, ge=0.0, lt=1.0)

    def begins_at(self, num_epochs: int) -> int:
        """The first epoch whose steps are averaged, counted from 0."""
        return int(self.after * num_epochs)
