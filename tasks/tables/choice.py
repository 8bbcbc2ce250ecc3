"""Selection of a table's runs: filters on rows, datasets, variants and seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from dml_core.config import refuse_repeats, unknown_name
from dml_core.training.epochs import Epoch

Track = Literal["paper", "common"]
TRACKS: tuple[Track, ...] = get_args(Track)


@dataclass(frozen=True)
class Choice:
    """Filters on tables, all optional. A row, dataset or seed that is given twice is refused (ConfigError)."""

    rows: Annotated[tuple[str, ...], Field(description="Rows, for the tables that have them; a named row must be one that is run.")] = ()
    datasets: Annotated[tuple[str, ...], Field(description="Datasets, for the tables that have them.")] = ()
    variant: Annotated[
        str | None, Field(description="Variant of the papers' protocols, as as_released, for every row that has it; by default its first.")
    ] = None
    track: Annotated[
        Track, Field(description="paper: each system as its authors ran it; common: every loss in the common track's protocol.")
    ] = "paper"
    seeds: Annotated[
        tuple[int, ...], Field(description="Every row or variant runs once with each; by default 0, or the comparison's default seeds.")
    ] = ()
    smoke: Annotated[
        bool, Field(description="Run a table's systems on a few drawn images, without trained weights and for one epoch, as a test.")
    ] = False
    prepared_only: Annotated[bool, Field(description="Skip datasets of tables that are not prepared.")] = False
    one_row: Annotated[bool, Field(description="With smoke, one run per table: the one whose network most others share.")] = False
    epochs: Annotated[
        tuple[Epoch, ...], Field(description="Epochs whose weights are scored in each run of a table; by default those of its protocol.")
    ] = ()

    def __post_init__(self) -> None:
        for what, values in (("--row", self.rows), ("--dataset", self.datasets), ("--seed", self.seeds)):
            refuse_repeats(what, values)


def narrowed(kind: str, requested: Sequence[str], known: dict[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return, for each table, the requested names that it has; all its names if none is requested.

    Args:
        kind: what the names are, for the error message.
        requested: names of rows or datasets.
        known: table -> the names that it has.

    Raises:
        ConfigError: no table has one of them; the error suggests the nearest name.
    """
    where = next(iter(known)) if len(known) == 1 else f"{len(known)} tables"
    every = list(dict.fromkeys(name for names in known.values() for name in names))
    for name in requested:
        if name not in every:
            raise unknown_name(f"{kind} of {where}", name, every)
    return {table: tuple(name for name in names if not requested or name in requested) for table, names in known.items()}
