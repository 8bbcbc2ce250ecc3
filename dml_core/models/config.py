"""Settings of an embedding network: pooling, head and the whole (the backbone's are in `backbones/config.py`); light to import."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dml_core.config import Config
from dml_core.models.backbones.config import BackboneConfig

READ_BY_KIND = {
    "identity": set[str](),
    "linear": {"embedding_dim", "bias", "initial", "normalise_in_training"},
    "bn": {"embedding_dim", "initial"},
    "two_layer": {"embedding_dim", "test_layer", "batchnorm"},
    "bn_neck": {"embedding_dim", "learn_scale", "learn_shift", "num_bn_relu"},
}


class HeadConfig(Config):
    """Options; setting an option that the kind does not read is an error.

    Attributes:
        kind: "identity"; "linear" (SoftTriple, tuplet margin; heated-up softmax's LN and HLN with `normalise_in_training`); "bn"
            (heated-up softmax's BN and HBN); "two_layer" (discriminative loss); "bn_neck" (SGSL, Boudiaf).
        embedding_dim: E; None omits bn_neck's projection, so that E = F (SGSL's 2048-d results). "identity" may have None.
        bias: use a bias in the linear layer.
        initial: initial weights of the linear layer of "linear" and "bn": "uniform", torch's default; or "slim", as in heated-up softmax's
            released code: TF-slim's normal of standard deviation sqrt(2 / F) (0.044 for 1024 features) and zero biases.
        normalise_in_training: normalise the training output to unit length.
        test_layer: layer of "two_layer" that gives the test embedding (the paper's Table 2; published "second_last").
        batchnorm: use the embedding layer of "bn" in "two_layer", so that the two heads differ only in the last layer.
        learn_scale: train the scale of bn_neck's BatchNorm (SGSL's paper: no; its released code: yes).
        learn_shift: train the shift of bn_neck's BatchNorm (SGSL: no).
        num_bn_relu: BatchNorm-ReLU pairs before bn_neck's BatchNorm (SGSL's Figure 4; 0).
        normalise_at_test: normalise test embeddings to unit length; with `test_layer` "last" they always are.
    """

    kind: Literal["identity", "linear", "bn", "two_layer", "bn_neck"] = "linear"
    embedding_dim: int | None = Field(default=64, ge=1, le=65_536)
    bias: bool = True
    initial: Literal["uniform", "slim"] = "uniform"
    normalise_in_training: bool = False
    test_layer: Literal["second_last", "last"] = "second_last"
    batchnorm: bool = False
    learn_scale: bool = False
    learn_shift: bool = False
    num_bn_relu: int = Field(default=0, ge=0, le=100)
    normalise_at_test: bool = True

    @model_validator(mode="after")
    def _only_what_the_kind_reads(self) -> Self:
        changed = self.model_dump(exclude_defaults=True, exclude_none=True).keys()
        unread = sorted(changed - READ_BY_KIND[self.kind] - {"kind", "normalise_at_test"})
        if unread:
            raise ValueError(f"head kind '{self.kind}' does not read '{unread[0]}': remove it")
        if self.test_layer == "last" and not self.normalise_at_test:
            raise ValueError("test_layer 'last' gives test embeddings of unit length: remove 'normalise_at_test'")
        if self.embedding_dim is None and self.kind not in ("bn_neck", "identity"):
            raise ValueError(f"head kind '{self.kind}' needs an embedding_dim: only 'bn_neck' and 'identity' can do without")
        return self


class PoolingConfig(Config):
    """Options; setting an option that the kind does not read is an error.

    Attributes:
        kind: "average", "max", "average_max" (their sum, as in Proxy-Anchor's code) or "gem".
        gem_power: GeM's p (SGSL's released code 3).
        learn_gem_power: learn p as a parameter, initially `gem_power`.
    """

    kind: Literal["average", "max", "average_max", "gem"] = "average"
    gem_power: float = Field(default=3.0, gt=0.0)
    learn_gem_power: bool = False

    @model_validator(mode="after")
    def _only_what_the_kind_reads(self) -> Self:
        unread = sorted(self.model_dump(exclude_defaults=True).keys() - {"kind"})
        if unread and self.kind != "gem":
            raise ValueError(f"pooling kind '{self.kind}' does not read '{unread[0]}': remove it")
        return self


class ModelConfig(Config):
    """The three parts of an embedding network.

    Attributes:
        backbone: images to feature maps.
        pooling: feature maps to one vector per image.
        head: that vector to the training output and the test embedding.
        freeze_batchnorm: frozen parts of the backbone's BatchNorm: "none", only the "scale" (TF-slim, which has none), the running
            "statistics" (SoftTriple on CUB and Cars), or statistics, scale and shift ("all", SGSL's released code).
        batchnorm_momentum: weight of a batch's statistics in the backbone's running ones; None keeps 0.1 (TensorFlow's decay is 1 minus
            this; heated-up softmax's released code: 0.05).
        memory_format: memory layout of weights and feature maps; it changes the last bits of results. "channels_last" (a pixel's channels
            are adjacent) trains in 0.7 to 0.85 of the time on CPUs, and tensor cores prefer it.
    """

    backbone: BackboneConfig
    pooling: PoolingConfig = PoolingConfig()
    head: HeadConfig = HeadConfig()
    freeze_batchnorm: Literal["none", "scale", "statistics", "all"] = "none"
    batchnorm_momentum: float | None = Field(default=None, gt=0.0, le=1.0)
    memory_format: Literal["channels_last", "contiguous"] = "channels_last"
