"""Cross-batch memory (Wang et al., "Cross-Batch Memory for Embedding Learning", CVPR 2020): compares a batch with earlier ones.

A ring buffer keeps the embeddings of the last samples, without gradients. A batch is added to it and then compared with all its samples,
except each sample with itself. The batch is the gathered one, in the same order on every worker, so all workers have the same memory. The
memory is part of the system's state and of checkpoints: resuming is bit-identical.

Shapes: N samples of the batch, M of the memory, D embedding dimensions.
"""

from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

from dml_core.errors import ConfigError
from dml_core.losses.contract import Loss, LossOutput, Needs
from dml_core.losses.registry import losses_with
from dml_core.training.config import CrossBatchConfig


class CrossBatchMemory(Loss):
    """A loss that compares samples, with a memory of earlier batches.

    Raises:
        ConfigError: the loss cannot compare a batch with a memory.
    """

    embeddings: Tensor
    labels: Tensor

    def __init__(self, loss: Loss, config: CrossBatchConfig, name: str) -> None:
        super().__init__(loss.config, loss.num_classes, loss.embedding_dim)
        if not loss.COMPARES_WITH_MEMORY:
            raise ConfigError(
                f"cross_batch_memory: loss '{name}' cannot compare a batch with a memory: remove it, or take one of "
                f"{losses_with('COMPARES_WITH_MEMORY')}, pml:<a loss over pairs or triplets>"
            )
        with torch.no_grad():  # refused here and not after `after_epochs`: only a call shows whether a loss of pytorch-metric-learning can
            batch_ND, labels_N = torch.eye(4, loss.embedding_dim), torch.tensor([0, 0, 1, 1])
            loss.compare(batch_ND, labels_N, batch_ND.clone(), labels_N.clone(), torch.arange(4), torch.Generator())
        self.loss = loss
        self.size, self.after_epochs = config.size, config.after_epochs
        self.num_seen, self.is_used = 0, config.after_epochs == 0
        self.register_buffer("embeddings", torch.zeros(config.size, loss.embedding_dim))
        self.register_buffer("labels", torch.zeros(config.size, dtype=torch.int64))

    @property
    def needs(self) -> Needs:
        """The wrapped loss's needs, with the global batch."""
        return replace(self.loss.needs, global_batch=True)

    @property
    def learning_rate_factor(self) -> float:
        """The wrapped loss's factor."""
        return self.loss.learning_rate_factor

    def start_epoch(self, epoch: int, num_epochs: int) -> None:
        """Start an epoch; the memory is used from epoch `after_epochs` on."""
        self.is_used = epoch >= self.after_epochs
        self.loss.start_epoch(epoch, num_epochs)

    def initialise(self, embeddings_ND: Tensor, labels_N: Tensor) -> None:
        """Initialise the wrapped loss."""
        self.loss.initialise(embeddings_ND, labels_N)

    def copy_memory(self, other: nn.Module) -> None:
        """Copy the samples of another memory."""
        assert isinstance(other, CrossBatchMemory)
        self.num_seen = other.num_seen
        self.embeddings.copy_(other.embeddings)
        self.labels.copy_(other.labels)

    def get_extra_state(self) -> Tensor:
        """Return the number of samples added so far; not a buffer, because on a GPU every step would wait to read it."""
        return torch.tensor(self.num_seen)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the state from `get_extra_state`."""
        self.num_seen = int(state)

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Compare the batch with the memory, which includes it; in the first epochs, only with itself.

        Raises:
            ConfigError: the memory is smaller than the batch.
        """
        memory_MD, labels_M, own_N = self._put_in(embeddings_ND.detach(), labels_N)
        if not self.is_used:
            return self.loss.compute(embeddings_ND, labels_N, generator)
        return self.loss.compare(embeddings_ND, labels_N, memory_MD, labels_M, own_N, generator)

    # Not compiled: the number of samples seen would be a constant, so every step would be recompiled.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _put_in(self, embeddings_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Replace the oldest samples by the batch; return the memory (M, D), its labels (M,) and the batch's indices in it (N,).

        Returns copies: the next batch may be written into the ring before this one's backward pass.
        """
        if len(labels_N) > self.size:
            raise ConfigError(f"cross_batch_memory: size {self.size} is less than a batch of {len(labels_N)}: raise it")
        own_N = (torch.arange(len(labels_N), device=labels_N.device) + self.num_seen) % self.size
        self.embeddings[own_N] = embeddings_ND.to(self.embeddings.dtype)
        self.labels[own_N] = labels_N
        self.num_seen += len(labels_N)
        filled = min(self.num_seen, self.size)
        return self.embeddings[:filled].clone(), self.labels[:filled].clone(), own_N
