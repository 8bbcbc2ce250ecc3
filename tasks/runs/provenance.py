"""Record which code made a finished step, so that the step is found again after the code has changed.

There is one small file for each step without its code (`StepIdentity.settings`): the identity under which it was last finished, or found
finished, and a hash of each source file at that time. With `--code keep` such a step is reused and its rows are marked.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from tasks.runs.identity import StepIdentity
from tasks.runs.records import Record
from tasks.sealed import read_or_set_aside, write_sealed

Code = Literal["strict", "keep"]  # if code changed, its steps run again, or results of older code are reused and marked


class MadeStep(Record):
    """A finished step: its identity, source file -> hash of what the file did, and the step that it read.

    `reads` is the identity of the previous step; None for training, and in records written before it was kept.
    """

    identity: str
    sources: dict[str, str]
    reads: str | None = None


_MADE = TypeAdapter(MadeStep)


@dataclass(frozen=True)
class OlderStep:
    """A step that other code made: its identity, and the source files that differ."""

    identity: str
    files: tuple[str, ...]


def record_provenance(state: Path, step: StepIdentity) -> None:
    """Record that a step is finished with the present code."""
    made = MadeStep(identity=step.identity, sources=step.sources(), reads=step.reads)
    if _read(state, step) == made:
        return
    write_sealed(_path(state, step), made, _MADE)


def find_older(state: Path, step: StepIdentity) -> OlderStep | None:
    """Return the step as other code last made it; None if no other code did, or if its record is damaged (renamed with a warning)."""
    made = _read(state, step)
    if made is None or made.identity == step.identity:
        return None
    now = step.sources()
    return OlderStep(made.identity, tuple(sorted(name for name in made.sources | now if made.sources.get(name) != now.get(name))))


def finished_identities(state: Path, step: StepIdentity) -> tuple[str, ...]:
    """Return the identities under which a step may be finished: with the present code, then with the code that made it last."""
    made = _read(state, step)
    return (step.identity,) if made is None or made.identity == step.identity else (step.identity, made.identity)


def steps_before(state: Path) -> dict[str, str]:
    """Return identity of a finished step -> identity of the step that it read, as far as recorded."""
    found = (read_or_set_aside(path, _MADE) for path in sorted((state / "made").glob("*.json")))
    return {made.identity: made.reads for made in found if made is not None and made.reads is not None}


def forget_provenance(state: Path, identities: Collection[str]) -> None:
    """Remove the records of these steps."""
    for path in (state / "made").glob("*.json"):
        made = read_or_set_aside(path, _MADE)
        if made is not None and made.identity in identities:
            path.unlink(missing_ok=True)


def made_by_older_code(files: Iterable[str]) -> str:
    """Return the remark of every report about results that `--code keep` reused."""
    return f"made by older code: {', '.join(files)}"


def _path(state: Path, step: StepIdentity) -> Path:
    return state / "made" / f"{step.settings}.json"


def _read(state: Path, step: StepIdentity) -> MadeStep | None:
    return read_or_set_aside(_path(state, step), _MADE)
