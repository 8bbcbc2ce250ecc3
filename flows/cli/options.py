"""Options of several verbs: runs of tables, overridden settings, prices, JSON, folders to write."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dml_core.errors import ConfigError

if TYPE_CHECKING:
    from flows.request import Request

Datasets = Annotated[
    list[str] | None,
    typer.Option("--dataset", "-d", metavar="DATASET", help="Dataset of the comparison or of a table's columns; repeat for several."),
]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant", "-v", metavar="VARIANT", help="Variant of the comparison, repeat for several; or of a table's protocol (as_released)."
    ),
]
Seeds = Annotated[
    list[int] | None, typer.Option("--seed", "-s", metavar="SEED", help="Run this seed; repeat for several: -s 0 -s 4 runs seeds 0 and 4.")
]
Rows = Annotated[list[str] | None, typer.Option("--row", metavar="ROW", help="For tables: only this row; repeat for several.")]
PriceFile = Annotated[Path | None, typer.Option("--prices", metavar="FILE", help="Prices in YAML, which turn costs into money.")]
NumSeeds = Annotated[
    str | None,
    typer.Option(
        "--seeds",
        "-r",
        metavar="N|auto",
        help="N seeds, only for tables: -r 4 runs seeds 0, 1, 2 and 3. auto: add seeds until differences are precise enough.",
    ),
]
ResolvePoints = Annotated[
    float | None,
    typer.Option(
        "--resolve", metavar="POINTS", help="With --seeds auto: required half-width of each difference's 95 % interval. Default: 1.0."
    ),
]
MaxSeeds = Annotated[int | None, typer.Option("--max-seeds", metavar="N", help="With --seeds auto: maximum number of seeds. Default: 20.")]
SameOverrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="The same --set options as in the `dml reproduce` that made it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AUTO = "auto"
MAX_SEEDS = 1000
NAME_OF_FILE = re.compile(r"\.(csv|gz|html?|jpe?g|jsonl?|log|md|np[yz]|onnx|parquet|pdf|png|pt[2h]?|svg|tar|txt|xml|ya?ml|zip)$", re.I)
TrackName = Annotated[
    Literal["paper", "common"] | None,
    typer.Option("--track", help="For tables: each paper's protocol, or a common one for every loss."),
]


def request_of(
    tables: Sequence[str] | None, seeds: Sequence[int] | None, num_seeds: str | None, variants: Sequence[str] | None, **others: Any
) -> "Request":
    """Return the request that a command's options form; `others` are fields of `Request`. None stands for an option that is not given.

    Raises:
        ConfigError: options conflict, or a value is invalid.
    """
    from flows.request import NEEDS_AUTO, REQUEST
    from tasks.runs.tuned import STANDING
    from tasks.tables.seeds_auto import DEFAULT_POINTS

    is_standing = not tables or list(tables) == [STANDING]
    if num_seeds == AUTO:
        others["resolve"] = DEFAULT_POINTS if others.get("resolve") is None else others["resolve"]
    elif others.get("resolve") is not None:
        raise ConfigError(NEEDS_AUTO)
    elif num_seeds is not None:
        if not num_seeds.isdecimal() or len(num_seeds) > len(str(MAX_SEEDS)) or not 1 <= int(num_seeds) <= MAX_SEEDS:
            raise ConfigError(f"--seeds {num_seeds}: expected a number from 1 to {MAX_SEEDS}, or auto")
        if is_standing:
            raise ConfigError(f"--seeds {num_seeds} requires a table; for the comparison give each seed, for example --seed 0 --seed 1")
        if seeds:
            raise ConfigError(
                f"--seed cannot be combined with --seeds {num_seeds}, which means seeds 0 to {int(num_seeds) - 1}; give one of them"
            )
        seeds = range(int(num_seeds))
    if is_standing:
        others["variants"] = variants
    elif variants and len(variants) > 1:
        raise ConfigError(f"--variant: a table runs in one variant at a time, for example as_released; {len(variants)} were given")
    elif variants:
        others["variant"] = variants[0]
    options = {"tables": tables, "seeds": seeds, **others}
    return REQUEST.validate_python({name: value for name, value in options.items() if value is not None})


def check_folder(path: Path, any_name: bool = False) -> None:
    """Check that a path given with -o is a folder, or can become one.

    Raises:
        ConfigError: it, or a folder above it, is something else; or, without `any_name`, a new folder would have the name of a file.
    """
    nearest = _nearest(path)
    if not _is_folder(nearest):
        raise ConfigError(f"-o {path}: expected a folder, but {nearest} is not one; choose another place")
    if nearest != path and NAME_OF_FILE.search(path.name) and not any_name:
        raise ConfigError(f"-o {path}: named as a file, and this command writes a folder; choose another name")


def check_file(path: Path, option: str = "-o") -> None:
    """Check that a path given with an option is no folder, and can be a file; `tasks.files.check_output` checks an existing one.

    Raises:
        ConfigError: it is a folder, or what it is in is none.
    """
    nearest = _nearest(path)
    if nearest == path and _is_folder(path):
        raise ConfigError(f"{option} {path}: expected a file, but {path} is a folder; choose another name")
    if nearest != path and not _is_folder(nearest):
        raise ConfigError(f"{option} {path}: expected a file in a folder, but {nearest} is not a folder; choose another place")


def _nearest(path: Path) -> Path:
    """Return the path if anything is there, else the nearest folder above it at whose place something is."""
    return next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112  Path.is_dir raises an error below a folder that may not be read


def embeddings_place(text: str) -> Path:
    """Return the folder, or the one file, that is given with -o for embeddings.

    Raises:
        ConfigError: its suffix is that of no file that can be written, or its folder is a file.
    """
    from tasks.runs.embeddings import SINGLE_FILES

    path = Path(text)
    if path.suffix in SINGLE_FILES and not text.endswith("/"):
        check_file(path)
    elif path.suffix in SINGLE_FILES or (path.suffix and not text.endswith("/") and not path.is_dir()):
        formats = " or ".join(SINGLE_FILES)
        raise ConfigError(f"-o {text}: expected a name that ends with {formats}, or of a folder: one without suffix, or that ends with /")
    else:
        check_folder(path, any_name=True)
    return path
