"""Optimisers: learning rate and weight decay of every parameter, and one step of each compared with its formula."""

import pytest
import torch
from torch import nn

from dml_core.config import parse
from dml_core.errors import ConfigError
from dml_core.losses.contract import Loss
from dml_core.losses.registry import build_loss
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.embedder import Embedder, ModelConfig
from dml_core.models.heads import HeadConfig
from dml_core.models.pooling import PoolingConfig
from dml_core.training.optimisation.optimisers import GroupConfig, OptimiserConfig, build_optimiser, set_learning_rates
from dml_core.training.parallel.workers import TrainingSystem


def system(**options):
    torch.manual_seed(0)
    model = Embedder(ModelConfig(backbone=BackboneConfig(name="small_cnn", width=8), head=HeadConfig(embedding_dim=4), **options), 3)
    return TrainingSystem(model, build_loss("softmax", {}, 3, 4))


def settings(optimiser, trained):
    """Return parameter name -> (rate, decay)."""
    names = {id(parameter): name for name, parameter in trained.named_parameters()}
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in optimiser.param_groups for p in group["params"]}


def test_every_group_has_its_own_rate_and_decay_or_the_optimisers():
    groups = {"head": GroupConfig(learning_rate=0.5), "loss": GroupConfig(learning_rate=2.0, weight_decay=0.0)}
    trained = system()
    found = settings(build_optimiser(OptimiserConfig(learning_rate=0.1, weight_decay=0.3, groups=groups), trained), trained)
    expected = {"model.backbone": (0.1, 0.3), "model.head": (0.5, 0.3), "loss.classifier": (2.0, 0.0)}
    assert len(found) == len(list(trained.parameters()))
    assert all(found[name] == next(value for start, value in expected.items() if name.startswith(start)) for name in found)


@pytest.mark.parametrize(
    ("without_decay", "undecayed"),
    [
        ("none", set()),
        ("biases", {"model.backbone.blocks.1.bias", "model.head.linear.bias", "loss.classifier.bias"}),
        ("one_dimension", {"model.backbone.blocks.1.bias", "model.backbone.blocks.1.weight", "model.head.linear.bias"}),
    ],
)
def test_what_does_not_decay(without_decay, undecayed):
    trained = system()
    found = settings(build_optimiser(OptimiserConfig(weight_decay=0.1, without_decay=without_decay), trained), trained)
    free = {name for name, (_, decay) in found.items() if decay == 0}
    assert undecayed <= free
    assert all(trained.get_parameter(name).dim() == 1 for name in free)
    assert ("model.backbone.blocks.1.weight" in free) == (without_decay == "one_dimension")
    assert len(found) == len(list(trained.parameters()))


def test_a_learned_pooling_trains_with_the_head():
    trained = system(pooling=PoolingConfig(kind="gem", learn_gem_power=True))
    optimiser = build_optimiser(OptimiserConfig(groups={"head": GroupConfig(learning_rate=0.5)}), trained)
    assert settings(optimiser, trained)["model.pooling.power"][0] == 0.5


def test_frozen_parameters_are_in_no_group():
    trained = system()
    trained.get_parameter("model.head.linear.bias").requires_grad_(False)
    assert "model.head.linear.bias" not in settings(build_optimiser(OptimiserConfig(), trained), trained)


def test_nothing_to_train_is_refused():
    trained = system().requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimiser(OptimiserConfig(), trained)


def test_one_factor_scales_all_rates():
    trained = system()
    optimiser = build_optimiser(OptimiserConfig(learning_rate=0.1, groups={"loss": GroupConfig(learning_rate=1.0)}), trained)
    for factor in (0.5, 0.1):  # twice: the factor applies to the base rate, not to the current one
        set_learning_rates(optimiser, factor)
    assert sorted({group["lr"] for group in optimiser.param_groups}) == pytest.approx([0.01, 0.1])


class OneNumber(Loss):
    """A loss with one trained number, whose gradient is 1."""

    def __init__(self):
        nn.Module.__init__(self)
        self.value = nn.Parameter(torch.tensor(2.0))

    def compute(self, embeddings_ND, labels_N, generator):
        raise AssertionError("not used")


def steps(num_steps, **options):
    model = Embedder(ModelConfig(backbone=BackboneConfig(name="small_cnn", width=8)), 3).requires_grad_(False)
    loss = OneNumber()
    optimiser = build_optimiser(OptimiserConfig(learning_rate=0.1, weight_decay=0.5, **options), TrainingSystem(model, loss))
    for _ in range(num_steps):
        optimiser.zero_grad()
        loss.value.backward()
        optimiser.step()
    return loss.value.item()


def test_sgd_by_hand():
    assert steps(1, name="sgd") == pytest.approx(2 - 0.1 * (1 + 0.5 * 2))


def test_nesterov_by_hand():
    """g = 1 + 0.5 x; v = 0.9 v + g; x -= 0.1 (g + 0.9 v)."""
    x, v = 2.0, 0.0
    for _ in range(2):
        g = 1 + 0.5 * x
        v = 0.9 * v + g
        x -= 0.1 * (g + 0.9 * v)
    assert steps(2, name="sgd", momentum=0.9, nesterov=True) == pytest.approx(x)


def test_adams_first_step_shows_its_eps_and_couples_the_decay():
    """The first step is lr g / (|g| + eps), with g = 1 + 0.5 * 2."""
    assert steps(1, name="adam", eps=0.5) == pytest.approx(2 - 0.1 * 2 / 2.5)


@pytest.mark.parametrize("eps", [1e-8, 0.01, 5.0])
def test_tensorflows_adam_by_its_own_formula(eps):
    """lr_t = lr sqrt(1 - b2^t) / (1 - b1^t); m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; x -= lr_t m / (sqrt(v) + eps)."""
    x, m, v = 2.0, 0.0, 0.0
    for t in range(1, 6):
        g = 1 + 0.5 * x
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        x -= 0.1 * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * m / (v**0.5 + eps)
    assert steps(5, name="adam", eps=eps, eps_before_bias_correction=True) == pytest.approx(x, rel=1e-6)
    assert (steps(5, name="adam", eps=eps) == pytest.approx(x, rel=1e-6)) == (eps == 1e-8)


def test_tensorflows_adam_goes_on_from_a_checkpoint():
    """Its eps depends on the number of steps done, which is part of the state."""
    config = OptimiserConfig(learning_rate=0.1, eps=0.01, eps_before_bias_correction=True)
    whole, broken = nn.Linear(2, 1), nn.Linear(2, 1)
    broken.load_state_dict(whole.state_dict())

    def train(layer, state, num_steps):
        frozen = Embedder(ModelConfig(backbone=BackboneConfig(name="small_cnn", width=8)), 3).requires_grad_(False)
        loss = OneNumber()
        loss.value = layer.weight
        optimiser = build_optimiser(config, TrainingSystem(frozen, loss))
        if state is not None:
            optimiser.load_state_dict(state)
        for _ in range(num_steps):
            optimiser.zero_grad()
            layer.weight.square().sum().backward()
            optimiser.step()
        return optimiser.state_dict()

    train(whole, None, 4)
    train(broken, train(broken, None, 2), 2)
    assert torch.equal(whole.weight, broken.weight)


def test_adamw_decays_beside_the_gradient():
    assert steps(1, name="adamw", eps=0.5) == pytest.approx(2 * (1 - 0.1 * 0.5) - 0.1 * 1 / 1.5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "adam", "momentum": 0.9}, "belong to sgd"),
        ({"name": "sgd", "nesterov": True}, "needs a momentum"),
        ({"name": "adamw", "eps_before_bias_correction": True}, "belongs to adam, not to adamw"),
        ({"groups": {"heads": {}}}, "groups"),
        ({"groups": {"head": {"learning_rat": 1.0}}}, "learning_rate"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        parse(OptimiserConfig, values, "optimiser")


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_fused_or_not_is_as_asked_and_a_step_is_the_same_but_for_rounding(name):
    stepped = []
    for fused in (True, False):
        trained = system()
        optimiser = build_optimiser(OptimiserConfig(name=name, learning_rate=0.1, weight_decay=0.1, fused=fused), trained)
        assert {group["fused"] for group in optimiser.param_groups} == {fused}
        for parameter in trained.parameters():
            parameter.grad = torch.ones_like(parameter) * parameter.sign()
        optimiser.step()
        stepped.append([parameter.detach() for parameter in trained.parameters()])
    torch.testing.assert_close(stepped[0], stepped[1])
