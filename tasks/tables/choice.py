"""Selection of a table's runs: filters on rows, datasets, variants and seeds."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from dml_core.config import refuse_repeats
from dml_core.epochs import Epoch

Track = Literal["paper", "common"]


@dataclass(frozen=True)
class Choice:
    """Filters on tables, all optional. A row, dataset or seed that is given twice is refused (ConfigError)."""

    rows: tuple[str, ...] = Field(default=(), description="Rows, for the tables that have them; a named row must be one that is run.")
    datasets: tuple[str, ...] = Field(default=(), description="Datasets, for the tables that have them.")
    variant: str | None = Field(
        default=None, description="Protocol variant, for example as_released, of every row that has it; by default the row's first."
    )
    track: Track = Field(
        default="paper", description="paper: each system as its authors ran it; common: every loss in the common track's protocol."
    )
    seeds: tuple[int, ...] = Field(
        default=(), description="Every row or variant runs once with each; by default 0, or the comparison's default seeds."
    )
    smoke: bool = Field(
        default=False, description="Run a table's systems on a few drawn images, without trained weights and for one epoch."
    )
    prepared_only: bool = Field(default=False, description="Skip datasets of tables that are not prepared.")
    one_row: bool = Field(default=False, description="With smoke, one run per table: the one whose network most others share.")
    epochs: tuple[Epoch, ...] = Field(
        default=(), description="Epochs whose weights are scored in each run of a table; by default those of its protocol."
    )

    def __post_init__(self) -> None:
        for what, values in (("--row", self.rows), ("--dataset", self.datasets), ("--seed", self.seeds)):
            refuse_repeats(what, values)
