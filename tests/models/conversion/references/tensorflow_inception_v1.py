"""TF-slim's Inception v1 in TensorFlow's own operations, with random weights: the reference for the project's network.

It runs in an environment with TensorFlow (`python -m venv tf && tf/bin/pip install tensorflow-cpu`), from the repository's root. The
committed file was written by TensorFlow 2.21 and

    tf/bin/python -m tests.models.conversion.references.tensorflow_inception_v1 \\
        features 75 64 tests/models/conversion/inception_v1_75x64.npy

Also: `features 224 224 OUT.npy`; `trained 64 64 OUT.npz`, one training pass of the first convolution; `checkpoint OUT.ckpt`, a checkpoint
in the format of 2016.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf

from tests.models.conversion.references.drawn import beside_the_features, image, slim_variables

VARIABLES = slim_variables()


def unit(maps, scope, stride=1):
    name = f"InceptionV1/{scope}"
    out = tf.nn.conv2d(maps, VARIABLES[f"{name}/weights"], strides=stride, padding="SAME")
    mean, variance, beta = (VARIABLES[f"{name}/BatchNorm/{kind}"] for kind in ("moving_mean", "moving_variance", "beta"))
    return tf.nn.relu(tf.nn.batch_normalization(out, mean, variance, offset=beta, scale=None, variance_epsilon=0.001))


def module(maps, name, third="Conv2d_0b_3x3"):
    one = unit(maps, f"{name}/Branch_0/Conv2d_0a_1x1")
    three = unit(unit(maps, f"{name}/Branch_1/Conv2d_0a_1x1"), f"{name}/Branch_1/Conv2d_0b_3x3")
    other = unit(unit(maps, f"{name}/Branch_2/Conv2d_0a_1x1"), f"{name}/Branch_2/{third}")
    pooled = unit(tf.nn.max_pool2d(maps, 3, 1, "SAME"), f"{name}/Branch_3/Conv2d_0b_1x1")
    return tf.concat([one, three, other, pooled], axis=3)


def features(images):
    maps = tf.nn.max_pool2d(unit(images, "Conv2d_1a_7x7", stride=2), 3, 2, "SAME")
    maps = tf.nn.max_pool2d(unit(unit(maps, "Conv2d_2b_1x1"), "Conv2d_2c_3x3"), 3, 2, "SAME")
    maps = module(module(maps, "Mixed_3b"), "Mixed_3c")
    maps = tf.nn.max_pool2d(maps, 3, 2, "SAME")
    for name in ("Mixed_4b", "Mixed_4c", "Mixed_4d", "Mixed_4e", "Mixed_4f"):
        maps = module(maps, name)
    maps = tf.nn.max_pool2d(maps, 2, 2, "SAME")
    return module(module(maps, "Mixed_5b", third="Conv2d_0a_3x3"), "Mixed_5c")


def trained(images):
    """Return output and moving statistics of the first convolution's BatchNorm in training, decay 0.95."""
    name = "InceptionV1/Conv2d_1a_7x7"
    out = tf.nn.conv2d(images, VARIABLES[f"{name}/weights"], strides=2, padding="SAME")
    normed, mean, variance = tf.compat.v1.nn.fused_batch_norm(
        out,
        scale=np.ones(64, np.float32),
        offset=VARIABLES[f"{name}/BatchNorm/beta"],
        mean=VARIABLES[f"{name}/BatchNorm/moving_mean"],
        variance=VARIABLES[f"{name}/BatchNorm/moving_variance"],
        epsilon=0.001,
        is_training=True,
        exponential_avg_factor=0.05,
    )
    return {"maps": tf.nn.relu(normed).numpy(), "mean": mean.numpy(), "variance": variance.numpy()}


def write_checkpoint(path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        everything = VARIABLES | beside_the_features()
        variables = [tf.compat.v1.get_variable(name, initializer=values, use_resource=False) for name, values in everything.items()]
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver(variables, write_version=tf.compat.v1.train.SaverDef.V1)
        saver.save(session, path, write_meta_graph=False)


if __name__ == "__main__":
    if sys.argv[1] == "checkpoint":
        write_checkpoint(str(Path(sys.argv[2]).resolve()))
    else:
        images = image(int(sys.argv[2]), int(sys.argv[3]), 0.5).transpose(1, 2, 0)[None]
        if sys.argv[1] == "features":
            np.save(sys.argv[4], features(images).numpy().transpose(0, 3, 1, 2))
        else:
            np.savez(sys.argv[4], **trained(images))
