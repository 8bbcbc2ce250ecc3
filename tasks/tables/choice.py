"""Selection of runs to start: names and patterns of tables, and filters on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dml_core.config import refuse_repeats, unknown_name
from dml_core.training.epochs import Epoch

Track = Literal["paper", "common"]
TRACKS: tuple[Track, ...] = get_args(Track)


@dataclass(frozen=True)
class Choice:
    """Filters on tables, all optional. A row, dataset or seed that is given twice is refused (ConfigError).

    Attributes:
        rows, datasets: names, for the tables that have them; a named row must be one that is run.
        variant: variant of the protocol, for every row that has it; by default each row's first.
        track: "paper" runs each system as its authors did, "common" every loss on the common track's protocol.
        seeds: every row runs once with each.
        smoke: run the same systems on a few drawn images, without trained weights and for one epoch.
        one_row: in a smoke run of several tables, one run of each: the one whose network most other runs share.
        prepared_only: skip datasets that are not prepared.
        epochs: epochs whose weights are scored in each run; by default those of the row or its protocol.
    """

    rows: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    variant: str | None = None
    track: Track = "paper"
    seeds: tuple[int, ...] = (0,)
    smoke: bool = False
    prepared_only: bool = False
    one_row: bool = False
    epochs: tuple[Epoch, ...] = ()

    def __post_init__(self) -> None:
        for what, values in (("--row", self.rows), ("--dataset", self.datasets), ("--seed", self.seeds)):
            refuse_repeats(what, values)


def narrowed(kind: str, asked: Sequence[str], known: dict[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return, for each table, the requested names that it has; all its names if none is requested.

    Args:
        kind: what the names are, for the error message.
        asked: requested names of rows or datasets.
        known: table -> the names that it has.

    Raises:
        ConfigError: no table has one of them; the error suggests the nearest name.
    """
    where = next(iter(known)) if len(known) == 1 else f"{len(known)} tables"
    for one in asked:
        if not any(one in names for names in known.values()):
            raise unknown_name(f"{kind} of {where}", one, list(dict.fromkeys(name for names in known.values() for name in names)))
    return {table: tuple(name for name in names if not asked or name in asked) for table, names in known.items()}
