"""Verbs of MLflow's data: compare runs, deliver waiting records, open its pages."""

import os
import socket
import sys
import time
import webbrowser
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer
from rich.text import Text

from dml_core.config import check_name, unknown_name
from dml_core.errors import ConfigError, TrackingError
from dml_core.evaluation.statistics.comparing import BOLD, Comparison
from flows.cli.app import app, examples
from flows.cli.columns import Column, print_table
from flows.cli.options import SameOverrides
from flows.cli.session import open_project, print_lines, say
from tasks.environment import Project, shown
from tasks.runs.comparable import commonest, present_digest, standing_today
from tasks.runs.params.file import load_params
from tasks.runs.specs import comparison_title
from tasks.storage import open_store
from tasks.tracking.child_run import page_query, view_link
from tasks.tracking.outbox import OUTBOX
from tasks.tracking.published import (
    comparable_runs,
    compare_published,
    comparison_rows,
    older_code_lines,
    published_runs,
    standing_comparisons,
)
from tasks.tracking.tags import Tag
from tasks.wording import counted, reproduce_command


@app.command(epilog=examples("dml compare synthetic", "dml compare synthetic | less -S"))
def compare(
    dataset: Annotated[str | None, typer.Argument(help="Dataset of the comparison. Default: the first default one of params.yaml.")] = None,
    override: SameOverrides = None,
) -> None:
    """Show a comparison's variants side by side, best first.

    Reads the runs from MLflow. Prints the significant differences above the table.
    """
    project = open_project()
    params = load_params(project.params_file, override or ())
    dataset = params.comparison.default_datasets[0] if dataset is None else dataset
    try:
        check_name(dataset)
    except ValueError as error:
        raise ConfigError(f"dataset {error}") from None
    title = comparison_title(dataset, params.evaluation.role, override or ())
    published = published_runs(project.tracking_uri, dataset, title)
    digest = present_digest(project, dataset) or commonest(Counter(run.tags.get(Tag.DIGEST) for run in published))
    today = standing_today(params, dataset, digest, override or ())
    runs, left_out = comparable_runs(dataset, published, today)
    for line in [*left_out, *older_code_lines(dataset, runs)]:
        print_lines(line)
    if not runs and dataset not in params.comparison.datasets:
        raise unknown_name("dataset of the comparison", dataset, list(params.comparison.datasets))
    if not runs:
        where, command = shown(project.tracking_uri), reproduce_command(dataset, override or ())
        raise TrackingError(f"{title}: MLflow at {where} has no run with the current data and settings; run {command}")
    comparison = compare_published(dataset, runs, params.comparison.reference)
    if comparison is not None:
        print_lines(comparison.sentence)
    _print_comparison(title, comparison_rows(runs, comparison), comparison)
    if comparison is not None and comparison.limits is not None:
        print_lines(f"{BOLD} {comparison.limits}")


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
    print_table(*columns, title=f"{title}: per cent, mean ± half of the 95 % interval over seeds")


@app.command(epilog=examples("dml sync"))
def sync() -> None:
    """Deliver records that wait because MLflow was down."""
    project = open_project()
    num_delivered = 0
    if any((project.state / OUTBOX).glob("*.json")):  # MLflow takes seconds to import
        from tasks.tracking.tracker import Tracker

        num_delivered = Tracker(project.tracking_uri, project.state, open_store(project)).sync()
    print_lines(f"{counted(num_delivered, 'record')} delivered to {shown(project.tracking_uri)}")


@app.command(epilog=examples("dml ui", "dml ui synthetic --port 5001"))
def ui(
    dataset: Annotated[
        str | None, typer.Argument(help="Dataset of the comparison. Default: the first one of params.yaml that has results.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port on this machine. Default: 5000.")] = None,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Only print the page's address. At a terminal with a display a browser opens it, too.")
    ] = False,
) -> None:
    """Show a comparison in MLflow, best variant first.

    Stop it with Ctrl-C. Only this machine can reach the pages. If results are on an MLflow server, its page is shown and nothing is
    started.
    """
    project = open_project()
    link = _comparison_link(project, dataset)
    has_browser = not no_open and _has_display()
    if project.tracking_uri.startswith("http"):
        page = f"{shown(project.tracking_uri).rstrip('/')}/{link}"
        if port is not None:
            say("note: --port is not used: results are on an MLflow server, and nothing is started")
        print_lines(f"MLflow: {page}")
        if has_browser:
            webbrowser.open(page)
        return
    port = port or 5000
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a server that just ended is still in TIME_WAIT
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise TrackingError(f"port {port} cannot be used ({error.strerror}); choose another: dml ui --port {port + 1}") from None
    os.environ |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONWARNINGS": "ignore"}
    # Not as options: a database's address may have a password, and every user of the machine can read command lines.
    os.environ |= {"MLFLOW_BACKEND_STORE_URI": project.tracking_uri, "MLFLOW_REGISTRY_STORE_URI": project.tracking_uri}
    page = f"http://127.0.0.1:{port}/{link}"
    print_lines(f"starting the MLflow UI: {page}   (stop it with Ctrl-C)", flush=True)
    server = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    if has_browser and os.fork() == 0:  # the parent becomes the server
        _open_when_ready(page, port)
        os._exit(0)
    os.execv(sys.executable, [*server, "--uvicorn-opts", "--log-level warning"])


def _comparison_link(project: Project, dataset: str | None) -> str:
    """Return the link below MLflow's address to a dataset's comparison, by default the first with results, else to all experiments."""
    experiments = standing_comparisons(project.tracking_uri)
    if not experiments and dataset is None:
        return f"#/experiments?{page_query()}"
    comparison = load_params(project.params_file).comparison
    if dataset is None:
        dataset = next((name for name in (*comparison.default_datasets, *comparison.datasets) if name in experiments), None)
    elif dataset not in {*experiments, *comparison.datasets}:
        raise unknown_name("dataset of the comparison", dataset, list(comparison.datasets))
    elif dataset not in experiments:
        has = f"it has: {', '.join(sorted(experiments))}" if experiments else "it has none"
        raise TrackingError(f"MLflow has no comparison on '{dataset}'; {has}; run {reproduce_command(dataset)}")
    return f"#/experiments?{page_query()}" if dataset is None else view_link(experiments[dataset])


def _has_display() -> bool:
    """Return whether the output is a terminal, and a browser has a display."""
    return sys.stdout.isatty() and (sys.platform == "darwin" or not {"DISPLAY", "WAYLAND_DISPLAY"}.isdisjoint(os.environ))


def _open_when_ready(page: str, port: int) -> None:
    """Open a page in a browser once its server, the parent process, listens; return without if that ends."""
    server = os.getppid()
    while os.getppid() == server:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            webbrowser.open(page)
            return
        time.sleep(0.2)
