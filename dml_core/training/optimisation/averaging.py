"""A moving average of the weights, which removes the noise of the last training steps.

The exponential moving average of Polyak and Juditsky (1992) in the form used for image models: after each step the average moves a little
towards the weights. It changes no training step, only the run's result, which is scored, saved and returned.
"""

from copy import deepcopy

import torch

from dml_core.training.optimisation.config import AverageConfig
from dml_core.training.parallel.cross_batch import CrossBatchMemory
from dml_core.training.parallel.workers import TrainingSystem


class WeightAverage:
    """The average of a system's parameters and floating-point buffers.

    Other state is copied from the last step: counters, and a cross-batch memory, whose samples and labels have no mean. torch's
    `AveragedModel` computes the same with a copy to the device and a test of it at each step.

    Attributes:
        module: the system with the averages.
        is_empty: True until `update` adds the first step.
    """

    def __init__(self, system: TrainingSystem, config: AverageConfig) -> None:
        self.module = deepcopy(system)
        self.is_empty = True
        self._system, self._decay = system, config.decay

    @torch.no_grad()
    def update(self) -> None:
        """Add the system's weights after a step to the average."""
        last, averages = ([*of.parameters(), *of.buffers()] for of in (self._system, self.module))
        pairs = list(zip(averages, last, strict=True))
        moving = [] if self.is_empty else [pair for pair in pairs if pair[0].is_floating_point()]
        copied = pairs if self.is_empty else [pair for pair in pairs if not pair[0].is_floating_point()]
        if moving:
            torch._foreach_lerp_([pair[0] for pair in moving], [pair[1] for pair in moving], 1 - self._decay)
        if copied:
            torch._foreach_copy_([pair[0] for pair in copied], [pair[1] for pair in copied])
        for average, memory in zip(self.module.modules(), self._system.modules(), strict=True):
            if isinstance(average, CrossBatchMemory):
                average.copy_memory(memory)
        self.is_empty = False
