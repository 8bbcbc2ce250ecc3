"""`dml verify`, `dml accept` and `dml receipt`: train results again and compare; make verified results the reference, or publish them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dml_core.errors import ConfigError
from flows.cli.app import app, examples
from flows.cli.columns import Column, print_table
from flows.cli.exit_codes import BUG
from flows.cli.options import AsJson, check_file
from flows.cli.session import open_project, print_lines, say
from tasks.environment import Project
from tasks.wording import counted

if TYPE_CHECKING:
    from tasks.watch.records import Receipt
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
        typer.Argument(metavar="NAME", help="Datasets of the comparison, or tables. Default: everything that is accepted."),
    ] = None,
    row: Rows = None,
    share: Annotated[float, typer.Option(help="Share of the rows, those verified longest ago first.")] = 1.0,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="End within this time, as 30m or 2h; rows that do not fit wait for the next time.")
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            "--seed",
            "-s",
            metavar="SEED",
            help="This seed; repeat for several. Default: the accepted seed verified longest ago, of a receipt one at random.",
        ),
    ] = None,
    receipt: Annotated[
        Path | None, typer.Option("--receipt", metavar="FILE", help="Compare with the runs of this receipt instead of accepted ones.")
    ] = None,
    signers: Annotated[
        Path | None, typer.Option("--signers", metavar="FILE", help="Allowed signers of SSH, of whom one must have signed the receipt.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the files of the runs, below state/verify, until the next verification.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Use torch's deterministic algorithms; a run with an operation that has none fails.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train accepted results again, from nothing, and compare.

    In the accepted environment, a row on a CPU is reproduced if its bits are identical; in another, if its scores are within the band of
    the accepted seeds. Finished runs are neither reused nor changed. Exits with code 1 if a row drifted, failed or vanished.
    """
    project = open_project()
    if not 0 < share <= 1:
        raise ConfigError(f"--share {share:g}: expected a number above 0, up to 1")
    minutes = None if budget is None else _minutes(budget)
    from tasks.watch.verifying import VerifyRequest
    from tasks.watch.verifying import verify as run

    request = VerifyRequest(tuple(names or ()), tuple(row or ()), tuple(seed or ()), share, minutes, keep, deterministic)
    verified = run(project, request, say, _receipt(project, receipt, signers, names or ()))
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
    rows = counted(len({evidence.row for evidence in reference.evidence}), "row")
    print_lines(f"{name}: accepted {rows}, {counted(len(reference.evidence), 'run')}, by {reference.who}")
    print_lines(f"commit it: git add {path.relative_to(project.root)}")


@app.command(name="receipt", epilog=examples("dml receipt synthetic -o synthetic.json --sign ~/.ssh/id_ed25519"))
def write_receipt(
    name: Annotated[str, typer.Argument(help="Dataset of the comparison, or table.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    row: Rows = None,
    sign: Annotated[Path | None, typer.Option("--sign", metavar="KEY", help="SSH key that signs it; the signature is in FILE.sig.")] = None,
) -> None:
    """Write verified results to a file that others can reproduce.

    The receipt says what ran and what came out: commit, data, settings, machine, hashes, losses and scores. Others verify it with
    `dml verify --receipt FILE`. Requires what `dml accept` requires.
    """
    check_file(output)
    project = open_project()
    from tasks.watch import receipts

    receipt = receipts.write_receipt(project, name, output, row or (), sign, say)
    rows = counted(len({evidence.row for evidence in receipt.evidence}), "row")
    signed = f", signed: {output}.sig" if sign is not None else ""
    print_lines(f"{output}: {rows}, {counted(len(receipt.evidence), 'run')}, by {receipt.who}{signed}")


def _receipt(project: Project, path: Path | None, signers: Path | None, names: Sequence[str]) -> "Receipt | None":
    """Read the receipt to verify, and print who made it."""
    if path is None:
        if signers is not None:
            raise ConfigError("--signers: only with --receipt")
        return None
    if names:
        raise ConfigError("--receipt: without NAME, which the receipt has; name rows with --row")
    from tasks.watch.receipts import lock_hash, read_receipt, signer_of

    receipt, signer = read_receipt(path), signer_of(path, signers)
    signed = "not signed" if signer is None else f"signed by {signer}"
    say(f"receipt of {receipt.name}: {counted(len(receipt.evidence), 'run')} by {receipt.who}, {receipt.accepted_at:%Y-%m-%d}; {signed}")
    if receipt.lock != lock_hash(project.root):
        say("requirements.lock differs from the receipt's")
    return receipt


def _minutes(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"--budget {text}: expected a time such as 90s, 30m or 2h")
    return float(match[1]) * _MINUTES[match[2]]


def _print(verified: "Verified") -> None:
    from tasks.watch.summary import first_sentence

    for verification in verified.verifications:
        reference = verified.references.get(verification.name)
        print_lines(first_sentence(verification, reference))
        if verification.rows:
            print_table(
                Column("row", [row.row for row in verification.rows], wraps=True),
                Column("seed", [str(row.seed) if row.evidence is not None else "" for row in verification.rows]),
                Column("verdict", [row.verdict.value for row in verification.rows]),
                Column("R@1", [row.recall for row in verification.rows], drop=2),
                Column("band", [row.recall_band for row in verification.rows], drop=1),
                Column("comparison", [row.reason for row in verification.rows], wraps=True),
            )
    changed = dict.fromkeys(line for one in verified.verifications for verdict in one.rows for line in verdict.changed)
    if changed:
        print_lines("differs from the accepted environment:", *(f"  {line}" for line in changed))
    if verified.folder is not None:
        print_lines(f"files of the runs: {verified.folder} (until the next verification)")
