"""The `dml` command: a thin layer; every verb calls a flow or a plain function. Heavy imports happen inside the verbs."""

from flows.cli.interrupts import interrupt_exits

with interrupt_exits():
    from flows.cli import data, looking, models, plan, report, run, scores, search, serve, stack, tables, tracking, tune  # noqa: F401  each adds its verbs, in the order of the help
    from flows.cli.app import app, data_app, models_app, stack_app, tables_app
    from flows.cli.exits import main

app.add_typer(tables_app, name="tables")
app.add_typer(models_app, name="models")
app.add_typer(data_app, name="data")
app.add_typer(stack_app, name="stack")

__all__ = ["app", "main"]
