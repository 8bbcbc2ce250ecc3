"""Settings of a run that have no effect because of its others, and parts of its schedule that its epochs do not reach.

A run inherits most settings from a protocol, so they are not errors. A setting that the user names, on the command line or in a search, is
one if it has no effect. In a file it is named before the run is trained.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dml_core.config import flatten
from dml_core.data.views.transform_config import Jitter
from dml_core.errors import DmlError
from dml_core.losses.registry import build_loss, parse_loss_options
from dml_core.models.backbones.registry import backbone_shapes
from dml_core.training.config import TrainingConfig

if TYPE_CHECKING:
    from dml_core.losses.contract import LossConfig  # imports torch

OPTIONS, GROUPS, BATCHNORM = "loss.options.", "optimiser.groups.", ("model.freeze_batchnorm", "model.batchnorm_momentum")
OF_GROUPS = ("optimiser.learning_rate", "optimiser.weight_decay")  # of groups without their own
HEATED = ("heated_alpha", "schedule", "heated_learning_rate_factor")
SIZE = 16  # features and classes of a head and a loss that are built to see whether they have parameters


def without_effect(training: TrainingConfig) -> dict[str, str]:
    """Return dotted path -> why the setting has no effect, for what is known without torch."""
    sampler, model, optimiser = training.sampler, training.model, training.optimiser
    idle = {f"sampler.{name}": f"sampler.kind is '{sampler.kind}'" for name in sampler.without_effect}
    if optimiser.name == "sgd":
        idle["optimiser.eps"] = "optimiser.name is 'sgd'"
    if not any((optimiser.weight_decay, *(group.weight_decay for group in optimiser.groups.values()))):
        idle["optimiser.without_decay"] = "optimiser.weight_decay is 0"
    if training.transform.crop != "random_resized":
        idle |= dict.fromkeys(("transform.crop_area", "transform.crop_ratio"), f"transform.crop is '{training.transform.crop}'")
    if training.transform.jitter == Jitter():
        idle["transform.jitter_first"] = "transform.jitter changes nothing"
    if not training.keep_epochs:
        idle["keep_every_epochs"] = "keep_epochs names none"
    if model.freeze_batchnorm in ("statistics", "all"):
        idle["model.batchnorm_momentum"] = f"model.freeze_batchnorm is '{model.freeze_batchnorm}'"
    return idle | {path: why for why, paths in _unreached(training).items() for path in paths}


def why_idle(training: TrainingConfig, paths: Collection[str]) -> str | None:
    """Return why settings have no effect if none of them has one, else None. Builds only the parts of the run that they are of."""
    idle, of_groups = without_effect(training), (GROUPS, *(OF_GROUPS if "backbone" in training.optimiser.groups else ()))
    for places, of_part in (((OPTIONS,), _of_loss), (of_groups, _of_groups), (BATCHNORM, _of_batchnorm)):
        if any(path.startswith(places) for path in paths):
            idle |= of_part(training)
    return next((idle[path] for path in paths), None) if idle.keys() >= set(paths) else None


def idle_notes(runs: Iterable[tuple[str, TrainingConfig, Mapping[str, Mapping[str, Any]]]]) -> list[str]:
    """Return a line for each setting that has an effect on none of the runs on a dataset. Builds parts of the runs.

    Args:
        runs: dataset and settings of each trained run, and place -> the settings there; several runs may share a place.
    """
    reasons: dict[tuple[str, str], list[str | None]] = {}
    for dataset, training, blocks in runs:
        for place, block in blocks.items():
            for path, value in flatten(block).items():
                if value is not None:
                    reasons.setdefault((f"{place}.{path}", dataset), []).append(why_idle(training, (path,)))
    return [f"{path} has no effect on {dataset}: {whys[0]}" for (path, dataset), whys in reasons.items() if None not in whys]


def unreached_notes(runs: Iterable[tuple[str, str, TrainingConfig]]) -> list[str]:
    """Return a line for each part of the schedule that the epochs of trained runs do not reach, with the runs. Imports their losses.

    Args:
        runs: dataset, label and settings of each.
    """
    labels: dict[tuple[str, str], dict[str, None]] = {}
    for dataset, label, training in runs:
        for line in (*_unreached(training), *_unheated(training)):
            labels.setdefault((dataset, line), {})[label] = None
    return [f"{', '.join(of_line)} on {dataset}: {line}" for (dataset, line), of_line in labels.items()]


def _unreached(training: TrainingConfig) -> dict[str, tuple[str, ...]]:
    """Return a line for each part of the schedule that the run's epochs do not reach -> the settings without effect because of it."""
    schedule, memory, num_epochs = training.schedule, training.cross_batch_memory, training.num_epochs
    drops = {"step": schedule.milestones, "every": (schedule.every_epochs or 0,)}.get(schedule.kind, (0,))
    lines: dict[str, tuple[str, ...]] = {}
    if drops[0] >= num_epochs:
        of_drops = "schedule.milestones", "schedule.every_epochs", "schedule.factor"
        lines[f"the first drop is after {drops[0]} of {num_epochs} epochs"] = of_drops
    elif drops[-1] >= num_epochs:
        lines[f"the last drop is after {drops[-1]} of {num_epochs} epochs"] = ()
    if 0 < num_epochs <= schedule.warmup_epochs:
        lines[f"the warm-up takes {schedule.warmup_epochs:g} of {num_epochs} epochs: the learning rate does not reach its full value"] = ()
    if memory is not None and memory.after_epochs >= num_epochs:
        of_memory = "cross_batch_memory.size", "cross_batch_memory.after_epochs"
        lines[f"cross_batch_memory.after_epochs is {memory.after_epochs} of {num_epochs} epochs"] = of_memory
    return lines


def _unheated(training: TrainingConfig) -> list[str]:
    """Return a line if the loss, or a term of it, is to be heated and is not within the run's epochs."""
    configs, num_epochs = _loss_configs(training.loss.name, training.loss.options), training.num_epochs
    starts = [getattr(config, "heat_from", 0.0) for config in configs if getattr(config, "heated_alpha", None) is not None]
    late = [start for start in starts if round(start * num_epochs) >= num_epochs]
    return [f"loss.options.heat_from {start:g} heats none of the {num_epochs} epochs" for start in late]


def _loss_configs(name: str, options: Mapping[str, Any]) -> Iterator["LossConfig"]:
    """Yield the options of a loss and of its terms. Wrong ones are left out: they are refused elsewhere."""
    with suppress(DmlError):
        config = parse_loss_options(name, options)
        yield config
        for term in getattr(config, "terms", ()):
            yield from _loss_configs(term.name, term.options)


def _of_loss(training: TrainingConfig) -> dict[str, str]:
    config = next(_loss_configs(training.loss.name, training.loss.options), None)
    idle = {} if config is None else dict.fromkeys(config.without_effect, "the loss's other options disable it")
    for line in _unheated(training):
        idle |= dict.fromkeys(HEATED, line)
    return {f"{OPTIONS}{name}": why for name, why in idle.items()}


def _of_groups(training: TrainingConfig) -> dict[str, str]:
    """Return settings of groups without parameters, and those of the optimiser if each group with parameters has its own."""
    own, learning = training.optimiser.groups, ("backbone", *_learning_parts(training))
    idle: dict[str, str] = {}
    for path in OF_GROUPS:
        name = path.rpartition(".")[2]
        idle |= {f"{GROUPS}{group}.{name}": f"the {group} has no parameters" for group in ("head", "loss") if group not in learning}
        if all(getattr(own.get(group), name, None) is not None for group in learning):  # type: ignore[call-overload]
            idle[path] = "every group has its own"
    return idle


def _learning_parts(training: TrainingConfig) -> tuple[str, ...]:
    """Return which of head (with the pooling) and loss have parameters to train; both if they do not fit, which is refused elsewhere."""
    from dml_core.models.heads import build_head
    from dml_core.models.pooling import build_pooling

    with suppress(DmlError):
        head = build_head(training.model.head, SIZE, SIZE)
        loss = build_loss(training.loss.name, training.loss.options, SIZE, head.output_dim)
        parts = {"head": (head, build_pooling(training.model.pooling)), "loss": (loss,)}
        return tuple(name for name, of in parts.items() if any(weight.requires_grad for part in of for weight in part.parameters()))
    return "head", "loss"


def _of_batchnorm(training: TrainingConfig) -> dict[str, str]:
    from torch.nn.modules.batchnorm import _BatchNorm

    backbone = training.model.backbone
    has_batchnorm = any(isinstance(module, _BatchNorm) for module in backbone_shapes(backbone).modules())
    return {} if has_batchnorm else dict.fromkeys(BATCHNORM, f"backbone '{backbone.name}' has no BatchNorm")
