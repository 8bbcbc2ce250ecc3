"""Finished steps and runs: their records, the code that made them, and the identities under which a run may be finished.

A step is finished if Prefect's file for its identity holds an intact, sealed record of it (`read_finished`). Whether the files that the
record names are unchanged is a question to the store: `Store.changed_files` names the changed ones, `Store.checked` raises.

Each step also has one small file without its code in the name (`StepIdentity.settings`): the identity under which it was last made or
reused, and a hash of each source file at that time. By it a step is found after its code has changed: with `--code keep` it is reused and
its rows are marked; readers that only show finished runs use it too.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from dml_core.errors import StoreError
from tasks.environment import finished_records
from tasks.runs.identity import StepIdentity, embed_step, evaluate_step, train_step
from tasks.runs.records import (
    METRICS_FILE,
    CheckpointRecord,
    DatasetRecord,
    EmbeddingRecord,
    Record,
    ScoreRecord,
    StepRecord,
    changed_file,
    read_scores,
)
from tasks.runs.specs import RunSpec
from tasks.sealed import DamagedError, NewerFormatError, read_bytes, read_or_set_aside, unseal, write_sealed

Code = Literal["strict", "keep"]  # if code changed, its steps run again, or results of older code are reused and marked
KINDS = {f"{kind.__module__}.{kind.__name__}": kind for kind in (CheckpointRecord, EmbeddingRecord, ScoreRecord)}
_SCORES = TypeAdapter(dict[str, float])
_RUN_NAME = re.compile(r"([^/]+)(?:/([^/]+)(?:/([0-9]{1,10}))?)?")


# ---------------------------------------------------------------- names


@dataclass(frozen=True)
class RunName:
    """Name of a run of the standing comparison; without a seed of all runs of a variant, without a variant of the whole comparison."""

    dataset: str
    variant: str | None
    seed: int | None


def parse_run_name(text: str) -> RunName | None:
    """Return the parts of `DATASET[/VARIANT[/SEED]]`, or None if the text has another form."""
    match = _RUN_NAME.fullmatch(text)
    if match is None:
        return None
    dataset, variant, seed = match.groups()
    return RunName(dataset, variant, None if seed is None else int(seed))


# ---------------------------------------------------------------- records


def read_finished(records: Path, step: str, identity: str) -> StepRecord | None:
    """Return the finished record of a step in `tasks.environment.finished_records`, or None. Its files are not checked.

    Raises:
        DamagedError: the record is damaged, belongs to another step, or names no file.
        NewerFormatError: a newer version of the program wrote it.
        StoreError: it cannot be read.
    """
    path = records / identity
    data = read_bytes(path)
    if data is None:
        return None
    try:
        result = from_json(unseal(from_json(data)["result"]))
        record: StepRecord = KINDS[result["__class__"]].model_validate(result["data"])
    except NewerFormatError as error:
        raise NewerFormatError(f"{path}: {error}") from None
    except (ValueError, TypeError, LookupError, ValidationError):
        raise DamagedError(f"{path}: damaged") from None
    if (record.step, record.identity) != (step, identity):
        raise DamagedError(f"{path}: damaged (the record of {record.step}/{record.identity})")
    if not record.files:
        raise DamagedError(f"{path}: damaged (it names no file)")
    return record


def intact_record(step: str, identity: str) -> StepRecord | None:
    """Return the record of a finished step on this machine; None if it is missing or damaged."""
    try:
        return read_finished(finished_records(), step, identity)
    except StoreError:
        return None


def finished_scores(folder: Path, *, trained: str, embedded: str, scored: str) -> dict[str, float] | None:
    """Return a run's scores from their file in `folder`, whose hash must match the record.

    If this machine has no record, as for a run that another machine left in a bucket, any readable file is accepted. None if there is no
    file, or if it is of a former network, because a forced run trained again and has not scored yet.

    Raises:
        StoreError: the file or the record of the evaluation is damaged.
    """
    path = folder / METRICS_FILE
    record = read_finished(finished_records(), "evaluate", scored)
    if isinstance(record, ScoreRecord):
        read = [intact_record("train", trained), intact_record("embed", embedded)]
        return read_scores(record, folder).metrics if record.is_made_from(read) else None
    data = read_bytes(path)
    try:
        return None if data is None else _SCORES.validate_json(data)
    except ValidationError:
        raise changed_file(path) from None


# ---------------------------------------------------------------- code that made them


class Provenance(Record):
    """Origin of a finished step: its identity, source file -> hash of what the file did, and the step that it read.

    `reads` is the identity of the previous step; None for training, and in records from before it was recorded.
    """

    identity: str
    sources: dict[str, str]
    reads: str | None = None


def record_provenance(state: Path, step: StepIdentity) -> None:
    """Record that a step is finished with the present code."""
    provenance = Provenance(identity=step.identity, sources=step.sources(), reads=step.reads)
    path = _provenance_path(state, step)
    if read_or_set_aside(path, Provenance) != provenance:
        write_sealed(path, provenance)


def finished_identities(state: Path, step: StepIdentity) -> dict[str, tuple[str, ...]]:
    """Return the identities under which a step may be finished -> source files that differ from the present ones.

    The first has the present code; a second has other code, if that made the step last. A damaged record of it is renamed with a warning.
    """
    identities: dict[str, tuple[str, ...]] = {step.identity: ()}
    last = read_or_set_aside(_provenance_path(state, step), Provenance)
    if last is not None and last.identity != step.identity:
        now = step.sources()
        identities[last.identity] = tuple(name for name in sorted(last.sources | now) if last.sources.get(name) != now.get(name))
    return identities


@dataclass(frozen=True)
class RunIdentities:
    """Identities of a run's steps, and the source files that differ from the present ones."""

    trained: str
    embedded: str
    scored: str
    older_code: tuple[str, ...]


def run_identities(state: Path, spec: RunSpec, dataset: DatasetRecord) -> Iterator[RunIdentities]:
    """Yield the identities under which a run may be finished, those of the present code first."""
    for trained, of_training in finished_identities(state, train_step(spec, dataset)).items():
        for embedded, of_embedding in finished_identities(state, embed_step(spec, trained)).items():
            for scored, of_scoring in finished_identities(state, evaluate_step(spec, embedded)).items():
                yield RunIdentities(trained, embedded, scored, tuple(sorted({*of_training, *of_embedding, *of_scoring})))


def steps_before(state: Path) -> dict[str, str]:
    """Return identity of a finished step -> identity of the step that it read, as far as recorded."""
    return {step.identity: step.reads for _, step in _provenances(state) if step.reads is not None}


def forget_provenance(state: Path, identities: Collection[str]) -> None:
    """Remove the records of the code that made these steps."""
    for path, step in _provenances(state):
        if step.identity in identities:
            path.unlink(missing_ok=True)


def _provenances(state: Path) -> Iterator[tuple[Path, Provenance]]:
    """Yield the records of all steps with their paths."""
    for path in sorted((state / "made").glob("*.json")):
        provenance = read_or_set_aside(path, Provenance)
        if provenance is not None:
            yield path, provenance


def made_by_older_code(files: Iterable[str]) -> str:
    """Return the remark of every report about results that `--code keep` reused."""
    return f"made by other code: {', '.join(files)}"


def _provenance_path(state: Path, step: StepIdentity) -> Path:
    return state / "made" / f"{step.settings}.json"
