"""A moving average of the weights: what a run's last steps have in common, without the noise of the very last one. Light to import.

As the exponential moving average of Polyak and Juditsky (1992) in the form that image models are trained with: after each step the average
moves a little towards the weights. It changes no step; only what the run's result is, and so what is scored, kept and returned.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from dml_core.config import Config

if TYPE_CHECKING:
    from torch import nn
    from torch.optim.swa_utils import AveragedModel


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


def build_average(system: "nn.Module", config: AverageConfig) -> "AveragedModel":
    """The average of a system's weights and BatchNorm's statistics, of no step yet; `update_parameters` takes in a step."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    return AveragedModel(system, multi_avg_fn=get_ema_multi_avg_fn(config.decay), use_buffers=True)  # type: ignore[no-untyped-call]
