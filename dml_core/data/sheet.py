"""A contact sheet of a packed dataset: one row per class, with its name and some of its images."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from dml_core.data.store.decode import MOST_PIXELS
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import ConfigError
from dml_core.extras import require
from dml_core.files import writing

_TILE_PIXELS = 96
_GAP_PIXELS = 4
_NAME_PIXELS = 180
_MAX_CHARACTERS = 28
_FONT_PIXELS = 10
_BOX_COLOUR = (255, 60, 60)


def contact_sheet(folder: Path, role: str, num_classes: int, num_samples: int, path: Path) -> None:
    """Write a PNG of a role's first classes, evenly spaced samples of each, and their boxes.

    Raises:
        DataError: no prepared dataset in `folder`.
        ConfigError: the dataset has no such role, or the sheet would be too large.
        MissingPackageError: matplotlib is not installed, whose font has the letters that Pillow's lacks (ä, é, я).
    """
    require("matplotlib")
    from matplotlib import get_data_path

    dataset = PackedDataset(folder, role)
    shown = range(min(num_classes, len(dataset.class_names)))
    sizes = np.bincount(dataset.labels, minlength=len(dataset.class_names))[: len(shown)]
    step = _TILE_PIXELS + _GAP_PIXELS
    width, height = _NAME_PIXELS + min(num_samples, int(sizes.max())) * step, len(shown) * step + _GAP_PIXELS
    if width * height > MOST_PIXELS:
        raise ConfigError(f"a sheet of {len(shown)} classes with {num_samples} images is too large; lower --classes or --samples")
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.truetype(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf", _FONT_PIXELS, layout_engine=ImageFont.Layout.BASIC)
    for class_index in shown:
        top = class_index * step + _GAP_PIXELS
        name = dataset.class_names[class_index]
        shown_name = name if len(name) <= _MAX_CHARACTERS else f"{name[: _MAX_CHARACTERS - 1]}…"
        draw.text((_GAP_PIXELS, top + _TILE_PIXELS // 2 - 6), shown_name, "black", font)
        members = np.flatnonzero(dataset.labels == class_index)
        for column, position in enumerate(np.linspace(0, len(members) - 1, min(num_samples, len(members)))):
            sheet.paste(_tile(dataset, int(members[round(position)])), (_NAME_PIXELS + column * step, top))
    with writing(path) as file:
        sheet.save(file, "PNG")


def _tile(dataset: PackedDataset, index: int) -> Image.Image:
    """Return the image in a square tile, with its box."""
    image = Image.fromarray(dataset.image(index).permute(1, 2, 0).numpy())
    scale = _TILE_PIXELS / max(image.size)
    fitted = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    box = dataset.box(index)
    if box is not None:
        left, top, right, bottom = (side * scale for side in box)
        shape = (left, top, max(left, right - 1), max(top, bottom - 1))  # at least a pixel
        ImageDraw.Draw(fitted).rectangle(shape, outline=_BOX_COLOUR)
    return ImageOps.pad(fitted, (_TILE_PIXELS, _TILE_PIXELS), color="white")
