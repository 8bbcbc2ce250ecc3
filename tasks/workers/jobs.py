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
        checkpoint_every_steps, checkpoint_every_minutes: checkpoints within an epoch, as `ScaleSpec` has them.
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
    checkpoint_every_steps: int | None = None
    checkpoint_every_minutes: float | None = None


@dataclass
class Outcome:
    """How a job stands with the group that was given it.

    Attributes:
        facts: device, seconds, workers; set when it is done.
        error: the one line that says why it failed for good.
        fault: what ended the group, so that another has to go on.
        progress: messages since the driver last asked.
        is_taken: whether the workers have begun.
        has_made_way: whether the workers ended because they were asked to; they left a checkpoint.
        quiet_seconds: how long no worker has said that its work goes on.
        is_patient: whether what is being done may take long.
    """

    facts: dict[str, object] | None = None
    error: str | None = None
    fault: str | None = None
    progress: list[Progress] = field(default_factory=list)
    is_taken: bool = False
    has_made_way: bool = False
    quiet_seconds: float = 0.0
    is_patient: bool = False
