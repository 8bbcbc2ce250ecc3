"""What steps hand to each other: small frozen records of paths and hashes. Tensors and arrays stay in files."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dml_core.errors import StoreError

METRICS_FILE, CLASSES_FILE, BY_EPOCH_FILE = "metrics.json", "class_recalls.json", "recall_by_epoch.json"


class Record(BaseModel):
    """Base of all records: immutable. Not strict as configuration is: Prefect reads a tuple back from JSON as a list.

    Fields that a newer program added are kept as they are: `tasks.sealed` says when they are not.
    """

    model_config = ConfigDict(frozen=True, extra="allow")


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


class ScoreRecord(StepRecord):
    """Scores of one run as files: `metrics.json` and figures. It holds no number: those are read from the file, once its hash fits."""


class MetricRecord(ScoreRecord):
    """The same with the numbers of its files, as `read_scores` found them; what is shown and published.

    Attributes:
        metrics: of `metrics.json`.
        class_recalls: Recall@1 of each class, by label; none of runs that were scored before these were kept.
        recall_by_epoch: Recall@1 of training and of test images by epochs done, by role; of runs with `recall_every_epochs`.
    """

    metrics: dict[str, float]
    class_recalls: dict[str, float] = {}
    recall_by_epoch: dict[str, dict[int, float]] = {}


def read_scores(record: ScoreRecord, folder: Path) -> MetricRecord:
    """A run's scores from their files in `folder`, the very bytes whose hashes fit the record.

    Raises:
        StoreError: they are not the recorded bytes.
    """
    names = {file.name for file in record.files}

    def optional(name: str) -> Any:
        return json.loads(_recorded(record, folder, name)) if name in names else {}

    return MetricRecord(
        **record.model_dump(include=set(ScoreRecord.model_fields)),
        metrics=json.loads(_recorded(record, folder, METRICS_FILE)),
        class_recalls=optional(CLASSES_FILE),
        recall_by_epoch={role: {int(epoch): recall for epoch, recall in curve.items()} for role, curve in optional(BY_EPOCH_FILE).items()},
    )


def _recorded(record: ScoreRecord, folder: Path, name: str) -> bytes:
    path = folder / name
    data = path.read_bytes() if path.is_file() else b""
    if not any(file.name == name and file.sha256 == hashlib.sha256(data).hexdigest() for file in record.files):
        raise changed_file(path)
    return data


def changed_file(path: Path) -> StoreError:
    """What is said of a file of a finished step that is no longer what the step left."""
    return StoreError(f"{path}: changed or gone since its step recorded it; start the same dml reproduce again, and the step runs again")


def describe_file(path: Path, name: str) -> FileRecord:
    """Size and hash of a file as it is now."""
    with path.open("rb") as file:
        return FileRecord(name=name, num_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def visible_files(folder: Path) -> list[Path]:
    """Every file below `folder`, sorted; those whose name begins with a dot are temporary, or were set aside."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def describe_folder(folder: Path) -> tuple[FileRecord, ...]:
    """Every visible file below `folder`, by its relative name, sorted."""
    return tuple(describe_file(path, path.relative_to(folder).as_posix()) for path in visible_files(folder))


class RunReport(Record):
    """All that is published of one run; enough to publish it later from the store, without the flow that made it.

    Attributes:
        comparison: title of the parent run.
        identity: of the run's evaluation; one published run has it.
        parameters: the flattened specification.
        tags: paper, table, row, git commit and what else a reader filters by.
        dvc_digest: DVC's hash of the dataset, where DVC tracks it.
        scores_only: settings, curves and scores are published, and no network: a search's runs, whose networks nobody wants and which do
            not stay in the store.
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
    scores_only: bool = False

    @property
    def outbox_name(self) -> str:
        """The record's file while it waits for MLflow."""
        return f"{self.identity}.json"


class ComparisonReport(Record):
    """What is published of a comparison beside its runs; their scores are read from MLflow itself.

    Attributes:
        comparison: title of the parent run.
        role: of the classes that the runs are scored on.
        folder: of the report and its figures; None for a part of the comparison, whose report is not the comparison's.
        tags: as a run's; "paper" and "table" of a table's runs are tags of the parent too.
        about: of a table, what it is and what came of it, Markdown; stands before the runs' own figures.
        files: the table's page in its forms, to be kept with the parent.
        is_search: the runs are a search's, which have no means over seeds: the parent says what is in `about`, and keeps the files.
        reference: the variant that the others are compared with; the best where none is named.
        digest: of the dataset's present content; runs on other content are left out. None where it is not known.
        settings: variant -> settings identity (`tasks.runs.comparable`) of its present settings, as far as they are known.
        is_one_protocol: runs of other settings than these are left out even where a variant has no others.
    """

    comparison: str
    dataset: str
    role: str
    folder: str | None
    tags: dict[str, str]
    about: str | None = None
    files: tuple[str, ...] = ()
    is_search: bool = False
    reference: str | None = None
    digest: str | None = None
    settings: dict[str, str] = {}
    is_one_protocol: bool = False

    @property
    def outbox_name(self) -> str:
        """The record's file while it waits for MLflow; by name after those of its runs, which are delivered first."""
        return f"~{hashlib.sha256(self.comparison.encode()).hexdigest()[:16]}.json"
