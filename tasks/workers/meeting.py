"""How the workers of a group meet, and what each is told of before it begins: the only code of ours in Ray Train's controller.

Ray Train lets workers meet at a store of torch's (`TCPStore`), which listens on every interface of the machine and asks for no token. On
one machine a file does the same. Workers of a cluster share no file and meet as Ray Train does it.
"""

import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.train.torch.config import TorchConfig, _TorchBackend

from tasks.workers.stopping import heed_sigterm


@dataclass
class Meeting(TorchConfig):  # type: ignore[misc]
    """A `TorchConfig` for groups that a flow can end.

    Attributes:
        board: told of the group's controller and of its placement group.
        folder: where the files are that the workers of one machine meet at; None for workers of a cluster.
    """

    board: Any = None
    folder: str | None = None

    @property
    def backend_cls(self) -> type:
        """What Ray Train calls when workers have started."""
        return _Backend


class _Backend(_TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: Meeting) -> None:
        """Join all workers; each start of a group meets at a file of its own."""
        placement_group = worker_group.execute_single(0, ray.util.get_current_placement_group)
        ray.get(backend_config.board.hold.remote(ray.get_runtime_context().current_actor, placement_group))
        worker_group.execute(heed_sigterm)
        if backend_config.folder is None:
            super().on_start(worker_group, backend_config)
            return
        backend = "nccl" if worker_group.get_resources_per_worker().get("GPU", 0) > 0 else "gloo"
        folder = Path(backend_config.folder)
        folder.mkdir(parents=True, exist_ok=True)
        meeting = folder / f"rendezvous-{uuid.uuid4()}"
        ray.get(
            [
                worker_group.execute_single_async(rank, _join, backend, meeting, rank, len(worker_group), backend_config.timeout_s)
                for rank in range(len(worker_group))
            ]
        )
        meeting.unlink(missing_ok=True)

    def on_shutdown(self, worker_group: Any, backend_config: Meeting) -> None:
        """Nothing: the processes end with the group, and one that hangs would be waited for."""


def _join(backend: str, meeting: Path, rank: int, world_size: int, timeout_seconds: int) -> None:
    timeout = timedelta(seconds=timeout_seconds)
    # By its path: torch does not decode the %20 of a file:// address.
    store = dist.FileStore(str(meeting), world_size)  # type: ignore[attr-defined]  # torch exports it at run time
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
