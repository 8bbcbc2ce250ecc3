"""Types for resizing, shared by a packed store and a protocol's views; light to import."""

from typing import Annotated, Literal

from pydantic import Field

MAX_SIDE = 4096  # pixels; a larger image of three float32 channels takes more than 200 MB
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
Resize = Side | tuple[Side, Side]  # the short side, or (height, width) ignoring the aspect ratio
Interpolation = Literal["bilinear", "bicubic", "lanczos"]
