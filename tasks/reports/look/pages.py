"""Write the pages of `dml look`: `index.html` of a run, or of a comparison, with one page for each of its runs.

The data is in scripts, because a page opened as a file may load scripts but not fetch data. The size is bounded: thumbnails by ALBUM_BYTES
and MAX_PICTURES, a run's own data by the number of pictures. If a dataset has more images, only a seeded sample of the queries can be
selected, with all neighbours of each; counts and scores always cover all queries.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader
from numpy.typing import NDArray

from dml_core.errors import ConfigError, StoreError
from dml_core.evaluation.metric_info import table_columns
from dml_core.evaluation.retrieval.outcomes import sample_queries
from dml_core.evaluation.statistics.comparing import Comparison, compare, tested_on
from dml_core.files import replace_folder
from tasks.environment import Project
from tasks.reports.look import run_evaluation
from tasks.reports.look.album import CELLS, COLUMNS, Album
from tasks.reports.look.run_evaluation import NUM_NEIGHBOURS, EvaluatedRun, Method
from tasks.reports.look.runs import Chosen, open_sides
from tasks.reports.site.pages import environment as site_environment
from tasks.reports.site.pictures import Picture, load_picture, picture_files
from tasks.runs.specs import row_name
from tasks.scores.figures import Side

INDEX, ITEMS, COMPARISON, PLOTLY = "index.html", "items.js", "comparison.js", "plotly.min.js"
MAX_PICTURES = 65_536
ALBUM_BYTES = 48_000_000
PATHS_BYTES = 4_000_000  # of the images' names, which are omitted if longer
FIGURES = ("curve", "similarities")  # of a run's own, which are not drawn again here
Say = Callable[[str], None]


@dataclass(frozen=True)
class Shown:
    """A run with the names of its page and its data.

    Attributes:
        evaluated: the run's scores, outcomes and map.
        stem: prefix of its file names.
    """

    evaluated: EvaluatedRun
    stem: str

    @property
    def variant(self) -> str:
        """Name of the variant in the comparison."""
        return self.evaluated.run.spec.variant


@dataclass(frozen=True)
class Images:
    """The images of all pages.

    Attributes:
        queries, gallery: one object if the queries are also the gallery.
        looked: (L,) the queries that can be selected.
        album: album of all of them and their neighbours.
    """

    queries: Side
    gallery: Side
    looked: NDArray[np.int64]
    album: Album

    @property
    def is_whole(self) -> bool:
        """True if every query can be selected."""
        return len(self.looked) == len(self.queries.labels)


def write_look(project: Project, chosen: Chosen, reference: str | None, folder: Path, method: Method, say: Say) -> Path:
    """Write the pages of the chosen run or comparison, replacing older pages, and return the first.

    Args:
        project: project whose store is read.
        chosen: a run or a comparison.
        reference: variant that others are compared with; by default the best.
        folder: folder that holds only these pages.
        method: method of the maps.
        say: reports progress.

    Raises:
        ConfigError: the folder contains something else.
        StoreError: embeddings are missing or do not match the scores, or the folder cannot be written.
        EvaluationError: embeddings cannot be scored.
    """
    _check_place(folder)
    runs, images = _see_all(project, chosen, method, say)
    place = folder.resolve()  # "." has no name
    beside = place.with_name(f".{place.name}.{uuid4().hex}")
    try:
        beside.mkdir(parents=True)
        _write_all(chosen, reference, runs, images, method, beside, say)
        _check_place(folder)  # the folder may have changed while drawing
        replace_folder(beside, place)
    except OSError as error:
        raise StoreError(f"{folder}: pages cannot be written ({error.strerror or error}); free space or choose another folder") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder / INDEX


def _check_place(folder: Path) -> None:
    """Check that a folder holds only pages of `dml look`, or nothing."""
    if folder.exists() and not (folder.is_dir() and ((folder / ITEMS).is_file() or not any(folder.iterdir()))):
        raise ConfigError(f"{folder}: there is something else; choose a new or empty folder with -o, or one that dml look made")


def _see_all(project: Project, chosen: Chosen, method: Method, say: Say) -> tuple[list[Shown], Images]:
    """Return every run to show, and the images of all. Embeddings of a run are released after it is evaluated."""
    images = _choose_images(*open_sides(project, chosen.shown[0], chosen.dataset), len(chosen.shown), chosen.seed)
    runs: list[Shown] = []
    for number, run in enumerate(chosen.shown):
        say(f"looking at {run.spec.title}")
        found = run_evaluation.evaluate_run(run, *open_sides(project, run, chosen.dataset), images.looked, method)
        runs.append(Shown(found, f"run-{number:02}-{row_name(run.spec.variant)}" if chosen.is_comparison else "run"))
    for shown in runs:
        for index in np.unique(shown.evaluated.outcomes.neighbours[images.looked]).tolist() if not images.is_whole else ():
            images.album.place(images.gallery, index)
    return runs, images


def _choose_images(queries: Side, gallery: Side, num_runs: int, seed: int) -> Images:
    """Choose the queries that can be selected; the album gets all images if they fit, else these queries and later their neighbours."""
    album = Album("images", ALBUM_BYTES)
    sides = (gallery,) if queries is gallery else (gallery, queries)
    if sum(len(side.labels) for side in sides) <= MAX_PICTURES:
        for side in sides:
            for index in range(len(side.labels)):
                album.place(side, index)
        return Images(queries, gallery, np.arange(len(queries.labels)), album)
    looked = sample_queries(queries.labels, MAX_PICTURES // (1 + NUM_NEIGHBOURS * num_runs), seed)
    for index in looked.tolist():
        album.place(queries, index)
    return Images(queries, gallery, looked, album)


def _write_all(
    chosen: Chosen, reference: str | None, runs: Sequence[Shown], images: Images, method: Method, folder: Path, say: Say
) -> None:
    from plotly.offline import get_plotlyjs

    (folder / PLOTLY).write_text(get_plotlyjs(), encoding="utf-8")
    (folder / ITEMS).write_text(f"look.items = {_json(_items(images))};\n")
    for shown in runs:
        _write_run(chosen, shown, images, method, folder)
    if chosen.is_comparison:
        _write_comparison(chosen, reference, runs, images, folder)
    say(f"drawing {len(images.album)} thumbnails")
    images.album.write(folder)


def _write_run(chosen: Chosen, shown: Shown, images: Images, method: Method, folder: Path) -> None:
    own = Album(shown.stem, run_evaluation.ALBUM_BYTES)
    found, run = shown.evaluated, shown.evaluated.run
    page = _environment().get_template("run.html")
    worst, confusions = run_evaluation.worst(found, own), run_evaluation.confusions(found, own)
    html = page.render(
        chosen=chosen,
        shown=shown,
        run=run,
        images=images,
        scores=run_evaluation.scores_of(found, chosen.over_seeds(run.spec.variant)),
        worst=worst,
        confusions=confusions,
        num_pairs=_num_pairs(found),
        pictures=_figures(run.scores),
        own=own,
        title=run.spec.title,
        method=method,
        choosable=frozenset(images.looked.tolist()),
        scripts=[ITEMS, f"{shown.stem}.js", PLOTLY],
    )
    (folder / (f"{shown.stem}.html" if chosen.is_comparison else INDEX)).write_text(html, encoding="utf-8")
    (folder / f"{shown.stem}.js").write_text(f"look.run = {_json(_run_data(found, images))};\n")
    own.write(folder)


def _write_comparison(chosen: Chosen, reference: str | None, runs: Sequence[Shown], images: Images, folder: Path) -> None:
    found = _differences(chosen, reference)
    summaries = {shown.variant: chosen.over_seeds(shown.variant) for shown in runs}
    is_found = {shown.variant: shown.evaluated.outcomes.is_found for shown in runs}
    order = [shown.variant for shown in runs] if found is None else list(found.means)
    html = (
        _environment()
        .get_template("comparison.html")
        .render(
            chosen=chosen,
            runs={shown.variant: shown for shown in runs},
            order=order,
            images=images,
            columns=table_columns(name for metrics in summaries.values() for name in metrics),
            summaries=summaries,
            found=found,
            # fields of a table that parts.html reads
            told=None if found is None else SimpleNamespace(told=[found.sentence], comparisons=[found], ranking=None),
            only={(one, other): int((is_found[one] & ~is_found[other]).sum()) for one in order for other in order},
            scripts=[ITEMS, COMPARISON],
        )
    )
    (folder / INDEX).write_text(html, encoding="utf-8")
    data = [
        {"name": shown.variant, "page": f"{shown.stem}.html", **_run_data(shown.evaluated, images, 1)}
        for variant in order
        for shown in runs
        if shown.variant == variant
    ]
    (folder / COMPARISON).write_text(f"look.runs = {_json(data)};\n")


def _differences(chosen: Chosen, reference: str | None) -> Comparison | None:
    """Compare the variants by their first metric, in per cent, paired by seed; as reports and `dml compare` do."""
    metric = table_columns(name for run in chosen.runs for name in run.metrics)[0]
    scores: dict[str, dict[int, float]] = {}
    for run in chosen.runs:
        scores.setdefault(run.spec.variant, {})[run.spec.seed] = 100 * run.metrics[metric]
    return compare(chosen.dataset.name, metric, scores, reference, **tested_on(chosen.runs[0].metrics))


# ---------------------------------------------------------------- what scripts read


def _items(images: Images) -> dict[str, Any]:
    """Return the data of each picture by its place, and which pictures are the queries that can be selected."""
    album = images.album
    paths = [side.dataset.paths[index] for side, index in album.images]
    return {
        "stem": album.stem,
        "columns": COLUMNS,
        "cells": CELLS,
        "classes": images.gallery.dataset.class_names,
        "labels": [int(side.labels[index]) for side, index in album.images],
        "numbers": [index for _, index in album.images],
        "paths": paths if sum(map(len, paths)) <= PATHS_BYTES else None,
        "queries": [album.place(images.queries, index) for index in images.looked.tolist()],
    }


def _run_data(found: EvaluatedRun, images: Images, num_neighbours: int = NUM_NEIGHBOURS) -> dict[str, Any]:
    """Return each selectable query's neighbours (places), their similarities in thousandths and the rank of the first correct one.

    A query with nothing to find has rank 0. The map is included if all neighbours are.
    """
    outcomes, looked = found.outcomes, images.looked
    neighbours = outcomes.neighbours[looked, :num_neighbours]
    data: dict[str, Any] = {
        "width": neighbours.shape[1],
        "neighbours": [images.album.place(found.gallery, index) for index in neighbours.ravel().tolist()],
        "similarities": np.round(1000 * outcomes.similarities[looked, :num_neighbours].ravel()).astype(int).tolist(),
        "firstRanks": np.where(outcomes.scores.is_scored[looked], outcomes.scores.first_rank[looked], 0).tolist(),
    }
    return data if num_neighbours == 1 else data | {"map": _map(found, images)}


def _map(found: EvaluatedRun, images: Images) -> dict[str, Any] | None:
    """Return the map for Plotly: found queries as dots, missed ones as crosses, a hue for each class."""
    if found.points is None:
        return None
    from plotly import graph_objects

    numbers = np.searchsorted(images.looked, found.drawn)  # the numbers by which the page selects a query
    labels = found.queries.labels[found.drawn]
    hues = np.floor((labels * 0.61803398875 % 1) * 360).astype(int)  # consecutive classes get distant hues
    names = np.array([found.queries.class_name(int(index)) for index in found.drawn], dtype=object)
    kinds = (
        ("nearest image right", "circle", found.outcomes.is_found),
        ("nearest image wrong", "x", found.outcomes.is_missed),
        ("nothing to find", "circle-open", ~found.outcomes.scores.is_scored),
    )
    figure = graph_objects.Figure()
    for name, symbol, chosen in kinds:
        of_kind = np.flatnonzero(chosen[found.drawn])
        if len(of_kind):
            figure.add_scatter(
                x=np.round(found.points[of_kind, 0], 3).tolist(),
                y=np.round(found.points[of_kind, 1], 3).tolist(),
                mode="markers",
                name=name,
                customdata=numbers[of_kind].tolist(),
                text=[f"{_plain(names[place])}, image {found.drawn[place]}" for place in of_kind],
                hovertemplate="%{text}<extra></extra>",
                marker={"symbol": symbol, "size": 8, "color": [f"hsl({hue},65%,48%)" for hue in hues[of_kind]]},
            )
    figure.update_layout(
        template="none",
        dragmode="pan",
        hovermode="closest",
        margin={"l": 6, "r": 6, "t": 6, "b": 6},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        xaxis={"visible": False},
        yaxis={"visible": False, "scaleanchor": "x"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    drawn: dict[str, Any] = json.loads(figure.to_json())
    return drawn


def _plain(name: str) -> str:
    """Escape a name so that Plotly, which interprets some HTML and entities in texts, shows it unchanged."""
    return name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _num_pairs(found: EvaluatedRun) -> int:
    """Return the number of different pairs of confused classes, of which the page lists the first."""
    missed = found.outcomes.is_missed & ~found.outcomes.is_right[:, 0]
    nearest = found.gallery.labels[found.outcomes.neighbours[missed, 0]]
    return len(set(zip(found.queries.labels[missed].tolist(), nearest.tolist(), strict=True)))


def _figures(folder: Path) -> list[Picture]:
    """Return the run's own figures that a page shows unchanged."""
    files = [path for path in picture_files(folder) if path.stem in FIGURES]
    return [load_picture(path, folder, len(files)) for path in files]


def _json(data: Any) -> str:
    """Return JSON that is also a valid script: ASCII, because Unicode line separators would end a line of script."""
    return json.dumps(data, separators=(",", ":"))


@cache
def _environment() -> Environment:
    packages = ("tasks.reports.look", "tasks.reports.site", "tasks")
    return site_environment().overlay(loader=ChoiceLoader([PackageLoader(name) for name in packages]))
