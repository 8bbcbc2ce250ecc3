"""`dml verify` and `dml accept`: train accepted results again and compare; make verified results the reference."""

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from dml_core.errors import ConfigError
from flows.cli.app import app, examples
from flows.cli.columns import Column, print_table
from flows.cli.exit_codes import BUG
from flows.cli.session import open_project, say

if TYPE_CHECKING:
    from tasks.watch.records import RowVerdict
    from tasks.watch.verifying import Verified

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")
_MINUTES = {"s": 1 / 60, "m": 1.0, "": 1.0, "h": 60.0}
Rows = Annotated[
    list[str] | None,
    typer.Option("--row", metavar="ROW", help="Only this row: a variant, a table's row, or its full name; repeat for several."),
]


@app.command(epilog=examples("dml verify synthetic --row softtriple", "dml verify --budget 30m"))
def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Datasets of the comparison, or tables. Default: everything that is accepted."),
    ] = None,
    row: Rows = None,
    share: Annotated[float, typer.Option(help="Share of the rows, those verified longest ago first.")] = 1.0,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="End within this time, as 30m or 2h; rows that do not fit wait for the next time.")
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            "--seed", "-s", metavar="SEED", help="This seed; repeat for several. Default: the accepted seed verified longest ago."
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the files of the runs, below state/verify.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train accepted results again, from nothing, and compare.

    In the accepted environment, a row on a CPU is reproduced if its bits are identical; in another, if its scores are within the band of
    the accepted seeds. Finished runs are neither reused nor changed. Exits with code 1 if a row drifted, failed or vanished.
    """
    project = open_project()
    from tasks.watch.verifying import VerifyRequest
    from tasks.watch.verifying import verify as run

    if not 0 < share <= 1:
        raise ConfigError(f"--share {share:g}: expected a number above 0, up to 1")
    minutes = None if budget is None else _minutes(budget)
    request = VerifyRequest(tuple(names or ()), tuple(row or ()), tuple(seed or ()), share, minutes, keep)
    verified = run(project, request, say)
    if as_json:
        print(json.dumps([verification.model_dump(mode="json") for verification in verified.verifications]))
    else:
        _print(verified)
    if verified.has_alarm:
        raise typer.Exit(BUG)


@app.command(epilog=examples("dml accept synthetic --why 'first results'"))
def accept(
    name: Annotated[str, typer.Argument(help="Dataset of the comparison, or table.")],
    why: Annotated[str, typer.Option(help="Your reason, for those who read the reference later.")],
    row: Rows = None,
) -> None:
    """Make finished and verified results the reference.

    Writes results/accepted/NAME.json, to be committed. Every run must be finished by the committed code, and `dml verify` must have trained
    the same with it.
    """
    project = open_project()
    from tasks.watch.accepting import accept as run

    reference, path = run(project, name, why, row or (), say)
    num_rows = len({evidence.row for evidence in reference.evidence})
    print(f"{name}: accepted {num_rows} row{'' if num_rows == 1 else 's'}, {len(reference.evidence)} runs, by {reference.who}")
    print(f"commit it: git add {path.relative_to(project.root)}")


def _minutes(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"--budget {text}: expected a time such as 90s, 30m or 2h")
    return float(match[1]) * _MINUTES[match[2]]


def _print(verified: "Verified") -> None:
    from tasks.watch.summary import first_sentence

    for verification in verified.verifications:
        reference = verified.references.get(verification.name)
        print(first_sentence(verification, reference))
        if verification.rows:
            _print_rows(verification.rows)
    changed = dict.fromkeys(line for one in verified.verifications for verdict in one.rows for line in verdict.changed)
    if changed:
        print("differs from the accepted environment:")
        print("\n".join(f"  {line}" for line in changed))
    if verified.folder is not None:
        print(f"files of the runs: {verified.folder} (until the next verification)")


def _print_rows(rows: "tuple[RowVerdict, ...]") -> None:
    from tasks.watch.summary import first_recall

    print_table(
        Column("row", [row.row for row in rows], wraps=True),
        Column("seed", [str(row.seed) if row.evidence is not None else "" for row in rows]),
        Column("verdict", [row.verdict.value for row in rows]),
        Column("R@1", [first_recall(row) for row in rows], drop=1),
        Column("comparison", [row.reason for row in rows], wraps=True),
    )
