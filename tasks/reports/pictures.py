"""Pictures of runs, small enough to be embedded in a page. A page's encoded pictures are cached: encoding takes most of its time."""

import base64
import hashlib
import io
import json
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from PIL import Image, features

from dml_core.errors import StoreError
from dml_core.evaluation.statistics.mean_ranks import Ranking
from tasks.runs.records import FIGURES_FOLDER, Record
from tasks.sealed import read_or_set_aside, write_sealed

MEASUREMENTS = "measurements"  # the folder of `tasks.scores.measuring`, which imports torch
CAPTIONS = {  # in their order on a page
    "curve": "loss over epochs",
    "gallery": "retrieval gallery",
    "similarities": "similarities of pairs",
    "map": "map of the embeddings",
}
PAGE_BYTES = 3_000_000  # of all pictures of a page, before base64 adds a third
LADDER = ((1400, 85), (1100, 80), (900, 75), (700, 65), (500, 50))  # (pixels, quality) to try, the best first


class Encoded(Record):
    """An encoded picture: its data URI, and its size in pixels; `source` is None if there was no room or the file is not a picture.

    It is the same for any number of bytes from `least` to below `below`.
    """

    source: str | None
    width: int = 0
    height: int = 0
    least: int = 0
    below: int = sys.maxsize


class Picture(Encoded):
    """An encoded picture with its caption and its file in the folder of the run's scores."""

    caption: str
    file: str

    @property
    def is_measurement(self) -> bool:
        """True if a measurement of the row drew it; a paper's figures are such pictures."""
        return self.file.startswith(f"{MEASUREMENTS}/")


class PictureCache:
    """The encoded pictures of a page as last written, by a hash of all that they depend on. Thread-safe.

    The hash covers a picture's bytes, this module's source and the libraries' versions. The file only saves time: if
    it is damaged, of another format or cannot be written, pictures are encoded again. Without a file nothing is cached.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._before: dict[str, Encoded] = {}
        self._now: dict[str, Encoded] = {}
        try:
            self._before = read_or_set_aside(path, dict[str, Encoded]) or {} if path is not None else {}
        except StoreError:
            self._path = None

    def encode(self, data: bytes, most_bytes: int) -> Encoded:
        """Return the picture of these bytes, encoded as `encode` does."""
        key = hashlib.sha256(f"{_encoder()} ".encode() + data).hexdigest()
        known = self._now.get(key) or self._before.get(key)
        if known is None or not known.least <= most_bytes < known.below:
            known = encode(data, most_bytes)
        self._now[key] = known
        return known

    def save(self) -> None:
        """Write the pictures that were used, and no others."""
        if self._path is not None and self._now != self._before:
            with suppress(StoreError):
                write_sealed(self._path, self._now)


@cache
def _encoder() -> str:
    """Return a hash of what encodes pictures: this file, Pillow and libwebp."""
    versions = json.dumps([Image.__version__, features.version("webp")])  # type: ignore[attr-defined]
    return hashlib.sha256(Path(__file__).read_bytes() + versions.encode()).hexdigest()


def encode(data: bytes, most_bytes: int) -> Encoded:
    """Return a picture as WebP at the best size and quality that fits `most_bytes`; without source if none fits or it is not a picture."""
    try:
        with Image.open(io.BytesIO(data)) as file:
            image = file.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return Encoded(source=None)
    below = sys.maxsize
    for pixels, quality in LADDER:
        small, encoded = image.copy(), io.BytesIO()
        small.thumbnail((pixels, 2 * pixels))
        small.save(encoded, "WEBP", quality=quality, method=4)
        if encoded.tell() <= most_bytes:
            source = f"data:image/webp;base64,{base64.b64encode(encoded.getvalue()).decode()}"
            return Encoded(source=source, width=small.width, height=small.height, least=encoded.tell(), below=below)
        below = min(below, encoded.tell())
    return Encoded(source=None, below=below)


def picture_files(folder: Path) -> list[Path]:
    """Return a finished run's pictures: the figures of every run, then those of its measurements."""
    known = list(CAPTIONS)
    figures, measurements = (sorted((folder / part).rglob("*.png")) for part in (FIGURES_FOLDER, MEASUREMENTS))
    return sorted(figures, key=lambda path: known.index(path.stem) if path.stem in known else len(known)) + measurements


def load_picture(path: Path, folder: Path, num_pictures: int, pictures: PictureCache) -> Picture:
    """Load a picture at the best size and quality that leaves room for all `num_pictures` of a page; it is named relative to `folder`."""
    try:
        encoded = pictures.encode(path.read_bytes(), PAGE_BYTES // max(num_pictures, 1))
    except OSError:
        encoded = Encoded(source=None)
    caption = CAPTIONS.get(path.stem, path.stem.replace("_", " ").replace("-", " "))
    return Picture(**dict(encoded), caption=caption, file=path.relative_to(folder).as_posix())


def diagram_picture(ranking: Ranking, pictures: PictureCache) -> Picture:
    """Return the critical-difference diagram of a table's systems, drawn again: it depends only on the table."""
    from dml_core.figures.mean_ranks import plot_mean_ranks

    with tempfile.TemporaryDirectory() as folder:
        path = plot_mean_ranks(ranking, Path(folder) / "ranks.png")
        return load_picture(path, Path(folder), 1, pictures)
