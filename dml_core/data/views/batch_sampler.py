"""Class-balanced batches for torch's `DataLoader`, in any training loop. The batches are those of `samplers`.

Shapes: N images.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import BatchSampler

from dml_core.config import parse
from dml_core.data.views.samplers import SamplerConfig, epoch_batches
from dml_core.errors import ConfigError, DataError


class ClassBalancedSampler(BatchSampler):
    """Batches of k classes with n images of each, for `DataLoader(dataset, batch_sampler=...)`.

    Each iteration over the sampler is one epoch with other batches, which depend only on seed and epoch. It is for one process: of several,
    each would draw the same batches.

    Args:
        labels: (N,) class of each image of the dataset, integers or strings.
        num_classes_per_batch: k.
        num_samples_per_class: n; a class with fewer images repeats some within a batch.
        seed: seed of the draws.
        class_frequency: "equal", every class appears about equally often; or "by_size", in proportion to its number of images.

    Attributes:
        epoch: the number of the next epoch, from 0.

    Raises:
        ConfigError: k or n below 2, fewer than k classes, or a seed that is no whole number from 0.
        DataError: labels that are no list of integers or strings.
    """

    def __init__(
        self,
        labels: ArrayLike | Tensor,
        num_classes_per_batch: int,
        num_samples_per_class: int,
        seed: int = 0,
        class_frequency: Literal["equal", "by_size"] = "equal",
    ) -> None:
        options = {
            "kind": "k_by_n",
            "num_classes_per_batch": num_classes_per_batch,
            "num_samples_per_class": num_samples_per_class,
            "class_frequency": class_frequency,
        }
        self._config = parse(SamplerConfig, options, "sampler")
        if not isinstance(seed, int | np.integer) or seed < 0:
            raise ConfigError(f"sampler: seed must be a whole number from 0, found {seed!r}")
        given = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
        if given.dtype == object and given.ndim == 1 and all(isinstance(label, str) for label in given):
            given = given.astype(str)  # as in a pandas column
        if given.ndim != 1 or given.dtype.kind not in "iuUS":
            raise DataError(f"sampler: expected one integer or string per image, found {given.dtype} of shape {given.shape}")
        self._labels_N = np.unique(given, return_inverse=True)[1]
        self.seed = int(seed)
        self.epoch = 0
        self._num_batches = len(epoch_batches(self._config, self._labels_N, seed, 0))
        super().__init__(range(len(given)), num_classes_per_batch * num_samples_per_class, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        """Return the batches of the next epoch, as indices of images."""
        batches = epoch_batches(self._config, self._labels_N, self.seed, self.epoch)
        self.epoch += 1
        return (batch.tolist() for batch in batches)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._num_batches

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, to resume a training."""
        self.epoch = epoch
