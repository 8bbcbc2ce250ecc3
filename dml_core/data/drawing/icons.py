"""Icons of a theme, drawn on white: PNG by Pillow, SVG by resvg.

Text in an SVG is not drawn, because fonts differ between machines; nor are files that it names, which resvg would read from the disk.
"""

import io
import re

import numpy as np
from PIL import Image, ImageOps

from dml_core.extras import require

_FILE = re.compile(r"""(\bhref\s*=\s*["'])(?!data:|\#)[^"']*""")
LEAST_CONTRAST = 32  # of 255: an icon without a pixel that differs so much from white is hardly visible


def draw_icon(data: bytes, image_size: int) -> Image.Image | None:
    """Return an icon as an RGB image, or None if it cannot be drawn or is hardly visible on white.

    Args:
        data: a PNG or SVG file.
        image_size: side of the square image, in pixels; an icon that is not square is centred.
    """
    try:
        icon = _open(data, image_size).convert("RGBA")
    except (ValueError, OSError, SyntaxError):  # SyntaxError: Pillow's for a damaged PNG
        return None
    on_white = Image.new("RGBA", icon.size, "white")
    on_white.alpha_composite(icon)
    drawn = ImageOps.pad(on_white.convert("RGB"), (image_size, image_size), Image.Resampling.LANCZOS, color="white")
    return drawn if np.asarray(drawn).min() <= 255 - LEAST_CONTRAST else None


def _open(data: bytes, image_size: int) -> Image.Image:
    if data.startswith(b"\x89PNG"):
        return Image.open(io.BytesIO(data))
    require("resvg_py")
    import resvg_py

    svg = _FILE.sub(r"\1", data.decode())
    return Image.open(io.BytesIO(resvg_py.svg_to_bytes(svg_string=svg, width=image_size, height=image_size, skip_system_fonts=True)))
