"""The `dml` command: thin; every subcommand calls a flow or a task's plain function. Heavy imports happen inside the subcommands."""

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from flows.reproduce import Comparison
    from tasks.environment import Project
    from tasks.specs import DatasetSpec

app = typer.Typer(
    help="Reproduce, compare and serve deep metric learning systems.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="The datasets of params.yaml: bring them in, pack them, look at them.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Datasets = Annotated[list[str] | None, typer.Option("--dataset", "-d", help="Dataset of the comparison; repeat for several.")]
Variants = Annotated[list[str] | None, typer.Option("--variant", "-v", help="Variant of the comparison; repeat for several.")]
Seeds = Annotated[list[int] | None, typer.Option("--seed", "-s", help="Seed; repeat for several.")]
DatasetName = Annotated[str, typer.Argument(metavar="DATASET", help="Dataset of params.yaml (`dml data list`).")]
Force = Annotated[bool, typer.Option("--force", help="Run every step again, also what is done.")]


def main() -> None:
    """Run the command; what a person can mend is one line on standard error and exit code 2."""
    from dml_core.errors import DmlError

    try:
        app()
    except DmlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


@app.command()
def reproduce(dataset: Datasets = None, variant: Variants = None, seed: Seeds = None, force: Force = False) -> None:
    """Run the standing comparison end to end and report it; what is done already is reused."""
    project = _open_project()
    with _prefect_starting():
        from flows.reproduce import reproduce as flow

    _print_comparisons(flow(dataset, variant, seed, force), project.tracking_uri)


@app.command()
def run(
    dataset: Annotated[str, typer.Argument(help="Dataset of the comparison.")],
    variant: Annotated[str, typer.Argument(help="Variant of the comparison.")],
    seed: Annotated[int, typer.Option("--seed", "-s", help="Seed.")] = 0,
    force: Force = False,
) -> None:
    """Run one variant on one dataset with one seed."""
    _open_project()
    with _prefect_starting():
        from flows.run import run as flow

    outcome = flow(dataset, variant, seed, force)
    for step, did_run in outcome.ran.items():
        print(f"{step}: {'ran' if did_run else 'reused'}")
    for name, value in outcome.scores.metrics.items():
        print(f"{name:>30}  {value:.4f}")


@app.command()
def compare(
    dataset: Annotated[str | None, typer.Argument(help="Dataset of the comparison; the default one when none is given.")] = None,
) -> None:
    """Show a comparison's runs side by side, from MLflow."""
    project = _open_project()
    from flows.run import comparison_title
    from tasks.reporting import comparison_table
    from tasks.specs import load_params
    from tasks.storage import Store
    from tasks.tracking import Tracker

    params = load_params(project.params_file)
    title = comparison_title(dataset or params.comparison.default_datasets[0], params.evaluation.role)
    tracker = Tracker(project.tracking_uri, project.state, Store(project.store, project.state / "cache"))
    _print_table(comparison_table(title, tracker.comparison_table(title)))


@app.command()
def evaluate(
    embeddings: Annotated[
        Path, typer.Option(help="Embeddings (N, D): a .npy file, or the folder of an extraction. The queries too where none are given.")
    ],
    labels: Annotated[Path | None, typer.Option(help="Labels, .npy, (N,), integers or strings; a folder has its own.")] = None,
    query_embeddings: Annotated[Path | None, typer.Option(help="Query embeddings, .npy, (Q, D).")] = None,
    query_labels: Annotated[Path | None, typer.Option(help="Query labels, .npy, (Q,).")] = None,
    k: Annotated[str, typer.Option("--k", help="The K of Recall@K, separated by commas.")] = "1,2,4,8",
    metric: Annotated[str, typer.Option(help="cosine or euclidean.")] = "cosine",
    stream: Annotated[bool, typer.Option("--stream", help="One shard at a time in memory: the retrieval metrics only.")] = False,
    approximate: Annotated[str | None, typer.Option(help="Search through an index, ivf, pq or hnsw: Recall@K only.")] = None,
    index_option: Annotated[list[str] | None, typer.Option(help="Of the index, as num_probes=64; repeat for several.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the metrics to this file too.")] = None,
) -> None:
    """Score embeddings from files: retrieval and clustering metrics, as fractions."""
    import json

    from dml_core.config import parse
    from dml_core.errors import ConfigError
    from dml_core.evaluation.config import EvaluationConfig
    from tasks.scoring import Files, approximation_of, score_files

    if not all(part.strip().isdigit() for part in k.split(",")):
        raise ConfigError(f"--k {k}: expected whole numbers separated by commas, as in 1,2,4,8")
    if index_option and approximate is None:
        raise ConfigError("--index-option is of an index; choose one with --approximate ivf, pq or hnsw")
    config = parse(EvaluationConfig, {"recall_at": [int(part) for part in k.split(",")], "metric": metric}, "dml evaluate")
    approximation = None if approximate is None else approximation_of(approximate, index_option or [])
    metrics = score_files(Files(embeddings, labels, query_embeddings, query_labels), config, stream, approximation)
    if approximate is not None:
        recalls = ", ".join(
            f"{value:.4f} {name.removeprefix('index_recall')}" for name, value in metrics.items() if name.startswith("index_")
        )
        print(
            f"approximate ({approximate}): of the exact nearest neighbours the index found {recalls}, "
            f"over {metrics['num_sampled_queries']} sampled queries; MAP@R, R-precision and the clustering metrics are not estimated",
            file=sys.stderr,
        )
    text = json.dumps(metrics, indent=2)
    if json_file is not None:
        json_file.write_text(text + "\n")
    print(text)


@app.command()
def claims() -> None:
    """Measure the papers' claims that can be measured on a CPU, and write docs/claims.md (tens of minutes)."""
    _open_project()
    from flows.claims import main as measure

    measure()


@app.command()
def results() -> None:
    """Train every system and its pytorch-metric-learning twin on Fashion-MNIST, and write docs/results.md (tens of minutes)."""
    _open_project()
    from flows.results import main as measure

    measure()


@app.command()
def sync() -> None:
    """Deliver the records that MLflow did not take while it was away."""
    project = _open_project()
    from tasks.storage import Store
    from tasks.tracking import Tracker

    tracker = Tracker(project.tracking_uri, project.state, Store(project.store, project.state / "cache"))
    print(f"{tracker.sync()} records delivered to {project.tracking_uri}")


@app.command()
def ui(port: Annotated[int, typer.Option(help="Port on this machine.")] = 5000) -> None:
    """Open the MLflow UI on the local results; ends with Ctrl-C."""
    import os

    project = _open_project()
    from dml_core.errors import TrackingError

    if project.tracking_uri.startswith("http"):
        raise TrackingError(f"results are on the MLflow server {project.tracking_uri}; open that address in a browser")
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    command = ["-m", "mlflow", "server", "--backend-store-uri", project.tracking_uri, "--port", str(port), "--workers", "1"]
    print(f"MLflow UI: http://127.0.0.1:{port}")
    os.execv(sys.executable, [sys.executable, *command])


@data_app.command("list")
def data_list() -> None:
    """List the datasets and how they stand, and the readers that params.yaml may name."""
    project = _open_project()
    from dml_core.data.registry import DATASETS
    from dml_core.errors import DataError
    from tasks.data import read_dataset
    from tasks.specs import load_params

    for name, spec in load_params(project.params_file).datasets.items():
        try:
            record = read_dataset(project, name)
            state = f"prepared, {', '.join(f'{count} {role}' for role, count in record.counts.items())}, digest {record.digest}"
        except DataError:
            state = f"not prepared; dml data {'prepare' if (project.root / spec.raw).exists() else 'fetch'} {name}"
        print(f"{name}: reader {spec.reader}, raw files in {spec.raw}: {state}")
    print(f"readers: {', '.join(DATASETS)}")


@data_app.command("fetch")
def data_fetch(name: DatasetName) -> None:
    """Bring raw files into place, or say how. Generates, copies, downloads, unpacks; what is there stays as it is."""
    with _working_on(name, "fetching") as (project, spec, progress):
        from tasks.data import fetch_raw

        raw = fetch_raw(project, spec, progress)
    print(f"{name}: raw files are in {raw}")


@data_app.command("check")
def data_check(name: DatasetName) -> None:
    """Look at every raw image. Counts, unreadable, duplicates across train and test, boxes; exit code 2 on a violation."""
    with _working_on(name, "checking") as (project, spec, progress):
        from tasks.data import check_raw

        report = check_raw(project, spec, progress)
    from dml_core.errors import DataError
    from tasks.reporting import check_table

    _print_table(check_table(name, report))
    if report.violations:
        raise DataError(f"{name}: {len(report.violations)} kinds of violation, see the table; mend the raw files in {spec.raw}")


@data_app.command("prepare")
def data_prepare(name: DatasetName) -> None:
    """Pack raw files into the dataset's store. `dvc repro prepare@NAME` does it when something changed."""
    with _working_on(name, "packing") as (project, spec, progress):
        from tasks.data import prepare_dataset

        record = prepare_dataset(project, name, spec, progress)
    print(f"{name}: {', '.join(f'{count} {role}' for role, count in record.counts.items())}, digest {record.digest}")


@data_app.command("show")
def data_show(
    name: DatasetName,
    role: Annotated[str, typer.Option(help="train, test, query or gallery.")] = "train",
    classes: Annotated[int, typer.Option(min=1, help="How many classes, one a row.")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="How many images of each.")] = 8,
    out: Annotated[Path, typer.Option(help="The PNG.")] = Path("contact_sheet.png"),
) -> None:
    """Draw a contact sheet of a prepared dataset. Classes by samples, with boxes."""
    project = _open_project()
    from tasks.data import dataset_spec, show_dataset
    from tasks.specs import load_params

    dataset_spec(load_params(project.params_file), name)  # a name that params.yaml does not have is told as such
    print(show_dataset(project, name, role, classes, samples, out))


@contextmanager
def _working_on(name: str, verb: str) -> "Iterator[tuple[Project, DatasetSpec, Callable[[int, int], None]]]":
    """The project, a dataset of its, and a bar on standard error that is moved by calls with (done, total)."""
    project = _open_project()
    from rich.console import Console
    from rich.progress import Progress

    from tasks.data import dataset_spec
    from tasks.specs import load_params

    spec = dataset_spec(load_params(project.params_file), name)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(f"{verb} {name}", total=None)
        yield project, spec, lambda done, total: bars.update(bar, completed=done, total=total or None)


def _open_project() -> "Project":
    """The project around the working directory, with the environment set for what is imported next."""
    import logging

    from tasks.environment import open_project

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    return open_project()


@contextmanager
def _prefect_starting() -> "Iterator[None]":
    """Have Prefect start its server while the body imports what the flow needs: both take seconds, on different cores.

    Prefect itself is imported first: two imports beside each other share one interpreter lock, and the server would wait for both.
    """
    import threading

    from prefect import get_client
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        import prefect.server.api.server  # noqa: F401  the client would import it in the thread

    def start() -> None:
        get_client(sync_client=True)

    thread = threading.Thread(target=start, name="prefect-start")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _print_table(table: "Table") -> None:
    """Print a table as wide as the terminal allows, or in a pipe as wide as it is."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 1000).print(table)


def _print_comparisons(comparisons: "list[Comparison]", tracking_uri: str) -> None:
    for comparison in comparisons:
        print(comparison.report.partition("![")[0])
        print(f"steps run: {_counts(comparison.ran)}; reused: {_counts(comparison.reused)}")
        print(f"report: {comparison.folder / 'report.md'}")
        if comparison.num_undelivered:
            print(f"{comparison.num_undelivered} records wait for MLflow; deliver them with: dml sync")
    where = tracking_uri if tracking_uri.startswith("http") else "run `make ui` (or `dml ui`) and open http://127.0.0.1:5000"
    print(f"runs, curves, galleries and models in MLflow: {where}")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{step} {count}" for step, count in counts.items()) or "none"


if __name__ == "__main__":
    main()
