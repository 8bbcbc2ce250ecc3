"""`python -m tests.faults.campaign --seed S --count 50`: cells drawn at random from all there are, taken down as the matrix's are."""

import argparse
import random
from typing import Any

from tests.faults.cells import Cell, every_cell
from tests.faults.record import read_facts, run_cells, write_facts


def drawn(seed: int, count: int) -> list[Cell]:
    """The cells of a seed: no two the same, in the order in which they are run."""
    return random.Random(seed).sample(every_cell(), count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed where none is given")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=240, help="begin no cell after so many")
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1_000_000)
    print(f"seed {seed}, {asked.count} cells of {len(every_cell())}", flush=True)
    campaign: dict[str, Any] = {"seed": seed, "count": asked.count, "cells": []}

    def keep(cell: Cell, fact: dict[str, Any]) -> None:
        campaign["cells"].append(fact)
        facts = read_facts()
        facts["campaigns"] = [found for found in facts["campaigns"] if found["seed"] != seed] + [campaign]
        write_facts(facts)

    run_cells(drawn(seed, asked.count), asked.minutes, keep)


if __name__ == "__main__":
    main()
