"""Caffe's GoogLeNet: its model file, and layers and features equal to OpenCV's."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from dml_core.errors import ConfigError
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.googlenet_caffe import GoogLeNetCaffe
from dml_core.models.backbones.registry import build_backbone
from dml_core.models.conversion.__main__ import convert
from dml_core.models.conversion.caffe import read_caffemodel
from tests.damage import cut, empty, garble
from tests.models.conversion.references.caffe_files import blob, block, caffemodel
from tests.models.conversion.references.drawn import caffe_layers, image

HERE = Path(__file__).parent
REFERENCE = ("-m", "tests.models.conversion.references.opencv_googlenet")
OPENCV = os.environ.get("DML_OPENCV_PYTHON", "")  # the Python of an environment with OpenCV 4
CLASSIFIER = {"loss3/classifier": (np.zeros((1000, 1024), np.float32), np.zeros(1000, np.float32))}


def network(tmp_path, is_old=True):
    (tmp_path / "drawn.caffemodel").write_bytes(caffemodel(caffe_layers() | CLASSIFIER, is_old))
    convert("caffe", tmp_path / "drawn.caffemodel", tmp_path / "bvlc_googlenet.pth")
    return build_backbone(BackboneConfig(name="googlenet_caffe", weights=str(tmp_path / "bvlc_googlenet.pth"))).eval()


def assert_features(found, expected):
    """Assert equality up to the float32 rounding of 22 layers, relative to the features' standard deviation."""
    expected = torch.from_numpy(expected)
    assert found.shape == expected.shape
    assert expected.std() > 1
    assert (found - expected).abs().max() < 1e-4 * expected.std()


def test_the_network_has_the_published_layers():
    """57 convolutions have the names and shapes of the published definition."""
    assert len(caffe_layers()) == 57
    expected = {}
    for layer, (weight, bias) in caffe_layers().items():
        expected |= {f"{layer}.weight": weight.shape, f"{layer}.bias": bias.shape}
    own = GoogLeNetCaffe(BackboneConfig(name="googlenet_caffe")).state_dict()
    assert {key: tuple(value.shape) for key, value in own.items()} == expected


@pytest.mark.parametrize("is_old", [True, False])
@torch.no_grad()
def test_features_are_opencvs(is_old, tmp_path):
    """The committed features are OpenCV's, of an image with one side that strides divide and one that they do not."""
    found = network(tmp_path, is_old)(torch.from_numpy(image(75, 64, 60))[None])
    assert_features(found, np.load(HERE / "googlenet_caffe_75x64.npy"))


@pytest.mark.proof
@torch.no_grad()
def test_features_of_224_pixels_are_opencvs(tmp_path):
    if not OPENCV:
        pytest.skip("no OpenCV here")
    ended = subprocess.run([OPENCV, *REFERENCE, "224", "224", tmp_path / "features.npy"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert_features(network(tmp_path)(torch.from_numpy(image(224, 224, 60))[None]), np.load(tmp_path / "features.npy"))


def test_local_response_normalisation_is_caffes_formula():
    """x / (1 + alpha / n * sum of squares of 5 channels)^beta, with 0 beyond the ends; inputs around 100 make the effect visible."""
    net = GoogLeNetCaffe(BackboneConfig(name="googlenet_caffe"))
    assert (net.normalise.size, net.normalise.alpha, net.normalise.beta, net.normalise.k) == (5, 1e-4, 0.75, 1.0)
    maps = 100 * torch.randn(2, 7, 3, 3)
    squares = functional.pad(maps.square(), (0, 0, 0, 0, 2, 2))
    sums = torch.stack([squares[:, channel : channel + 5].sum(dim=1) for channel in range(7)], dim=1)
    divisor = (1 + 1e-4 / 5 * sums) ** 0.75
    assert divisor.max() > 1.2
    torch.testing.assert_close(net.normalise(maps), maps / divisor)


@pytest.mark.parametrize("damage", [cut, empty, garble, Path.unlink])
def test_a_file_that_cannot_be_read_is_one_line(damage, tmp_path):
    path = tmp_path / "drawn.caffemodel"
    path.write_bytes(caffemodel({"conv1/7x7_s2": caffe_layers()["conv1/7x7_s2"]}))
    damage(path)
    with pytest.raises(ConfigError, match=r"cannot be read|is not a Caffe model|has no layer with weights") as error:
        read_caffemodel(path)
    assert "\n" not in str(error.value)


def test_a_file_cut_between_layers_names_what_is_missing(tmp_path):
    layers = dict(list(caffe_layers().items())[:50])
    (tmp_path / "cut.caffemodel").write_bytes(caffemodel(layers))
    with pytest.raises(ConfigError, match=r"cut.caffemodel' do not fit the backbone: 14 missing \(.*, \.\.\.\)$"):
        convert("caffe", tmp_path / "cut.caffemodel", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_another_network_is_named(tmp_path):
    layers = caffe_layers() | {"inception_3a/5x5": (np.zeros((32, 16, 3, 3), np.float32), np.zeros(32, np.float32))}
    (tmp_path / "other.caffemodel").write_bytes(caffemodel(layers))
    with pytest.raises(ConfigError, match=r"1 wrong shape \(inception_3a/5x5\.weight \(32, 16, 3, 3\) for \(32, 16, 5, 5\)\)$"):
        convert("caffe", tmp_path / "other.caffemodel", tmp_path / "out.pth")


def test_a_blob_whose_numbers_do_not_fill_its_shape_is_refused(tmp_path):
    damaged = blob(np.ones(6, np.float32), is_old=False).replace(block(7, block(1, b"\x06")), block(7, block(1, b"\x07")))
    (tmp_path / "w.caffemodel").write_bytes(block(100, block(1, b"conv1/7x7_s2") + block(7, damaged)))
    with pytest.raises(ConfigError, match=r"layer 'conv1/7x7_s2' has 6 numbers for the shape \(7,\): the file is damaged"):
        read_caffemodel(tmp_path / "w.caffemodel")
