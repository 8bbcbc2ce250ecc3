"""Train runs again from nothing: `dml reproduce`, in a bare copy of the project.

The copy, `state/verify/<time>`, has the project's settings and reads its packed datasets in place. It has its own state, store, MLflow
database and results, so nothing finished is reused, and in the project only locks next to its packed datasets are written. If the project's
store is a bucket, the copy's store is a prefix in it, because machines of a cluster share no folder; its datasets are the project's there.
"""

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dml_core.config import merge, read_yaml
from dml_core.errors import StoreError
from tasks.environment import Project
from tasks.locks import FileLock, alone
from tasks.plans.results import load_result
from tasks.project_copies import FOLDER, LOCK
from tasks.runs.specs import RunSpec
from tasks.runs.tuned import STANDING
from tasks.storage import Store, open_store
from tasks.tables.result import FailedRun
from tasks.wording import Say
from tasks.yaml_text import yaml_text

COPIED = ("params.yaml", "dvc.yaml", "dvc.lock")
DROPPED = ("PREFECT_", "MLFLOW_", "DML_STATE", "DML_STORE")  # prefixes of variables that name the project's own places
PR_SET_PDEATHSIG = 1
END_SECONDS = 30.0  # for a supervisor to end its processes
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workspace:
    """A bare copy of the project; `records` is the folder of its finished steps' records."""

    project: Project
    store: Store
    records: Path
    environment: dict[str, str]


@contextmanager
def workspace(project: Project, keep: Callable[[], bool], changed: Mapping[str, Any]) -> Iterator[Workspace]:
    """Create a workspace, and remove it at the end unless `keep` returns True; also remove those that ended verifications left.

    `changed` are settings of params.yaml that differ in the copy.
    """
    folder = project.state / FOLDER
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}"
    root, lock = folder / name, FileLock(folder / name / LOCK)
    state = root / "state"
    with alone(folder / LOCK):
        for ended in (path for path in folder.iterdir() if path.is_dir()):
            _remove_ended(ended, _store_address(project, ended))
        lock.acquire()
        state.mkdir()
    for file in COPIED:
        if (project.root / file).is_file():
            shutil.copy(project.root / file, root / file)
    if changed:
        (root / "params.yaml").write_text(yaml_text(merge(read_yaml(root / "params.yaml"), changed)), encoding="utf-8")
    (root / "data").symlink_to(project.root / "data")
    store = _store_address(project, root)
    copy = Project(root, state, store, f"sqlite:///{state / 'mlflow.db'}")
    code = str(Path(__file__).parents[2])
    environment = {key: value for key, value in os.environ.items() if not key.startswith(DROPPED)}
    environment |= {"DML_STORE": store} if store.startswith("s3://") else {}
    environment |= {
        "DVC_STAGE": FOLDER,  # datasets are verified and read, as in a stage of DVC
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([code, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])),
    }
    try:
        yield Workspace(copy, open_store(copy), state / "prefect" / "storage", environment)
    finally:
        lock.release()
        if not keep():
            _remove_ended(root, store)


def train(space: Workspace, specs: Sequence[RunSpec], until: float, say: Say) -> dict[tuple[str, int], str]:
    """Run specs of one dataset's standing comparison or of one table on one dataset, all with the same seed, with `dml reproduce`.

    The command is ended when `time.monotonic()` is `until`; `say` receives its messages.

    Returns:
        (label, seed) -> reason, for runs that failed: all of them if the command failed. Runs that neither failed nor finished were
        stopped at `until`.
    """
    command = [sys.executable, "-m", "flows.cli", "reproduce", *_words(specs)]
    errors: list[str] = []
    log = (space.project.state / "reproduce.log").open("a")
    with (
        log,
        subprocess.Popen(
            command,
            cwd=space.project.root,
            env=space.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=_end_with_parent,
        ) as process,
    ):
        listener = threading.Thread(target=_listen, args=(process, errors, say), name="verify-messages", daemon=True)
        listener.start()
        is_late = False
        try:
            process.wait(None if until == float("inf") else max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            is_late = True
            say("the budget ends: stopping the runs that are not finished")
        finally:
            _end(process)
            listener.join()
    failed = _failures(space.project, specs)
    if process.returncode != 0 and not is_late and not failed:
        reason = errors[-1] if errors else f"dml reproduce ended with exit code {process.returncode}"
        return {(spec.label, spec.seed): reason for spec in specs}
    return failed


def remove_steps(space: Workspace, keys: Iterable[str]) -> None:
    """Remove the files of steps, by their keys in the store, and MLflow's copies; what a bucket keeps now is removed with the workspace."""
    shutil.rmtree(space.project.state / "mlartifacts", ignore_errors=True)
    with suppress(StoreError):
        for key in keys:
            space.store.clear(key)


def _words(specs: Sequence[RunSpec]) -> list[str]:
    """Return the arguments of `dml reproduce` for these runs."""
    first = specs[0]
    if first.table is None:
        variants = [word for spec in specs for word in ("--variant", spec.variant)]
        return ["--dataset", first.dataset, *variants, "--seed", str(first.seed)]
    rows = [word for row in dict.fromkeys(str(spec.row) for spec in specs) for word in ("--row", row)]
    return [first.table, "--dataset", str(first.column), *rows, "--seed", str(first.seed)]


def _failures(project: Project, specs: Sequence[RunSpec]) -> dict[tuple[str, int], str]:
    """Return the reasons of failed runs from the copy's results."""
    reasons = {run.place: run.reason for run in load_result(project, specs[0].table or STANDING).failed}
    places = {(spec.label, spec.seed): FailedRun.of(spec, "").place for spec in specs}
    return {run: reasons[place] for run, place in places.items() if place in reasons}


def _listen(process: "subprocess.Popen[str]", errors: list[str], say: Say) -> None:
    """Pass on a command's messages; add its error lines to `errors` instead."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("error: "):
            errors.append(line.removeprefix("error: ").strip())
        elif line.strip() and not line.startswith("interrupted; "):
            say(line.rstrip())


def _end(process: "subprocess.Popen[str]") -> None:
    """End the command with all that it started: its supervisor does it on SIGTERM."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    """Let the system send SIGTERM to this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _store_address(project: Project, root: Path) -> str:
    """Return the store of a copy: in its state folder, or in the project's bucket."""
    return f"{project.store.rstrip('/')}/{FOLDER}/{root.name}" if project.store.startswith("s3://") else str(root / "state" / "store")


def _remove_ended(root: Path, address: str) -> None:
    """Remove a copy and its store, unless a verification uses it; the next one removes what cannot be removed from a bucket now."""
    lock = FileLock(root / LOCK)
    if not lock.acquire(wait=False):
        return
    lock.release()
    store = Store(address, root / "state" / "cache")
    if store.is_remote:
        try:
            for key in ("train", "embed", "evaluate", "data"):
                store.clear(key)
        except StoreError as error:  # the verdicts are more important
            logger.warning("%s; the next verification removes the files of %s", error, root)
            return
    shutil.rmtree(root, ignore_errors=True)
