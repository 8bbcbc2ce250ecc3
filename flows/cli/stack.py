"""Verbs of the servers around the project: check the configuration, and run the local stack."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dml_core.errors import ConfigError, StoreError
from flows.cli.app import app, examples, new_group
from flows.cli.columns import Column, print_table
from flows.cli.session import check_code, open_project, print_lines
from tasks.doctor import examine
from tasks.environment import STACK_ENV, find_project, set_environment
from tasks.gc import delete as delete_steps
from tasks.gc import find_unused
from tasks.stack import lifecycle
from tasks.stack.settings import Stack
from tasks.wording import counted

NO_LOGIN = (
    "Prefect's server was started without a password; to give it one: dml stack restart (with your own S3 server), or dml stack down, "
    "then up, which deletes the stack's data"
)
LOGIN = "Prefect's page asks for a password: the text of PREFECT_API_AUTH_STRING in {}"

stack_app = new_group("stack", no_args_is_help=True)


@app.command(epilog=examples("dml doctor"))
def doctor() -> None:
    """Check the configuration and the servers, and print what to fix.

    Exits with code 2 if something is wrong. Starts and changes nothing, and prints no secrets.
    """
    project = check_code(find_project())
    with suppress(StoreError):  # the table reports it
        set_environment(project)
    findings = examine(project)
    print_table(
        Column("check", [finding.what for finding in findings]),
        Column("where", [finding.where for finding in findings], drop=1, wraps=True),
        Column("status", [finding.status for finding in findings]),
        Column("finding", [finding.result for finding in findings], wraps=True),
        title="dml doctor",
    )
    for finding in findings:
        if finding.remedy:
            print_lines(f"{finding.what}: {finding.remedy}")
    wrong = [finding.what for finding in findings if finding.status == "wrong"]
    if wrong:
        raise ConfigError(f"{len(wrong)} of {len(findings)} checks failed: {', '.join(wrong)}; see above for what to do")


@app.command(epilog=examples("dml gc --days 30", "dml gc --delete"))
def gc(
    delete: Annotated[bool, typer.Option("--delete", help="Delete the listed steps. Default: only list them.")] = False,
    days: Annotated[float, typer.Option(min=0.0, help="Keep steps written or used within this many days.")] = 7.0,
) -> None:
    """List finished steps that nothing uses, or delete them.

    Keeps steps that a table, MLflow or the outbox references or that the current parameters would reuse, and the steps they were made from.
    Copies of training images that `dml tune` made are listed, too, if no prepared dataset has their content any more.
    Works on a store in the state folder; another folder may have other users. Of a bucket it deletes the copies on this machine.
    """
    project = open_project()
    steps, num_kept, num_recent = find_unused(project, days)
    if steps:
        print_table(
            Column("step", [step.key for step in steps]),
            Column("MB", [f"{step.num_bytes / 1e6:.1f}" for step in steps]),
            Column("last written", [time.strftime("%Y-%m-%d %H:%M", time.localtime(step.touched)) for step in steps], drop=1),
            title="dml gc",
        )
    recent = f" ({num_recent} of them only because of --days {days:g})" if num_recent else ""
    if project.store.startswith("s3://"):
        print_lines("copies on this machine; the bucket keeps the steps, from which they are fetched again")
    print_lines(f"{counted(len(steps), 'unused step')}; {num_kept} kept{recent}")
    if delete:
        print_lines(f"{delete_steps(project, steps) / 1e6:.1f} MB removed")
    elif steps:
        print_lines(f"{sum(step.num_bytes for step in steps) / 1e6:.1f} MB; nothing was removed; to remove them: dml gc --delete")


@stack_app.command(epilog=examples("dml stack up"))
def up(
    s3: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Use your own S3 server, with the login in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."),
    ] = None,
) -> None:
    """Start the missing servers of infra/stack.yaml. They run on this machine; dml uses them from then on."""
    _start(lambda report: lifecycle.up(check_code(find_project()), report, s3))


@stack_app.command(epilog=examples("dml stack restart"))
def restart() -> None:
    """Stop all servers and start them with the present code and settings, as after an upgrade.

    Keeps databases and records. Needs your own S3 server: the stack's has its objects in memory.
    """
    _start(lambda report: lifecycle.restart(check_code(find_project()), report))


def _start(start: Callable[[Callable[[str], None]], Stack]) -> None:
    begun = time.monotonic()
    stack = start(lambda line: print_lines(line, flush=True))
    print_lines(f"the stack is up ({time.monotonic() - begun:.0f} s); dml uses it from now on: {stack.environment_file}")
    for name, what in (("PREFECT_API_URL", "Prefect"), ("MLFLOW_TRACKING_URI", "MLflow")):
        print_lines(f"{what}: {stack.file.clients[name].removesuffix('/api')}")
    print_lines(f"Ray: {stack.file.clients['RAY_ADDRESS']}")
    print_lines(_login(stack.folder, stack.environment_file))


def _login(folder: Path, environment_file: Path) -> str:
    """Return how Prefect's page is opened, by the settings with which the servers were started."""
    config = folder / "supervisor.conf"
    has_password = config.is_file() and "PREFECT_SERVER_API_AUTH_STRING" in config.read_text()
    return LOGIN.format(environment_file) if has_password else NO_LOGIN


@stack_app.command(epilog=examples("dml stack status"))
def status() -> None:
    """Show the state of each server; exit code 2 unless all are up."""
    project = find_project()
    servers = lifecycle.status(project)
    print_table(
        Column("server", [server.name for server in servers]),
        Column("state", [server.state for server in servers]),
        Column("process", [str(server.pid or "") for server in servers], drop=1),
        Column("address", [server.address for server in servers], wraps=True),
        Column("log", [str(server.log) for server in servers], wraps=True),
        title="dml stack",
    )
    print_lines(_login(project.state / "stack", project.state / STACK_ENV))
    if any(server.state != "up" for server in servers):
        raise ConfigError("not all servers of the stack are up; check the logs, and start the missing ones: dml stack up")


@stack_app.command(epilog=examples("dml stack logs mlflow --follow"))
def logs(
    server: Annotated[str, typer.Argument(help="Server, as listed by `dml stack status`.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines; stop with Ctrl-C.")] = False,
) -> None:
    """Show the last lines of a server's log."""
    log = find_project().state / "stack" / server / "log"
    if not log.is_file():
        raise ConfigError(f"server '{server}' has no log; dml stack status lists the servers")
    sys.stdout.flush()
    os.execvp("tail", ["tail", "-n", "200", *(["-F"] if follow else []), str(log)])


@stack_app.command(epilog=examples("dml stack down"))
def down() -> None:
    """Stop all servers of the stack. Deletes their databases, objects and stored records; keeps the logs and your own S3 server."""
    num_killed = lifecycle.down(find_project())
    killed = f"; processes that had to be killed: {num_killed}" if num_killed else ""
    print_lines(f"the stack is down{killed}; dml uses your own settings again, or this machine's defaults")
