"""Random weights and images for the published networks, with their files' names, shapes and layouts; needs only NumPy.

The tables are copied from the published definitions, not from the project's:
tensorflow/models, research/slim/nets/inception_v1.py, and
BVLC/caffe, models/bvlc_googlenet/deploy.prototxt.
"""

import hashlib
import math

import numpy as np

# Scope in InceptionV1/: input channels, output channels, kernel size.
SLIM = {
    "Conv2d_1a_7x7": (3, 64, 7),
    "Conv2d_2b_1x1": (64, 64, 1),
    "Conv2d_2c_3x3": (64, 192, 3),
}
# Input channels, then those of Branch_0/Conv2d_0a_1x1, Branch_1/Conv2d_0a_1x1 and 0b_3x3, Branch_2's two, Branch_3/Conv2d_0b_1x1.
SLIM_MODULES = {
    "Mixed_3b": (192, 64, 96, 128, 16, 32, 32),
    "Mixed_3c": (256, 128, 128, 192, 32, 96, 64),
    "Mixed_4b": (480, 192, 96, 208, 16, 48, 64),
    "Mixed_4c": (512, 160, 112, 224, 24, 64, 64),
    "Mixed_4d": (512, 128, 128, 256, 24, 64, 64),
    "Mixed_4e": (512, 112, 144, 288, 32, 64, 64),
    "Mixed_4f": (528, 256, 160, 320, 32, 128, 128),
    "Mixed_5b": (832, 256, 160, 320, 32, 128, 128),
    "Mixed_5c": (832, 384, 192, 384, 48, 128, 128),
}
for _name, (_in, _one, _reduce3, _three, _reduce5, _five, _projection) in SLIM_MODULES.items():
    SLIM[f"{_name}/Branch_0/Conv2d_0a_1x1"] = (_in, _one, 1)
    SLIM[f"{_name}/Branch_1/Conv2d_0a_1x1"] = (_in, _reduce3, 1)
    SLIM[f"{_name}/Branch_1/Conv2d_0b_3x3"] = (_reduce3, _three, 3)
    SLIM[f"{_name}/Branch_2/Conv2d_0a_1x1"] = (_in, _reduce5, 1)
    SLIM[f"{_name}/Branch_2/Conv2d_0{'a' if _name == 'Mixed_5b' else 'b'}_3x3"] = (_reduce5, _five, 3)
    SLIM[f"{_name}/Branch_3/Conv2d_0b_1x1"] = (_in, _projection, 1)

CAFFE = {"conv1/7x7_s2": (3, 64, 7), "conv2/3x3_reduce": (64, 64, 1), "conv2/3x3": (64, 192, 3)}
CAFFE_MODULES = dict(zip(("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b"), SLIM_MODULES.values(), strict=True))
for _name, (_in, _one, _reduce3, _three, _reduce5, _five, _projection) in CAFFE_MODULES.items():
    CAFFE[f"inception_{_name}/1x1"] = (_in, _one, 1)
    CAFFE[f"inception_{_name}/3x3_reduce"] = (_in, _reduce3, 1)
    CAFFE[f"inception_{_name}/3x3"] = (_reduce3, _three, 3)
    CAFFE[f"inception_{_name}/5x5_reduce"] = (_in, _reduce5, 1)
    CAFFE[f"inception_{_name}/5x5"] = (_reduce5, _five, 5)
    CAFFE[f"inception_{_name}/pool_proj"] = (_in, _projection, 1)


def normal(name, shape, deviation):
    """Return normal random numbers that depend only on the name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return np.random.default_rng(seed).normal(0, deviation, shape).astype(np.float32)


def slim_variables():
    """Return the variables of slim's network without its classifier, by the checkpoint's names; convolutions are HWIO."""
    variables = {}
    for scope, (entering, leaving, size) in SLIM.items():
        name = f"InceptionV1/{scope}"
        variables[f"{name}/weights"] = normal(f"{name}/weights", (size, size, entering, leaving), math.sqrt(2 / (entering * size**2)))
        variables[f"{name}/BatchNorm/beta"] = normal(f"{name}/beta", leaving, 0.3)
        variables[f"{name}/BatchNorm/moving_mean"] = normal(f"{name}/mean", leaving, 0.3)
        variables[f"{name}/BatchNorm/moving_variance"] = np.exp(normal(f"{name}/variance", leaving, 0.5))
    return variables


def beside_the_features():
    """Return the other variables of such a checkpoint: the classifier, an optimiser's slots and the step."""
    return {
        "InceptionV1/Logits/Conv2d_0c_1x1/weights": np.zeros((1, 1, 1024, 1001), np.float32),
        "InceptionV1/Logits/Conv2d_0c_1x1/biases": np.zeros(1001, np.float32),
        "InceptionV1/Conv2d_1a_7x7/weights/RMSProp": np.zeros((7, 7, 3, 64), np.float32),
        "global_step": np.array(0, np.int64),
    }


def caffe_layers():
    """Return weights (OIHW) and biases of Caffe's GoogLeNet without its classifiers, by layer.

    Weights are larger than usual, so that local response normalisation divides by much more than 1.
    """
    return {
        layer: (
            normal(f"{layer}.weight", (leaving, entering, size, size), 1.5 * math.sqrt(2 / (entering * size**2))),
            normal(f"{layer}.bias", leaving, 0.3),
        )
        for layer, (entering, leaving, size) in CAFFE.items()
    }


def image(height, width, scale):
    """Return one image (3, height, width) of normal random numbers with some structure."""
    noise = normal(f"image {height} {width}", (3, height, width), scale)
    rows, columns = np.mgrid[:height, :width]
    return (noise + scale * np.sin(rows / 5 + columns / 9)).astype(np.float32)
