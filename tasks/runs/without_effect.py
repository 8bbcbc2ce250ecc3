"""Settings of a run that have no effect because of its others.

A run inherits most settings from a protocol, so they are not errors. A setting that the user names, on the command line or in a search, is
one if it has no effect.
"""

from collections.abc import Collection
from contextlib import suppress
from functools import cache

from dml_core.data.views.transform_config import Jitter
from dml_core.errors import ConfigError
from dml_core.losses.registry import parse_loss_options
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.registry import build_backbone
from dml_core.training.config import TrainingConfig

OPTIONS, BATCHNORM = "loss.options.", ("model.freeze_batchnorm", "model.batchnorm_momentum")
HEATED = ("heated_alpha", "schedule", "heated_learning_rate_factor")


def without_effect(training: TrainingConfig) -> dict[str, str]:
    """Return dotted path -> the setting because of which it has no effect; without the options of the loss. Imports no torch."""
    sampler, schedule, memory, model = training.sampler, training.schedule, training.cross_batch_memory, training.model
    idle = {f"sampler.{name}": f"sampler.kind is '{sampler.kind}'" for name in sampler.without_effect}
    if training.optimiser.name == "sgd":
        idle["optimiser.eps"] = "optimiser.name is 'sgd'"
    if training.transform.crop != "random_resized":
        idle |= dict.fromkeys(("transform.crop_area", "transform.crop_ratio"), f"transform.crop is '{training.transform.crop}'")
    if training.transform.jitter == Jitter():
        idle["transform.jitter_first"] = "transform.jitter changes nothing"
    if not training.keep_epochs:
        idle["keep_every_epochs"] = "keep_epochs names none"
    first_drop = {"step": min(schedule.milestones, default=0), "every": schedule.every_epochs or 0}.get(schedule.kind, 0)
    if first_drop >= training.num_epochs:
        names = ("schedule.milestones", "schedule.every_epochs", "schedule.factor")
        idle |= dict.fromkeys(names, f"the first drop is after {first_drop} of {training.num_epochs} epochs")
    if memory is not None and memory.after_epochs >= training.num_epochs:
        why = f"cross_batch_memory.after_epochs is {memory.after_epochs} of {training.num_epochs} epochs"
        idle |= dict.fromkeys(("cross_batch_memory.size", "cross_batch_memory.after_epochs"), why)
    if model.freeze_batchnorm in ("statistics", "all"):
        idle["model.batchnorm_momentum"] = f"model.freeze_batchnorm is '{model.freeze_batchnorm}'"
    return idle


def batchnorm_without_effect(training: TrainingConfig) -> dict[str, str]:
    """Return what `without_effect` does for the settings of the backbone's BatchNorm. Builds the backbone."""
    backbone = training.model.backbone
    return {} if _has_batchnorm(backbone) else dict.fromkeys(BATCHNORM, f"backbone '{backbone.name}' has no BatchNorm")


@cache
def _has_batchnorm(backbone: BackboneConfig) -> bool:
    from torch.nn.modules.batchnorm import _BatchNorm

    network = build_backbone(backbone.model_copy(update={"weights": "none", "weights_sha256": None}))
    return any(isinstance(module, _BatchNorm) for module in network.modules())


def loss_options_without_effect(training: TrainingConfig) -> dict[str, str]:
    """Return what `without_effect` does for the options of the loss; none if one of them is wrong. Imports the loss."""
    with suppress(ConfigError):
        config = parse_loss_options(training.loss.name, training.loss.options)
        idle = dict.fromkeys(config.without_effect, "the loss's other options disable it")
        heat_from = getattr(config, "heat_from", 0.0)
        if round(heat_from * training.num_epochs) >= training.num_epochs:
            idle |= dict.fromkeys(HEATED, f"loss.options.heat_from {heat_from:g} heats none of the {training.num_epochs} epochs")
        return {f"{OPTIONS}{name}": why for name, why in idle.items()}
    return {}


def why_idle(training: TrainingConfig, paths: Collection[str]) -> str | None:
    """Return why settings have no effect if none of them has one, else None."""
    idle = without_effect(training)
    if any(path.startswith(OPTIONS) for path in paths):
        idle |= loss_options_without_effect(training)
    if any(path in BATCHNORM for path in paths):
        idle |= batchnorm_without_effect(training)
    return next((idle[path] for path in paths), None) if idle.keys() >= set(paths) else None
