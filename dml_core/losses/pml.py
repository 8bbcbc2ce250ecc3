"""Losses of pytorch-metric-learning over labelled batches, by class name (`pml:<ClassName>`), with an optional miner.

Options are the class's keyword arguments. An option that is itself an object (miner, distance, reducer, embedding_regularizer,
weight_regularizer), at any depth, is a mapping of `name` and its options:
`{margin: 0.1, miner: {name: BatchHardMiner, distance: {name: LpDistance, power: 2}}}`.
"""

import inspect
import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers
from pytorch_metric_learning.utils import loss_and_miner_utils
from torch import Generator, Tensor, nn

from dml_core.config import check_known, nearest_hint
from dml_core.errors import ConfigError, first_line
from dml_core.losses.contract import Loss, LossConfig, LossOutput, Needs
from dml_core.training.seeding import seeded

CLASSES = {  # kind of object, also its option's name -> module and base class in the library
    "loss": (losses, losses.BaseMetricLossFunction),
    "miner": (miners, miners.BaseMiner),
    "distance": (distances, distances.BaseDistance),
    "reducer": (reducers, reducers.BaseReducer),
    "embedding_regularizer": (regularizers, regularizers.BaseRegularizer),
    "weight_regularizer": (regularizers, regularizers.BaseRegularizer),
}
# A base class, two losses that take no labels, and one whose second step fails: it needs the graph of the first step again.
UNUSABLE = (losses.GenericPairLoss, losses.ManifoldLoss, losses.VICRegLoss, losses.DynamicSoftMarginLoss)
ONE_MARGIN_PER_CLASS = "MarginLoss"  # takes the number of classes, but compares samples
RUN_TIME = frozenset({"num_classes", "embedding_size"})  # set by the run for classes that take them, never by the configuration


class PmlConfig(LossConfig):
    """Class name after `pml:` and its options, checked against the library's signatures.

    Attributes:
        target: class name within pytorch_metric_learning.losses.
        options: its keyword arguments.
    """

    target: str
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known(self) -> Self:
        try:
            _check("loss", self.target, self.options, also=frozenset({"miner"}))
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


class PmlLoss(Loss):
    """The named loss and miner as a `Loss`: float32 under autocast, random draws from the run's generator, the global batch.

    Raises:
        ConfigError: the library rejects the values, or cannot compute the loss with them.
    """

    Config = PmlConfig
    config: PmlConfig
    COMPARES_WITH_MEMORY = True

    def __init__(self, config: PmlConfig, num_classes: int, embedding_dim: int) -> None:
        super().__init__(config, num_classes, embedding_dim)
        sizes = {"num_classes": num_classes, "embedding_size": embedding_dim}
        self.has_classes = config.target != ONE_MARGIN_PER_CLASS and bool(sizes.keys() & _parameters(_named("loss", config.target)))
        options = dict(config.options)
        miner = options.pop("miner", None)
        try:
            self.miner: nn.Module | None = miner and _built("miner", miner["name"], _without_name(miner), sizes)
            self.loss: nn.Module = _built("loss", config.target, options, sizes)
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():  # some options are refused only by a call, which would end the first training step
                deepcopy(self).compute(torch.randn(12, embedding_dim, generator=generator), torch.arange(12) % 2, generator)
        except Exception as error:  # noqa: BLE001 - the library raises whatever its options lead it to
            raise ConfigError(f"loss 'pml:{config.target}' refuses its options: {first_line(error)}") from None
        for module in self.modules():  # tensors that the library keeps as plain attributes would stay on the CPU
            for name in [name for name, value in vars(module).items() if isinstance(value, Tensor)]:
                module.register_buffer(name, module.__dict__.pop(name), persistent=False)

    @property
    def needs(self) -> Needs:
        """The global batch; several images per class, unless the loss has a classifier and no miner."""
        return Needs(sampler="any" if self.has_classes and self.miner is None else "k_by_n", global_batch=True)

    def compute(self, embeddings_ND: Tensor, labels_N: Tensor, generator: Generator | None) -> LossOutput:
        """Return the library's loss, reduced by its reducer."""
        with seeded(_seed(generator), embeddings_ND.device):
            indices = self.miner(embeddings_ND, labels_N) if self.miner is not None else None
            total: Tensor = self.loss(embeddings_ND, labels_N, indices)
        return LossOutput(total, {self.config.target: total.detach()})

    def compare(
        self, embeddings_ND: Tensor, labels_N: Tensor, memory_MD: Tensor, labels_M: Tensor, own_N: Tensor, generator: Generator | None
    ) -> LossOutput:
        """Return the library's loss over pairs or triplets of an anchor from the batch and others from the memory.

        Raises:
            ConfigError: the library's loss does not support this.
        """
        with seeded(_seed(generator), embeddings_ND.device):
            if self.miner is not None:
                indices = self.miner(embeddings_ND, labels_N, memory_MD, labels_M)
            else:
                indices = loss_and_miner_utils.get_all_pairs_indices(labels_N, labels_M)
            indices = loss_and_miner_utils.remove_self_comparisons(indices, own_N, len(labels_M))
            try:
                total: Tensor = self.loss(embeddings_ND, labels_N, indices, memory_MD, labels_M)
            except (TypeError, ValueError, AssertionError) as error:
                raise ConfigError(f"cross_batch_memory: 'pml:{self.config.target}' cannot take a memory ({error}); remove it") from None
        return LossOutput(total, {self.config.target: total.detach()})


def _seed(generator: Generator | None) -> int:
    """Draw a seed for torch's global state, which the library draws from and which differs between workers, from the step's generator."""
    return int(torch.randint(2**31, (), generator=generator, device=None if generator is None else generator.device))


def _named(kind: str, name: str) -> Any:
    """Return the library's class of the given kind and name."""
    module, base = CLASSES[kind]
    classes = {key: value for key, value in vars(module).items() if inspect.isclass(value) and issubclass(value, base)}
    known = {key: value for key, value in classes.items() if value not in (base, *UNUSABLE)}
    check_known(f"pytorch-metric-learning {kind}", name, known)
    return known[name]


def _parameters(cls: type) -> set[str]:
    """Return the names of a class's keyword arguments, including its bases'."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("pytorch_metric_learning")]
    parameters = [parameter for base in own for parameter in inspect.signature(base.__init__).parameters.values()]  # type: ignore[misc]
    return {parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD} - {"self"}


def _check(kind: str, name: str, options: Mapping[str, Any], also: frozenset[str] = frozenset()) -> None:
    """Reject unknown classes and options, and options that the run sets, also in nested objects."""
    known = (_parameters(_named(kind, name)) | also) - RUN_TIME
    for option, value in options.items():
        if option not in known:
            raise ConfigError(f"{name} has no option '{option}'{nearest_hint(option, known)} (it has: {', '.join(sorted(known))})")
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):  # JSON has one form for all of these
            raise ConfigError(f"{name}: option '{option}' is not a finite number")
        if option in CLASSES:
            if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
                raise ConfigError(f"{name}: option '{option}' is a mapping of 'name' and options, found {value!r}")
            _check(option, value["name"], _without_name(value))


def _built(kind: str, name: str, options: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """Build the object of the given kind and name, with its nested objects and the sizes that it takes."""
    target = _named(kind, name)
    parts = {key: _built(key, value["name"], _without_name(value), sizes) for key, value in options.items() if key in CLASSES}
    return target(**{**options, **parts, **{key: size for key, size in sizes.items() if key in _parameters(target)}})


def _without_name(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != "name"}
