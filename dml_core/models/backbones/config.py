"""Settings of a backbone: its name and its initial weights."""

from typing import Literal

from pydantic import Field, model_validator

from dml_core.config import Config


class BackboneConfig(Config):
    """A backbone by name. Options of another family are rejected.

    Attributes:
        name: a key of `BACKBONES`, or `timm:<model>`.
        weights: "none" (random, seeded), "imagenet" (published), the path of a state dict saved by torch, or its http(s) or s3
            address.
        weights_sha256: the file's SHA-256; required for an address, and by a project's runs for a path.
        width: channels of the first layer of `small_cnn`; other backbones have their published widths.
        last_stride: stride of a ResNet's last stage; 1 (SGSL's released code) doubles the resolution of its maps.
        rbr: omit a ResNet's last BatchNorm and ReLU (SGSL, "remove the last ReLU and BN"). "published" removes these two; "released"
            also removes the last block's other ReLUs, because all three are one module in the released code.
        stem_pool: a ResNet's first pooling: "padded" as in torchvision, or "ceil" without padding (SGSL's released code).
    """

    name: str
    weights: str = "none"
    weights_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    width: int = Field(default=32, ge=8, le=4096, multiple_of=8)
    last_stride: Literal[1, 2] = 2
    rbr: Literal["none", "published", "released"] = "none"
    stem_pool: Literal["padded", "ceil"] = "padded"

    @model_validator(mode="after")
    def _fits(self) -> "BackboneConfig":
        if "://" in self.weights and self.weights_sha256 is None:
            raise ValueError(f"weights '{self.weights}' come from elsewhere: give their weights_sha256")
        if self.weights in ("none", "imagenet") and self.weights_sha256 is not None:
            raise ValueError(f"weights '{self.weights}' are no file: remove weights_sha256")
        foreign = set() if self.name.startswith("resnet") else {"last_stride", "rbr", "stem_pool"}
        foreign |= set() if self.name == "small_cnn" else {"width"}
        unread = foreign & self.model_dump(exclude_defaults=True).keys()
        if unread:
            raise ValueError(f"backbone '{self.name}' does not read '{min(unread)}': remove it")
        return self
