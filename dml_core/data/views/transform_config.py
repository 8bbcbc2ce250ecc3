"""Settings of a protocol's views (made by `transforms.py`); light to import."""

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from dml_core.config import Config
from dml_core.data.store.sizes import MAX_SIDE, Interpolation, Resize, Side
from dml_core.errors import ConfigError

Scaling = Literal["rgb-imagenet", "bgr-caffe", "bgr-bvlc", "zero-one", "minus-one-one"]


class Jitter(Config):
    """Strengths of the colour jitter, as defined by torchvision; 0 leaves the property unchanged."""

    brightness: float = Field(default=0.0, ge=0.0, le=1.0)
    contrast: float = Field(default=0.0, ge=0.0, le=1.0)
    saturation: float = Field(default=0.0, ge=0.0, le=1.0)
    hue: float = Field(default=0.0, ge=0.0, le=0.5)


class TransformConfig(Config):
    """Views of one protocol.

    Attributes:
        crop_to_box: crop the image to its bounding box first (the papers' "cropped" results).
        train_resize, test_resize: resize before the crop; an int is the short side, (height, width) ignores the aspect ratio.
        interpolation: interpolation of every resize, always antialiased.
        crop: training crop. "random" takes a crop_size square anywhere, "random_exclusive" anywhere except at the last offset of each
            axis (heated-up softmax's released code: 0 to 31 of 0 to 32), "random_resized" a part of the image resized to crop_size,
            "padded" a crop_size square after padding with black (small images).
        crop_size: side of the input in pixels; a test view is the centre square of this size. Training with crop "none" needs null.
        crop_area, crop_ratio: area as a share of the image, and width divided by height, of a random_resized crop.
        padding: pixels on every side for "padded".
        flip: mirror a training view left to right with probability 0.5.
        jitter: colour jitter of training views.
        jitter_first: jitter before the crop, so that contrast uses the whole image (SGSL's released code, Boudiaf's); else last.
        scaling: channel order and range; "bgr-caffe" is BGR 0 to 255 minus (104, 117, 128), "bgr-bvlc" minus (104, 117, 123).
        decoder: "nvjpeg" decodes JPEGs and computes views on the worker's GPU, in training, validation and embedding; it needs a GPU. The
            pixels differ slightly from those of "cpu", so it is part of a run's identity.
    """

    crop_to_box: bool = False
    train_resize: Resize | None = None
    test_resize: Resize | None = None
    interpolation: Interpolation = "bilinear"
    crop: Literal["none", "random", "random_exclusive", "random_resized", "padded"] = "none"
    crop_size: Side | None = None
    crop_area: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    padding: int = Field(default=0, ge=0, le=MAX_SIDE)
    flip: bool = False
    jitter: Jitter = Jitter()
    jitter_first: bool = False
    scaling: Scaling = "rgb-imagenet"
    decoder: Literal["cpu", "nvjpeg"] = "cpu"

    @model_serializer(mode="wrap")
    def _without_default_decoder(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit the CPU's decoder, so that settings are serialised, and hashed into identities, as before there was another."""
        values: dict[str, Any] = serialise(self)
        if self.decoder == "cpu":
            values.pop("decoder", None)
        return values

    @model_validator(mode="after")
    def _consistent(self) -> "TransformConfig":
        if self.crop != "none" and self.crop_size is None:
            raise ValueError(f"crop '{self.crop}' needs crop_size")
        if self.crop == "padded" and not self.padding:
            raise ValueError("crop 'padded' needs padding above 0")
        if self.crop != "padded" and self.padding:
            raise ValueError(f"crop is '{self.crop}', so padding has no place: set it to null")
        for name in ("crop_area", "crop_ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} must rise from above 0, found ({low}, {high})")
        if self.crop_area[1] > 1:
            raise ValueError(f"crop_area is a share of the image, found {self.crop_area[1]}")
        if self.decoder == "nvjpeg" and self.interpolation == "lanczos":
            raise ValueError("interpolation 'lanczos' is computed by Pillow on the CPU; with decoder 'nvjpeg' choose bilinear or bicubic")
        return self


def check_training_crop(config: TransformConfig) -> None:
    """Reject a crop size that only the test views would have; called before training.

    Raises:
        ConfigError: `crop` is "none", and there is a `crop_size`.
    """
    if config.crop == "none" and config.crop_size is not None:
        raise ConfigError(
            "transform: crop is 'none', so crop_size would crop only test images: choose a crop for training, or set crop_size to null"
        )
