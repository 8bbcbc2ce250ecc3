"""Verbs of MLflow's data: compare runs, deliver waiting records, open its pages."""

import os
import socket
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from dml_core.config import check_name
from dml_core.errors import ConfigError, TrackingError
from dml_core.evaluation.statistics.comparing import Comparison
from flows.cli.app import app, examples
from flows.cli.columns import Column, print_table
from flows.cli.session import open_project
from tasks.environment import shown
from tasks.runs.comparable import present_digest, standing_today
from tasks.runs.specs import comparison_title, load_params
from tasks.storage import open_store
from tasks.tracking.connection import check_available
from tasks.tracking.outbox import OUTBOX
from tasks.tracking.published import comparable_runs, compare_published, comparison_rows, published_runs


@app.command(epilog=examples("dml compare synthetic", "dml compare synthetic | less -S"))
def compare(
    dataset: Annotated[str | None, typer.Argument(help="Dataset of the comparison. Default: the first default one of params.yaml.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="The same --set options as in the `dml reproduce` that made it.")
    ] = None,
) -> None:
    """Show a comparison's variants side by side, best first.

    Reads the runs from MLflow. Prints the significant differences above the table.
    """
    project = open_project()
    params = load_params(project.params_file, override or ())
    dataset = dataset or params.comparison.default_datasets[0]
    try:
        check_name(dataset)
    except ValueError as error:
        raise ConfigError(f"dataset {error}") from None
    title = comparison_title(dataset, params.evaluation.role, override or ())
    today = standing_today(params, dataset, present_digest(project, dataset), override or ())
    selection = comparable_runs(dataset, published_runs(project.tracking_uri, dataset, title), today)
    for line in selection.left_out:
        print(line)
    runs = selection.runs
    if not runs:
        raise TrackingError(f"{title}: no run in MLflow has the current data and settings; run dml reproduce --dataset {dataset}")
    comparison = compare_published(dataset, runs, params.comparison.reference)
    if comparison is not None:
        print(comparison.sentence)
    _print_comparison(title, comparison_rows(runs, comparison), comparison)
    if comparison is not None and comparison.limits is not None:
        print(f"{comparison.bold_says} {comparison.limits}")


def _print_comparison(title: str, rows: Sequence[Sequence[str]], comparison: Comparison | None) -> None:
    """Print the rows of `comparison_rows` with the confidence set of the best in bold.

    The first metric and the differences are never omitted; of the other columns, the last metric is omitted first, the seeds last.
    """
    best = comparison.best_set if comparison is not None else frozenset()
    num_columns = len(rows[0])
    drops = {1: num_columns} | {place: num_columns - place for place in range(3, num_columns - bool(best))}
    styles = ["bold" if variant in best else "" for variant, *_ in rows[1:]]
    columns = [
        Column(name, [Text(value, style) for value, style in zip(values, styles, strict=True)], drop=drops.get(place))
        for place, (name, *values) in enumerate(zip(*rows, strict=True))
    ]
    print_table(*columns, title=title)


@app.command(epilog=examples("dml sync"))
def sync() -> None:
    """Deliver records that wait because MLflow was down."""
    project = open_project()
    num_delivered = 0
    if any((project.state / OUTBOX).glob("*.json")):  # MLflow takes seconds to import
        from tasks.tracking.tracker import Tracker

        num_delivered = Tracker(project.tracking_uri, project.state, open_store(project)).sync()
    print(f"{num_delivered} records delivered to {shown(project.tracking_uri)}")


@app.command(epilog=examples("dml ui --port 5001"))
def ui(port: Annotated[int, typer.Option(min=1, max=65535, help="Port on this machine.")] = 5000) -> None:
    """Open the MLflow UI for the local results; stop it with Ctrl-C.

    Only this machine can reach it.
    """
    project = open_project()
    if project.tracking_uri.startswith("http"):
        raise TrackingError(f"results are on the MLflow server {shown(project.tracking_uri)}; open that address in a browser")
    check_available(project.tracking_uri)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a server that just ended is still in TIME_WAIT
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise TrackingError(f"port {port} cannot be used ({error.strerror}); choose another: dml ui --port {port + 1}") from None
    os.environ |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONWARNINGS": "ignore"}
    # Not as options: a database's address may have a password, and every user of the machine can read command lines.
    os.environ |= {"MLFLOW_BACKEND_STORE_URI": project.tracking_uri, "MLFLOW_REGISTRY_STORE_URI": project.tracking_uri}
    page = f"http://127.0.0.1:{port}/#/experiments?workflowType=machine_learning"
    print(f"MLflow UI, ready in about 10 s: {page}   (stop it with Ctrl-C)", flush=True)
    server = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    os.execv(sys.executable, [*server, "--uvicorn-opts", "--log-level warning"])
