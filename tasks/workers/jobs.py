"""Messages between the driver and a group of workers: plain data, importable without Ray."""

import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dml_core.errors import DmlError, TrainingError
from dml_core.training.history import Progress
from tasks.runs.costs import Cost
from tasks.runs.identity import differing_files
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.runs.surroundings import versions

MEMORY = re.compile("OutOfMemoryError|out of memory|allocate memory", re.IGNORECASE)  # in texts of Ray, torch and the system


class InfrastructureError(TrainingError):
    """Ray, a device or the code of a machine failed: the settings of the run are not the reason.

    What ends a job decides what it ends of `dml tune`:
    - the trial: a worker's own exception, which its settings may cause, and full memory of any kind (TrainingError).
    - the search: images that cannot be read (DataError), and workers that were ended from outside too often (LostWorkersError).
    - the command, with the searches that follow: this error, and a store that cannot be written (StoreError).
    """


class LostWorkersError(InfrastructureError):
    """A run's workers ended too often without an exception in its code: they or the board died, did not start or did not answer."""


class Faults:
    """Counts a job's faults; receives its progress, which it passes on.

    Faults do not add up if the job trains for `seconds`, the time between two checkpoints, beyond the place that it had reached before: a
    long training may lose a node now and then. A fault that recurs at its place, or a little later each time, is counted.
    """

    def __init__(self, watch: Callable[[Progress], None], seconds: float) -> None:
        self.number = 0
        self._watch, self._seconds = watch, seconds
        self._place = self._reached = (0, 0)  # epoch and step: the furthest of earlier attempts, and of all
        self._since: float | None = None  # when this attempt passed that place
        self._beyond = 0.0  # seconds from then until its last message

    def watch(self, message: Progress) -> None:
        """Receive a progress message."""
        if message.note is None and (message.epoch, message.step) > self._place:
            self._since = self._since or time.monotonic()
            self._reached, self._beyond = (message.epoch, message.step), time.monotonic() - self._since
        self._watch(message)

    def attempt_ended(self, is_fault: bool) -> None:
        """Count the end of an attempt."""
        self.number = is_fault + (self.number if self._beyond < self._seconds else 0)
        self._place, self._since, self._beyond = self._reached, None, 0.0


def class_of_end(ended: BaseException) -> type[TrainingError]:
    """Return the class of an end of workers by the rule of `InfrastructureError`; its cause is the worker's report, if there is one."""
    is_own = type(ended.__cause__) is TrainingError or MEMORY.search(str(ended))
    return TrainingError if is_own else LostWorkersError


def check_code(sources: Mapping[str, str], packages: Mapping[str, str], whose: str = "the flow") -> None:
    """Compare the code and the libraries of this process with those of the one that sent it its work, for which its files will count.

    Libraries that are missing here, and builds of one version (`+cpu`), are not compared.

    Raises:
        InfrastructureError: a file or version differs.
    """
    machine = f"this machine ({socket.gethostname()})"
    if files := differing_files(sources):
        names = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        reason = f"{machine} has other code than {whose}, or was edited since ({names})"
        raise InfrastructureError(f"{reason}: rerun with the same code everywhere")
    for name, here in versions().items():
        there = packages.get(name, here)
        if here.partition("+")[0] != there.partition("+")[0]:
            remedy = "install the same on every machine (make .venv/.done, or its image built again)"
            raise InfrastructureError(f"{machine} has {name} {here}, {whose} {there}: {remedy}")


@dataclass(frozen=True)
class Job:
    """One step of one run, for a whole worker group.

    Attributes:
        step: "train" or "embed".
        dataset_key, dataset_folder: location of the packed data in a remote store, and on the driver's machine.
        train_key: folder of the run's checkpoint in the store.
        embed_key: folder of the run's embeddings in the store.
        store, cache: the store's address and this machine's cache of it.
        num_loader_workers: image-loading processes of each worker; set by the group that does the job.
        sources: file -> hash of the step's source files, as the flow read them for the step's identity.
        packages: versions of the libraries that compute, where the job is made: of the flow.
        scale: when the workers write checkpoints, how many images they cache, and whether they compute deterministically.
    """

    step: str
    spec: RunSpec
    dataset_key: str
    dataset_folder: str
    train_key: str
    embed_key: str
    store: str
    cache: str
    num_loader_workers: int = 0
    sources: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=versions)
    scale: ScaleSpec = field(default_factory=ScaleSpec)


@dataclass
class JobState:
    """State of a job in the group that does it.

    Attributes:
        facts: device, seconds, workers; set when it is done.
        error: a permanent failure, in one line.
        fault: what ended the group, so that another group has to resume the job; a LostWorkersError if it came from outside of a worker.
        progress: messages since the driver's last query.
        is_taken: whether the workers have started it.
        has_made_way: whether the workers ended on request; they saved a checkpoint.
        quiet_seconds: time since the latest heartbeat of any worker.
        is_patient: whether the current work may take long.
        used: rank -> what the worker has used for the job, as of its latest heartbeat.
    """

    facts: dict[str, object] | None = None
    error: DmlError | None = None
    fault: TrainingError | None = None
    progress: list[Progress] = field(default_factory=list)
    is_taken: bool = False
    has_made_way: bool = False
    quiet_seconds: float = 0.0
    is_patient: bool = False
    used: dict[int, Cost] = field(default_factory=dict)
