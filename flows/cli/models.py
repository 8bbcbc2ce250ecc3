"""Verbs of trained networks: `models` lists, promotes and exports them, `embed` embeds any images with one."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from dml_core.errors import ConfigError
from flows.cli.app import FirstByDefault, app, examples, new_group
from flows.cli.columns import Column, print_table
from flows.cli.options import check_folder, embeddings_place
from flows.cli.session import open_model, open_project, print_lines, say, say_boxes
from tasks.environment import ray_cluster
from tasks.models.sources import find_images
from tasks.runs.best import VALIDATION
from tasks.runs.finished import made_by_older_code
from tasks.wording import counted

models_app = new_group("models", cls=FirstByDefault)

RUN = Annotated[
    str, typer.Argument(help="A run as dataset/variant or dataset/variant/seed, its network's identity, or models:/name/version.")
]


@models_app.command("list", epilog=examples("dml models synthetic --all", "dml models project/finetuned"))
def list_(
    name: Annotated[
        str | None, typer.Argument(help="List only networks of this dataset, or those of a table. Default: those of params.yaml.")
    ] = None,
    every_seed: Annotated[bool, typer.Option("--all", help="List every seed, not only the one that dataset/variant selects.")] = False,
) -> None:
    """List trained networks, highest validation Recall@1 first.

    Scores are percentages on the test classes; validation recall@1 is on held-out training classes. Runs that other code made are named,
    with the source files that have changed. Also lists the versions in MLflow's registry. Other commands take a table's network by its
    identity, 32 hexadecimal digits.
    """
    project = open_project()
    from tasks.models.listing import is_table_name, list_models

    (models, best), is_table = list_models(project, name, every_seed), is_table_name(name)
    if not models:
        where = "" if name is None else f" of {name}" if is_table else f" on {name}"
        what = name if is_table else "those of the comparison in params.yaml"
        raise ConfigError(f"no trained networks{where}; train {what}: dml reproduce{f' {name}' if is_table else ''}")
    validation, recall, map_at_r = (
        [f"{100 * model.scores[name]:.1f}" if name in model.scores else "-" for model in models]
        for name in (VALIDATION, "recall@1", "map@r")
    )
    print_table(
        Column("run", [model.run for model in models]),
        Column("seeds", [str(model.num_seeds) for model in models], drop=5),
        Column("validation recall@1", validation),
        Column("recall@1", recall),
        Column("map@r", map_at_r, drop=4),
        Column("parameters", [f"{model.num_parameters:,}" for model in models], drop=3),
        Column("checkpoint", [f"{model.num_bytes / 1e6:.1f} MB" for model in models], drop=2),
        Column("identity", [model.identity for model in models], drop=None if is_table else 1),
    )
    older: dict[tuple[str, ...], list[str]] = {}
    for model in models:
        older.setdefault(model.older_code, []).append(model.run)
    for files, runs in older.items():
        if files:
            print_lines(f"{', '.join(runs)}: {made_by_older_code(files)}")
    for dataset, line in best.items():
        print_lines(f"{dataset}: {line}")
    if project.is_tracked and not is_table:
        _print_registry(project.tracking_uri, name)


def _print_registry(uri: str, dataset: str | None) -> None:
    from tasks.tracking.versions import registered_versions

    versions = registered_versions(uri, dataset)
    if versions:
        reasons = [version.gate or "" for version in versions]
        print_table(
            Column("registered model", [f"models:/{version.name}/{version.number}" for version in versions]),
            Column("aliases", [", ".join(version.aliases) for version in versions], wraps=True),
            *([Column("reason", reasons, wraps=True)] if any(reasons) else []),
        )


@models_app.command(epilog=examples("dml models promote synthetic/softtriple"))
def promote(
    run: RUN,
    alias: Annotated[str, typer.Option(help="Alias that points to it in the registry.")] = "champion",
    force: Annotated[bool, typer.Option("--force", help="Promote regardless of the comparison; requires --reason.")] = False,
    reason: Annotated[str | None, typer.Option(help="Reason for --force; stored with the version and in its model card.")] = None,
) -> None:
    """Make a network the champion, if it is better.

    The champion is the version of MLflow's registered model that the alias points to. Better means a one-sided test of the difference in
    Recall@1, paired by the classes of the same test images: by more than `promotion.min_gain` points of params.yaml, at a significance
    level that decreases with each attempt. A model card is stored with it.
    """
    if force != (reason is not None) or (reason is not None and not reason.strip()):
        raise ConfigError("--force and --reason require each other; give both or neither, and words as the reason")
    project = open_project()
    from tasks.models.promotion import promote as promote_run

    promotion = promote_run(project, run, alias, reason)
    print_lines(f"models:/{promotion.version.name}@{alias} is version {promotion.version.number}: {promotion.reason}")


@models_app.command(epilog=examples("dml models export synthetic/softtriple --format onnx -o exported"))
def export(
    run: Annotated[str, typer.Argument(help="A run, an identity, or models:/name@alias.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    graph_format: Annotated[Literal["onnx", "torch-export"], typer.Option("--format", help="Format of the graph.")] = "onnx",
    precision: Annotated[Literal["fp32", "fp16", "int8"], typer.Option(help="Precision of the weights; int8 only for ONNX.")] = "fp32",
) -> None:
    """Export a network as a graph, and measure it.

    Other programs can run the graph. It includes the scaling of pixel values, but not decoding, resizing or cropping.
    """
    check_folder(output)
    project = open_project()
    from tasks.models.export import MEASURED_FILE
    from tasks.models.export import export as export_run

    graph = export_run(project, run, graph_format, precision, output)
    print_lines(
        f"{output}: {graph.format} {graph.precision} of {graph.run}",
        f"Recall@1 {100 * graph.recall_at_1:.2f} % (the run: {100 * graph.recall_at_1_of_run:.2f} %) "
        f"on {graph.num_images} test images; embeddings differ by up to {graph.largest_difference:.1e}",
        f"{graph.num_bytes / 1e6:.2f} MB (the run's weights: {graph.num_bytes_of_run / 1e6:.2f} MB); "
        f"{graph.milliseconds:.2f} ms per image on this machine (the run's network: {graph.milliseconds_of_run:.2f} ms); {MEASURED_FILE}",
    )


@app.command(epilog=examples("dml embed synthetic/softtriple images -o embeddings"))
def embed(
    model: Annotated[str, typer.Argument(help="A run as dataset/variant[/seed], an identity, a folder, or models:/name@alias.")],
    source: Annotated[str, typer.Argument(help="A folder of images, a .csv or .parquet list of paths, or s3://bucket/prefix.")],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="Folder, .npz file or .parquet file to write; resumed if it was interrupted. The name of a folder with a dot ends with /.",
        ),
    ],
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip and list files that are not images; by default they are an error.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 64,
) -> None:
    """Embed any images with a trained network.

    The output is readable by `dml evaluate --embeddings`. Rerun the command to resume after an interruption. If a Ray cluster is set
    (RAY_ADDRESS) its nodes read and embed the images.
    """
    place = embeddings_place(output)
    images = find_images(source)
    folder, network = open_model(model)
    say_boxes(network, images)
    from tasks.models.embed import embed_on_cluster, embed_to

    cluster = partial(embed_on_cluster, folder, batch_size) if ray_cluster() else None
    began = time.monotonic()

    def tell(done: int, of: int) -> None:
        say(f"{done:,} of {of:,} images, {time.monotonic() - began:.0f} s")

    embedded = embed_to(network, images, place, skip_bad=skip_bad, batch_size=batch_size, progress=tell, spread=cluster)
    reused = f", {embedded.num_reused:,} of them reused" if embedded.num_reused else ""
    by = network.title or network.identity
    print_lines(f"{place}: {embedded.num_rows:,} embeddings of {network.num_dimensions} dimensions by {by}{reused}")
    if embedded.bad:
        print_lines(f"skipped: {counted(len(embedded.bad), 'bad image')}")
        for name, why in embedded.bad:
            print_lines(f"  {name}: {why}")
