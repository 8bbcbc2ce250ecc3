"""Characters of a font file, drawn black on white by Pillow's FreeType with its basic layout, which needs no other library."""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from dml_core.extras import require

EM_SHARE = 0.8  # of the image's side; the rest is margin
NO_CHARACTER = "\U0010ffff"  # in no font, so the font's sign for a missing character is drawn


def code_points(path: Path, index: int = 0) -> frozenset[int]:
    """Return the code points that a font maps to a glyph.

    Args:
        path: a TrueType or OpenType file, or a collection.
        index: the font's number in a collection.
    """
    require("fontTools")
    from fontTools.ttLib import TTFont

    with TTFont(path, fontNumber=index, lazy=True) as font:
        return frozenset(font.getBestCmap() or {})


class GlyphDrawer:
    """Draws characters of one font.

    Args:
        path: a TrueType or OpenType file, or a collection.
        index: the font's number in a collection.
        image_size: side of the square images, in pixels.
    """

    def __init__(self, path: Path, index: int, image_size: int) -> None:
        em = max(1, round(EM_SHARE * image_size))
        self._font = ImageFont.truetype(path, em, index, layout_engine=ImageFont.Layout.BASIC)
        self._size = image_size
        self._missing = self._drawn(NO_CHARACTER).tobytes()

    def draw(self, character: str) -> Image.Image | None:
        """Return the character's ink in the middle of a grey image, or None if it has none or is the font's sign for missing ones."""
        image = self._drawn(character)
        return None if image.tobytes() == self._missing or image.getextrema() == (255, 255) else image

    def _drawn(self, character: str) -> Image.Image:
        canvas = Image.new("L", (4 * self._size, 4 * self._size))
        ImageDraw.Draw(canvas).text((self._size, self._size), character, fill=255, font=self._font)
        ink = canvas.crop(canvas.getbbox())
        image = Image.new("L", (self._size, self._size))
        image.paste(ink, ((self._size - ink.width) // 2, (self._size - ink.height) // 2))
        return ImageOps.invert(image)
