"""Selection of a table's runs: filters on rows, datasets, variants and seeds."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from dml_core.config import refuse_repeats
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
