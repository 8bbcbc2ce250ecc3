"""How images are resized: the two types that a packed store and a protocol's views share; light to import."""

from typing import Literal

from pydantic import PositiveInt

Resize = PositiveInt | tuple[PositiveInt, PositiveInt]  # the short side, or (height, width) whatever the aspect ratio
Interpolation = Literal["bilinear", "bicubic", "lanczos"]
