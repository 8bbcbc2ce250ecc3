"""Numbers and commands as users read them."""

import shlex
from collections.abc import Callable, Iterable

Say = Callable[[str], None]  # prints a line of progress


def counted(number: int, noun: str) -> str:
    """Return `1 run`, or `2 runs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def reproduce_command(dataset: str, overrides: Iterable[str] = (), variant: str | None = None, seed: int | None = None) -> str:
    """Return the command that makes runs of the standing comparison on a dataset."""
    options = [("dataset", dataset), ("variant", variant), ("seed", seed), *(("set", setting) for setting in overrides)]
    return " ".join(["dml reproduce", *(f"--{name} {shlex.quote(str(value))}" for name, value in options if value is not None)])


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
