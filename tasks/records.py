"""What steps hand to each other: small frozen records of paths and hashes. Tensors and arrays stay in files."""

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of all records: immutable, no unknown keys. Not strict as configuration is: Prefect reads a tuple back from JSON as a list."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(Record):
    """One file of a finished step, by name inside the step's folder, with its size in bytes and its SHA-256."""

    name: str
    num_bytes: int
    sha256: str


class DatasetRecord(Record):
    """A prepared dataset: `digest` is the content's fingerprint (DVC's where DVC tracks it); `counts` are images per role."""

    name: str
    folder: str
    digest: str
    counts: dict[str, int]
    source: str


class StepRecord(Record):
    """A finished step: what made it (`identity`), where it is (`key` in the store), what it consists of.

    Attributes:
        facts: what is worth knowing and is no result: device, workers, seconds.
    """

    step: str
    identity: str
    key: str
    files: tuple[FileRecord, ...]
    facts: dict[str, Any] = {}


class CheckpointRecord(StepRecord):
    """A trained system: `checkpoint.pt`, `history.jsonl`, and `validation_split.json` where classes were held out."""


class EmbeddingRecord(StepRecord):
    """Extracted embeddings: `manifest.json` and float32 shards, one set a role."""


class MetricRecord(StepRecord):
    """Scores of one run, with `metrics.json` and figures as files."""

    metrics: dict[str, float]


def describe_file(path: Path, name: str) -> FileRecord:
    """Size and hash of a file as it is now."""
    with path.open("rb") as file:
        return FileRecord(name=name, num_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def describe_folder(folder: Path) -> tuple[FileRecord, ...]:
    """Every file below `folder`, by its relative name, sorted; files whose name begins with a dot are somebody's temporary ones."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return tuple(describe_file(path, path.relative_to(folder).as_posix()) for path in paths)


class RunReport(Record):
    """All that is published of one run; enough to publish it later from the store, without the flow that made it.

    Attributes:
        comparison: title of the parent run.
        identity: of the run's evaluation; one published run has it.
        parameters: the flattened specification.
        tags: paper, table, row, git commit and what else a reader filters by.
        dvc_digest: DVC's hash of the dataset, where DVC tracks it.
    """

    comparison: str
    identity: str
    dataset: DatasetRecord
    variant: str
    seed: int
    parameters: dict[str, Any]
    tags: dict[str, str]
    dvc_digest: str | None
    checkpoint: CheckpointRecord
    embeddings: EmbeddingRecord
    scores: MetricRecord
