"""`python -m tests.faults.record`: run all or some cells of the matrix and write docs/reliability.json and tests/faults/results.md.

Earlier outcomes stay in the record until the cell runs again; cells that never ran are marked.
"""

import argparse
import fcntl
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.faults.cells import MATRIX, WHEN, Cell, Ground, Outcome

FACTS = ROOT / "docs" / "reliability.json"
PAGE = ROOT / "tests" / "faults" / "results.md"
PLACES = {
    "before-checkpoint": "before a checkpoint",
    "in-checkpoint": "while it is written",
    "after-checkpoint": "after it",
    "embedding": "while embeddings are written",
    "evaluating": "while evaluating",
    "publishing": "while publishing",
}
HEAD = """# What a run survives

Written by `python -m tests.faults.record` from what `tests/faults` saw: nothing here is typed by hand. `docs/reliability.json` has it all.

A **cell** is one run of the standing comparison on drawn images (SoftTriple, three epochs, one worker), in which something dies at an exact
place: the run stops there by itself, is struck, and is let go. It has to end by itself or on the same command again, and then: every file
of its store, its scores among them, has the bytes of an undisturbed run's; MLflow has one run, one model, every point of every curve and
every file once, equal to the undisturbed run's; no process is left fifteen seconds after a command's end; at most one whole epoch was
trained again (there is a checkpoint after each). The time that a command prints is its wall clock but for at most ten
seconds at its end. What was not so stands below the table.

Checkpoints are written by a thread while steps go on. Here epochs are shorter than that takes, so no step begins while one is on its way;
in a real run what was trained meanwhile, at most up to the next checkpoint, is lost with one that does not arrive.

**by itself**: the same command went on. **again**: the same command was started again. **sync**: the run ended well without MLflow, and
`dml sync` delivered it. The seconds are from the strike until the run was past the place where it was struck, the start of a second command
included, on a machine of two cores that others used too (the record has the load).

Not in the matrix: PostgreSQL and Prefect's worker, which the stack alone has, and the network between hosts. Both are below.
"""
STACK_HEAD = "A scheduled run, struck by kill -9 in the middle of its training (`DML_RECORD=1 pytest tests/e2e/test_stack.py`)."


def read_facts() -> dict[str, Any]:
    if not FACTS.exists():
        return {"cells": {}, "campaigns": [], "hosts": {}}
    found: dict[str, Any] = json.loads(FACTS.read_text())
    return found


@contextmanager
def changed_facts() -> Iterator[dict[str, Any]]:
    """Yield the record for changes, then write it and its page; a lock lets several processes run cells."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        facts = read_facts()
        yield facts
        FACTS.write_text(json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        PAGE.write_text(page(facts))


def taken_down(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as the record's entry."""
    return outcome.as_json() | {"on": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"), "machine": platform.processor() or platform.machine()}


def keep_cell(cell: Cell, fact: dict[str, Any]) -> None:
    """Record a cell of the matrix."""
    with changed_facts() as facts:
        facts["cells"][cell.name] = fact


def keep_host_fact(name: str, found: str) -> None:
    """Record an observation of the tests with several hosts if `DML_RECORD` is set."""
    _keep_fact("hosts", name, found)


def keep_stack_fact(name: str, found: str) -> None:
    """Record an observation of the tests of the local stack if `DML_RECORD` is set."""
    _keep_fact("stack", name, found)


def _keep_fact(section: str, name: str, found: str) -> None:
    if "DML_RECORD" not in os.environ:
        return
    with changed_facts() as facts:
        facts.setdefault(section, {})[name] = found


def page(facts: dict[str, Any]) -> str:
    """Return the text of tests/faults/results.md."""
    cells = facts["cells"]
    asked = [cell for cell in MATRIX if cell.name in cells]
    green = [cell for cell in asked if not cells[cell.name]["falls_short"]]
    lines = [
        HEAD,
        f"**{len(asked)} of the matrix's {len(MATRIX)} cells were run; of all that were, {len(green)} of {len(cells)} are green.**",
        "",
    ]
    shares = [share for cell in cells.values() if (share := cell.get("share_between_steps")) is not None]
    if shares:
        lines += [f"Of the printed time at most {max(shares):.1%} belonged to no step ({len(shares)} cells).", ""]
    lines += ["| what dies, how | " + " | ".join(PLACES.values()) + " |", "|---|" + "---|" * len(WHEN)]
    for victim, how in dict.fromkeys((cell.victim, cell.how) for cell in MATRIX):
        row = [[cell for cell in MATRIX if (cell.victim, cell.how, cell.when) == (victim, how, when)] for when in WHEN]
        lines.append(f"| {victim}, {how} | " + " | ".join("; ".join(short(cells, cell) for cell in of) for of in row) + " |")
    lines += ["", "## What falls short", ""]
    short_of = [f"- {name}: {'; '.join(fact['falls_short'])}" for name, fact in sorted(cells.items()) if fact["falls_short"]]
    lines += short_of or ["Nothing of what was run."]
    lines += ["", "## Random campaigns", ""]
    lines += [campaign(found) for found in facts["campaigns"]] or ["None was run."]
    lines += ["", "## Several hosts", ""]
    lines += [f"- {name}: {found}" for name, found in sorted(facts["hosts"].items())] or ["Not run."]
    lines += ["", "## The local stack", "", STACK_HEAD, ""]
    lines += [f"- {name}: {found}" for name, found in sorted(facts.get("stack", {}).items())] or ["Not run."]
    return "\n".join(lines) + "\n"


def short(cells: dict[str, Any], cell: Cell) -> str:
    """Return a cell's entry in the table."""
    fact = cells.get(cell.name)
    if fact is None:
        return "*not run*"
    if fact["falls_short"]:
        return "**falls short**"
    ended = {"by itself": "by itself", "the same command again": "again", "dml sync": "sync"}[fact["ended"]]
    recovered = fact["seconds_to_recover"]
    return f"{ended}, {recovered:.0f} s" if recovered is not None else ended


def campaign(found: dict[str, Any]) -> str:
    cells = found["cells"]
    green = [fact for fact in cells if not fact["falls_short"]]
    told = [f"  - {name(fact)}: {'; '.join(fact['falls_short'])}" for fact in cells if fact["falls_short"]]
    return "\n".join([f"- seed {found['seed']}, {len(cells)} of {found['count']} cells run: {len(green)} green", *told])


def name(fact: dict[str, Any]) -> str:
    return Cell(**fact["cell"]).name


def diagonal(cell: Cell) -> int:
    """Return a sort key by which any part of the matrix has cells of every row and column."""
    rows = list(dict.fromkeys((other.victim, other.how) for other in MATRIX))
    return (WHEN.index(cell.when) - rows.index((cell.victim, cell.how))) % len(WHEN)


def run_cells(cells: Iterable[Cell], minutes: float, keep: Callable[[Cell, dict[str, Any]], None]) -> None:
    """Run cells one after another until the time is over, and print each outcome."""
    until = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="dml-faults-") as folder:
        (Path(folder) / "project").mkdir()
        ground = Ground(Path(folder))
        for cell in cells:
            if time.monotonic() > until:
                print("the time is over")
                return
            began = time.monotonic()
            try:
                outcome = ground.run(cell)
            except Exception as error:  # noqa: BLE001 - recorded, and the other cells run
                outcome = Outcome(cell, falls_short=[f"the test itself failed: {type(error).__name__}: {error}"])
            fact = taken_down(outcome)
            keep(cell, fact)
            told = "; ".join(fact["falls_short"]) or f"{fact['ended']}, recovered after {fact['seconds_to_recover']} s"
            print(f"{'GREEN' if not fact['falls_short'] else 'SHORT'} {cell.name} ({time.monotonic() - began:.0f} s): {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="part of a cell's name; repeat for several")
    parser.add_argument("--missing", action="store_true", help="only cells that the record does not have, or has as falling short")
    parser.add_argument("--minutes", type=float, default=240, help="begin no cell after so many")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page from the record")
    asked = parser.parse_args()
    facts = read_facts()
    cells = [cell for cell in MATRIX if not asked.only or any(part in cell.name for part in asked.only)]
    if asked.missing:
        cells = [cell for cell in cells if cell.name not in facts["cells"] or facts["cells"][cell.name]["falls_short"]]

    cells.sort(key=diagonal)
    if asked.page:
        with changed_facts():
            return
    run_cells(cells, asked.minutes, keep_cell)


if __name__ == "__main__":
    main()
