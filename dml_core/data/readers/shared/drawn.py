"""Datasets drawn from Debian packages, such as characters of fonts and icons of themes.

`fetch` downloads the packages and draws every picture once. The raw folder then has `images.zip` (`<class>/<source>.png`), `images.csv`
(each picture, the file that it is drawn from, and the reason if it is left out), `sources.csv` (package, version, licence and SHA-256 of
each source), `licences/` (Debian's copyright files) and `generator.txt` (options, and the SHA-256 of code and of every file). The same
packages and options give the same bytes. Tables are verified when read, except in a folder of an earlier version, which has no SHA-256
of them.
"""

import csv
import hashlib
import inspect
import io
import posixpath
import tempfile
import zipfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import ClassVar

from PIL import Image
from pydantic import Field

from dml_core.data.readers.shared.archives import DAMAGE, Progress
from dml_core.data.readers.shared.contract import DatasetConfig
from dml_core.data.readers.shared.generated import generate_once, recorded_sha256
from dml_core.data.readers.shared.own import split_by_class
from dml_core.data.readers.shared.packages import DebianArchive, cache_folder, debian_archive
from dml_core.data.store.rows import Counts, Row
from dml_core.data.store.sizes import Side
from dml_core.errors import DataError

IMAGES, TABLE, SOURCES, LICENCES = "images.zip", "images.csv", "sources.csv", "licences"
TWO_CLASSES = "same pixels in two classes"
REPEATED = "same pixels as another image of its class"
FEW = "too few images in its class"
_COLUMNS = ("path", "class", "left_out", "file")
_MAX_EXAMPLES = 5


@dataclass(frozen=True)
class Source:
    """A font or a theme: its short name, Debian package, licence and file (in the package, or the package itself)."""

    name: str
    package: str
    version: str
    licence: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Picture:
    """A picture of a class from a source; `image` is None if there is nothing to store, `left_out` the reason to leave it out, or empty."""

    class_name: str
    source: str
    file: str
    image: Image.Image | None
    left_out: str = ""


class DrawnDataset(DatasetConfig):
    """Options of every drawn dataset; the first half of the classes, in order of their names, is for training, the rest for test.

    Attributes:
        image_size: side of the square images, in pixels.
        least_images: images that a class needs; classes with fewer are left out.
        num_classes: classes to draw, at most, evenly over all names; null draws all.
    """

    published: ClassVar[Mapping[str, Counts]] = {}
    published_sha256: ClassVar[Mapping[str, str]] = {}  # of the sources of the published counts

    image_size: Side = 64
    least_images: int = Field(default=4, ge=2)
    num_classes: int | None = Field(default=None, ge=4)

    @abstractmethod
    def packages(self) -> list[str]:
        """Return the names of the Debian packages."""

    @abstractmethod
    def sources(self, archives: Mapping[str, DebianArchive], folder: Path) -> list[Source]:
        """Return the sources; files may be unpacked into `folder`."""

    @abstractmethod
    def pictures(self, archives: Mapping[str, DebianArchive], folder: Path, progress: Progress) -> Iterator[Picture]:
        """Draw the pictures of the chosen classes, in any fixed order."""

    def materialise(self, raw: Path) -> None:
        """Like `fetch`."""
        self.fetch(raw)

    def fetch(self, raw: Path, progress: Progress | None = None) -> None:
        """Download the packages and draw the pictures unless `raw` is the result of these options and this code.

        Raises:
            DataError: a package cannot be downloaded, or `raw` holds other files.
        """
        report = progress or (lambda done, total: None)
        generate_once(raw, self._stamp(), lambda folder: self._draw(folder, report))

    def chosen(self, num_sources: Mapping[str, int]) -> list[str]:
        """Return the names of the classes to draw, sorted, by the number of sources that have each."""
        names = sorted(name for name, number in num_sources.items() if number >= self.least_images)
        if self.num_classes is None or self.num_classes >= len(names):
            return names
        return [names[index * len(names) // self.num_classes] for index in range(self.num_classes)]

    def rows(self, raw: Path) -> list[Row]:
        """Return the pictures that are not left out, by class and source."""
        kept = [(row["path"], row["class"]) for row in _read_csv(raw / TABLE) if not row["left_out"]]
        roles = split_by_class({name for _, name in kept})
        numbers = {name: number for number, name in enumerate(sorted(roles))}
        return [Row(path, numbers[name], name, roles[name]) for path, name in kept]

    def reader(self, raw: Path) -> Callable[[Row], bytes]:
        """Return a reader of the pictures in `images.zip`."""
        try:
            stored = zipfile.ZipFile(raw / IMAGES)
        except (*DAMAGE, RuntimeError):
            raise DataError(f"{raw / IMAGES}: missing or damaged; remove {raw} and run `dml data fetch` again") from None

        def read(row: Row) -> bytes:
            try:
                return stored.read(row.path)
            except (*DAMAGE, KeyError, RuntimeError):  # an unknown compression is a RuntimeError
                raise DataError(f"{raw / IMAGES}: {row.path} is missing or damaged; remove {raw} and run `dml data fetch` again") from None

        return read

    def published_for(self, raw: Path) -> Mapping[str, Counts]:
        """Return the published counts if the sources are the published ones and the options the default."""
        is_default = self._options() == type(self)()._options()
        return self.published if is_default and not self._changed(raw) else {}

    def notes(self, raw: Path) -> Mapping[str, list[str]]:
        """Return the pictures that are left out, by reason, and the sources whose content is not that of the published counts."""
        left_out: dict[str, list[str]] = {}
        for row in _read_csv(raw / TABLE):
            if row["left_out"]:
                left_out.setdefault(f"left out: {row['left_out']}", []).append(row["path"])
        return {**dict(sorted(left_out.items())), "source differs from that of the published counts": self._changed(raw)}

    def _changed(self, raw: Path) -> list[str]:
        found = {row["name"]: row for row in _read_csv(raw / SOURCES)}
        return [
            f"{name} ({row['package']} {row['version']})"
            for name, row in found.items()
            if row["sha256"] != self.published_sha256.get(name, row["sha256"])
        ]

    def _options(self) -> str:
        """Return the options that the pictures depend on."""
        return self.model_dump_json(indent=2, exclude=set(DatasetConfig.model_fields))

    def _stamp(self) -> str:
        modules = {inspect.getfile(kind) for kind in type(self).__mro__ if kind.__module__.startswith("dml_core.data.readers")}
        code = b"".join(Path(path).read_bytes() for path in sorted(modules | {self.drawing_module()}, key=posixpath.basename))
        return f"{self._options()}\n{hashlib.sha256(code).hexdigest()}\n"

    @abstractmethod
    def drawing_module(self) -> str:
        """Return the path of the module that draws, whose change draws the pictures again."""

    def _draw(self, out: Path, progress: Progress) -> None:
        archives = {package: self._archive(package) for package in self.packages()}
        (out / LICENCES).mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=out) as name:
            sources = self.sources(archives, Path(name))
            table = _store(self.pictures(archives, Path(name), progress), out / IMAGES, self.least_images)
        _write_csv(out / TABLE, _COLUMNS, table)
        _write_csv(out / SOURCES, [field.name for field in fields(Source)], map(astuple, sources))
        for archive in archives.values():
            (out / LICENCES / f"{archive.package}.txt").write_bytes(copyright_of(archive))

    def _archive(self, package: str) -> DebianArchive:
        try:
            return debian_archive(package, cache_folder())
        except DataError as error:
            raise DataError(f"Debian's package {package}: {error}; {self.how_to_get}") from None


def copyright_of(archive: DebianArchive) -> bytes:
    """Return Debian's copyright file of a package; empty if it is a link to another package's."""
    wanted = f"usr/share/doc/{archive.package}/copyright"
    return next((file.read() for file in archive.files() if file.path == wanted and file.link is None), b"")


def _store(pictures: Iterable[Picture], path: Path, least_images: int) -> list[tuple[str, str, str, str]]:
    """Write the pictures as they come and return the table's lines, sorted by class and source."""
    entries: list[tuple[Picture, str, bytes]] = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as stored:
        for picture in pictures:
            name = f"{picture.class_name}/{picture.source}.png"
            pixels = b""
            if picture.image is not None:
                encoded = io.BytesIO()
                picture.image.save(encoded, "PNG")
                stored.writestr(zipfile.ZipInfo(name), encoded.getvalue())
                pixels = hashlib.sha256(picture.image.convert("RGB").tobytes()).digest()
            entries.append((Picture(picture.class_name, picture.source, picture.file, None, picture.left_out), name, pixels))
    reasons = left_out_reasons([(picture.class_name, pixels, picture.left_out) for picture, _, pixels in entries], least_images)
    lines = [(name, picture.class_name, reason, picture.file) for (picture, name, _), reason in zip(entries, reasons, strict=True)]
    return sorted(lines, key=lambda line: (line[1], line[0]))


def left_out_reasons(pictures: list[tuple[str, bytes, str]], least_images: int) -> list[str]:
    """Return the reason to leave each picture out, or "".

    Pictures of two classes with the same pixels are all left out, because their class is ambiguous. Of the same pixels in one class the
    first picture is kept. Classes that then have fewer than `least_images` pictures are left out.

    Args:
        pictures: class, hash of the pixels, and a reason that is known already or "", for each picture.
        least_images: pictures that a class needs.
    """
    classes: dict[bytes, str | None] = {}
    for class_name, pixels, reason in pictures:
        if not reason:
            classes[pixels] = class_name if classes.get(pixels, class_name) == class_name else None
    reasons, seen = [], set()
    for _, pixels, known in pictures:
        reasons.append(known or (TWO_CLASSES if classes[pixels] is None else REPEATED if pixels in seen else ""))
        if not known:
            seen.add(pixels)
    sizes = Counter(class_name for (class_name, _, _), reason in zip(pictures, reasons, strict=True) if not reason)
    return [
        reason or (FEW if sizes[class_name] < least_images else "") for (class_name, _, _), reason in zip(pictures, reasons, strict=True)
    ]


def _read_csv(path: Path) -> Iterator[dict[str, str]]:
    damaged = DataError(f"{path}: missing or damaged; remove {path.parent} and run `dml data fetch` again")
    try:
        data, recorded = path.read_bytes(), recorded_sha256(path)
        if recorded not in (None, hashlib.sha256(data).hexdigest()):
            raise damaged
        for line in csv.DictReader(io.StringIO(data.decode(), newline="")):
            if None in line or None in line.values():  # too many or too few columns
                raise damaged
            yield line
    except (OSError, UnicodeDecodeError, csv.Error):
        raise damaged from None


def _write_csv(path: Path, columns: Iterable[str], lines: Iterable[Iterable[str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(lines)
