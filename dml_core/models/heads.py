"""Embedding heads: from a pooled feature to the training output, which the loss sees (`forward`), and to the test embedding (`embed`).

Shapes: N samples, F backbone features, D training output dimensions, E test embedding dimensions, C classes.
"""

from torch import Tensor, nn

from dml_core.errors import ConfigError
from dml_core.float32 import at_least_float32
from dml_core.initial_weights import SLIM, start_as_tensorflow
from dml_core.models.config import HeadConfig
from dml_core.unit_length import unit_length


class Head(nn.Module):
    """Base of all heads; as it is, that of kind "identity".

    Attributes:
        output_dim: D, dimensions of the training output.
        embedding_dim: E, dimensions of the test embedding.
    """

    def __init__(self, output_dim: int, embedding_dim: int, config: HeadConfig) -> None:
        super().__init__()
        self.output_dim = output_dim
        self.embedding_dim = embedding_dim
        self.normalise_in_training, self.normalise_at_test = config.normalise_in_training, config.normalise_at_test

    def forward(self, features_NF: Tensor) -> Tensor:
        """Return the training output, (N, D), normalised if so configured."""
        output_ND = self.test_features(features_NF)
        return unit_length(output_ND) if self.normalise_in_training else output_ND

    def embed(self, features_NF: Tensor) -> Tensor:
        """Return the test embedding, (N, E), in float32 or better, normalised if so configured."""
        embeddings_NE = at_least_float32(self.test_features(features_NF))
        return unit_length(embeddings_NE) if self.normalise_at_test else embeddings_NE

    def test_features(self, features_NF: Tensor) -> Tensor:
        """Return the test embedding before normalisation, (N, E); here the feature itself."""
        return features_NF


class LinearHead(Head):
    """One linear layer."""

    def __init__(self, config: HeadConfig, in_features: int, embedding_dim: int) -> None:
        super().__init__(embedding_dim, embedding_dim, config)
        self.linear = nn.Linear(in_features, embedding_dim, bias=config.bias)
        if config.initial == "slim":
            start_as_tensorflow(self.linear, SLIM)

    def test_features(self, features_NF: Tensor) -> Tensor:
        """Return the linear layer's output, (N, E)."""
        return self.linear(features_NF)


class BatchNormHead(Head):
    """BN(W f) / sqrt(k), heated-up softmax's eq. 7: no scale, a learned shift, momentum and epsilon as released."""

    def __init__(self, config: HeadConfig, in_features: int, embedding_dim: int) -> None:
        super().__init__(embedding_dim, embedding_dim, config)
        self.linear = nn.Linear(in_features, embedding_dim, bias=False)
        if config.initial == "slim":
            start_as_tensorflow(self.linear, SLIM)
        self.norm = nn.BatchNorm1d(embedding_dim, eps=0.001, momentum=0.05)  # TensorFlow's decay 0.95
        self.norm.weight.requires_grad_(False)

    def test_features(self, features_NF: Tensor) -> Tensor:
        """Return the batch-normalised embedding, (N, E), whose norm is near 1."""
        return self.norm(self.linear(features_NF)) / self.embedding_dim**0.5


class TwoLayerHead(Head):
    """Two linear layers of E and C outputs (discriminative loss, section 4.2); the training output is the last one's, at unit length.

    The first may be `BatchNormHead`'s whole embedding layer.
    """

    def __init__(self, config: HeadConfig, in_features: int, embedding_dim: int, num_classes: int) -> None:
        last = config.test_layer == "last"
        super().__init__(num_classes, num_classes if last else embedding_dim, config)
        self.first: nn.Module = nn.Linear(in_features, embedding_dim)
        if config.batchnorm:
            self.first = BatchNormHead(config, in_features, embedding_dim)
        self.second = nn.Linear(embedding_dim, num_classes)  # no ReLU between the layers: the paper mentions none (assumed)
        self.test_at_last = last

    def forward(self, features_NF: Tensor) -> Tensor:
        """Return the unit-length output of the last layer, (N, C)."""
        return unit_length(self.second(self.first(features_NF)))

    def test_features(self, features_NF: Tensor) -> Tensor:
        """Return the output of the layer that gives the test embedding, (N, E)."""
        return self.forward(features_NF) if self.test_at_last else self.first(features_NF)


class BatchNormNeck(Head):
    """SGSL's neck: optional projection, Figure 4's optional BatchNorm-ReLU pairs, BatchNorm."""

    def __init__(self, config: HeadConfig, in_features: int) -> None:
        dim = config.embedding_dim or in_features
        super().__init__(dim, dim, config)
        layers: list[nn.Module] = []
        if config.embedding_dim is not None:
            projection = nn.Linear(in_features, dim, bias=False)
            nn.init.kaiming_normal_(projection.weight, mode="fan_out")  # as released
            layers.append(projection)
        for _ in range(config.num_bn_relu):
            layers += [nn.BatchNorm1d(dim), nn.ReLU()]
        last = nn.BatchNorm1d(dim)
        last.weight.requires_grad_(config.learn_scale)
        last.bias.requires_grad_(config.learn_shift)
        self.layers = nn.Sequential(*layers, last)

    def test_features(self, features_NF: Tensor) -> Tensor:
        """Return the last BatchNorm's output, (N, E)."""
        return self.layers(features_NF)


def build_head(config: HeadConfig, in_features: int, num_classes: int) -> Head:
    """Build the configured head over `in_features` backbone features.

    Raises:
        ConfigError: fewer than one class.
    """
    if num_classes < 1:
        raise ConfigError(f"a network is trained on one class at least, found num_classes {num_classes}")
    if config.kind == "identity":
        return Head(in_features, in_features, config)
    if config.kind == "bn_neck":
        return BatchNormNeck(config, in_features)
    assert config.embedding_dim is not None
    if config.kind == "linear":
        return LinearHead(config, in_features, config.embedding_dim)
    if config.kind == "bn":
        return BatchNormHead(config, in_features, config.embedding_dim)
    return TwoLayerHead(config, in_features, config.embedding_dim, num_classes)
