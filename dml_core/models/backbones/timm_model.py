"""Any timm model by name (`timm:<model>`), without pooling and classifier. A transformer's patches become positions of a map."""

from typing import Any

from torch import Tensor, nn

from dml_core.config import nearest_hint, unknown_name
from dml_core.errors import ConfigError, first_line
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.registry import TIMM_PREFIX
from dml_core.models.backbones.weights import StateDict, start_from


class TimmModel(nn.Module):
    """A timm model's `forward_features`, converted to feature maps from the model's own layout."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        import timm

        name = config.name.removeprefix(TIMM_PREFIX)
        published_config(name)  # refuses an unknown model
        self.model: Any = timm.create_model(name, num_classes=0)
        self.name = name
        self.num_features: int = self.model.num_features
        self.channels_last = getattr(self.model, "output_fmt", "NCHW") == "NHWC"
        has_class_token = any("cls_token" in parameter for parameter, _ in self.model.named_parameters())
        if has_class_token and not hasattr(self.model, "num_prefix_tokens"):
            raise ConfigError(f"backbone '{config.name}' does not declare where its features have the class token; choose another model")
        self.num_prefix_tokens: int = getattr(self.model, "num_prefix_tokens", 0)
        classifier = self.model.default_cfg.get("classifier") or ()
        left_out = (classifier,) if isinstance(classifier, str) else tuple(classifier)
        start_from(self.model, config, tuple(f"{layer}." for layer in left_out), lambda: _download_imagenet(name))

    def forward(self, images: Tensor) -> Tensor:
        """Feature maps (N, F, h, w) of images (N, 3, H, W); (N, F, L, 1) for the L patches of a transformer, without the class token."""
        try:
            features = self.model.forward_features(images)
        except (AssertionError, RuntimeError) as error:  # many transformers take images of one size only
            if isinstance(error, RuntimeError) and not images.is_meta:
                raise  # a check before the training runs it on the device "meta"; elsewhere the machine may be the cause
            height, width = images.shape[2:]
            raise ConfigError(
                f"timm's '{self.name}' does not take images of {height} x {width} pixels ({first_line(error)}); set transform.crop_size"
            ) from None
        if not isinstance(features, Tensor):
            raise ConfigError(
                f"timm's '{self.name}' returns several features ({type(features).__name__}), not one map; choose another model"
            )
        if features.dim() == 3:
            return features[:, self.num_prefix_tokens :].transpose(1, 2)[..., None]
        return features.permute(0, 3, 1, 2) if self.channels_last else features


def published_config(name: str) -> Any:
    """Return timm's description of the published weights of a model, `<model>` or `<model>.<tag>`; None if there are none.

    Raises:
        ConfigError: unknown model or tag; the message suggests the nearest name.
    """
    import timm

    if not timm.is_model(name):
        raise ConfigError(f"unknown timm model '{name}'{nearest_hint(name, timm.list_models())}")
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError:  # an unknown tag
        raise unknown_name("timm model", name, timm.list_pretrained(f"{name.partition('.')[0]}.*")) from None


def _download_imagenet(name: str) -> StateDict:
    import timm

    try:
        return dict(timm.create_model(name, pretrained=True, num_classes=0).state_dict())
    except Exception as error:  # noqa: BLE001 - urllib, http and hub clients raise a dozen kinds, and all mean the same here
        raise ConfigError(
            f"timm's pretrained '{name}' cannot be downloaded ({first_line(error)}); download its weights by hand and set weights: <file>"
        ) from None
