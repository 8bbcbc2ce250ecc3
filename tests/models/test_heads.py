"""Heads: the loss's inputs, the tested embeddings, and the trained parameters."""

import pytest
import torch
from torch.nn import functional

from dml_core.config import parse
from dml_core.errors import ConfigError
from dml_core.models.config import READ_BY_KIND, HeadConfig
from dml_core.models.heads import build_head

FEATURES = torch.randn(16, 12, generator=torch.Generator().manual_seed(0)) * 3 + 1
SMALL = {
    "identity": {},
    "linear": {"embedding_dim": 4},
    "bn": {"embedding_dim": 4},
    "two_layer": {"embedding_dim": 4},
    "bn_neck": {"embedding_dim": 4},
}


def head(**options):
    torch.manual_seed(0)
    return build_head(HeadConfig(**options), 12, num_classes=7)


def lengths(embeddings):
    return embeddings.norm(dim=1)


@pytest.mark.parametrize("kind", READ_BY_KIND)
def test_every_kind_declares_the_sizes_that_it_gives(kind):
    built = head(kind=kind, **SMALL[kind])
    assert built(FEATURES).shape == (16, built.output_dim)
    assert built.embed(FEATURES).shape == (16, built.embedding_dim)
    torch.testing.assert_close(lengths(built.embed(FEATURES)), torch.ones(16))


@pytest.mark.parametrize("kind", READ_BY_KIND)
def test_test_embeddings_are_as_they_come_without_normalisation(kind):
    raw = head(kind=kind, normalise_at_test=False, **SMALL[kind]).eval().embed(FEATURES)
    assert not torch.allclose(lengths(raw), torch.ones(16))
    torch.testing.assert_close(functional.normalize(raw), head(kind=kind, **SMALL[kind]).eval().embed(FEATURES))


def test_default_is_a_linear_layer_with_bias_to_64():
    built = build_head(HeadConfig(), 12, 7)
    assert built(FEATURES).shape == (16, 64)
    torch.testing.assert_close(built(FEATURES), FEATURES @ built.linear.weight.T + built.linear.bias)


def test_linear_head_normalises_what_the_loss_sees_on_request():
    built = head(kind="linear", embedding_dim=4, normalise_in_training=True)
    torch.testing.assert_close(lengths(built(FEATURES)), torch.ones(16))


@pytest.mark.parametrize("kind", ["linear", "bn"])
@pytest.mark.parametrize(("initial", "deviation"), [("uniform", 0.018), ("slim", 0.0442)])
def test_a_bottleneck_starts_with_torchs_deviation_or_tf_slims(kind, initial, deviation):
    layer = build_head(HeadConfig(kind=kind, initial=initial), 1024, 7).linear
    assert layer.weight.std().item() == pytest.approx(deviation, rel=0.02)
    assert layer.bias is None or bool(layer.bias.any()) == (initial == "uniform")


def test_bn_head_is_equation_7_with_a_learned_shift_and_no_scale():
    built = head(kind="bn", embedding_dim=4)
    projected = FEATURES @ built.linear.weight.T
    expected = (projected - projected.mean(0)) / (projected.var(0, correction=0) + 0.001).sqrt() / 2  # sqrt(k) = 2
    torch.testing.assert_close(built(FEATURES), expected)
    assert {name for name, p in built.named_parameters() if p.requires_grad} == {"linear.weight", "norm.bias"}
    torch.testing.assert_close(built.norm.running_mean, 0.05 * projected.mean(0))


def test_two_layer_head_with_batchnorm_embeds_as_the_bn_head():
    """The tested embeddings are the same function of the features, so that comparing losses does not compare heads."""
    torch.manual_seed(0)
    both = head(kind="two_layer", embedding_dim=4, batchnorm=True), head(kind="bn", embedding_dim=4)
    both[0].first.load_state_dict(both[1].state_dict())
    for _ in range(2):
        assert not torch.equal(both[0](FEATURES)[:, :4], both[1](FEATURES))
    for built in both:
        built.eval()
    torch.testing.assert_close(both[0].embed(FEATURES), both[1].embed(FEATURES), rtol=0, atol=0)


@pytest.mark.parametrize(("layer", "size"), [("second_last", 4), ("last", 7)])
def test_two_layer_head_shows_the_loss_unit_vectors_of_one_dimension_per_class(layer, size):
    built = head(kind="two_layer", embedding_dim=4, test_layer=layer)
    assert (built.output_dim, built.embedding_dim) == (7, size)
    torch.testing.assert_close(lengths(built(FEATURES)), torch.ones(16))
    expected = built.first(FEATURES) if layer == "second_last" else built(FEATURES)
    torch.testing.assert_close(built.embed(FEATURES), functional.normalize(expected))


@pytest.mark.parametrize(("scale", "shift"), [(False, False), (True, False), (True, True)])
def test_neck_trains_scale_and_shift_only_as_asked(scale, shift):
    built = head(kind="bn_neck", embedding_dim=None, learn_scale=scale, learn_shift=shift)
    assert built.output_dim == 12
    trained = {name for name, p in built.named_parameters() if p.requires_grad}
    assert trained == {name for name, wanted in [("layers.0.weight", scale), ("layers.0.bias", shift)] if wanted}
    expected = (FEATURES - FEATURES.mean(0)) / (FEATURES.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(built(FEATURES), expected)


def test_neck_stacks_bn_relu_pairs_before_its_last_bn():
    built = head(kind="bn_neck", embedding_dim=4, num_bn_relu=2)
    kinds = [type(layer).__name__ for layer in built.layers]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "BatchNorm1d", "ReLU", "BatchNorm1d"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_test_embeddings_are_float32_under_autocast(dtype):
    with torch.autocast("cpu", dtype=dtype):
        embeddings = head(kind="linear", embedding_dim=4).embed(FEATURES)
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(lengths(embeddings), torch.ones(16))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "bn", "bias": False}, "head kind 'bn' does not read 'bias'"),
        ({"kind": "linear", "embedding_dim": None}, "needs an embedding_dim"),
        ({"kind": "linear", "embedding_dim": 0}, "embedding_dim"),
        ({"kind": "linear", "embeding_dim": 64}, "did you mean 'embedding_dim'"),
        ({"kind": "bn_neck", "num_bn_relu": -1}, "num_bn_relu"),
        ({"kind": "two_layer", "test_layer": "last", "normalise_at_test": False}, "of unit length: remove 'normalise_at_test'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        parse(HeadConfig, values, "head")


def test_null_unsets_a_size_that_the_kind_does_not_read():
    """A layer below gives 128; whoever takes the pooled features as they are cannot remove that line, but can override it."""
    below = {"kind": "linear", "embedding_dim": 128}
    with pytest.raises(ConfigError, match="head kind 'identity' does not read 'embedding_dim'"):
        parse(HeadConfig, below | {"kind": "identity"}, "head")
    config = parse(HeadConfig, below | {"kind": "identity", "embedding_dim": None}, "head")
    assert build_head(config, 12, num_classes=7)(FEATURES).shape == (16, 12)


@pytest.mark.parametrize("kind", READ_BY_KIND)
def test_settings_survive_being_written_out_and_read_back(kind):
    config = HeadConfig(kind=kind, **SMALL[kind])
    assert parse(HeadConfig, config.model_dump(), "head") == config
