"""Interface between the training loop and a loss.

Shapes: N samples of the batch that the loss sees, D embedding dimensions, C classes, K centres per class.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn

from dml_core.config import Config
from dml_core.errors import ConfigError, DataError, first_line
from dml_core.float32 import at_least_float32
from dml_core.losses.class_shards import ClassShard

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)  # converted to int64


class LossConfig(Config):
    """Base of every loss's options (margins, scales). Run-time values (classes, sizes) are not options."""

    @property
    def without_effect(self) -> frozenset[str]:
        """Names of the options that have no effect given the values of the others; a search skips them."""
        return frozenset()


class LossOutput(NamedTuple):
    """`total`, the scalar to minimise, and its named parts (detached scalars, for curves)."""

    total: Tensor
    parts: dict[str, Tensor]


@dataclass(frozen=True)
class Needs:
    """Requirements of a loss on the training loop.

    Attributes:
        sampler: "k_by_n" if batches must hold several images of each of several classes, else "any".
        global_batch: the loss compares samples (or depends on the whole batch), so it receives all workers' embeddings.
        initial_embeddings: the loop calls `initialise` with the training set's embeddings before the first epoch.
        labels_on_cpu: the loop leaves the labels on the CPU, where their structure is known without waiting for a GPU.
    """

    sampler: Literal["any", "k_by_n"] = "any"
    global_batch: bool = False
    initial_embeddings: bool = False
    labels_on_cpu: bool = False


PAIRS = Needs(sampler="k_by_n", global_batch=True)  # same-class pairs within the global batch


class Loss(nn.Module, ABC):
    """Base of every loss: single-process computation on the given embeddings.

    A loss owns its centres or classifier as parameters; they train in the optimiser's `loss` group. It returns the mean over
    the N samples, plus regularisers. It does not depend on the number of workers: the loop gathers and averages.
    Parameters in `CLASS_DIMS` may be sharded by class over the workers; sums over classes therefore use `class_shards`.
    Every parameter `p` gets a gradient in every step, also one without effect (add `0 * p.sum()`): with several workers torch raises
    otherwise. No part is called `loss`, `epoch`, `step` or `learning_rate_factor`: these are the history's own.

    Attributes:
        NEEDS: requirements on the training loop.
        CLASS_DIMS: parameter name -> its class dimension; empty if the loss cannot be sharded.
        COMPARES_WITH_MEMORY: True if the loss implements `compare`.
        shard: the range of classes that this worker holds; None for all.

    Raises:
        ConfigError: fewer than two classes.
    """

    Config: ClassVar[type[LossConfig]] = LossConfig
    NEEDS: ClassVar[Needs] = Needs()
    CLASS_DIMS: ClassVar[Mapping[str, int]] = {}
    COMPARES_WITH_MEMORY: ClassVar[bool] = False
    shard: ClassShard | None = None

    def __init__(self, config: LossConfig, num_classes: int, embedding_dim: int) -> None:
        super().__init__()
        if num_classes < 2:
            raise ConfigError(f"a loss needs at least two classes to tell apart, the training set has {num_classes}: add classes")
        self.config = config
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim

    @property
    def needs(self) -> Needs:
        """Requirements of this loss, as configured; NEEDS unless they depend on the options."""
        return self.NEEDS

    @property
    def learning_rate_factor(self) -> float:
        """Factor on every group's learning rate in the current epoch (heated-up softmax lowers it when heated)."""
        return 1.0

    def start_epoch(self, epoch: int, num_epochs: int) -> None:
        """Called before each epoch (0-based). Epoch-dependent state derives only from these two, so a resumed run is the same."""

    def initialise(self, embeddings_ND: Tensor, labels_N: Tensor) -> None:
        """Called once before training with the training set's embeddings if `needs.initial_embeddings`."""

    @property
    def sharded_dims(self) -> dict[str, int]:
        """`CLASS_DIMS` of the parameters that are currently sharded."""
        return {name: self.CLASS_DIMS[name] for name, _ in self.named_parameters() if self.shard is not None and name in self.CLASS_DIMS}

    def shard_classes(self, shard: ClassShard) -> None:
        """Keep only this worker's part of the centres; call it before creating an optimiser."""
        self.shard = shard
        for name, dim in self.sharded_dims.items():
            parameter = self.get_parameter(name)
            parameter.data = shard.cut(parameter.data, dim)

    def join_classes(self) -> None:
        """Restore all centres on every worker; all must call it, and no optimiser may step afterwards."""
        for name, dim in self.sharded_dims.items():
            assert self.shard is not None
            parameter = self.get_parameter(name)
            parameter.data = self.shard.join(parameter.data, dim)
        self.shard = None

    def forward(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None = None) -> LossOutput:
        """Return the loss of one batch, computed in float32 or better also under autocast.

        Args:
            embeddings_ND: the head's training output, not normalised unless the head does so.
            labels_N: class indices in [0, C), of any integer type, on the embeddings' device, or on the CPU if `needs.labels_on_cpu`.
            generator: on the embeddings' device, seeded from (seed, epoch, step), for losses that draw.

        Raises:
            DataError: wrong shapes or types, or labels outside [0, C) on the CPU (a check on a GPU would force a synchronisation).
            RuntimeError: in a compiled loss, labels outside [0, C); it checks nothing else.
        """
        if torch.compiler.is_compiling():  # a check that reads values would break the graph
            labels_N = labels_N.long() if labels_N.dtype in INTEGERS else labels_N
            is_valid_N = (labels_N >= 0) & (labels_N < self.num_classes)
            torch._assert_async(is_valid_N.all(), f"a training label is outside 0..{self.num_classes - 1}")
        else:
            embeddings_ND, labels_N = self.checked(embeddings_ND, labels_N)
        with torch.autocast(embeddings_ND.device.type, enabled=False):
            return self.compute(at_least_float32(embeddings_ND), labels_N, generator)

    def checked(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and labels as validated tensors, integer labels as int64."""
        try:
            embeddings_ND, labels_N = torch.as_tensor(embeddings), torch.as_tensor(labels)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"embeddings are a tensor of floats and labels one of class indices ({first_line(error)})") from None
        if labels_N.dim() != 1 or embeddings_ND.shape != (len(labels_N), self.embedding_dim) or not len(labels_N):
            found = f"embeddings {tuple(embeddings_ND.shape)} and labels {tuple(labels_N.shape)}"
            raise DataError(f"a loss over {self.embedding_dim} dimensions takes (N, {self.embedding_dim}) and (N,), found {found}")
        own = next((p.dtype for p in self.parameters()), embeddings_ND.dtype)
        halved = {tensor.dtype for tensor in (*self.parameters(), *self.buffers())} & {torch.float16, torch.bfloat16}
        if halved:
            raise DataError(f"the loss's parameters are {halved.pop()}, and it computes in float32: call loss.float()")
        is_full_precision = embeddings_ND.dtype in (torch.float32, torch.float64)  # half precision is converted to float32
        if not embeddings_ND.is_floating_point() or (is_full_precision and embeddings_ND.dtype != own):
            wanted = own if own.is_floating_point else "floating-point numbers"
            raise DataError(f"embeddings are {embeddings_ND.dtype}, this loss computes in {wanted}: convert one of them")
        if labels_N.dtype in INTEGERS:
            labels_N = labels_N.long()
        if labels_N.is_cpu:
            check_labels(labels_N, self.num_classes)
        return embeddings_ND, labels_N

    @abstractmethod
    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Compute the paper's loss: arguments of `forward`, embeddings at least float32, no autocast."""

    def compare(
        self, embeddings_ND: Tensor, labels_N: Tensor, memory_MD: Tensor, labels_M: Tensor, own_N: Tensor, generator: Generator | None
    ) -> LossOutput:
        """Like `compute`, but compare each sample with the M samples of a memory, which include the batch.

        Args:
            embeddings_ND, labels_N, generator: as for `compute`; only these embeddings receive gradients.
            memory_MD, labels_M: earlier samples and the batch's, without gradients.
            own_N: index in the memory of each sample itself, which is excluded from its comparisons.
        """
        raise NotImplementedError(f"{type(self).__name__} compares with no memory")


def check_labels(labels_N: Tensor, num_classes: int) -> None:
    """Reject training labels that are not valid class indices; called once before training.

    Raises:
        DataError: labels are not int64 or not in [0, num_classes).
    """
    if labels_N.dtype != torch.int64:
        raise DataError(f"training labels must be int64 class indices, found {labels_N.dtype}: convert them")
    outside = labels_N[(labels_N < 0) | (labels_N >= num_classes)]
    if outside.numel():
        raise DataError(f"training label {int(outside[0])} is outside 0..{num_classes - 1}: number the classes from 0 without gaps")
