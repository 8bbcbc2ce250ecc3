"""Configuration of one training run: everything that its result depends on besides the dataset and the seed.

`checkpoint_every_epochs`, and `keep_every_epochs` of a run that keeps no epochs, do not change the result.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from dml_core.config import Config
from dml_core.data.store.split_config import ValidationConfig
from dml_core.data.views.samplers import SamplerConfig
from dml_core.data.views.transform_config import TransformConfig
from dml_core.epochs import KeptEpoch
from dml_core.models.backbones.registry import TRAINED_WITH
from dml_core.models.config import ModelConfig
from dml_core.training.optimisation.config import AverageConfig, OptimiserConfig
from dml_core.training.optimisation.schedules import ScheduleConfig


class LossChoice(Config):
    """A loss by name, with the options that its own configuration defines."""

    name: str
    options: dict[str, Any] = {}


class CrossBatchConfig(Config):
    """Settings of the cross-batch memory.

    Attributes:
        size: number of samples kept, at least one batch.
        after_epochs: initial epochs that compare only within the batch, until embeddings drift slowly (the paper takes 1,000 steps). The
            memory fills meanwhile.
    """

    size: int = Field(ge=1)
    after_epochs: int = Field(default=1, ge=0)


class TrainingConfig(Config):
    """Configuration of one training run.

    Attributes:
        validation: training classes that are held out (`data.splits.open_role` opens the rest); None trains on all of them.
        num_epochs: 0 leaves the network as initialised (the untrained reference).
        warm_up_batchnorm: make one pass over the training images before the first epoch that only updates BatchNorm's averages (heated-up
            softmax's released code, whose new head would otherwise start from empty averages).
        precision: "auto" is bfloat16 autocast if all workers' GPUs support it, else float32: runs of a CPU and of a GPU are comparable only
            with a set precision. "float32" is full float32 on GPUs too, without TF32, which the papers' GPUs did not have.
        checkpoint_every_epochs: epochs between checkpoints, the most that a crash can lose; the last epoch is always saved.
        embed_at_once: images of a worker's share of a batch whose activations are held at a time, for batches larger than memory
            (`training.parallel.grad_cache`): same gradients for one more forward pass. None holds all. Networks whose BatchNorm uses batch
            statistics are rejected.
        compile: True compiles network and loss for training (torch.compile), not for embedding and scoring; weights differ in their last
            bits. Workers need a C++ compiler, on GPUs also Python's headers, which the container image lacks. None does not compile.
        cross_batch_memory: compare a batch also with earlier ones (`training.parallel.cross_batch`), for losses that compare samples.
        shard_classes: True shards the loss's classes over the workers, with their centres, gradients and optimiser state, for more classes
            than one device holds (`training.parallel`); weights differ in their last bits. None keeps all centres on every worker.
        average: return a moving average of the weights; None returns the last step's.
        keep_epochs: epochs whose weights are kept in addition to the last: the best on the held-out classes, the best on the test classes.
            This does not change the last epoch's weights.
        keep_every_epochs: epochs between checks for a new best; the last is always checked.
        recall_every_epochs: epochs between measurements of Recall@1 on training and test images, for curves; the last is always measured.
            They select nothing. None disables them.
    """

    model: ModelConfig
    loss: LossChoice
    sampler: SamplerConfig
    transform: TransformConfig
    validation: ValidationConfig | None = None
    optimiser: OptimiserConfig = OptimiserConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    num_epochs: int = Field(ge=0)
    warm_up_batchnorm: bool = False
    average: AverageConfig | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    embed_at_once: int | None = Field(default=None, ge=1)
    compile: Literal[True] | None = None
    cross_batch_memory: CrossBatchConfig | None = None
    shard_classes: Literal[True] | None = None
    checkpoint_every_epochs: int = Field(default=1, ge=1)
    keep_epochs: tuple[KeptEpoch, ...] = ()
    keep_every_epochs: int = Field(default=1, ge=1)
    recall_every_epochs: int | None = Field(default=None, ge=1)

    def without_weights(self) -> "TrainingConfig":
        """Return the same configuration without the backbone's published weights, for loading a checkpoint."""
        backbone = self.model.backbone.model_copy(update={"weights": "none", "weights_sha256": None})
        return self.model_copy(update={"model": self.model.model_copy(update={"backbone": backbone})})

    @model_validator(mode="after")
    def _kept_epochs_can_be_told(self) -> "TrainingConfig":
        if len(set(self.keep_epochs)) != len(self.keep_epochs):
            raise ValueError(f"keep_epochs names one twice: {', '.join(self.keep_epochs)}")
        if "best_validation" in self.keep_epochs and self.validation is None:
            raise ValueError("keep_epochs: 'best_validation' needs classes that are held out; set validation: {share: 0.2}")
        return self

    @model_validator(mode="after")
    def _pixels_fit_the_weights(self) -> "TrainingConfig":
        name = self.model.backbone.name
        expected = TRAINED_WITH.get(name, self.transform.scaling)
        if self.model.backbone.weights != "none" and self.transform.scaling != expected:
            raise ValueError(
                f"backbone '{name}' with weights expects transform.scaling '{expected}', found '{self.transform.scaling}': its published "
                "weights were trained with it"
            )
        return self
