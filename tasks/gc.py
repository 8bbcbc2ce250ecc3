"""`dml gc`: list the finished steps in the store that nothing references; `--delete` removes them.

A step is referenced if a table's result, a run in MLflow or a record in the outbox names it, or if the current parameters and tables would
reuse it. The steps it read (its embeddings, its network) also count, according to `state/made`; if that has no entry, because the step is
older than this log, everything that existed when the step ended is kept. Steps in progress are kept (their lock is held), and so are those
written or used in the last days, because a stopped run may be resumed, or since the oldest running flow began. Copies of training images
that `dml tune` made are listed likewise, unless a prepared dataset has their content.

Only a store in the state folder is supported: of another folder, which projects may share, none knows all tables. Nor does one of a bucket:
of that only the copies on this machine are listed, whatever refers to them but the outbox, since they are fetched again when needed; on a
node of a cluster also those of datasets, and what verifications left there.
"""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dml_core.errors import ConfigError, StoreError, TrackingError
from tasks.data import dataset_if_prepared
from tasks.environment import Project, finished_records, shown
from tasks.files import files_set_aside
from tasks.locks import FileLock, running_since
from tasks.plans.plan import LocalState
from tasks.plans.results import runs_today
from tasks.project_copies import DAY_SECONDS, FOLDER, ended_copies
from tasks.runs.costs import journal_file
from tasks.runs.finished import forget_provenance, run_identities, steps_before
from tasks.runs.identity import STEP_VERSION, identity_in
from tasks.runs.params.comparison import runnable_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import RunReport
from tasks.runs.tuned import STANDING
from tasks.sealed import DamagedError, move_damaged, read_sealed
from tasks.storage import Store, open_store
from tasks.tables.choice import Choice
from tasks.tables.file import load_table, table_names
from tasks.tables.result import TableResult
from tasks.tables.runs import runs_of_tables
from tasks.tracking.outbox import OUTBOX, REPORT

TRAINING_ROWS = "tuning"  # searches' copies of training images, in this folder of the state
STEP_BEFORE = {"embed": "train", "evaluate": "embed"}
Content = TypeVar("Content")


@dataclass(frozen=True)
class StoredStep:
    """A step's folder in the store, its size in bytes and the time of the last write in it."""

    step: str
    identity: str
    folder: Path
    num_bytes: int
    touched: float

    @property
    def key(self) -> str:
        """Key of the step in the store."""
        return f"{self.step}/{self.identity}"


def find_unused(project: Project, days: float) -> tuple[list[StoredStep], int, int]:
    """Find the finished steps that nothing references, or a bucket's copies on this machine, older than `days`. The environment is set.

    Returns:
        These steps, the largest first; the number of other steps, which are kept; and that of those among them that nothing references but
        that were touched in the last days.

    Raises:
        ConfigError: the store is not in the state folder, or the parameters are wrong.
        DataError: a prepared dataset is damaged.
        StoreError, TrackingError: a table's result is damaged or MLflow's database is missing or does not answer, so their references are
            unknown.
    """
    _check_own(project)
    store = open_store(project)
    stored = list(_stored(store))
    referenced = _waiting(project) if store.is_remote else _referenced(project, stored)
    stored += _training_rows(project, referenced)
    free = [step for step in stored if step.key not in referenced]
    since = min(time.time() - days * DAY_SECONDS, running_since(store.locks))
    unused = sorted((step for step in free if step.touched < since), key=lambda step: -step.num_bytes)
    return unused, len(stored) - len(unused), len(free) - len(unused)


def _check_own(project: Project) -> None:
    is_own = Path(os.path.normpath(project.store)).is_relative_to(os.path.normpath(project.state))
    if not is_own and not open_store(project).is_remote:
        may_be_shared, link = f"{project.store}: may have other users, whose tables are unknown here", project.state / "store"
        raise ConfigError(f"{may_be_shared}; if only this project uses it, unset DML_STORE and make {link} a link to it")


def delete(project: Project, unused: Iterable[StoredStep]) -> int:
    """Remove the unused steps, or a bucket's copies, except those now in use, and return the number of bytes freed.

    Raises:
        StoreError: a folder cannot be removed.
    """
    store, num_bytes, gone = open_store(project), 0, set()
    for step in unused:
        locks = [FileLock(store.step_lock(of, step.identity)) for of in (step.step, f"worker-{step.step}")]  # of a flow, of a node's worker
        try:
            if not all(lock.acquire(wait=False) for lock in locks):
                continue
            if not step.folder.is_dir() or _touched(step.folder) != step.touched:
                continue  # removed or used since the search
            if not store.is_remote:
                # The finished record goes first: after an interruption here, the step runs again.
                record = finished_records() / step.identity
                if record.is_dir():
                    move_damaged(record)
                record.unlink(missing_ok=True)
                journal_file(project.state, step.step, step.identity).unlink(missing_ok=True)
            shutil.rmtree(step.folder)
        except OSError as error:
            raise StoreError(f"{step.folder}: cannot be removed ({error.strerror or error})") from None
        finally:
            for lock in locks:
                lock.release()
        gone.add(step.identity)
        num_bytes += step.num_bytes
    if not store.is_remote:
        forget_provenance(project.state, gone)
    return num_bytes


def _stored(store: Store) -> Iterator[StoredStep]:
    """Yield the steps and what else workers fetch from a bucket to a node: datasets, and the files of verifications that have ended."""
    for step in (*STEP_VERSION, "data"):
        yield from _inside(step, store.folder(step).glob("*"))
    yield from _inside(FOLDER, ended_copies(store.cache.parent))


def _training_rows(project: Project, referenced: set[str]) -> Iterator[StoredStep]:
    """Yield the copies of training images that searches made (`tasks.tuning.training_rows`); of today's datasets they are referenced."""
    prepared = [dataset_if_prepared(project, name) for name in load_params(project.params_file).datasets]
    referenced |= {f"{TRAINING_ROWS}/{dataset.digest}" for dataset in prepared if dataset is not None}
    yield from _inside(TRAINING_ROWS, (project.state / TRAINING_ROWS / "datasets").glob("*"))


def _inside(step: str, folders: Iterable[Path]) -> Iterator[StoredStep]:
    for folder in sorted(path for path in folders if path.is_dir()):
        yield StoredStep(step, folder.name, folder, sum(file.st_size for file in _stats(folder)), _touched(folder))


def _touched(folder: Path) -> float:
    """Return the time of the last change in a folder; 0 if the folder is gone."""
    return max((file.st_mtime for file in _stats(folder)), default=0.0)


def _stats(folder: Path) -> Iterator[os.stat_result]:
    """Yield the facts of a folder and of all below it. Links are not followed; what a run removes or renames meanwhile is skipped."""
    below = (Path(inside, name) for inside, folders, files in os.walk(folder) for name in (*folders, *files))
    for path in (folder, *below):
        with suppress(FileNotFoundError):
            yield path.lstat()


def _referenced(project: Project, stored: list[StoredStep]) -> set[str]:
    """Return the keys of the referenced steps and of the steps they read."""
    results = list(_contents(project.state / "tables", TableResult, "dml tables show rebuilds it"))
    scored = {f"evaluate/{run.identity}" for result in results for run in result.runs}
    referenced = scored | _waiting(project) | _in_mlflow(project, stored) | _of_today(project, results)
    before = steps_before(project.state)
    lost = 0.0  # what was made before this time may have been read by a step of unknown origin
    touched = {step.key: step.touched for step in stored}
    for key in list(referenced):
        step, identity = key.split("/")
        while step in STEP_BEFORE:
            if identity not in before:
                lost = max(lost, touched.get(key, 0.0))
                break
            step, identity = STEP_BEFORE[step], before[identity]
            referenced.add(f"{step}/{identity}")
    return referenced | {step.key for step in stored if step.step != "evaluate" and step.touched <= lost}


def _waiting(project: Project) -> set[str]:
    """Return the keys of the steps whose files the outbox's records will publish."""
    reports = [report for report in _contents(project.state / OUTBOX, REPORT, "dml sync sets it aside") if isinstance(report, RunReport)]
    return {record.key for report in reports for record in (report.checkpoint, report.embeddings, report.scores)}


def _contents(folder: Path, kind: type[Content], repair: str) -> Iterator[Content]:
    """Yield the content of every sealed file in a folder and below.

    Raises:
        StoreError: one is damaged, or was and is set aside: it may reference any step.
    """
    for path in files_set_aside(folder):
        raise StoreError(f"{path}: damaged, so the steps that it refers to are unknown; remove it when you need none of them")
    for path in sorted(folder.rglob("*.json")):
        try:
            content = read_sealed(path, kind)
        except DamagedError as error:
            raise StoreError(f"{error}, so the steps that it refers to are unknown; {repair}") from None
        if content is not None:
            yield content


def _in_mlflow(project: Project, stored: list[StoredStep]) -> set[str]:
    """Return the scores MLflow shows. A run has their identity or, outside the standing comparison, a hash of it and its comparison.

    Raises:
        TrackingError: MLflow's database is missing although runs have been scored, or MLflow does not answer.
    """
    scored = [step.identity for step in stored if step.step == "evaluate"]
    if not project.is_tracked:
        if scored:  # these runs were published, here before it was moved away or elsewhere
            missing = f"MLflow's database {shown(project.tracking_uri)} is missing, so the steps that it shows are unknown"
            raise TrackingError(f"{missing}; restore it, or correct MLFLOW_TRACKING_URI; if it is lost: dml reproduce")
        return set()
    from tasks.tracking.published import published_as

    published, comparisons = published_as(project.tracking_uri)
    return {
        f"evaluate/{identity}"
        for identity in scored
        if identity in published or any(identity_in(comparison, identity) in published for comparison in comparisons)
    }


def _of_today(project: Project, results: list[TableResult]) -> set[str]:
    """Return every step of the standing comparison and of all tables, for the current settings and datasets, and of present or older code.

    The runs are those of the default seeds and variants, and all that a result of a table has, measured or failed. `--code keep` reuses
    what older code made, also where a run was stopped before its scores, which no result names yet.

    Raises:
        DataError: a prepared dataset is damaged, so the steps that read it are unknown.
    """
    params, names = load_params(project.params_file), table_names()
    prepared = {name: record for name in params.datasets if (record := dataset_if_prepared(project, name)) is not None}
    local, (of_tables, _) = LocalState(project, params), runs_of_tables([name for name in names if name != STANDING], Choice())
    datasets = {(name, column): local.dataset(column, load_table(name)) for name, column in of_tables}
    runs = [(spec, datasets[key]) for key, specs in of_tables.items() for spec in specs]
    for dataset in prepared.keys() & params.comparison.datasets.keys():
        runs += [(spec, prepared[dataset]) for spec in runnable_runs(params, dataset)]
    for result in results:
        if result.name in names:
            runs += runs_today(project, params, result)
    identities = [one for spec, dataset in runs for one in run_identities(project.state, spec, dataset)]
    return {key for one in identities for key in (f"train/{one.trained}", f"embed/{one.embedded}", f"evaluate/{one.scored}")}
