"""`python -m tests.faults.campaign --seed S --count 50`: run randomly drawn cells and record them like those of the matrix.

The same command again runs the cells that are missing from the record.
"""

import argparse
import random
from typing import Any

from tests.faults.cells import Cell, every_cell
from tests.faults.record import changed_facts, name, read_facts, run_cells


def drawn(seed: int, count: int) -> list[Cell]:
    """Return the distinct cells of a seed, in the order in which they run."""
    return random.Random(seed).sample(every_cell(), count)


def of_seed(facts: dict[str, Any], seed: int, count: int) -> dict[str, Any]:
    """Return a campaign of the record, added to it if missing."""
    found = next((found for found in facts["campaigns"] if (found["seed"], found["count"]) == (seed, count)), None)
    if found is None:
        found = {"seed": seed, "count": count, "cells": []}
        facts["campaigns"].append(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed where none is given")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=240, help="begin no cell after so many")
    parser.add_argument("--part", default="1/1", help="every n-th of them beginning with the k-th, as k/n: for several processes at a time")
    parser.add_argument("--short", action="store_true", help="run those again that fell short")
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1_000_000)
    first, step = (int(number) for number in asked.part.split("/"))
    cells = drawn(seed, asked.count)
    print(f"seed {seed}, {asked.count} cells of {len(every_cell())}", flush=True)
    done = {name(fact) for fact in of_seed(read_facts(), seed, asked.count)["cells"] if not (asked.short and fact["falls_short"])}

    def keep(cell: Cell, fact: dict[str, Any]) -> None:
        with changed_facts() as facts:
            campaign = of_seed(facts, seed, asked.count)
            kept = [other for other in campaign["cells"] if name(other) != cell.name] + [fact]
            campaign["cells"] = sorted(kept, key=lambda other: cells.index(Cell(**other["cell"])))

    run_cells([cell for cell in cells[first - 1 :: step] if cell.name not in done], asked.minutes, keep)


if __name__ == "__main__":
    main()
