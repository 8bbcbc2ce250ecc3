"""Which code made a finished step: kept beside the state, so that the step is found again when the code has changed since.

One small file for each step apart from its code (`StepIdentity.settings`): the identity under which it was last finished, or found
finished, by the code of that time, and a hash of each source file of that code. With `--code keep` such a step is reused and its rows are
marked.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from tasks.files import write_whole
from tasks.runs.identity import StepIdentity
from tasks.runs.records import Record, seal, unseal

Code = Literal["strict", "keep"]  # what changed code does: its steps run again, or what older code made is reused and marked


class MadeStep(Record):
    """A step that was finished by the code of its time: its identity, and source file -> hash of what the file did."""

    identity: str
    sources: dict[str, str]


@dataclass(frozen=True)
class OlderStep:
    """A step that other code made: its identity, and the source files that differ."""

    identity: str
    files: tuple[str, ...]


def note_made(state: Path, step: StepIdentity) -> None:
    """Note that a step is finished by the code as it is."""
    made = MadeStep(identity=step.identity, sources=step.sources())
    if _read(state, step) == made:
        return
    write_whole(_path(state, step), seal(made.model_dump_json()))


def find_older(state: Path, step: StepIdentity) -> OlderStep | None:
    """The step as other code made it last; None where no other did, or where what was noted of it is damaged."""
    made = _read(state, step)
    if made is None or made.identity == step.identity:
        return None
    now = step.sources()
    return OlderStep(made.identity, tuple(sorted(name for name in made.sources | now if made.sources.get(name) != now.get(name))))


def made_by_older_code(files: Iterable[str]) -> str:
    """What every report says of what `--code keep` reused."""
    return f"made by older code: {', '.join(files)}"


def _path(state: Path, step: StepIdentity) -> Path:
    return state / "made" / f"{step.settings}.json"


def _read(state: Path, step: StepIdentity) -> MadeStep | None:
    try:
        return MadeStep.model_validate_json(unseal(_path(state, step).read_bytes()))
    except (FileNotFoundError, ValueError, ValidationError):
        return None
