"""Verbs for image search: `index` builds and changes indexes, `search` finds images in one."""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dml_core.errors import ConfigError, DmlError, StoreError
from dml_core.index.index import Index
from dml_core.index.layout import THUMBNAIL_PIXELS
from dml_core.index.writing import Batch, add_items, build_index, check_names, remove_items
from flows.cli.app import FirstByDefault, app, examples, new_group
from flows.cli.columns import Column, print_table
from flows.cli.options import AsJson, check_file, check_folder
from flows.cli.session import open_model, print_lines, say, say_boxes
from tasks.files import check_output, write_output
from tasks.models.sources import Images as Found
from tasks.models.sources import find_images
from tasks.wording import counted

if TYPE_CHECKING:  # these import torch
    from dml_core.trained import TrainedModel
    from tasks.models.searching import Answer

_NUM_SHOWN = 10  # names in a command
index_app = new_group("index", cls=FirstByDefault, no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="INDEX", help="Folder of the index.")]
Source = Annotated[
    str, typer.Argument(help="A folder of images, a list of them (CSV, Parquet), s3://bucket/prefix, or the output of `dml embed`.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Skip and list unreadable images; by default the first one is an error.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model of the index, if it cannot be found by its identity.")]
Images = Annotated[Path | None, typer.Option("--images", help="For embeddings: folder that contains their images, for thumbnails.")]
Pixels = Annotated[int, typer.Option("--thumbnail", min=0, max=512, help="Longer side of the stored thumbnails in pixels; 0 stores none.")]


@index_app.command(epilog=examples("dml index synthetic/softtriple images -o my.index"))
def build(
    model: Annotated[str, typer.Argument(help="A run as dataset/variant, an identity, a folder, or models:/name@alias.")],
    source: Source,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the index to.")],
    approximate: Annotated[
        Literal["ivf", "pq", "hnsw", "auto"] | None,
        typer.Option(help="Search approximately: faster, but misses some neighbours. Default: exact."),
    ] = None,
    images: Images = None,
    thumbnail: Pixels = THUMBNAIL_PIXELS,
    skip_bad: SkipBad = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing index.")] = False,
) -> None:
    """Build an index of images."""
    check_folder(output)
    _, trained = open_model(model)
    say(f"dml index: {trained.title or model}, {trained.num_dimensions} dimensions")
    with _told_bad(skip_bad) as bad:
        identity, weights, batches = _batches(source, partial(check_names, output), lambda: trained, images, thumbnail, bad)
        if identity != trained.identity:
            raise ConfigError(
                f"{source}: embeddings of model {identity}, not of {trained.identity}; give their model, or embed the images again"
            )
        if None not in (weights, trained.weights_sha256) and weights != trained.weights_sha256:
            raise ConfigError(
                f"{source}: embeddings of model {identity} with other weights: it was trained again since; embed the images again"
            )
        index = build_index(output, batches, identity, trained.metric, approximate, model, force, weights)
    _print_index(index)


@index_app.command(epilog=examples("dml index add my.index more-images"))
def add(
    folder: Folder,
    source: Source,
    model: ModelOption = None,
    images: Images = None,
    thumbnail: Pixels = THUMBNAIL_PIXELS,
    skip_bad: SkipBad = False,
    new: Annotated[bool, typer.Option("--new", help="Add only images whose names the index does not have; none is no error.")] = False,
) -> None:
    """Embed images with an index's model, and add them."""
    index = Index.open(folder)
    check, grown = partial(check_names, folder, present=frozenset(index.names())), index if new else None
    with _told_bad(skip_bad) as bad:
        identity, weights, batches = _batches(source, check, lambda: open_index_model(index, model)[1], images, thumbnail, bad, grown)
        changed = add_items(folder, batches, identity, weights)
    _print_index(changed)


@index_app.command(epilog=examples("dml index remove my.index blurred.jpg"))
def remove(
    folder: Folder,
    names: Annotated[list[str], typer.Argument(help="Names of items, as printed by `dml search`.")],
) -> None:
    """Remove items from an index by their names."""
    _print_index(remove_items(folder, names))


@index_app.command(epilog=examples("dml index show my.index --json"))
def show(folder: Folder, as_json: AsJson = False) -> None:
    """Show an index's size, model and, if it is approximate, recall."""
    index = Index.open(folder)
    if as_json:
        print(index.info.model_dump_json(indent=1))
    else:
        _print_index(index)


@app.command(epilog=examples("dml search my.index query.jpg -k 5", "dml search my.index queries --html found.html"))
def search(
    folder: Folder,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Query images; a folder means all of its images.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Number of images to find for each query.")] = 10,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with the pictures to this file.")] = None,
    as_json: AsJson = False,
    model: ModelOption = None,
) -> None:
    """Find the images of an index that are nearest to query images.

    Prints a table; --html writes a page.
    """
    from tasks.models.searching import query_images, search_images, search_page

    if html is not None:
        check_file(html, "--html")
        check_output(html, "text/html", b"<!doctype html>")
    index = Index.open(folder)
    _, trained = open_index_model(index, model)
    queries = query_images(images)
    say_boxes(trained, queries)
    answers = search_images(index, trained, queries, k)
    if html is not None:
        write_output(html, search_page(index, answers))
        say(f"page: {html}")
    if as_json:
        approximate = None if index.info.found is None else index.info.found.recalls
        described = {"kind": index.kind, "metric": index.metric, "items": index.num_items, "recalls": approximate}
        print(json.dumps({"index": described, "answers": [answer.as_values() for answer in answers]}, indent=1))
    elif html is None:
        _print_answers(index, answers)


def _batches(
    source: str,
    check: Callable[[list[str]], None],
    model: "Callable[[], TrainedModel]",
    images: Path | None,
    pixels: int,
    bad: list[str] | None,
    grown: Index | None = None,
) -> tuple[str, str | None, Iterator[Batch]]:
    """Return the identity of a source's model, the hash of its weights (None if unknown), and the batches.

    If the source holds images, `check` is called with their names before they are embedded; `model` is called only then. Images whose names
    the index `grown` has are left out; the command ends if these are all.
    """
    from tasks.models.indexing import batches_of_embeddings, batches_of_images, is_embeddings

    if is_embeddings(Path(source)):
        if grown is not None:
            raise ConfigError(f"--new applies only to images, and {source} contains embeddings; remove the option")
        network, batches = batches_of_embeddings(Path(source), images, pixels)
        return network.model_identity, network.weights_sha256, batches
    if images is not None:
        raise ConfigError(f"--images applies only to embeddings, and {source} contains images; remove the option")
    paths = find_images(source)
    if grown is not None:
        _say_outdated(grown, paths, source)
        paths = paths.without(frozenset(grown.names()))
    if not len(paths):
        say(f"the index has all images of {source}")
        raise typer.Exit
    check(paths.names)
    trained = model()
    say_boxes(trained, paths)
    return trained.identity, trained.weights_sha256, batches_of_images(trained, paths, pixels, bad)


def _say_outdated(index: Index, images: Found, source: str) -> None:
    """Say which images of an index have another class in a source that has some of them, and which are not there any more."""
    indexed = dict(zip(index.names(), index.items["class_name"].to_pylist(), strict=True))
    classes = dict(zip(images.names, images.classes or (), strict=False))
    other = [name for name, class_name in indexed.items() if classes.get(name, class_name) != class_name]
    missing = sorted(indexed.keys() - set(images.names))
    if len(missing) == len(indexed):  # the index was built from other sources
        missing = []
    notes = (
        ("has another class for", other, "remove them, then add them again"),
        ("does not have", missing, "if they were deleted there, remove them"),
    )
    for what, names, then in notes:
        if names:
            command = shlex.join(["dml", "index", "remove", str(index.folder), "--", *names[:_NUM_SHOWN]])
            first = f" (these {_NUM_SHOWN} first)" if len(names) > _NUM_SHOWN else ""
            say(f"note: {source} {what} {counted(len(names), 'image')} of the index; {then}{first}: {command}")


@contextmanager
def _told_bad(skip_bad: bool) -> Iterator[list[str] | None]:
    """Give a list for skipped images, which is printed at the end, also of a body that fails as all were; None if none is to be skipped."""
    bad: list[str] = []
    try:
        yield bad if skip_bad else None
    finally:
        for line in bad:
            say(f"skipped: {line}")


def open_index_model(index: Index, named: str | None, device: str | None = None) -> "tuple[Path, TrainedModel]":
    """Open the named model, or the index's own, found by its identity or by its name when the index was built; return its folder too.

    Raises:
        ConfigError: the model is not the index's, or it is not here.
        DmlError: the index's own model could not be opened, neither by its identity nor by its name, for another reason.
    """
    if named is not None:
        folder, trained = open_model(named, device)
        index.check_model(trained.identity, trained.weights_sha256)
        return folder, trained
    errors: list[DmlError] = []
    for text in filter(None, (index.model_identity, index.info.model_source)):
        try:
            if _is_program(Path(text)):  # an index may come from a stranger, and say where what they sent lies
                raise StoreError(
                    f"{index.folder}: its model {text} may execute any code when opened; if you trust it, give it with --model"
                )
            folder, trained = open_model(text, device)
        except ConfigError:
            continue  # it names none
        except DmlError as error:
            errors.append(error)
            continue
        try:
            if trained.identity == index.model_identity:
                index.check_model(trained.identity, trained.weights_sha256)
                return folder, trained
        except ConfigError as error:  # trained again since
            errors.append(error)
    if errors:
        raise errors[0]
    called = f" ({index.info.model_source})" if index.info.model_source else ""
    raise ConfigError(f"{index.folder}: its model {index.model_identity}{called} was not found; give it with --model")


def _is_program(folder: Path) -> bool:
    """Return whether a folder, or the file that describes it, is that of a network whose graph executes code when it is opened."""
    from dml_core.network_description import DESCRIPTION_FILE, read_description

    folder = folder.parent if folder.name == DESCRIPTION_FILE else folder
    graph = read_description(folder).graph if (folder / DESCRIPTION_FILE).is_file() else None
    return graph is not None and graph.format == "torch-export"


def _print_index(index: Index) -> None:
    from tasks.models.searching import describe

    print_lines(f"{index.folder}: {index.nbytes / 2**20:,.1f} MiB")
    for line in describe(index):
        print_lines(f"  {line}")


def _print_answers(index: Index, answers: "list[Answer]") -> None:
    from tasks.models.searching import kind_line

    for answer in answers:
        print_lines(f"{answer.name}:")
        is_cosine = index.metric == "cosine"
        print_table(
            Column("rank", [str(hit.rank) for hit in answer.hits]),
            Column(
                "cosine" if is_cosine else "distance",
                [f"{hit.score:.4f}" if is_cosine else f"{-hit.score:.4g}" for hit in answer.hits],
            ),
            Column("class", [hit.item.class_name or "" for hit in answer.hits], wraps=True),
            Column("name", [hit.item.name for hit in answer.hits], wraps=True),
        )
    print_lines(kind_line(index))
