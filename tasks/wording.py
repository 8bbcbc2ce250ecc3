"""Numbers, commands and unknown names as users read them."""

import difflib
import shlex
from collections.abc import Callable, Collection, Iterable

from dml_core.errors import ConfigError

Say = Callable[[str], None]  # prints a line of progress
MAX_NAMES = 24  # that an error lists
NUM_NEAREST = 3  # names that it lists instead of more


def counted(number: int, noun: str) -> str:
    """Return `1 run`, or `2 runs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def reproduce_command(dataset: str, overrides: Iterable[str] = (), variant: str | None = None, seed: int | None = None) -> str:
    """Return the command that makes runs of the standing comparison on a dataset."""
    options = [("dataset", dataset), ("variant", variant), ("seed", seed), *(("set", setting) for setting in overrides)]
    return " ".join(["dml reproduce", *(f"--{name} {shlex.quote(str(value))}" for name, value in options if value is not None)])


def check_listed(kind: str, name: str, known: Collection[str], listed_by: str = "") -> None:
    """Check that a name is known, like `check_known`; of many known names the error has only the nearest, and where all are listed.

    Raises:
        ConfigError: it is unknown.
    """
    from dml_core.config import check_known, nearest_hint  # pydantic, for messages of commands that need none

    if name in known or len(known) <= MAX_NAMES:
        check_known(kind, name, known)
        return
    nearest = ", ".join(difflib.get_close_matches(name, known, n=NUM_NEAREST, cutoff=0.0))
    listed = "; ".join(filter(None, [f"nearest of {len(known)}: {nearest}", listed_by]))
    raise ConfigError(f"unknown {kind} '{name}'{nearest_hint(name, known)} ({listed})")


def duration(seconds: float) -> str:
    """Return `45 s`, `12 min` or `3 h 20 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def significant(value: float, digits: int, sign: str = "") -> str:
    """Return a number with so many significant digits, a larger one as a whole number: `0.036`, `+4.4`, `1,234`. `sign` is "" or "+"."""
    text = f"{value:{sign}.{digits}g}"
    return f"{value:{sign},.0f}" if "e+" in text else text
