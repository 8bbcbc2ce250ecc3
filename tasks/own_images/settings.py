"""Settings of the standing comparison for a user's images: changes of the protocol with which every variant runs on them.

Without a backbone they keep the protocol's network, input size, batch size and number of epochs as far as the images allow. A pretrained
backbone is fine-tuned: it keeps its BatchNorm statistics and learns at a tenth of the embedding layer's rate, and its input is that of its
training, the same scaling of pixels, resize and crop, or smaller ones for small images. These are the project's assumptions, not tuned
values.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dml_core.config import located, parse
from dml_core.data.store.rows import Counts
from dml_core.data.store.split_config import ValidationConfig, num_held_out
from dml_core.data.views.samplers import SamplerConfig
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import ConfigError
from dml_core.files import file_sha256
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.trained_on import TrainedOn, trained_on

if TYPE_CHECKING:
    from dml_core.data.check import CheckReport

_NUM_STEPS = 200  # fewest of a training, up to `_MAX_EPOCHS`: about as many as `synthetic`, the embedded dataset, gets
_MAX_EPOCHS = 60
_FINE_TUNING_STEPS, _FINE_TUNING_EPOCHS = 300, (10, 30)
_EMBEDDING_DIM = 128


def fitted_settings(protocol: dict[str, Any], report: "CheckReport") -> dict[str, Any]:
    """Return a dataset's settings in the comparison, without those that equal `protocol` (`comparison.protocol` as written in the file).

    Raises:
        ConfigError: a setting of the protocol is invalid.
    """
    planned, kept = parse(SamplerConfig, protocol.get("sampler", {}), "sampler"), _kept_for_training(protocol, report)
    fitted = _sampler(planned, kept)
    sampler = {key: value for key, value in fitted.items() if value != getattr(planned, key)}
    num_batches = -(-kept.num_images // fitted["batch_size"])
    num_epochs = min(_MAX_EPOCHS, -(-_NUM_STEPS // num_batches))
    more_epochs = num_epochs if num_epochs > protocol["num_epochs"] else None
    settings = {"transform": _transform(protocol, report), "sampler": sampler, "num_epochs": more_epochs}
    return {key: value for key, value in settings.items() if value}


def pretrained_backbone(name: str, weights: Path | None) -> BackboneConfig:
    """Return a backbone with its ImageNet weights, or with those of a file, after building it once. Imports torch.

    Args:
        name: a backbone's name, or `timm:<model>`.
        weights: a state dict saved by torch, with the backbone's names; None for the published weights, which are downloaded if needed.

    Raises:
        ConfigError: the backbone is unknown, or the weights are missing, damaged or of another network.
    """
    from dml_core.models.backbones.registry import build_backbone

    values: dict[str, Any] = {"name": name, "weights": "imagenet"}
    if weights is not None:
        if not weights.is_file():
            raise ConfigError(f"--weights {weights}: no such file")
        values |= {"weights": str(weights.resolve()), "weights_sha256": file_sha256(weights)}
    backbone = BackboneConfig(**values)
    with located(f"--backbone {name}"):
        build_backbone(backbone)
    return backbone


def fine_tuning_settings(protocol: dict[str, Any], report: "CheckReport", backbone: BackboneConfig) -> dict[str, Any]:
    """Return a dataset's settings in the comparison, with the sampler of `protocol` (`comparison.protocol` as written in the file).

    Raises:
        ConfigError: a setting of the protocol is invalid, or nothing is known of the images that the backbone was trained on.
    """
    images = trained_on(backbone.name)
    if images is None:
        raise ConfigError(f"--backbone {backbone.name}: the images that it was trained on are not known; write its settings by hand")
    kept = _kept_for_training(protocol, report)
    sampler = _sampler(parse(SamplerConfig, protocol.get("sampler", {}), "sampler"), kept)
    num_batches = -(-kept.num_images // sampler["batch_size"])
    return {
        "model": {
            "backbone": backbone.model_dump(exclude_defaults=True),
            "pooling": {"kind": "average"},
            "head": {"embedding_dim": _EMBEDDING_DIM},
            "freeze_batchnorm": "statistics",
        },
        "transform": _pretrained_transform(report, images),
        "sampler": sampler,
        "optimiser": {
            "name": "adamw",
            "learning_rate": 1e-4,
            "weight_decay": 1e-4,
            "groups": {"head": {"learning_rate": 1e-3}, "loss": {"learning_rate": 1e-2}},
        },
        "num_epochs": min(_FINE_TUNING_EPOCHS[1], max(_FINE_TUNING_EPOCHS[0], -(-_FINE_TUNING_STEPS // num_batches))),
    }


def _sampler(planned: SamplerConfig, kept: Counts) -> dict[str, int]:
    """Return batches of about the planned size, with no more classes and images per class than the dataset has."""
    num_images, num_classes = kept.num_images, kept.num_classes
    balanced = planned.num_classes_per_batch * planned.num_samples_per_class
    samples = max(2, min(num_images // num_classes, balanced // min(num_classes, planned.num_classes_per_batch)))
    if num_classes >= planned.num_classes_per_batch:
        samples = min(samples, planned.num_samples_per_class)
    return {
        "batch_size": _batch_size(planned.batch_size, num_images),
        "num_classes_per_batch": max(2, min(num_classes, balanced // samples)),
        "num_samples_per_class": samples,
    }


def _boxes(report: "CheckReport") -> dict[str, Any]:
    """Return the setting that crops images to their boxes, if every image has one."""
    return {"crop_to_box": True} if report.num_boxes == sum(counts.num_images for counts in report.counts.values()) else {}


def _transform(protocol: dict[str, Any], report: "CheckReport") -> dict[str, Any]:
    """Return settings that resize images to the network's input size, or to their median if smaller; other crops resize automatically."""
    planned = parse(TransformConfig, protocol.get("transform", {}), "transform")
    boxes = _boxes(report)
    if planned.crop != "padded" or planned.crop_size is None:
        return boxes
    smallest, middle, largest = report.short_sides
    side = min(planned.crop_size, middle)
    resize = {} if smallest == largest == side and not boxes else {"train_resize": side, "test_resize": side}
    return boxes | resize | {"crop_size": side, "padding": max(1, round(planned.padding * side / planned.crop_size))}


def _pretrained_transform(report: "CheckReport", images: TrainedOn) -> dict[str, Any]:
    """Return views as the backbone was trained; images smaller than its input keep their size, unless it accepts no other."""
    median = report.short_sides[1]
    side = images.side if images.has_fixed_side else min(images.side, median)
    resize = round(images.resize * side / images.side)
    return _boxes(report) | {
        "train_resize": resize,
        "test_resize": resize,
        "interpolation": images.interpolation,
        "crop": "random_resized",
        "crop_area": [0.16, 1.0],
        "crop_size": side,
        "padding": 0,
        "scaling": images.scaling,
    }


def _kept_for_training(protocol: dict[str, Any], report: "CheckReport") -> Counts:
    """Return the images and classes without the classes that the protocol holds out for validation, which count as of average size."""
    train = report.counts["train"]
    if protocol.get("validation") is None:
        return train
    held_out = num_held_out(parse(ValidationConfig, protocol["validation"], "validation"), train.num_classes)
    num_classes = max(2, train.num_classes - held_out)
    return Counts(train.num_images * num_classes // train.num_classes, num_classes)


def _batch_size(planned: int, num_images: int) -> int:
    """Return the planned size, reduced if the last batch would be a single image, which BatchNorm cannot take."""
    size = min(planned, num_images)
    while size > 2 and num_images % size == 1:
        size -= 1
    return size
