"""A moving average of the weights, which removes the noise of the last training steps.

The exponential moving average of Polyak and Juditsky (1992) in the form used for image models: after each step the average moves a little
towards the weights. It changes no training step, only the run's result, which is scored, saved and returned.
"""

from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dml_core.training.optimisation.config import AverageConfig
from dml_core.training.parallel.cross_batch import CrossBatchMemory
from dml_core.training.parallel.workers import TrainingSystem


class WeightAverage(AveragedModel):
    """The average of a system's parameters and floating-point buffers; empty until `update_parameters` adds the first step.

    Other state is copied from the last step: counters, and a cross-batch memory, whose samples and labels have no mean.
    """

    module: TrainingSystem

    def __init__(self, system: TrainingSystem, config: AverageConfig) -> None:
        super().__init__(system, multi_avg_fn=_weights_alone(config.decay), use_buffers=True)

    def update_parameters(self, model: nn.Module) -> None:
        """Add the weights after a step to the average."""
        super().update_parameters(model)
        for average, last in zip(self.module.modules(), model.modules(), strict=True):
            if isinstance(average, CrossBatchMemory):
                average.copy_memory(last)


def _weights_alone(decay: float) -> Any:
    """Return the update function: exponential moving average for floating-point tensors, a copy for others."""
    moving_average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def update(averages: list[Tensor], values: list[Tensor], num_averaged: Tensor | int) -> None:
        if averages[0].is_floating_point():
            moving_average(averages, values, num_averaged)
            return
        for average, value in zip(averages, values, strict=True):
            average.copy_(value)

    return update
