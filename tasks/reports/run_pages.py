"""Write the pages of `dml look`: `index.html` of a run, or of a comparison, with one page for each of its runs.

The data is in scripts, because a page opened as a file may load scripts but not fetch data. The size is bounded: thumbnails by ALBUM_BYTES
and MAX_PICTURES, a run's own data by the number of pictures. If a dataset has more images, only a seeded sample of the queries can be
selected, with all neighbours of each; counts and scores always cover all queries.
"""

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from dml_core.data.store.embedded import EmbeddedImages
from dml_core.errors import ConfigError
from dml_core.evaluation.metric_info import table_columns
from dml_core.evaluation.retrieval.outcomes import confused_pairs, sample_queries
from dml_core.evaluation.statistics.comparing import BOLD
from dml_core.evaluation.statistics.over_seeds import Summary
from dml_core.files import replace_folder, write_errors
from tasks.environment import Project
from tasks.reports.album import CELLS, COLUMNS, Album
from tasks.reports.compare import Summaries, compare_runs, summarise_runs
from tasks.reports.finished_runs import SelectedRuns, open_sides
from tasks.reports.kit import render
from tasks.reports.pictures import PictureCache, load_picture, picture_files
from tasks.reports.run_evaluation import NUM_NEIGHBOURS, EvaluatedRun, Images, Method, evaluate_finished
from tasks.runs.params.comparison import row_name
from tasks.wording import Say

INDEX, ITEMS, COMPARISON, PLOTLY = "index.html", "items.js", "comparison.js", "plotly.min.js"
FILES = re.compile(r"index\.html|(items|comparison|plotly\.min)\.js|(images|run(-\d+-.+)?)(-\d+\.webp|\.html|\.js)")
MAX_PICTURES = 65_536
ALBUM_BYTES = 48_000_000
RUN_ALBUM_BYTES = 3_000_000  # of worst queries and confused classes
PATHS_BYTES = 4_000_000  # of the images' names, which are omitted if longer
NUM_COUNTED_PAIRS = 200  # of the table of pairs without pictures
FIGURES = ("curve", "similarities")  # of a run's own, which are not drawn again here


def write_look(project: Project, selected: SelectedRuns, reference: str | None, folder: Path, method: Method, say: Say) -> Path:
    """Write the pages of the selected run or comparison into a folder that holds only these, replacing older pages; return the first.

    Other variants are compared with `reference`, by default the best; `say` reports progress.

    Raises:
        ConfigError: the folder contains something else.
        StoreError: embeddings are missing or do not match the scores, or the folder cannot be written.
        EvaluationError: embeddings cannot be scored, or the runs are scored on different classes.
    """
    _check_place(folder)
    images, runs = _evaluate_all(project, selected, method, say)
    place = folder.resolve()  # "." has no name
    beside = place.with_name(f".{place.name}.{uuid4().hex}")
    try:
        with write_errors(f"{folder}: pages", "free space or choose another folder"):
            beside.mkdir(parents=True)
            _write_all(selected, reference, images, runs, beside)
            say(f"drawing {len(images.album)} thumbnails")
            images.album.write(beside)
            _check_place(folder)  # the folder may have changed while drawing
            replace_folder(beside, place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder / INDEX


def _check_place(folder: Path) -> None:
    """Check that a folder holds only pages of `dml look`, or nothing."""
    if not folder.exists():
        return
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [folder.name]
    other = next((name for name in names if ITEMS not in names or not FILES.fullmatch(name)), None)
    if other is not None:
        raise ConfigError(f"{folder}: contains other files ({other}); choose a new or empty folder with -o, or one that dml look wrote")


def _evaluate_all(project: Project, selected: SelectedRuns, method: Method, say: Say) -> tuple[Images, dict[str, EvaluatedRun]]:
    """Return the images of all pages, and every run to show by the stem of its files. Embeddings are released after each run."""
    images = _select_images(*open_sides(project, selected.shown[0], selected.dataset), len(selected.shown), selected.seed)
    runs: dict[str, EvaluatedRun] = {}
    for number, run in enumerate(selected.shown):
        say(f"evaluating {run.spec.title}")
        stem = f"run-{number:02}-{row_name(run.spec.variant)}" if selected.is_comparison else "run"
        runs[stem] = evaluate_finished(run, *open_sides(project, run, selected.dataset), images, method)
    if not images.is_whole:
        for evaluated in runs.values():
            for index in np.unique(evaluated.outcomes.neighbours[images.selectable]).tolist():
                images.album.place(images.gallery, index)
    return images, runs


def _select_images(queries: EmbeddedImages, gallery: EmbeddedImages, num_runs: int, seed: int) -> Images:
    """Select the queries of the pages; the album gets all images if they fit, else these queries and later their neighbours."""
    album = Album("images", ALBUM_BYTES)
    sides = (gallery,) if queries is gallery else (gallery, queries)
    if sum(len(side.labels) for side in sides) <= MAX_PICTURES:
        for side in sides:
            for index in range(len(side.labels)):
                album.place(side, index)
        return Images(queries, gallery, np.arange(len(queries.labels)), album)
    selectable = sample_queries(queries.labels, MAX_PICTURES // (1 + NUM_NEIGHBOURS * num_runs), seed)
    for index in selectable.tolist():
        album.place(queries, index)
    return Images(queries, gallery, selectable, album)


def _write_all(selected: SelectedRuns, reference: str | None, images: Images, runs: Mapping[str, EvaluatedRun], folder: Path) -> None:
    if any(evaluated.points is not None for evaluated in runs.values()):
        from plotly.offline import get_plotlyjs

        (folder / PLOTLY).write_text(get_plotlyjs(), encoding="utf-8")
    (folder / ITEMS).write_text(f"look.items = {_json(_items(images))};\n")
    summaries = summarise_runs([(run.spec, run.metrics) for run in selected.runs])
    for stem, evaluated in runs.items():
        _write_run(selected, stem, evaluated, summaries[evaluated.variant], folder)
    if selected.is_comparison:
        _write_comparison(selected, reference, images, runs, summaries, folder)


def _write_run(selected: SelectedRuns, stem: str, evaluated: EvaluatedRun, over_seeds: Mapping[str, Summary], folder: Path) -> None:
    run, images, album = evaluated.run, evaluated.images, Album(stem, RUN_ALBUM_BYTES)
    pairs = confused_pairs(evaluated.outcomes, images.gallery.labels, images.queries.labels)
    figures = [path for path in picture_files(run.scores) if path.stem in FIGURES]
    page = render(
        "run.html",
        selected=selected,
        evaluated=evaluated,
        run=run,
        images=images,
        columns=table_columns(run.metrics),
        over_seeds=over_seeds,
        intervals=evaluated.intervals(),
        worst=evaluated.worst(album),
        examples=evaluated.examples(album, pairs),
        pairs=pairs[:NUM_COUNTED_PAIRS],
        num_pairs=len(pairs),
        pictures=[load_picture(path, run.scores, len(figures), PictureCache()) for path in figures],
        album=album,
        method=evaluated.method,
        again=_command(f"{run.spec.dataset}/{run.spec.variant}/{run.spec.seed}", evaluated),
        selectable=frozenset(images.selectable.tolist()),
        scripts=[ITEMS, f"{stem}.js"],
        library=PLOTLY,
    )
    (folder / (f"{stem}.html" if selected.is_comparison else INDEX)).write_text(page, encoding="utf-8")
    (folder / f"{stem}.js").write_text(f"look.run = {_json(_run_data(evaluated) | {'map': _map(evaluated)})};\n")
    album.write(folder)


def _write_comparison(
    selected: SelectedRuns,
    reference: str | None,
    images: Images,
    runs: Mapping[str, EvaluatedRun],
    summaries: Summaries,
    folder: Path,
) -> None:
    comparison = compare_runs([(run.spec, run.metrics) for run in selected.runs], reference)
    stems = {evaluated.variant: stem for stem, evaluated in runs.items()}
    order = list(stems) if comparison is None else list(comparison.means)
    correct = {evaluated.variant: evaluated.outcomes.is_found for evaluated in runs.values()}
    page = render(
        "runs.html",
        selected=selected,
        stems={variant: stems[variant] for variant in order},
        runs=runs,
        images=images,
        columns=table_columns(name for metrics in summaries.values() for name in metrics),
        summaries=summaries,
        comparison=comparison,
        bold=BOLD,
        again=_command(f"{selected.dataset.name} --seed {selected.seed}", next(iter(runs.values()))),
        only={(one, other): int((correct[one] & ~correct[other]).sum()) for one in order for other in order},
        scripts=[ITEMS, COMPARISON],
    )
    (folder / INDEX).write_text(page, encoding="utf-8")
    data = [{"name": variant, "page": f"{stems[variant]}.html", **_run_data(runs[stems[variant]], num_neighbours=1)} for variant in order]
    (folder / COMPARISON).write_text(f"look.runs = {_json(data)};\n")


def _command(named: str, evaluated: EvaluatedRun) -> str:
    """Return the command that writes pages of the named runs with the options of these."""
    options = [f"--set {shlex.quote(setting)}" for setting in evaluated.run.spec.overrides]
    return " ".join(["dml look", named, *options, *(["--map pca"] if evaluated.method == "pca" else [])])


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
        "queries": [album.place(images.queries, index) for index in images.selectable.tolist()],
    }


def _run_data(evaluated: EvaluatedRun, num_neighbours: int = NUM_NEIGHBOURS) -> dict[str, Any]:
    """Return each selectable query's neighbours (places), their similarities in thousandths and the rank of the first correct one.

    A query without a correct image in the gallery has rank 0.
    """
    outcomes, images, selectable = evaluated.outcomes, evaluated.images, evaluated.images.selectable
    neighbours = outcomes.neighbours[selectable, :num_neighbours]
    return {
        "width": neighbours.shape[1],
        "neighbours": [images.album.place(images.gallery, index) for index in neighbours.ravel().tolist()],
        "similarities": np.round(1000 * outcomes.similarities[selectable, :num_neighbours].ravel()).astype(int).tolist(),
        "firstRanks": np.where(outcomes.scores.is_scored[selectable], outcomes.scores.first_rank[selectable], 0).tolist(),
    }


def _map(evaluated: EvaluatedRun) -> dict[str, list[float]] | None:
    """Return the positions of the map's queries, which are named by their number among the selectable ones."""
    if evaluated.points is None:
        return None
    x, y = np.round(evaluated.points.T, 3).tolist()
    return {"x": x, "y": y, "queries": np.searchsorted(evaluated.images.selectable, evaluated.drawn).tolist()}


def _json(data: Any) -> str:
    """Return JSON that is also a valid script: ASCII, because Unicode line separators would end a line of script."""
    return json.dumps(data, separators=(",", ":"))
