"""`icons`: icons of Debian's icon themes; a class is a name that several themes draw, such as `edit-copy`.

In each theme an icon's file is the one with the smallest nominal size that is not below `image_size` (`scalable` counts as the largest),
else the largest one; of two, SVG is taken before PNG. Left out are links from one name to another, symbolic icons, which have one colour,
and icons for one direction of text.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

from pydantic import field_validator

from dml_core.data.drawing import icons
from dml_core.data.drawing.icons import draw_icon
from dml_core.data.readers.shared.archives import Progress
from dml_core.data.readers.shared.drawn import DrawnDataset, Picture, Source
from dml_core.data.readers.shared.packages import DebianArchive
from dml_core.data.store.rows import Counts
from dml_core.data.store.sizes import Side
from dml_core.errors import DataError
from dml_core.files import file_sha256

NOT_DRAWN = "damaged, or nothing visible on white"
LINK = "a link to another name"
_SCALABLE = 1 << 20  # pixels: above any size of a folder
_UNWANTED = ("-symbolic", "-rtl", "-ltr")


@dataclass(frozen=True)
class Theme:
    """An icon theme: Debian package, folder below `usr/share/icons`, and licence."""

    package: str
    folder: str
    licence: str


THEMES: dict[str, Theme] = {
    "adwaita": Theme("adwaita-icon-theme", "Adwaita", "LGPL-3 or CC-BY-SA-3.0"),
    "bloom": Theme("deepin-icon-theme", "bloom", "LGPL-3+"),
    "breeze": Theme("breeze-icon-theme", "breeze", "LGPL-3+"),
    "elementary": Theme("elementary-icon-theme", "elementary", "GPL-3+"),
    "elementary-xfce": Theme("elementary-xfce-icon-theme", "elementary-xfce", "GPL-2+"),
    "faba": Theme("faba-icon-theme", "Faba", "GPL-3 or CC-BY-SA-4.0"),
    "faenza": Theme("faenza-icon-theme", "Faenza", "GPL-3+"),
    "gnome": Theme("gnome-icon-theme", "gnome", "GPL-2+"),
    "gnome-colors": Theme("gnome-colors-common", "gnome-colors-common", "GPL-2"),
    "mate": Theme("mate-icon-theme", "mate", "LGPL-3+ or CC-BY-SA-3.0"),
    "mint-y": Theme("mint-y-icons", "Mint-Y", "CC-BY-SA-4.0"),
    "numix": Theme("numix-icon-theme", "Numix", "GPL-3+"),
    "numix-circle": Theme("numix-icon-theme-circle", "Numix-Circle", "GPL-3+"),
    "nuovext2": Theme("lxde-icon-theme", "nuoveXT2", "LGPL-3+"),
    "obsidian": Theme("obsidian-icon-theme", "Obsidian", "GPL-3"),
    "oxygen": Theme("oxygen-icon-theme", "oxygen", "LGPL-3+"),
    "paper": Theme("paper-icon-theme", "Paper", "CC-BY-SA-3.0"),
    "papirus": Theme("papirus-icon-theme", "Papirus", "GPL-3"),
    "suru": Theme("suru-icon-theme", "suru", "CC-BY-SA-3.0"),
    "tango": Theme("tango-icon-theme", "Tango", "public domain"),
    "yaru": Theme("yaru-theme-icon", "Yaru", "CC-BY-SA-4.0"),
}


class Icons(DrawnDataset):
    """Icon names by themes.

    Attributes:
        themes: names of the themes that draw; null for all of `THEMES`.
    """

    how_to_get: ClassVar[str] = "run `dml data fetch icons` on Debian or Ubuntu, with a network"
    published: ClassVar[Mapping[str, Counts]] = {"train": Counts(6_109, 934), "test": Counts(5_842, 934)}
    published_sha256: ClassVar[Mapping[str, str]] = {  # of the packages of Debian 12
        "adwaita": "4b67610565d16b604d3efd9908e8e4b5d71873c5d0f9347433df509020f22af7",
        "bloom": "ee8875442e7a022c991b68be0fa4d26c7fddc2db62db2db91183239094f64d3e",
        "breeze": "268e05fd9626b659f473ade05153bd5ec3b8bf704fcd07d27d91d2ce5db1bbfd",
        "elementary": "a1ae4a0c569043b85972d94bccc24d4e9e98fdcab31e501ccd71a691af295287",
        "elementary-xfce": "012bd2eda0e19b162b9cdc167e904a4a4254f7c2e6409862d0f29a56d3630b75",
        "faba": "749f12745e6d037b5cfd12b23a7e2e04e9020d083c7de05e6d9807feeb029fba",
        "faenza": "0ba952f8c066ba427182d165b48453cad6360bd4c62ee1abfbec464662e92b2c",
        "gnome": "243520edcff2c309065b7e12ae08f666580e6098ecafa0c0f7d28c75aedcfdc3",
        "gnome-colors": "8d4ebf2fcf8f370df0f43076a67808307774672b249784a59cb5492d3a3e0673",
        "mate": "356945b21bf2449ab4d3c0cead5abbc84fab247b140c6d0252263470df49dc54",
        "mint-y": "46eabcb4c910cbecd76fcf840c0b7013a5e070202141c7ad26a154dad281edd3",
        "numix": "6c1dd55a3c4d1b0a61946b984a08f4076cba24c11047fbb11d76f1c2be418dba",
        "numix-circle": "b9fcfc94184b5dae0a6c8716c1491e2a313d795d6049d53a28bbc97711c137f6",
        "nuovext2": "1b47e4879bf8b456c4d801d9d6a2035550bc50184dea05148e8b6e30c61b5ccd",
        "obsidian": "bc73451d8574830ba2c9a9575cca6e18ff595bde77ef9f5b5744002049e71eb5",
        "oxygen": "3e49023e148906e41457a98a19a09858ddd761ef4f212fa356232924b3cebcce",
        "paper": "06ce9ee1b11d46aac18e1df9e97c72df7b494e6a5c593d5f5ee595a78c779fcb",
        "papirus": "3d00a7f3ed7bb2c74ed0dc4853ce7cf21b43f7b7bb0a033df7443c271077bace",
        "suru": "3bfa189256558e6426cbc9c9f48d85a3893fec4509d8409ec696c482080686e2",
        "tango": "dff317aca52fde744b884a02dd9fc2702a0cc6aaecc22271b5abf6906cd90b94",
        "yaru": "2caaa7aa3301bdf674c6059587e3d949563231f9e3cd976b9c829fd0e7ccda3c",
    }

    image_size: Side = 96
    themes: tuple[str, ...] | None = None

    @field_validator("themes")
    @classmethod
    def _known(cls, themes: tuple[str, ...] | None) -> tuple[str, ...] | None:
        unknown = [name for name in themes or () if name not in THEMES]
        if unknown or themes == ():
            raise ValueError(f"no theme '{unknown[0] if unknown else ''}'; themes are {', '.join(THEMES)}")
        return themes

    def packages(self) -> list[str]:
        """Return the packages of the themes."""
        return sorted({theme.package for theme in self._themes().values()})

    def sources(self, archives: Mapping[str, DebianArchive], folder: Path) -> list[Source]:
        """Describe the themes; the file of each is its package."""
        return [
            Source(name, theme.package, archive.version, theme.licence, archive.path.name, file_sha256(archive.path))
            for name, theme in self._themes().items()
            for archive in [archives[theme.package]]
        ]

    def pictures(self, archives: Mapping[str, DebianArchive], folder: Path, progress: Progress) -> Iterator[Picture]:
        """Draw package by package, in the order of its files; nothing is unpacked to disk."""
        listed = {name: self._listed(theme, archives[theme.package]) for name, theme in self._themes().items()}
        chosen = {*self.chosen(Counter(icon for found in listed.values() for icon, file in found.items() if file))}
        wanted = {
            (THEMES[theme].package, file): (theme, icon)
            for theme, found in listed.items()
            for icon, file in found.items()
            if icon in chosen
        }
        done = 0
        for theme, found in listed.items():
            for icon in sorted(icon for icon, file in found.items() if not file and icon in chosen):
                yield Picture(icon, theme, "", None, LINK)
        for package, archive in archives.items():
            for file in archive.files():
                if (package, file.path) in wanted:
                    theme, icon = wanted[package, file.path]
                    image = draw_icon(file.read(), self.image_size)
                    yield Picture(icon, theme, file.path, image, NOT_DRAWN if image is None else "")
                    done += 1
                    progress(done, len(wanted))

    def drawing_module(self) -> str:
        """Return the module that draws icons."""
        return icons.__file__

    def _listed(self, theme: Theme, archive: DebianArchive) -> dict[str, str]:
        """Return icon name -> its file; an empty path where the theme has only links to other names."""
        best: dict[str, tuple[tuple[bool, int, bool, str], str]] = {}
        links: set[str] = set()
        for file in archive.files():
            path = PurePosixPath(file.path)
            if not file.path.startswith(f"usr/share/icons/{theme.folder}/") or path.suffix not in (".png", ".svg") or not _is_wanted(path):
                continue
            if file.link is not None:
                links |= {path.stem} if PurePosixPath(file.link).stem != path.stem else set()
                continue
            size = _nominal_size(path)
            too_small = size < self.image_size
            rank = (too_small, -size if too_small else size, path.suffix == ".png", file.path)
            best[path.stem] = min(best.get(path.stem, (rank, file.path)), (rank, file.path))
        if not best:
            raise DataError(f"{archive.path}: has no icons in usr/share/icons/{theme.folder}; leave the theme out with the option 'themes'")
        return {**dict.fromkeys(links, ""), **{icon: path for icon, (_, path) in best.items()}}

    def _themes(self) -> dict[str, Theme]:
        return {name: theme for name, theme in THEMES.items() if self.themes is None or name in self.themes}


def _is_wanted(path: PurePosixPath) -> bool:
    return (
        path.stem.isprintable() and not path.stem.endswith(_UNWANTED) and not any("@" in part or part == "symbolic" for part in path.parts)
    )


def _nominal_size(path: PurePosixPath) -> int:
    """Return the size in the names of the folders, as 48 in `48x48/apps`, `apps/48` and `apps/48s`; folders without one are scalable."""
    sizes = [int(found[1]) for part in path.parent.parts if (found := re.fullmatch(r"(\d+)(x\d+|s)?", part))]
    return sizes[-1] if sizes else _SCALABLE
