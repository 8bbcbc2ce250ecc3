"""Settings of the standing comparison for a user's images: the changes of the protocol that let every variant run on them.

They keep the protocol's input size, batch size and number of epochs as far as the images allow.
"""

from typing import TYPE_CHECKING, Any

from dml_core.config import parse
from dml_core.data.store.split_config import ValidationConfig, num_held_out
from dml_core.data.views.samplers import SamplerConfig
from dml_core.data.views.transform_config import TransformConfig

if TYPE_CHECKING:
    from dml_core.data.check import CheckReport

_NUM_STEPS = 200  # fewest of a training, up to `_MAX_EPOCHS`: about as many as `synthetic`, the embedded dataset, gets
_MAX_EPOCHS = 60


def fitted_settings(protocol: dict[str, Any], report: "CheckReport") -> dict[str, Any]:
    """Return a dataset's settings in the comparison, without those that equal `protocol` (`comparison.protocol` as written in the file).

    Raises:
        ConfigError: a setting of the protocol is invalid.
    """
    planned = parse(SamplerConfig, protocol.get("sampler", {}), "sampler")
    fitted = fitted_sampler(protocol, report)
    sampler = {key: value for key, value in fitted.items() if value != getattr(planned, key)}
    num_batches = -(-report.counts["train"].num_images // fitted["batch_size"])
    num_epochs = min(_MAX_EPOCHS, -(-_NUM_STEPS // num_batches))
    more_epochs = num_epochs if num_epochs > protocol["num_epochs"] else None
    settings = {"transform": _transform(protocol, report), "sampler": sampler, "num_epochs": more_epochs}
    return {key: value for key, value in settings.items() if value}


def fitted_sampler(protocol: dict[str, Any], report: "CheckReport") -> dict[str, int]:
    """Return batches of about the protocol's size, with no more classes and images per class than the dataset has.

    Raises:
        ConfigError: a setting of the protocol is invalid.
    """
    planned = parse(SamplerConfig, protocol.get("sampler", {}), "sampler")
    num_images, num_classes = report.counts["train"].num_images, _num_training_classes(protocol, report)
    balanced = planned.num_classes_per_batch * planned.num_samples_per_class
    samples = max(2, min(num_images // num_classes, balanced // min(num_classes, planned.num_classes_per_batch)))
    if num_classes >= planned.num_classes_per_batch:
        samples = min(samples, planned.num_samples_per_class)
    return {
        "batch_size": _batch_size(planned.batch_size, num_images),
        "num_classes_per_batch": max(2, min(num_classes, balanced // samples)),
        "num_samples_per_class": samples,
    }


def has_all_boxes(report: "CheckReport") -> bool:
    """Return whether every image has a box."""
    return report.num_boxes == sum(counts.num_images for counts in report.counts.values())


def _transform(protocol: dict[str, Any], report: "CheckReport") -> dict[str, Any]:
    """Return settings that resize images to the network's input size, or to their median if smaller; other crops resize automatically."""
    planned = parse(TransformConfig, protocol.get("transform", {}), "transform")
    boxes = {"crop_to_box": True} if has_all_boxes(report) else {}
    if planned.crop != "padded" or planned.crop_size is None:
        return boxes
    smallest, middle, largest = report.short_sides
    side = min(planned.crop_size, middle)
    resize = {} if smallest == largest == side and not boxes else {"train_resize": side, "test_resize": side}
    return boxes | resize | {"crop_size": side, "padding": max(1, round(planned.padding * side / planned.crop_size))}


def _num_training_classes(protocol: dict[str, Any], report: "CheckReport") -> int:
    """Return the number of classes without those that the protocol holds out for validation (`dml_core.data.store.splits`)."""
    num_classes = report.counts["train"].num_classes
    if protocol.get("validation") is None:
        return num_classes
    return max(2, num_classes - num_held_out(parse(ValidationConfig, protocol["validation"], "validation"), num_classes))


def _batch_size(planned: int, num_images: int) -> int:
    """Return the planned size, reduced if the last batch would be a single image, which BatchNorm cannot take."""
    size = min(planned, num_images)
    while size > 2 and num_images % size == 1:
        size -= 1
    return size
