"""Settings of the standing comparison that fine-tune a pretrained backbone on a user's images.

The backbone keeps its BatchNorm statistics and learns at a tenth of the embedding layer's rate. Its input is that of its training: the same
scaling of pixels, resize and crop, or smaller ones for small images. These are the project's assumptions, not tuned values.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dml_core.config import located
from dml_core.errors import ConfigError
from dml_core.files import file_sha256
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.trained_on import TrainedOn, trained_on
from tasks.own_images.settings import fitted_sampler, has_all_boxes

if TYPE_CHECKING:
    from dml_core.data.check import CheckReport

_NUM_STEPS, _EPOCHS = 300, (10, 30)
_EMBEDDING_DIM = 128


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
    sampler = fitted_sampler(protocol, report)
    num_batches = -(-report.counts["train"].num_images // sampler["batch_size"])
    return {
        "model": {
            "backbone": backbone.model_dump(exclude_defaults=True),
            "pooling": {"kind": "average"},
            "head": {"embedding_dim": _EMBEDDING_DIM},
            "freeze_batchnorm": "statistics",
        },
        "transform": _transform(report, images),
        "sampler": sampler,
        "optimiser": {
            "name": "adamw",
            "learning_rate": 1e-4,
            "weight_decay": 1e-4,
            "groups": {"head": {"learning_rate": 1e-3}, "loss": {"learning_rate": 1e-2}},
        },
        "num_epochs": min(_EPOCHS[1], max(_EPOCHS[0], -(-_NUM_STEPS // num_batches))),
    }


def _transform(report: "CheckReport", images: TrainedOn) -> dict[str, Any]:
    """Return views as the backbone was trained; images smaller than its input keep their size, unless it accepts no other."""
    median = report.short_sides[1]
    side = images.side if images.has_fixed_side else min(images.side, median)
    resize = round(images.resize * side / images.side)
    boxes = {"crop_to_box": True} if has_all_boxes(report) else {}
    return boxes | {
        "train_resize": resize,
        "test_resize": resize,
        "interpolation": images.interpolation,
        "crop": "random_resized",
        "crop_area": [0.16, 1.0],
        "crop_size": side,
        "padding": 0,
        "scaling": images.scaling,
    }
