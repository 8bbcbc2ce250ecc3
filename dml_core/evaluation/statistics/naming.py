"""Lists of systems in the sentences of comparisons and rankings."""

from collections.abc import Sequence

MOST_NAMES = 3  # names listed in a sentence; more are counted


def names_of(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Join names, or count them if there are too many."""
    if len(names) > most:
        return f"{len(names)} others"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def leaders_named(leaders: Sequence[str]) -> str:
    """Join the names of equal systems, or name the first and count the others if there are many."""
    return names_of(leaders) if len(leaders) <= MOST_NAMES else f"{leaders[0]} and {len(leaders) - 1} others"
