"""`glyphs`: Chinese characters as classes, fonts of Debian as views, at the size of Stanford Online Products.

A class is one of the 20,992 code points of Unicode's block CJK Unified Ideographs, named as `U+4E00`. An image is the character as one font
draws it: printed, rounded, handwritten or with a brush. The block is ordered by radical, so characters that share one are mostly in the
same half of the classes.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from dml_core.data.drawing import glyphs
from dml_core.data.drawing.glyphs import GlyphDrawer, code_points
from dml_core.data.readers.shared.archives import Progress
from dml_core.data.readers.shared.drawn import DrawnDataset, Picture, Source
from dml_core.data.readers.shared.packages import DebianArchive
from dml_core.data.store.rows import Counts
from dml_core.data.store.sizes import Side
from dml_core.errors import DataError

CHARACTERS = range(0x4E00, 0xA000)
NOT_DRAWN = "the font draws nothing or its sign for a missing character"


@dataclass(frozen=True)
class Font:
    """A font: Debian package, file below `usr/share/fonts`, its number in a collection, style and licence."""

    package: str
    file: str
    index: int
    style: str
    licence: str


FONTS: dict[str, Font] = {
    "uming": Font("fonts-arphic-uming", "truetype/arphic/uming.ttc", 0, "Ming, printed", "Arphic Public License"),
    "ukai": Font("fonts-arphic-ukai", "truetype/arphic/ukai.ttc", 0, "Kai, printed", "Arphic Public License"),
    "zenhei": Font("fonts-wqy-zenhei", "truetype/wqy/wqy-zenhei.ttc", 0, "Hei, printed", "GPL-2 with font embedding exception"),
    "maruberi": Font("fonts-motoya-l-maruberi", "truetype/motoya-l-maruberi/MTLmr3m.ttf", 0, "rounded", "Apache-2.0"),
    "wenkai": Font("fonts-lxgw-wenkai", "truetype/lxgw-wenkai/LXGWWenKai-Regular.ttf", 0, "handwritten, neat", "OFL-1.1"),
    "seto": Font("fonts-seto", "truetype/seto/setofont.ttf", 0, "handwritten", "OFL-1.1"),
    "kouzan": Font("fonts-kouzan-mouhitsu", "truetype/kouzan-mouhitsu/kouzan-mouhitsu.ttf", 0, "brush", "public domain"),
    "gyosho": Font(
        "fonts-kouzan-mouhitsu", "truetype/kouzan-mouhitsu/kouzan-mouhitsu-gyosho.ttf", 0, "brush, semi-cursive", "public domain"
    ),
}


class Glyphs(DrawnDataset):
    """Characters by fonts.

    Attributes:
        fonts: names of the fonts that draw; null for all of `FONTS`.
    """

    how_to_get: ClassVar[str] = "run `dml data fetch glyphs` on Debian or Ubuntu, with a network"
    published: ClassVar[Mapping[str, Counts]] = {"train": Counts(62_489, 10_309), "test": Counts(58_239, 10_310)}
    published_sha256: ClassVar[Mapping[str, str]] = {  # of the fonts of Debian 12
        "uming": "fe952e55617275142d9cefd4d79eade4df446517b0478b2567d9bc7df49f70e2",
        "ukai": "cfc758e69386a21bade8cb3b373fda20d7f2fac6e8904ced2ded98588b63e274",
        "zenhei": "79c18ebe7b811951e8311bad7103ebeae8c337ed9988ea69e8a78a66cfe029b9",
        "maruberi": "91b9a5c85d29750dbffadbf9f8d243840597164a3d4493cce45bfe6cc1344903",
        "wenkai": "bbf534b0ca093928f94d1782855e65a19a32cde82b075d495d072025521953c8",
        "seto": "af54468357473617a77515436f7dca8f9376690aa514f3a7dbfc36a3b3f8229e",
        "kouzan": "582f269574e71336f1ee8318664ff6cfafd84293b3267ddf39410015713c951e",
        "gyosho": "6b063cc0f9591ea2e71c97f06c8e663d04a0b0ac4bbe6c0e4c3b49a13215db99",
    }

    image_size: Side = 48
    least_images: int = Field(default=3, ge=2)
    fonts: tuple[str, ...] | None = None

    @field_validator("fonts")
    @classmethod
    def _known(cls, fonts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        unknown = [name for name in fonts or () if name not in FONTS]
        if unknown or fonts == ():
            raise ValueError(f"no font '{unknown[0] if unknown else ''}'; fonts are {', '.join(FONTS)}")
        return fonts

    def packages(self) -> list[str]:
        """Return the packages of the fonts."""
        return sorted({font.package for font in self._fonts().values()})

    def sources(self, archives: Mapping[str, DebianArchive], folder: Path) -> list[Source]:
        """Unpack the fonts into `folder`, as files with the fonts' names, and describe them."""
        found = []
        files = {f"usr/share/fonts/{font.file}": font.package for font in self._fonts().values()}
        content = {file.path: file.read() for archive in archives.values() for file in archive.files() if file.path in files}
        for name, font in self._fonts().items():
            path = f"usr/share/fonts/{font.file}"
            if path not in content:
                raise DataError(f"{archives[font.package].path}: has no file {path}; leave the font '{name}' out with the option 'fonts'")
            (folder / name).write_bytes(content[path])
            version = archives[font.package].version
            found.append(Source(name, font.package, version, font.licence, path, hashlib.sha256(content[path]).hexdigest()))
        return found

    def pictures(self, archives: Mapping[str, DebianArchive], folder: Path, progress: Progress) -> Iterator[Picture]:
        """Draw font by font, in order of the characters."""
        drawn = {name: code_points(folder / name, font.index) & set(CHARACTERS) for name, font in self._fonts().items()}
        chosen = {*self.chosen(Counter(_name(point) for found in drawn.values() for point in found))}
        points = {name: sorted(point for point in found if _name(point) in chosen) for name, found in drawn.items()}
        total, done = sum(map(len, points.values())), 0
        for name, font in self._fonts().items():
            drawer = GlyphDrawer(folder / name, font.index, self.image_size)
            for point in points[name]:
                image = drawer.draw(chr(point))
                yield Picture(_name(point), name, font.file, image, NOT_DRAWN if image is None else "")
                done += 1
                progress(done, total)

    def drawing_module(self) -> str:
        """Return the module that draws characters."""
        return glyphs.__file__

    def _fonts(self) -> dict[str, Font]:
        return {name: font for name, font in FONTS.items() if self.fonts is None or name in self.fonts}


def _name(point: int) -> str:
    return f"U+{point:04X}"
