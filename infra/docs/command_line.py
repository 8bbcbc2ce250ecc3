"""Write the reference of the `dml` command as Markdown, from the commands themselves."""

import re
from collections.abc import Iterator
from typing import Any

from typer._click.core import Context

from flows.cli import exit_codes
from flows.cli.app import GROUPS, VERBS, FirstByDefault, load_verb

INTRODUCTION = """# Command line

For everyone who uses `dml`: all verbs with their arguments, options and defaults. `make docs` writes this page from the commands' help.
Run verbs inside a project: a folder with a `params.yaml`, or a folder below it.

`dml --version` prints the version, `dml VERB --help` a verb's help.

Tables fit the terminal: columns that do not fit are omitted and named below the table. In a pipe, for example `dml compare | less -S`,
tables have all columns, and each row is one line.
"""


def page() -> str:
    """Return the page."""
    codes = [line for line in str(exit_codes.__doc__).splitlines() if line.startswith("|")]
    parts = [INTRODUCTION, "## Exit codes\n", *codes, "\n## Verbs"]
    for title, verbs in GROUPS.items():
        parts += [f"\n{title}:\n", "| verb | purpose |\n|---|---|"]
        parts += [f"| [`dml {verb}`](#dml-{verb}) | {line} |" for verb, (_, line) in verbs.items()]
    for verb in VERBS:
        command = load_verb(verb)
        if not hasattr(command, "commands"):
            parts += _section(command, f"dml {verb}", "##")
            continue
        parts += [f"\n## dml {verb}\n", escaped(command.help)]
        if isinstance(command, FirstByDefault):
            name, _ = command.default
            parts.append(f"\n`{name}` is the default verb: `dml {verb} ...` is `dml {verb} {name} ...`.")
        for name, part in command.commands.items():
            parts += _section(part, f"dml {verb} {name}", "###")
    return "\n".join(parts) + "\n"


def _section(command: Any, title: str, level: str) -> Iterator[str]:
    context = Context(command, info_name=title)
    yield f"\n{level} {title}\n"
    yield f"```text\n{title} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    yield escaped(command.help)
    records = [(parameter, parameter.get_help_record(context)) for parameter in command.get_params(context)]
    for kind in ("argument", "option"):
        rows = [record for parameter, record in records if parameter.param_type_name == kind and record and record[0] != "--help"]
        if rows:
            yield f"\n| {kind} | meaning | default |\n|---|---|---|"
            yield from (_row(*record) for record in rows)
    if examples := examples_of(command):
        yield "\n".join(["\n```sh", *examples, "```"])


def examples_of(command: Any) -> list[str]:
    """Return the commands at the end of a verb's help."""
    return [line.strip() for line in (command.epilog or "").splitlines() if line.startswith("  ")]


def _row(names: str, meaning: str) -> str:
    """Return a table's row; the help ends with `[default: 10; x>=1]` or `[required]`."""
    match = re.fullmatch(r"(.*?)(?:\s*\[((?:default: |required|env var|\S*[<>]=?)[^\]]*)\])?", meaning, re.DOTALL)
    assert match is not None
    text, extra = match.groups()
    default, limits = "", []
    for part in (extra or "").split("; "):
        if part.startswith("default: "):
            default = f"`{part.removeprefix('default: ')}`"
        elif part == "required":
            default = "required"
        elif part:
            limits.append(f"`{part}`")
    return f"| `{_cell(names)}` | {_cell(escaped(text))}{f' ({_cell(limits[0])})' if limits else ''} | {_cell(default)} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def escaped(text: str) -> str:
    """Return plain text as Markdown: outside of code, characters that Markdown or HTML would take for markup are escaped."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<*_\[\]])", r"\\\1", part) for part in parts)
