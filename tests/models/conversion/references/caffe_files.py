"""Write Caffe's model files byte by byte in the wire format of protocol buffers, and the text of BVLC GoogLeNet's definition."""

import struct

from tests.models.conversion.references.drawn import CAFFE_MODULES, caffe_layers


def varint(number):
    """Encode a number in groups of seven bits, lowest first."""
    groups = bytearray()
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


def number(field, value):
    return varint(field << 3) + varint(value)


def block(field, content):
    return varint(field << 3 | 2) + varint(len(content)) + content


def blob(values, is_old):
    """Encode a BlobProto: data (5, packed), diff (6); four axes (1 to 4), or shape (7) with dim (1, packed)."""
    data = block(5, values.astype("<f4").tobytes()) + block(6, struct.pack("<2f", 0.0, 0.0))
    if is_old:
        axes = (1,) * (4 - values.ndim) + values.shape
        return b"".join(number(field, side) for field, side in enumerate(axes, start=1)) + data
    return data + block(7, block(1, b"".join(varint(side) for side in values.shape)))


def caffemodel(layers=None, is_old=True):
    """Encode a NetParameter: name (1), then `layers` (2; name 4, type 5, blobs 6) or `layer` (100; name 1, type 2, blobs 7)."""
    content = block(1, b"GoogleNet")
    for name, blobs in (caffe_layers() if layers is None else layers).items():
        encoded = [blob(values, is_old) for values in blobs]
        if is_old:
            content += block(2, block(4, name.encode()) + number(5, 4) + b"".join(block(6, one) for one in encoded))
        else:
            content += block(100, block(1, name.encode()) + block(2, b"Convolution") + b"".join(block(7, one) for one in encoded))
    return content


def convolution(name, below, outputs, size, stride=1, pad=0):
    parameters = f"num_output: {outputs} kernel_size: {size} stride: {stride} pad: {pad}"
    rectified = f'layer {{ name: "{name}/relu" type: "ReLU" bottom: "{name}" top: "{name}" }}\n'
    return (
        f'layer {{ name: "{name}" type: "Convolution" bottom: "{below}" top: "{name}" convolution_param {{ {parameters} }} }}\n{rectified}'
    )


def pooling(name, below, stride, pad):
    parameters = f"pool: MAX kernel_size: 3 stride: {stride} pad: {pad}"
    return f'layer {{ name: "{name}" type: "Pooling" bottom: "{below}" top: "{name}" pooling_param {{ {parameters} }} }}\n'


def normalisation(name, below):
    parameters = "local_size: 5 alpha: 0.0001 beta: 0.75"
    return f'layer {{ name: "{name}" type: "LRN" bottom: "{below}" top: "{name}" lrn_param {{ {parameters} }} }}\n'


def prototxt(height, width):
    """Return the definition of the network up to inception_5b/output."""
    text = f'name: "GoogleNet"\ninput: "data"\ninput_shape {{ dim: 1 dim: 3 dim: {height} dim: {width} }}\n'
    text += convolution("conv1/7x7_s2", "data", 64, 7, 2, 3) + pooling("pool1/3x3_s2", "conv1/7x7_s2", 2, 0)
    text += normalisation("pool1/norm1", "pool1/3x3_s2") + convolution("conv2/3x3_reduce", "pool1/norm1", 64, 1)
    text += convolution("conv2/3x3", "conv2/3x3_reduce", 192, 3, 1, 1) + normalisation("conv2/norm2", "conv2/3x3")
    text += pooling("pool2/3x3_s2", "conv2/norm2", 2, 0)
    below = "pool2/3x3_s2"
    for name, (_, one, reduce3, three, reduce5, five, projection) in CAFFE_MODULES.items():
        stem = f"inception_{name}"
        text += convolution(f"{stem}/1x1", below, one, 1)
        text += convolution(f"{stem}/3x3_reduce", below, reduce3, 1) + convolution(f"{stem}/3x3", f"{stem}/3x3_reduce", three, 3, 1, 1)
        text += convolution(f"{stem}/5x5_reduce", below, reduce5, 1) + convolution(f"{stem}/5x5", f"{stem}/5x5_reduce", five, 5, 1, 2)
        text += pooling(f"{stem}/pool", below, 1, 1) + convolution(f"{stem}/pool_proj", f"{stem}/pool", projection, 1)
        bottoms = " ".join(f'bottom: "{stem}/{branch}"' for branch in ("1x1", "3x3", "5x5", "pool_proj"))
        text += f'layer {{ name: "{stem}/output" type: "Concat" {bottoms} top: "{stem}/output" }}\n'
        below = f"{stem}/output"
        if name in ("3b", "4e"):
            text += pooling(f"pool{int(name[0])}/3x3_s2", below, 2, 0)
            below = f"pool{int(name[0])}/3x3_s2"
    return text
