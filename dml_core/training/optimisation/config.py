"""Settings of the optimiser (built in `optimisers.py`) and of the weight average (`averaging.py`); light to import."""

from typing import Literal

from pydantic import Field, model_validator

from dml_core.config import Config

GroupName = Literal["backbone", "head", "loss"]


class GroupConfig(Config):
    """Settings of one group; None uses the optimiser's."""

    learning_rate: float | None = Field(default=None, gt=0)
    weight_decay: float | None = Field(default=None, ge=0)


class OptimiserConfig(Config):
    """An optimiser and its groups.

    Attributes:
        name: "sgd", "adam" or "adamw", torch's.
        learning_rate: base rate of every group without its own.
        weight_decay: L2 coefficient of every group without its own; decoupled with adamw.
        without_decay: parameters never decayed: "biases" (SGSL's released code), or "one_dimension": biases and the scales of
            normalisations.
        momentum: SGD's momentum.
        nesterov: SGD's Nesterov momentum.
        eps: Adam's epsilon.
        eps_before_bias_correction: add eps to the square root of the uncorrected second moment, as TensorFlow and PyTorch 1.1 do: early
            steps are smaller, by up to sqrt(1 - beta2) if eps outweighs the gradient.
        fused: update all parameters in one kernel, faster on CPUs and GPUs; changes the last bits.
        groups: separate settings of "backbone", "head" or "loss".
    """

    name: Literal["sgd", "adam", "adamw"] = "adam"
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    without_decay: Literal["none", "biases", "one_dimension"] = "none"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False
    eps: float = Field(default=1e-8, gt=0)
    eps_before_bias_correction: bool = False
    fused: bool = True
    groups: dict[GroupName, GroupConfig] = {}

    @model_validator(mode="after")
    def _fits(self) -> "OptimiserConfig":
        if self.name != "sgd" and (self.momentum or self.nesterov):
            raise ValueError(f"momentum and nesterov belong to sgd, not to {self.name}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        if self.eps_before_bias_correction and self.name != "adam":
            raise ValueError(f"eps_before_bias_correction belongs to adam, not to {self.name}")
        return self


class AverageConfig(Config):
    """Steps that are averaged, and their weights.

    Attributes:
        decay: weight of the old average at each step; the average covers about 1 / (1 - decay) steps.
        after: share of the epochs after which averaging starts, from the weights at that time.
    """

    decay: float = Field(gt=0.0, lt=1.0)
    after: float = Field(default=0.5, ge=0.0, lt=1.0)

    def begins_at(self, num_epochs: int) -> int:
        """Return the first epoch whose steps are averaged, counted from 0."""
        return int(round(self.after * num_epochs, 6))  # 0.7 * 90 is a little less than 63
