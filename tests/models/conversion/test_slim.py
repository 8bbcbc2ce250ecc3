"""TF-slim's Inception v1: names, shapes and layouts of its checkpoint, and features equal to TensorFlow's."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from dml_core.errors import ConfigError
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.inception_v1 import InceptionV1, Unit, same_padded
from dml_core.models.backbones.registry import build_backbone
from dml_core.models.conversion.__main__ import convert
from dml_core.models.conversion.slim import read_arrays
from tests.damage import cut, empty, garble
from tests.models.conversion.references.drawn import beside_the_features, image, slim_variables

HERE = Path(__file__).parent
REFERENCE = ("-m", "tests.models.conversion.references.tensorflow_inception_v1")
READER = Path("dml_core/models/conversion/read_slim_checkpoint.py").absolute()
TENSORFLOW = os.environ.get("DML_TENSORFLOW_PYTHON", "")  # the Python of an environment with TensorFlow
FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}  # features are of order 1, after 22 layers


@pytest.fixture
def converted(tmp_path):
    """The drawn network as a user gets it: a NumPy archive, converted and loaded from a file."""
    np.savez(tmp_path / "drawn.npz", **slim_variables(), **beside_the_features())
    convert("slim", tmp_path / "drawn.npz", tmp_path / "inception_v1_2016_08_28.pth")
    return build_backbone(BackboneConfig(name="inception_v1", weights=str(tmp_path / "inception_v1_2016_08_28.pth"))).eval()


def test_the_drawn_network_has_the_published_number_of_variables_and_numbers():
    """slim's own test counts 5,607,184 (inception_v1_test.py); 57 convolutions have four variables each."""
    variables = slim_variables()
    assert len(variables) == 57 * 4
    assert sum(values.size for values in variables.values()) == 5_607_184
    assert variables["InceptionV1/Mixed_5b/Branch_2/Conv2d_0a_3x3/weights"].shape == (3, 3, 32, 128)


@torch.no_grad()
def test_features_are_tensorflows(converted):
    """The committed features are TensorFlow's, of an image with one side that needs uneven padding and one that needs even padding."""
    expected = torch.from_numpy(np.load(HERE / "inception_v1_75x64.npy"))
    found = converted(torch.from_numpy(image(75, 64, 0.5))[None])
    assert found.shape == (1, 1024, 3, 2)
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, **FLOAT32)


def test_batchnorm_learns_its_shift_alone():
    net = InceptionV1(BackboneConfig(name="inception_v1"))
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".")[2] for name in trained if ".norm." in name} == {"bias"}
    assert len(trained) == 57 * 2
    assert all(unit.norm.eps == 0.001 for unit in net.modules() if isinstance(unit, Unit))


@pytest.mark.parametrize(
    ("side", "size", "stride", "before", "after"),
    [(224, 7, 2, 2, 3), (75, 7, 2, 3, 3), (112, 3, 2, 0, 1), (113, 3, 2, 1, 1), (14, 2, 2, 0, 0), (7, 2, 2, 0, 1), (5, 3, 1, 1, 1)],
)
def test_same_padding_by_hand(side, size, stride, before, after):
    """There are ceil(side / stride) windows; the missing pixels are split between both ends, an odd one at the end."""
    maps = torch.rand(1, 1, side, side) + 1
    padded = same_padded(maps, size, stride)
    torch.testing.assert_close(padded, functional.pad(maps, (before, after, before, after)))
    assert (padded.shape[2] - size) // stride + 1 == -(-side // stride)


def changed(**changes):
    variables = slim_variables()
    for name, values in changes.items():
        variables[f"InceptionV1/{name}"] = values
    return {name: values for name, values in variables.items() if values is not None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"Mixed_5b/Branch_2/Conv2d_0a_3x3/weights": None}, r"1 missing \(Mixed_5b\.Branch_2\.Conv2d_0a_3x3\.conv\.weight\)$"),
        (
            {"Conv2d_1a_7x7/weights": np.zeros((64, 3, 7, 7), np.float32)},
            r"1 wrong shape \(Conv2d_1a_7x7\.conv\.weight \(7, 7, 64, 3\) for \(64, 3, 7, 7\)\)$",
        ),
        ({"Conv2d_1a_7x7/BatchNorm/gamma": np.ones(64, np.float32)}, r"1 unexpected \(InceptionV1/Conv2d_1a_7x7/BatchNorm/gamma\)$"),
        ({"Mixed_6a/weights": np.ones(64, np.float32)}, r"1 unexpected \(InceptionV1/Mixed_6a/weights\)$"),
    ],
)
def test_another_network_is_named(changes, said, tmp_path):
    np.savez(tmp_path / "drawn.npz", **changed(**changes))
    with pytest.raises(ConfigError, match=said):
        convert("slim", tmp_path / "drawn.npz", tmp_path / "out.pth")


def an_array_alone(path):
    np.save(path.with_suffix(".npy"), np.ones(3))
    path.with_suffix(".npy").rename(path)


def deflated_and_flipped(path):
    np.savez_compressed(path, weights=np.ones((50, 50), np.float32))
    content = bytearray(path.read_bytes())
    content[64:96] = bytes(range(32))  # within the compressed values
    path.write_bytes(content)


def encrypted(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + 8] |= 1  # the flag in the archive's directory
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, empty, garble, Path.unlink, an_array_alone, deflated_and_flipped, encrypted])
def test_a_file_that_cannot_be_read_is_one_line(damage, tmp_path):
    path = tmp_path / "drawn.npz"
    np.savez(path, weights=np.ones((50, 50), np.float32))
    damage(path)
    with pytest.raises(ConfigError, match=r"no such file|is not a NumPy archive") as error:
        read_arrays(path)
    assert "\n" not in str(error.value)


def test_the_command_ends_with_2_and_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["conversion", "slim", str(tmp_path / "none.npz"), str(tmp_path / "out.pth")])
    monkeypatch.delitem(sys.modules, "dml_core.models.conversion.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("dml_core.models.conversion", run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"error: {tmp_path}/none.npz: no such file\n")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_not_overwritten(tmp_path):
    np.savez(tmp_path / "drawn.npz", **slim_variables())
    (tmp_path / "out.pth").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="exists: remove it"):
        convert("slim", tmp_path / "drawn.npz", tmp_path / "out.pth")
    assert (tmp_path / "out.pth").read_bytes() == b"mine"
    with pytest.raises(ConfigError, match="cannot be written"):
        convert("slim", tmp_path / "drawn.npz", tmp_path / "missing" / "out.pth")


def test_a_write_that_fails_leaves_no_part_of_the_file(tmp_path, monkeypatch):
    def on_a_full_disk(state, place):
        with place.open("wb") if isinstance(place, Path) else place as file:
            file.write(b"a part")
        raise RuntimeError("unexpected pos 64 vs 0")

    np.savez(tmp_path / "drawn.npz", **slim_variables())
    monkeypatch.setattr(torch, "save", on_a_full_disk)
    with pytest.raises(ConfigError, match="cannot be written"):
        convert("slim", tmp_path / "drawn.npz", tmp_path / "out.pth")
    assert [path.name for path in tmp_path.iterdir()] == ["drawn.npz"]


# ---------------------------------------------------------------- compared with TensorFlow


def by_tensorflow(*command):
    if not TENSORFLOW:
        pytest.skip("no TensorFlow here")
    ended = subprocess.run([TENSORFLOW, *map(str, command)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.mark.proof
@torch.no_grad()
def test_a_checkpoint_of_2016s_format_gives_tensorflows_features(tmp_path):
    """TensorFlow writes and reads the checkpoint and computes the features of 224 pixels."""
    by_tensorflow(*REFERENCE, "checkpoint", tmp_path / "inception_v1.ckpt")
    by_tensorflow(READER, tmp_path / "inception_v1.ckpt", tmp_path / "inception_v1.npz")
    convert("slim", tmp_path / "inception_v1.npz", tmp_path / "w.pth")
    network = build_backbone(BackboneConfig(name="inception_v1", weights=str(tmp_path / "w.pth"))).eval()
    for height, width in ((224, 224), (75, 64)):
        by_tensorflow(*REFERENCE, "features", height, width, tmp_path / "features.npy")
        expected = torch.from_numpy(np.load(tmp_path / "features.npy"))
        torch.testing.assert_close(network(torch.from_numpy(image(height, width, 0.5))[None]), expected, **FLOAT32)
    assert np.abs(np.load(tmp_path / "features.npy") - np.load(HERE / "inception_v1_75x64.npy")).max() < 1e-4


@pytest.mark.proof
@torch.no_grad()
def test_a_training_pass_moves_batchnorms_averages_as_tensorflows(converted, tmp_path):
    """The decay is 0.95; the moving variance averages the unbiased variance."""
    by_tensorflow(*REFERENCE, "trained", 64, 64, tmp_path / "trained.npz")
    unit = converted.get_submodule("Conv2d_1a_7x7").train()
    unit.norm.momentum = 0.05
    maps = unit(torch.from_numpy(image(64, 64, 0.5))[None])
    with np.load(tmp_path / "trained.npz") as expected:
        torch.testing.assert_close(maps, torch.from_numpy(expected["maps"]).permute(0, 3, 1, 2), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(unit.norm.running_mean, torch.from_numpy(expected["mean"]))
        torch.testing.assert_close(unit.norm.running_var, torch.from_numpy(expected["variance"]))


@pytest.mark.proof
def test_the_checkpoints_reader_refuses_what_is_none(tmp_path):
    by_tensorflow("-c", "import tensorflow")
    (tmp_path / "none.ckpt").write_bytes(b"no checkpoint")
    for name in ("none.ckpt", "missing.ckpt"):
        ended = subprocess.run(
            [TENSORFLOW, READER, tmp_path / name, tmp_path / "out.npz"], capture_output=True, text=True, check=False,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        )  # fmt: skip
        assert ended.returncode == 2
        assert f"{name} is not a checkpoint of TensorFlow" in ended.stderr.splitlines()[-1]
        assert not (tmp_path / "out.npz").exists()
