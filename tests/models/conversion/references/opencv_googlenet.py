"""Caffe's GoogLeNet in OpenCV, which reads Caffe's files and has its own layers: the reference for the project's network.

It runs in an environment with OpenCV (`python -m venv cv && cv/bin/pip install "opencv-python-headless<5"`), from the
repository's root. The committed file was written by OpenCV 4.14 and

    cv/bin/python -m tests.models.conversion.references.opencv_googlenet 75 64 tests/models/conversion/googlenet_caffe_75x64.npy
"""

import sys

import cv2
import numpy as np

from tests.models.conversion.references.caffe_files import caffemodel, prototxt
from tests.models.conversion.references.drawn import image

if __name__ == "__main__":
    height, width = int(sys.argv[1]), int(sys.argv[2])
    definition, weights = (np.frombuffer(content, np.uint8) for content in (prototxt(height, width).encode(), caffemodel()))
    net = cv2.dnn.readNetFromCaffe(definition, weights)
    net.setInput(image(height, width, 60)[None])
    np.save(sys.argv[3], net.forward("inception_5b/output"))
