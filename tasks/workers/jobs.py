"""What the driver asks of a group of workers, and what comes back: plain data, importable without Ray."""

from dataclasses import dataclass, field

from dml_core.training.history import Progress
from tasks.runs.specs import RunSpec


@dataclass(frozen=True)
class Job:
    """One step of one run, for a whole worker group.

    Attributes:
        id: unique in a flow.
        step: "train" or "embed".
        dataset_key, dataset_folder: where the packed data is in a remote store, and where it is on the driver's machine.
        train_key: folder of the run's checkpoint in the store.
        embed_key: folder of the run's embeddings in the store.
        store, cache: the store's address and this machine's cache of it.
        num_loader_workers: image-loading processes of each worker; the group that does the job says how many.
    """

    id: str
    step: str
    spec: RunSpec
    dataset_key: str
    dataset_folder: str
    train_key: str
    embed_key: str
    store: str
    cache: str
    num_loader_workers: int = 0


@dataclass
class Outcome:
    """How a job stands.

    Attributes:
        facts: device, seconds, workers; set when it is done.
        error: the one line that says why it failed for good.
        progress: messages since the driver last asked.
        attempts: how often workers have taken it up.
        job_id: the job; None after the board itself was started anew and has forgotten it.
    """

    facts: dict[str, object] | None = None
    error: str | None = None
    progress: list[Progress] = field(default_factory=list)
    attempts: int = 0
    job_id: str | None = None
