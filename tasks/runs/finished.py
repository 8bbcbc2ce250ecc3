"""Records of finished steps as Prefect stores them: one file per step identity, with the sealed record as its result."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from tasks.environment import finished_records
from tasks.runs.records import (
    METRICS_FILE,
    CheckpointRecord,
    EmbeddingRecord,
    ScoreRecord,
    StepRecord,
    changed_file,
    read_scores,
)
from tasks.sealed import DamagedError, NewerFormatError, read_bytes, unseal

KINDS: dict[str, TypeAdapter[Any]] = {
    f"{kind.__module__}.{kind.__name__}": TypeAdapter(kind) for kind in (CheckpointRecord, EmbeddingRecord, ScoreRecord)
}

_SCORES = TypeAdapter(dict[str, float])


def read_finished(records: Path, step: str, identity: str) -> StepRecord | None:
    """Return the finished record of a step, or None. Its files are not checked (`Store.changed_files`).

    Args:
        records: the folder of the records (`tasks.environment.finished_records`).
        step: "train", "embed" or "evaluate".
        identity: identity of the step.

    Raises:
        DamagedError: the record is damaged, or belongs to another step.
        NewerFormatError: a newer version of the program wrote it.
        StoreError: it cannot be read.
    """
    path = records / identity
    data = read_bytes(path)
    if data is None:
        return None
    try:
        kept = from_json(unseal(from_json(data)["result"]))
        record: StepRecord = KINDS[kept["__class__"]].validate_python(kept["data"])
    except NewerFormatError as error:
        raise NewerFormatError(f"{path}: {error}") from None
    except (ValueError, TypeError, LookupError, ValidationError):
        raise DamagedError(f"{path}: damaged") from None
    if (record.step, record.identity) != (step, identity):
        raise DamagedError(f"{path}: damaged (the record of {record.step}/{record.identity})")
    return record


def finished_scores(folder: Path, identity: str) -> dict[str, float] | None:
    """Return the scores of an evaluation from its file in `folder`, whose hash must match the record; None if there is no file.

    If this machine has no record, as for a run that another machine left in a bucket, any readable file is accepted.

    Raises:
        StoreError: the file or the record is damaged.
    """
    path = folder / METRICS_FILE
    record = read_finished(finished_records(), "evaluate", identity)
    if isinstance(record, ScoreRecord):
        return read_scores(record, folder).metrics
    data = read_bytes(path)
    try:
        return None if data is None else _SCORES.validate_json(data)
    except ValidationError:
        raise changed_file(path) from None
