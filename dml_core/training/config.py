"""What one training run is: everything here changes its result, and nothing that is not here does."""

from typing import Any, Literal

from pydantic import Field, model_validator

from dml_core.config import Config
from dml_core.data.store.split_config import ValidationConfig
from dml_core.data.views.samplers import SamplerConfig
from dml_core.data.views.transform_config import TransformConfig
from dml_core.models.backbones.registry import TRAINED_WITH
from dml_core.models.config import ModelConfig
from dml_core.training.averaging_config import AverageConfig
from dml_core.training.cross_batch_config import CrossBatchConfig
from dml_core.training.epochs import KeptEpoch
from dml_core.training.optim_config import OptimiserConfig
from dml_core.training.schedules import ScheduleConfig


class LossChoice(Config):
    """A loss by name, with its options as that loss's own configuration defines them."""

    name: str
    options: dict[str, Any] = {}


class TrainingConfig(Config):
    """One system as it is trained.

    Attributes:
        validation: training classes that are held out (`data.splits.open_role` opens the rest); None trains on all of them.
        num_epochs: 0 leaves the network as it was initialised (the untrained reference).
        warm_up_batchnorm: one pass over the training images before the first epoch that only moves BatchNorm's averages (heated-up
            softmax's released code, whose new head would start from averages of nothing).
        precision: "auto" is bfloat16 autocast on a GPU that has it and float32 elsewhere. "float32" is whole float32 on GPUs too, without
            TF32, which the papers' cards had not.
        checkpoint_every_epochs: how much work a crash can cost; the last epoch is always kept.
        embed_at_once: images of a worker's share of a batch whose activations are held at a time, for batches larger than memory
            (`training.grad_cache`): the same gradients for one more forward pass. None holds those of all. A network in which BatchNorm
            takes its statistics from the batch is refused.
        compile: true compiles network and loss for training (torch.compile); embedding and scoring are not compiled. Weights differ in
            their last bits. None runs them as they are written.
        cross_batch_memory: a batch is compared with those before it too (`training.cross_batch`), for losses that compare samples.
        shard_classes: true spreads the classes of the loss over the workers, each of which holds the centres of a part, their gradients and
            their share of the optimiser's state: for more classes than one device holds (`training.class_shards`). Weights differ in their
            last bits. None keeps all centres on every worker.
        average: the run's result is a moving average of the weights; None leaves the last step's.
        keep_epochs: whose weights are kept beside the last epoch's: those of the best on the held-out classes, of the best on the test
            classes. The last epoch's weights are the same with and without.
        keep_every_epochs: after how many epochs these are looked for; the last is always looked at.
        recall_every_epochs: after how many epochs, and after the last, Recall@1 of training images and of test images is measured, for a
            curve of both; nothing is chosen by it. None leaves it out.
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
        """The same system, its backbone's published weights left out: for whoever loads a checkpoint into it."""
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
