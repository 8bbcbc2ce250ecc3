"""Reads Caffe's model files, and converts BVLC GoogLeNet to a state dict of the backbone `googlenet_caffe`.

A `.caffemodel` is a protocol buffer, `NetParameter` of Caffe's caffe.proto. Only fields that hold weights are described here; the
library skips the others.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from numpy.typing import NDArray

from dml_core.errors import ConfigError
from dml_core.models.backbones.weights import StateDict

_Field = descriptor_pb2.FieldDescriptorProto
# Message -> field -> number, type, repeated. Files from before the format change of 2014 have V1 layers and blobs of exactly four axes.
_MESSAGES: dict[str, dict[str, tuple[int, Any, bool]]] = {
    "BlobShape": {"dim": (1, _Field.TYPE_INT64, True)},
    "BlobProto": {
        "num": (1, _Field.TYPE_INT32, False),
        "channels": (2, _Field.TYPE_INT32, False),
        "height": (3, _Field.TYPE_INT32, False),
        "width": (4, _Field.TYPE_INT32, False),
        "data": (5, _Field.TYPE_FLOAT, True),
        "shape": (7, "BlobShape", False),
    },
    "V1LayerParameter": {"name": (4, _Field.TYPE_STRING, False), "blobs": (6, "BlobProto", True)},
    "LayerParameter": {"name": (1, _Field.TYPE_STRING, False), "blobs": (7, "BlobProto", True)},
    "NetParameter": {"layers": (2, "V1LayerParameter", True), "layer": (100, "LayerParameter", True)},
}


def read_caffemodel(path: Path) -> dict[str, list[NDArray[np.float32]]]:
    """Return the blobs of each layer that has any, by layer name, in the file's order (weights, then biases).

    Raises:
        ConfigError: the file is missing, damaged, or not a Caffe model.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
    net = _message_class("NetParameter")()
    try:
        net.ParseFromString(content)
    except message.DecodeError:
        raise ConfigError(f"{path} is not a Caffe model, or it is damaged (download it again)") from None
    layers = [layer for layer in (*net.layers, *net.layer) if layer.blobs]
    if not layers:
        raise ConfigError(f"{path} has no layer with weights: it is not a Caffe model, or it is damaged (download it again)")
    return {layer.name: [_array(blob, f"{path}: layer '{layer.name}'") for blob in layer.blobs] for layer in layers}


def state_dict_from_caffe(layers: dict[str, list[NDArray[np.float32]]], own: StateDict) -> StateDict:
    """Return BVLC GoogLeNet's blobs as `<layer>.weight` (OIHW as in Caffe) and `<layer>.bias`, for the layers of the backbone.

    Args:
        layers: output of `read_caffemodel`.
        own: the backbone's own state, for its names.
    """
    state: StateDict = {}
    for layer, blobs in layers.items():
        for key, array in zip((f"{layer}.weight", f"{layer}.bias"), blobs, strict=False):
            if key in own:
                tensor = torch.from_numpy(array.copy())
                state[key] = tensor.flatten() if own[key].dim() == 1 else tensor  # the old format stores a bias as (1, 1, 1, channels)
    return state


def _array(blob: Any, what: str) -> NDArray[np.float32]:
    shape = list(blob.shape.dim) if blob.HasField("shape") else [blob.num, blob.channels, blob.height, blob.width]
    values = np.array(blob.data, dtype=np.float32)
    if min(shape, default=0) < 1 or int(np.prod(shape)) != values.size:
        raise ConfigError(f"{what} has {values.size} numbers for the shape {tuple(shape)}: the file is damaged")
    return values.reshape(shape)


def _message_class(name: str) -> Any:
    """Create the class of one message from the table above, in its own descriptor pool."""
    file = descriptor_pb2.FileDescriptorProto(name="caffe_weights.proto", package="caffe", syntax="proto2")
    for message_name, fields in _MESSAGES.items():
        described = file.message_type.add(name=message_name)
        for field_name, (number, kind, is_repeated) in fields.items():
            field = described.field.add(name=field_name, number=number)
            field.label = _Field.LABEL_REPEATED if is_repeated else _Field.LABEL_OPTIONAL
            if isinstance(kind, str):
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".caffe.{kind}"
            else:
                field.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"caffe.{name}"))
