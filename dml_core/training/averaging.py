"""A moving average of the weights: what a run's last steps have in common, without the noise of the very last one.

As the exponential moving average of Polyak and Juditsky (1992) in the form that image models are trained with: after each step the average
moves a little towards the weights. It changes no step; only what the run's result is, and so what is scored, kept and returned.
"""

from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dml_core.training.averaging_config import AverageConfig
from dml_core.training.cross_batch import CrossBatchMemory
from dml_core.training.parallel import TrainingSystem


class WeightAverage(AveragedModel):
    """The average of a system's parameters and floating-point buffers, of no step yet; `update_parameters` takes in a step.

    What is no weight is the last step's: counters, and a cross-batch memory, whose samples and labels have no mean.
    """

    module: TrainingSystem

    def __init__(self, system: TrainingSystem, config: AverageConfig) -> None:
        super().__init__(system, multi_avg_fn=_weights_alone(config.decay), use_buffers=True)

    def update_parameters(self, model: nn.Module) -> None:
        """Take in the weights after a step."""
        super().update_parameters(model)
        for average, last in zip(self.module.modules(), model.modules(), strict=True):
            if isinstance(average, CrossBatchMemory):
                average.copy_memory(last)


def _weights_alone(decay: float) -> Any:
    """The exponential moving average of floating-point tensors; a copy of others."""
    moving_average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def update(averages: list[Tensor], values: list[Tensor], num_averaged: Tensor | int) -> None:
        if averages[0].is_floating_point():
            moving_average(averages, values, num_averaged)
            return
        for average, value in zip(averages, values, strict=True):
            average.copy_(value)

    return update
