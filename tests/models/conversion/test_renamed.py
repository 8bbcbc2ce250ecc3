"""A timm model's tensors under other names: the converted file starts the same network, and another network's is refused."""

import hashlib
import sys

import pytest
import timm
import torch

from dml_core.errors import ConfigError
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.registry import build_backbone
from dml_core.models.conversion.__main__ import convert, main
from dml_core.models.conversion.renamed import read_tensors
from tests.damage import cut, empty, garble

MODEL = "tf_efficientnet_lite0"


@pytest.fixture(scope="module")
def network():
    """The timm model with drawn weights and statistics, unlike those of any new network."""
    torch.manual_seed(3)
    drawn = timm.create_model(MODEL).eval()
    for value in drawn.state_dict().values():
        if value.is_floating_point():
            value.add_(0.1 * torch.rand_like(value))
    return drawn


def renumbered(network):
    """Return its tensors in order, with numbers instead of the names of layers."""
    return {f"layer{number}.{name.rpartition('.')[2]}": value for number, (name, value) in enumerate(network.state_dict().items())}


def converted(state, tmp_path):
    torch.save(state, tmp_path / "theirs.pth")
    convert("timm", tmp_path / "theirs.pth", tmp_path / "ours.pth", f"timm:{MODEL}")
    return tmp_path / "ours.pth"


@torch.no_grad()
def assert_same_features(weights, network):
    images = torch.randn(2, 3, 64, 64)
    backbone = build_backbone(BackboneConfig(name=f"timm:{MODEL}", weights=str(weights))).eval()
    assert torch.equal(backbone(images), network.forward_features(images))


def test_features_are_those_of_the_file(network, tmp_path):
    assert_same_features(converted(renumbered(network), tmp_path), network)


def test_a_checkpoint_with_its_weights_in_an_entry(network, tmp_path):
    assert_same_features(converted({"state_dict": renumbered(network), "epoch": 3}, tmp_path), network)


def test_a_file_without_batchnorms_counters(network, tmp_path):
    state = {name: value for name, value in renumbered(network).items() if not name.endswith("num_batches_tracked")}
    assert_same_features(converted(state, tmp_path), network)


def test_without_conversion_the_names_are_refused(network, tmp_path):
    torch.save(renumbered(network), tmp_path / "theirs.pth")
    with pytest.raises(ConfigError, match=r"do not fit the backbone: \d+ missing"):
        build_backbone(BackboneConfig(name=f"timm:{MODEL}", weights=str(tmp_path / "theirs.pth")))


def swapped(state, first, second):
    names = list(state)
    names[first], names[second] = names[second], names[first]
    return {name: state[name] for name in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: dict(list(state.items())[:-2]), "294 tensors, the network 296: it is of another network"),
        (lambda state: swapped(state, 1, 2), r"tensor 2 of 296 does not fit: layer2.bias \(32,\) in the file, bn1.weight \(32,\)"),
        (
            lambda state: {**state, "layer0.weight": torch.zeros(32, 3, 5, 5)},
            r"tensor 1 of 296 does not fit: .*\(32, 3, 5, 5\) in the file",
        ),
        (lambda state: {}, "not a state dict"),
        (lambda state: {**state, "epoch": 3}, "not a state dict"),
    ],
)
def test_another_network_is_refused(network, change, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        converted(change(renumbered(network)), tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ours.pth").exists()


def test_a_hash_in_the_file_s_name_is_verified(network, tmp_path):
    torch.save(renumbered(network), tmp_path / "theirs.pth")
    sha256 = hashlib.sha256((tmp_path / "theirs.pth").read_bytes()).hexdigest()
    named = (tmp_path / "theirs.pth").rename(tmp_path / f"theirs-{sha256[:8]}.pth")
    assert_same_state(read_tensors(named), renumbered(network))
    other = named.rename(tmp_path / "theirs-00000000.pth")
    with pytest.raises(ConfigError, match=f"theirs-00000000.pth is damaged: its SHA-256 is {sha256}, by its name it begins with 00000000"):
        read_tensors(other)


def assert_same_state(state, expected):
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("damage", [cut, empty, garble, lambda path: path.unlink()])
def test_a_file_that_cannot_be_read_is_one_line(network, damage, tmp_path):
    torch.save(renumbered(network), tmp_path / "theirs.pth")
    damage(tmp_path / "theirs.pth")
    with pytest.raises(ConfigError, match=r"no such file|not a state dict") as caught:
        convert("timm", tmp_path / "theirs.pth", tmp_path / "ours.pth", f"timm:{MODEL}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["timm", "theirs.pth", "ours.pth"], "timm needs --backbone"),
        (["slim", "theirs.pth", "ours.pth", "--backbone", "timm:resnet18"], "no other kind reads it"),
        (["timm", "theirs.pth", "ours.pth", "--backbone", "resnet18"], "write timm:<model>"),
        (["timm", "theirs.pth", "ours.pth", "--backbone", "timm:resnet19"], "unknown timm model 'resnet19'"),
        (["timm", "theirs.pth", ".", "--backbone", f"timm:{MODEL}"], ". exists: remove it, or choose another place"),
    ],
)
def test_a_command_that_is_wrong_ends_with_2(network, words, message, tmp_path, monkeypatch, capsys):
    torch.save(renumbered(network), tmp_path / "theirs.pth")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["conversion", *words])
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err
