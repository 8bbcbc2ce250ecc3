"""Small frozen records of paths and hashes that steps pass to each other. Tensors and arrays stay in files."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dml_core.data.store.info import read_info
from dml_core.errors import DataError, StoreError

METRICS_FILE, CLASSES_FILE, BY_EPOCH_FILE = "metrics.json", "class_recalls.json", "recall_by_epoch.json"
FIGURES_FOLDER = "figures"  # next to them


class Record(BaseModel):
    """Immutable base of all records. Not strict as configuration is: Prefect reads a tuple back from JSON as a list.

    Fields that a newer program added are kept unchanged; `tasks.sealed` lists the exceptions.
    """

    model_config = ConfigDict(frozen=True, extra="allow")


class FileRecord(Record):
    """One file of a finished step: name inside the step's folder, size in bytes and SHA-256."""

    name: str
    num_bytes: int
    sha256: str


class DatasetRecord(Record):
    """A prepared dataset: `digest` is the content's fingerprint; `counts` are images per role."""

    name: str
    folder: str
    digest: str
    counts: dict[str, int]
    source: str


class StepRecord(Record):
    """A finished step: `identity` hashes what made it, `key` is its place in the store, `files` its contents.

    Attributes:
        facts: useful values that are no result: device, workers, seconds.
        inputs: `hash_of_files` of the steps that it read: trained again, a network may have other bits under the same identity. None for
            training, and in records from before it was kept.
    """

    step: str
    identity: str
    key: str
    files: tuple[FileRecord, ...]
    facts: dict[str, Any] = {}
    inputs: str | None = None

    def is_made_from(self, steps: Sequence["StepRecord | None"]) -> bool:
        """Return whether it was made from the present files of the steps before it; true if `inputs` or the record of a step is missing."""
        known = [step for step in steps if step is not None]
        return self.inputs is None or len(known) < len(steps) or self.inputs == hash_of_files(known)


class CheckpointRecord(StepRecord):
    """A trained system: `checkpoint.pt`, `history.jsonl`, and `validation_split.json` if classes were held out."""


class EmbeddingRecord(StepRecord):
    """Extracted embeddings: `manifest.json` and float32 shards, one set per role."""


class ScoreRecord(StepRecord):
    """Scores of one run as files: `metrics.json` and figures. It holds no numbers: they are read from the file once its hash matches."""


class MetricRecord(ScoreRecord):
    """A score record with the numbers from its files, read by `read_scores`, for display and publishing.

    Attributes:
        metrics: contents of `metrics.json`.
        class_recalls: Recall@1 of each class, by label; empty for runs scored before these were kept.
        recall_by_epoch: Recall@1 of training and test images by epochs done, by role; for runs with `recall_every_epochs`.
    """

    metrics: dict[str, float]
    class_recalls: dict[str, float] = {}
    recall_by_epoch: dict[str, dict[int, float]] = {}


def read_scores(record: ScoreRecord, folder: Path) -> MetricRecord:
    """Read a run's scores from their files in `folder`, from the very bytes whose hashes match the record.

    Raises:
        StoreError: a file differs from its record.
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
    """Return the error about a finished step's file that has changed or disappeared."""
    return StoreError(f"{path}: changed or gone since its step recorded it; start the same dml reproduce again, and the step runs again")


def describe_file(path: Path, name: str) -> FileRecord:
    """Return size and hash of a file as it is now."""
    with path.open("rb") as file:
        return FileRecord(name=name, num_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def visible_files(folder: Path) -> list[Path]:
    """Return all files below `folder`, sorted; names that begin with a dot (temporary or set aside) are skipped."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def describe_folder(folder: Path) -> tuple[FileRecord, ...]:
    """Return a record of every visible file below a finished step's `folder`, by its relative name, sorted.

    Raises:
        StoreError: there is none; a record without files would always count as intact.
    """
    files = visible_files(folder)
    if not files:
        raise StoreError(
            f"{folder}: the step left no file here; check that all processes of the run reach this folder, and rerun the command"
        )
    return tuple(describe_file(path, path.relative_to(folder).as_posix()) for path in files)


def check_unchanged(dataset: DatasetRecord) -> None:
    """Check that a dataset was not prepared again with other content since a run began: the run uses the former images.

    Raises:
        DataError: the content changed, or the dataset was removed.
    """
    digest = read_info(Path(dataset.folder)).fingerprint
    if digest != dataset.digest:
        change = f"digest {digest}, before {dataset.digest}"
        raise DataError(f"{dataset.folder}: was prepared again during the run ({change}); rerun the command that trains on it")


def hash_of_files(records: Iterable[StepRecord]) -> str:
    """Return a hash of the names and contents of the files of some steps."""
    files = [(file.name, file.sha256) for record in records for file in record.files]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


class RunReport(Record):
    """Everything that is published of one run; enough to publish it later from the store, without the flow that made it.

    Attributes:
        comparison: title of the parent run.
        identity: identity of the published run; in a comparison only variants with equal settings share one.
        parameters: the specification's training, evaluation and measurements, as plain values.
        tags: paper, table, row, git commit and other fields to filter by.
        dvc_digest: DVC's hash of the dataset, if DVC tracks it.
        scores_only: publish settings, curves and scores, but no network: for the runs of a search, whose networks do not stay in the store.
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
        """File name of the record while it waits for MLflow. A newer run of the same variant and seed replaces the record that waits."""
        place = f"{self.comparison}\n{self.variant}\n{self.seed}"
        return f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.json"


class ComparisonReport(Record):
    """Content published of a comparison, in addition to its runs, whose scores are read from MLflow.

    Attributes:
        comparison: title of the parent run.
        role: role of the classes that the runs are scored on.
        folder: folder of the report of the last command's runs, and its figures; None for a table or a search.
        tags: as a run's; "paper" and "table" of a table's runs are tags of the parent too.
        about: description and results of a table in Markdown, placed before the runs' scores.
        files: the table's page in its formats, stored with the parent.
        is_search: the runs are a search's and have no means over seeds: the parent shows `about` and stores the files.
        reference: variant that the others are compared with; by default the best.
        digest: digest of the dataset's present content; runs on other content are omitted. None if unknown.
        settings: variant -> settings identity (`tasks.runs.comparable`) of its present settings, as far as known.
        is_one_protocol: omit runs with other settings even if a variant has no others.
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
        """File name of the record while it waits for MLflow; sorts after those of its runs, which are delivered first."""
        return f"~{hashlib.sha256(self.comparison.encode()).hexdigest()[:16]}.json"
