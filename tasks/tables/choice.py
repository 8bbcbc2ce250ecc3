"""Which runs of which tables are asked for: names and patterns of tables, and what narrows them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dml_core.config import refuse_repeats, unknown_name
from dml_core.training.epochs import Epoch

Track = Literal["paper", "common"]
TRACKS: tuple[Track, ...] = get_args(Track)


@dataclass(frozen=True)
class Choice:
    """What narrows tables; nothing of it is needed. A row, dataset or seed that is given twice is refused (ConfigError).

    Attributes:
        rows, datasets: of the tables that have them; a row that is named has to be one that is run.
        variant: of the protocol, for every row that has it; each row's first where none is given.
        track: "paper", each system as its authors ran it, or "common", every loss on the common track's protocol.
        seeds: every row runs once with each.
        smoke: the same systems on a few drawn images, without trained weights and for one epoch.
        one_row: of a smoke of several tables, one run of each: that whose network most other runs share.
        prepared_only: leave out datasets that are not prepared.
        epochs: whose weights are scored of each run; those of the row or of its protocol where none is given.
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
    """For each table those of the asked names that it has; every one where none is asked for.

    Args:
        kind: what the names are, for the error.
        asked: names of rows, or of datasets.
        known: table -> the names that it has.

    Raises:
        ConfigError: no table has one of them; the nearest name is given.
    """
    where = next(iter(known)) if len(known) == 1 else f"{len(known)} tables"
    for one in asked:
        if not any(one in names for names in known.values()):
            raise unknown_name(f"{kind} of {where}", one, list(dict.fromkeys(name for names in known.values() for name in names)))
    return {table: tuple(name for name in names if not asked or name in asked) for table, names in known.items()}
