"""Pictures of runs, reduced so that they can be embedded in the page."""

import base64
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from dml_core.evaluation.statistics.mean_ranks import Ranking
from dml_core.figures.mean_ranks import plot_mean_ranks

FIGURES, MEASUREMENTS = "figures", "measurements"
ORDER = ("curve", "gallery", "similarities", "map")
CAPTIONS = {
    "curve": "loss over epochs",
    "gallery": "retrieval gallery",
    "similarities": "similarities of pairs",
    "map": "map of the embeddings",
}
PAGE_BYTES = 3_000_000  # of all pictures of a page, before base64 adds a third
LADDER = ((1400, 85), (1100, 80), (900, 75), (700, 65), (500, 50))  # (pixels, quality) to try, the best first
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".svg"}


@dataclass(frozen=True)
class Picture:
    """A picture in a page: `source` is a data URI, or None if there was no room or the file is not a picture."""

    caption: str
    file: str
    source: str | None
    width: int = 0
    height: int = 0

    @property
    def is_measurement(self) -> bool:
        """True if a measurement of the row drew it; a paper's figures are such pictures."""
        return self.file.startswith(f"{MEASUREMENTS}/")


def picture_files(folder: Path) -> list[Path]:
    """Return a finished run's pictures: the figures of every run, then those of its measurements."""
    found = [path for part in (FIGURES, MEASUREMENTS) for path in sorted((folder / part).rglob("*")) if path.suffix.lower() in SUFFIXES]
    known = [path for name in ORDER for path in found if path.parent.name == FIGURES and path.stem == name]
    return known + [path for path in found if path not in known]


def load_picture(path: Path, folder: Path, num_pictures: int) -> Picture:
    """Load a picture at the best size and quality that leaves room for all pictures of a page.

    Args:
        path: the picture.
        folder: folder of the run's scores; pictures are named relative to it.
        num_pictures: number of pictures on the whole page.
    """
    name, budget = path.relative_to(folder).as_posix(), PAGE_BYTES // max(num_pictures, 1)
    caption = CAPTIONS.get(path.stem, path.stem.replace("_", " ").replace("-", " "))
    if path.suffix.lower() == ".svg":
        data = path.read_bytes()
        return Picture(caption, name, _data_uri("svg+xml", data) if len(data) <= budget else None)
    try:
        with Image.open(path) as image:
            image.load()
            found = _encoded(image.convert("RGB"), budget)
    except (OSError, ValueError):
        return Picture(caption, name, None)
    if found is None:
        return Picture(caption, name, None)
    data, size = found
    return Picture(caption, name, _data_uri("webp", data), *size)


def _encoded(image: Image.Image, budget: int) -> tuple[bytes, tuple[int, int]] | None:
    for pixels, quality in LADDER:
        small = image.copy()
        small.thumbnail((pixels, 2 * pixels))
        file = io.BytesIO()
        small.save(file, "WEBP", quality=quality, method=4)
        if file.tell() <= budget:
            return file.getvalue(), small.size
    return None


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def all_pictures(folders: Sequence[Path]) -> dict[Path, list[Picture]]:
    """Return the pictures of each run's folder, which share the space of a page."""
    files = {folder: picture_files(folder) for folder in folders}
    num_pictures = sum(map(len, files.values()))
    return {folder: [load_picture(path, folder, num_pictures) for path in paths] for folder, paths in files.items()}


def diagram_picture(ranking: Ranking) -> Picture:
    """Return the critical-difference diagram of a table's systems, drawn again: it depends only on the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = plot_mean_ranks(ranking, Path(folder) / "ranks.png")
        return load_picture(path, Path(folder), 1)
