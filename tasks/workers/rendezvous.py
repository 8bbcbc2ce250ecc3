"""The rendezvous of a group's workers and their setup; the only code of ours in Ray Train's controller.

Ray Train's rendezvous is a torch `TCPStore`, which listens on every interface of the machine and needs no token. On one machine a file
replaces it. Workers of a cluster share no files and use Ray Train's rendezvous.
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
class Rendezvous(TorchConfig):  # type: ignore[misc]
    """A `TorchConfig` for groups that a flow can end.

    Attributes:
        board: receives the group's controller and its placement group.
        folder: folder of the rendezvous files for workers of one machine; None for workers of a cluster.
    """

    board: Any = None
    folder: str | None = None

    @property
    def backend_cls(self) -> type:
        """The backend class that Ray Train uses when workers have started."""
        return _Backend


class _Backend(_TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: Rendezvous) -> None:
        """Join all workers; each start of a group has its own rendezvous file."""
        placement_group = worker_group.execute_single(0, ray.util.get_current_placement_group)
        ray.get(backend_config.board.hold.remote(ray.get_runtime_context().current_actor, placement_group))
        worker_group.execute(heed_sigterm)
        if backend_config.folder is None:
            super().on_start(worker_group, backend_config)
            return
        backend = "nccl" if worker_group.get_resources_per_worker().get("GPU", 0) > 0 else "gloo"
        folder = Path(backend_config.folder)
        folder.mkdir(parents=True, exist_ok=True)
        meeting_file = folder / f"rendezvous-{uuid.uuid4()}"
        ray.get(
            [
                worker_group.execute_single_async(rank, _join, backend, meeting_file, rank, len(worker_group), backend_config.timeout_s)
                for rank in range(len(worker_group))
            ]
        )
        meeting_file.unlink(missing_ok=True)

    def on_shutdown(self, worker_group: Any, backend_config: Rendezvous) -> None:
        """Do nothing: the processes end with the group, and a shutdown would wait for one that hangs."""


def _join(backend: str, meeting_file: Path, rank: int, world_size: int, timeout_seconds: int) -> None:
    timeout = timedelta(seconds=timeout_seconds)
    # Pass the path: torch does not decode the %20 of a file:// address.
    store = dist.FileStore(str(meeting_file), world_size)  # type: ignore[attr-defined]  # torch exports it at run time
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
