"""Search an index for images; return the results as plain values or as a page.

The page is one file that loads nothing: pictures, style and script are embedded. All output of templates is escaped, file names included.
"""

import base64
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from dml_core.data.readers.shared.own import is_list_name
from dml_core.data.store.rows import Box
from dml_core.files import read_regular
from dml_core.index.choosing import outgrown
from dml_core.index.index import Index
from dml_core.index.items import Item
from dml_core.index.thumbnails import picture_size
from dml_core.trained import TrainedModel
from tasks.models.indexing import batches_of_images
from tasks.models.sources import Images, find_images

QUERY_PIXELS = 320
SHARP_PIXELS = 64  # smaller pictures are shown with sharp pixels, not smoothed


class Hit(NamedTuple):
    """An item that was found: its rank from 1, its score (cosine, or negative distance) and its entry in the index."""

    rank: int
    score: float
    item: Item


class Answer(NamedTuple):
    """The results of one query image: its name as given, a small WebP of it, and the items nearest to it, nearest first."""

    name: str
    picture: bytes
    hits: list[Hit]

    def as_values(self) -> dict[str, Any]:
        """Return the results as plain values for programs."""
        hits = [{"rank": hit.rank, "score": hit.score, "name": hit.item.name, "class": hit.item.class_name} for hit in self.hits]
        return {"image": self.name, "found": hits}


def search_images(index: Index, model: TrainedModel, images: Images, k: int) -> list[Answer]:
    """Find the nearest items of each image.

    Raises:
        ConfigError: the model is not the index's, or k is below 1.
        DataError: a file is missing or not an image.
    """
    index.check_model(model.identity, model.weights_sha256)
    batches = [*batches_of_images(model, images, QUERY_PIXELS)]
    queries = [item for batch in batches for item in batch.items]
    scores_Qk, positions_Qk = index.search(np.concatenate([batch.embeddings for batch in batches]), k)
    answers = []
    for query, scores, positions in zip(queries, scores_Qk, positions_Qk.tolist(), strict=True):
        nearest = enumerate(zip(scores, positions, strict=True), start=1)
        hits = [Hit(rank, float(score), index.item(position)) for rank, (score, position) in nearest]
        answers.append(Answer(query.name, query.thumbnail or b"", hits))
    return answers


def query_images(paths: Sequence[Path]) -> Images:
    """Return the images at paths, with their boxes; a folder or list means all of its images.

    Raises:
        DataError: a folder or list has none, or cannot be read.
    """
    images: list[tuple[str, Box | None, Callable[[], bytes]]] = []
    for path in paths:
        if path.is_dir() or is_list_name(path):
            source, root = find_images(str(path)), path if path.is_dir() else path.parent
            named = zip(source.names, source.boxes or [None] * len(source), strict=True)
            images += [(str(root / name), box, partial(source.read, position)) for position, (name, box) in enumerate(named)]
        else:
            images.append((str(path), None, partial(read_regular, path)))
    names, boxes = [name for name, _, _ in images], [box for _, box, _ in images]
    return Images(names, None, boxes, "", lambda position: images[position][2](), lambda _: "")


def describe(index: Index) -> list[str]:
    """Describe an index in a few lines."""
    info = index.info
    source = f" ({info.model_source})" if info.model_source else ""
    lines = [
        f"{info.num_items:,} item{'' if info.num_items == 1 else 's'} of {info.num_dimensions} dimensions, by {info.metric}",
        f"model {info.model_identity}{source}",
    ]
    if info.reason:
        lines.append(f"chosen by size: {info.reason}")
    return [*lines, *outgrown(info), kind_line(index)]


def kind_line(index: Index) -> str:
    """Return the index's kind and, if it is approximate, what it misses."""
    if index.kind == "exact":
        return "exact search: finds all nearest neighbours"
    return f"approximate ({index.kind})" + (f": {index.info.found}" if index.info.found is not None else "")


# ---------------------------------------------------------------- the page


def search_page(index: Index, answers: Sequence[Answer]) -> str:
    """Return the search results as HTML."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("tasks.models"), PackageLoader("tasks")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "data_uri": lambda picture: f"data:image/webp;base64,{base64.b64encode(picture).decode()}",
        "is_sharp": lambda picture: max(picture_size(picture)) <= SHARP_PIXELS,
        "base": lambda name: name.rpartition("/")[2],  # without its folders
    }
    environment.globals |= {"nearness": _nearness, "share": _share}
    return environment.get_template("search.html").render(index=index, answers=answers, kind=kind_line(index))


def _nearness(score: float, metric: str) -> str:
    return f"cosine {score:.3f}" if metric == "cosine" else f"distance {-score:.3g}"


def _share(score: float, best: float, metric: str) -> int:
    """Return the filled share of a score's bar, in per cent: of cosine 1, or the best distance divided by this one."""
    filled = score if metric == "cosine" else (best / score if score < 0 else 1.0)
    return round(100 * min(1.0, max(0.0, filled)))
