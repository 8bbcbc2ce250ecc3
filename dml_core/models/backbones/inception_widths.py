"""Channels of GoogLeNet's nine inception modules (Szegedy et al., CVPR 2015, Table 1), shared by two networks."""

from typing import NamedTuple


class Widths(NamedTuple):
    """Input and branch channels of one module. The "five" branch is a 5x5 convolution in the paper and in Caffe, 3x3 in TF-slim."""

    in_channels: int
    one: int
    three_reduce: int
    three: int
    five_reduce: int
    five: int
    projection: int


WIDTHS = {
    "3a": Widths(192, 64, 96, 128, 16, 32, 32),
    "3b": Widths(256, 128, 128, 192, 32, 96, 64),
    "4a": Widths(480, 192, 96, 208, 16, 48, 64),
    "4b": Widths(512, 160, 112, 224, 24, 64, 64),
    "4c": Widths(512, 128, 128, 256, 24, 64, 64),
    "4d": Widths(512, 112, 144, 288, 32, 64, 64),
    "4e": Widths(528, 256, 160, 320, 32, 128, 128),
    "5a": Widths(832, 256, 160, 320, 32, 128, 128),
    "5b": Widths(832, 384, 192, 384, 48, 128, 128),
}
