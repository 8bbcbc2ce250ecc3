"""Cross-batch memory (Wang et al., "Cross-Batch Memory for Embedding Learning", CVPR 2020): a batch is compared with those before it.

A ring keeps the embeddings of the last samples, without gradients; a batch is put in and then compared with all that is there, each sample
but with itself. The batch is the gathered one, in the same order on every worker, so every worker keeps the same memory. It is part of the
system's state: a checkpoint has it, and a run goes on bit for bit.

Shapes: N samples of the batch, M of the memory, D embedding dimensions.
"""

from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

from dml_core.errors import ConfigError
from dml_core.losses.contract import Loss, LossOutput, Needs
from dml_core.training.cross_batch_config import CrossBatchConfig


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
                f"cross_batch_memory: loss '{name}' cannot compare a batch with a memory: remove it, or take contrastive, "
                "triplet_batch_hard or pml:<a loss over pairs or triplets>"
            )
        self.loss = loss
        self.size, self.after_epochs = config.size, config.after_epochs
        self.num_seen, self.is_used = 0, config.after_epochs == 0
        self.register_buffer("embeddings", torch.zeros(config.size, loss.embedding_dim))
        self.register_buffer("labels", torch.zeros(config.size, dtype=torch.int64))

    @property
    def needs(self) -> Needs:
        """The loss's own, of the global batch."""
        return replace(self.loss.needs, global_batch=True)

    @property
    def learning_rate_factor(self) -> float:
        """The loss's own."""
        return self.loss.learning_rate_factor

    def start_epoch(self, epoch: int, num_epochs: int) -> None:
        """Whether the memory is used already."""
        self.is_used = epoch >= self.after_epochs
        self.loss.start_epoch(epoch, num_epochs)

    def initialise(self, embeddings_ND: Tensor, labels_N: Tensor) -> None:
        """The loss's own."""
        self.loss.initialise(embeddings_ND, labels_N)

    def copy_memory(self, other: nn.Module) -> None:
        """Hold the samples that another memory holds."""
        assert isinstance(other, CrossBatchMemory)
        self.num_seen = other.num_seen
        self.embeddings.copy_(other.embeddings)
        self.labels.copy_(other.labels)

    def get_extra_state(self) -> Tensor:
        """How many samples have been put in; kept beside the buffers, for on a GPU a step would wait for it."""
        return torch.tensor(self.num_seen)

    def set_extra_state(self, state: Tensor) -> None:
        """As `get_extra_state` gave it."""
        self.num_seen = int(state)

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """The batch against the memory, itself included; against itself alone in the first epochs.

        Raises:
            ConfigError: the memory is smaller than the batch.
        """
        memory_MD, labels_M, own_N = self._put_in(embeddings_ND.detach(), labels_N)
        if not self.is_used:
            return self.loss.compute(embeddings_ND, labels_N, generator)
        return self.loss.compare(embeddings_ND, labels_N, memory_MD, labels_M, own_N, generator)

    # Not compiled: the number of samples seen would be a constant there, and every step would be compiled again.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _put_in(self, embeddings_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Put the batch in place of the oldest; the memory (M, D), its labels (M,), and where in it each sample of the batch now is (N,).

        Copies: the next batch is written into the ring, perhaps before this one's backward pass.
        """
        if len(labels_N) > self.size:
            raise ConfigError(f"cross_batch_memory: size {self.size} is less than a batch of {len(labels_N)}: raise it")
        own_N = (torch.arange(len(labels_N), device=labels_N.device) + self.num_seen) % self.size
        self.embeddings[own_N] = embeddings_ND.to(self.embeddings.dtype)
        self.labels[own_N] = labels_N
        self.num_seen += len(labels_N)
        filled = min(self.num_seen, self.size)
        return self.embeddings[:filled].clone(), self.labels[:filled].clone(), own_N
