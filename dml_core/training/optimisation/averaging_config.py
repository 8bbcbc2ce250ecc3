"""Settings of the weight average (computed in `averaging.py`); light to import."""

from pydantic import Field

from dml_core.config import Config


class AverageConfig(Config):
    """Which steps are averaged, with which weights.

    Attributes:
        decay: weight of the old average at each step; the average covers about 1 / (1 - decay) steps.
        after: share of the epochs after which averaging starts, from the weights at that time.
    """

    decay: float = Field(gt=0.0, lt=1.0)
    after: float = Field(default=0.5, ge=0.0, lt=1.0)

    def begins_at(self, num_epochs: int) -> int:
        """Return the first epoch whose steps are averaged, counted from 0."""
        return int(self.after * num_epochs)
