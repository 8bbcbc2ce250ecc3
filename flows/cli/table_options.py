"""Options that narrow tables, shared by `dml reproduce`, `dml plan` and `dml tables`."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tasks.tables.choice import Choice, Track
    from tasks.tables.seeds_auto import Resolve

Rows = Annotated[list[str] | None, typer.Option("--row", help="For tables: only this row; repeat for several.")]
NumSeeds = Annotated[
    str | None,
    typer.Option(
        "--seeds",
        "-r",
        metavar="N|auto",
        help="For tables: number of seeds, from seed 0. auto: add seeds until differences are precise enough.",
    ),
]
ResolvePoints = Annotated[
    float | None,
    typer.Option(
        "--resolve", metavar="POINTS", help="With --seeds auto: required half-width of each difference's 95 % interval. Default: 1.0."
    ),
]
MaxSeeds = Annotated[int | None, typer.Option("--max-seeds", metavar="N", help="With --seeds auto: maximum number of seeds. Default: 20.")]
AUTO = "auto"
TrackName = Annotated[
    str | None,
    typer.Option("--track", metavar="paper|common", help="For tables: each paper's protocol, or a common one for every loss."),
]


def choice_of(
    rows: "list[str] | None",
    datasets: "list[str] | None",
    variants: "list[str] | None",
    track: str | None,
    seeds: "list[int] | None",
    num_seeds: str | None,
    smoke: bool = False,
    prepared_only: bool = False,
    one_row: bool = False,
) -> "Choice":
    """Return the options that narrow tables.

    Raises:
        ConfigError: the options conflict.
    """
    from dml_core.config import unknown_name
    from dml_core.errors import ConfigError
    from tasks.tables.choice import TRACKS, Choice

    if variants and len(variants) > 1:
        raise ConfigError(f"--variant: a table runs in one variant at a time, for example as_released; {len(variants)} were given")
    count = number_of_seeds(num_seeds)
    if seeds and num_seeds:
        said = f"means seeds 0 to {count - 1}" if num_seeds != AUTO else "adds seeds until differences are precise enough"
        raise ConfigError(f"--seed cannot be combined with --seeds {num_seeds}, which {said}; give one of them")
    if track not in (None, *TRACKS):
        raise ConfigError(f"--track: {unknown_name('track', str(track), list(TRACKS))}")
    if one_row and not smoke:
        raise ConfigError("--one-row requires --smoke: one run per table, as in continuous integration")
    if track == "common" and variants:
        raise ConfigError("--variant cannot be combined with --track common, which has its own protocol; give one of them")
    variant = variants[0] if variants else None
    chosen = tuple(seeds or range(count))
    known: Track = "common" if track == "common" else "paper"
    return Choice(tuple(rows or ()), tuple(datasets or ()), variant, known, chosen, smoke, prepared_only, one_row)


def number_of_seeds(num_seeds: str | None) -> int:
    """Return the requested number of seeds; for auto the initial number.

    Raises:
        ConfigError: the number is invalid.
    """
    from dml_core.errors import ConfigError
    from tasks.tables.seeds_auto import FIRST_SEEDS

    if num_seeds is None:
        return 1
    if num_seeds == AUTO:
        return FIRST_SEEDS
    if not num_seeds.isdigit() or int(num_seeds) < 1:
        raise ConfigError(f"--seeds {num_seeds}: expected a number from 1, or auto")
    return int(num_seeds)


def resolving(num_seeds: str | None, points: float | None, most: int | None, smoke: bool = False) -> "Resolve | None":
    """Return the target of `--seeds auto`, or None if a number of seeds was given.

    Raises:
        ConfigError: the options conflict, or the width or cap is invalid.
    """
    from dml_core.errors import ConfigError
    from tasks.tables.seeds_auto import checked_resolve

    if num_seeds != AUTO:
        if points is not None or most is not None:
            raise ConfigError("--resolve and --max-seeds require --seeds auto, which adds seeds until differences are that precise")
        return None
    if smoke:
        raise ConfigError("--seeds auto compares scores, and a smoke run has none; remove --seeds auto or --smoke")
    return checked_resolve(points, most)
