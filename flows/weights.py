"""Weights from which networks start, checked before Ray starts: each network is built once with its weights."""

from collections.abc import Callable, Sequence
from functools import cache

from dml_core.config import located
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.published import PUBLISHED, is_kept
from tasks.environment import ray_cluster
from tasks.runs.specs import RunSpec
from tasks.storage import enable_s3_weights


def bring_weights(to_train: Sequence[RunSpec], say: Callable[[str], None]) -> None:
    """Fetch the weights of runs that will train, and check that they fit. On a cluster each node does so itself.

    Args:
        to_train: the runs.
        say: reports a download.

    Raises:
        ConfigError: weights are missing, cannot be downloaded, are damaged, or are those of another network.
    """
    if ray_cluster() is not None:
        return
    for spec in to_train:
        backbone = spec.training.model.backbone
        if backbone.weights == "imagenet" and backbone.name in PUBLISHED and not is_kept(PUBLISHED[backbone.name]):
            say(f"downloading the ImageNet weights of {backbone.name} to {PUBLISHED[backbone.name].path}")
        with located(spec.where):
            _build(backbone)


@cache
def _build(backbone: BackboneConfig) -> None:
    """Build a network that starts from weights; a network that did is not built again in this process."""
    if backbone.weights == "none":
        return
    from dml_core.models.backbones.registry import build_backbone

    enable_s3_weights()
    build_backbone(backbone)
