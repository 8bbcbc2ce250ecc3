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
    "adwaita": Theme("adwaita-icon-theme", "Adwaita", "?"),
    "bloom": Theme("deepin-icon-theme", "bloom", "?"),
    "breeze": Theme("breeze-icon-theme", "breeze", "?"),
    "elementary": Theme("elementary-icon-theme", "elementary", "?"),
    "elementary-xfce": Theme("elementary-xfce-icon-theme", "elementary-xfce", "?"),
    "faba": Theme("faba-icon-theme", "Faba", "?"),
    "faenza": Theme("faenza-icon-theme", "Faenza", "?"),
    "gartoon": Theme("gnome-icon-theme-gartoon", "gartoon", "?"),
    "gnome": Theme("gnome-icon-theme", "gnome", "?"),
    "gnome-colors": Theme("gnome-colors-common", "gnome-colors-common", "?"),
    "mate": Theme("mate-icon-theme", "mate", "?"),
    "mint-y": Theme("mint-y-icons", "Mint-Y", "?"),
    "moka": Theme("moka-icon-theme", "Moka", "?"),
    "numix": Theme("numix-icon-theme", "Numix", "?"),
    "numix-circle": Theme("numix-icon-theme-circle", "Numix-Circle", "?"),
    "nuovext2": Theme("lxde-icon-theme", "nuoveXT2", "?"),
    "obsidian": Theme("obsidian-icon-theme", "Obsidian", "?"),
    "oxygen": Theme("oxygen-icon-theme", "oxygen", "?"),
    "paper": Theme("paper-icon-theme", "Paper", "?"),
    "papirus": Theme("papirus-icon-theme", "Papirus", "?"),
    "suru": Theme("suru-icon-theme", "suru", "?"),
    "tango": Theme("tango-icon-theme", "Tango", "?"),
    "yaru": Theme("yaru-theme-icon", "Yaru", "?"),
    "vintage": Theme("deepin-icon-theme", "Vintage", "?"),
    "nuovo": Theme("gnome-icon-theme-nuovo", "Nuovo", "?"),
    "yasis": Theme("gnome-icon-theme-yasis", "yasis", "?"),
}


class Icons(DrawnDataset):
    """Icon names by themes.

    Attributes:
        themes: names of the themes that draw; null for all of `THEMES`.
    """

    how_to_get: ClassVar[str] = "run `dml data fetch icons` on Debian or Ubuntu, with a network"
    published: ClassVar[Mapping[str, Counts]] = {}
    published_sha256: ClassVar[Mapping[str, str]] = {}

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
        return {**dict.fromkeys(links, ""), **{icon: path for icon, (_, path) in best.items()}}

    def _themes(self) -> dict[str, Theme]:
        return {name: theme for name, theme in THEMES.items() if self.themes is None or name in self.themes}


def _is_wanted(path: PurePosixPath) -> bool:
    return (
        path.stem.isprintable() and not path.stem.endswith(_UNWANTED) and not any("@" in part or part == "symbolic" for part in path.parts)
    )


def _nominal_size(path: PurePosixPath) -> int:
    """Return the size in the names of the folders, as 48 in `48x48/apps` and `apps/48`; folders without one are scalable."""
    sizes = [int(found[1]) for part in path.parent.parts if (found := re.fullmatch(r"(\d+)(x\d+)?", part))]
    return sizes[-1] if sizes else _SCALABLE
