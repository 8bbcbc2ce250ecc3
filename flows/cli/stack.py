"""Verbs of the servers around the project: what is configured and works, and the local stack."""

from contextlib import suppress

from flows.cli.app import app, print_table


@app.command()
def doctor() -> None:
    """Say what is configured, whether it works, and what to do where it does not.

    Ends with exit code 2 where something is wrong. Starts and changes nothing, and prints no secret.
    """
    from rich.table import Table

    from dml_core.errors import StoreError
    from tasks.doctor import check_findings, examine
    from tasks.environment import find_project, set_environment

    project = find_project()
    with suppress(StoreError):  # it is in the table
        set_environment(project)
    findings = examine(project)
    table = Table(title="dml doctor")
    for name in ("what", "where", "", "found", "to do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        table.add_row(finding.what, finding.where, finding.how, finding.said, finding.mend)
    print_table(table)
    check_findings(findings)
