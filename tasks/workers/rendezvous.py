"""How the workers of one machine meet: over a file, so that nothing listens.

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


@dataclass
class FileRendezvous(TorchConfig):  # type: ignore[misc]
    """A `TorchConfig` for workers of one machine.

    Attributes:
        folder: where the files are that the workers meet at.
    """

    folder: str = ""

    @property
    def backend_cls(self) -> type:
        """What Ray Train calls when workers have started."""
        return _FileBackend


class _FileBackend(_TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: FileRendezvous) -> None:
        """Join all workers; each start of a group meets at a file of its own."""
        backend = "nccl" if worker_group.get_resources_per_worker().get("GPU", 0) > 0 else "gloo"
        meeting = Path(backend_config.folder) / f"rendezvous-{uuid.uuid4()}"
        ray.get(
            [
                worker_group.execute_single_async(rank, _join, backend, meeting, rank, len(worker_group), backend_config.timeout_s)
                for rank in range(len(worker_group))
            ]
        )
        meeting.unlink(missing_ok=True)


def _join(backend: str, meeting: Path, rank: int, world_size: int, timeout_seconds: int) -> None:
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, init_method=meeting.as_uri(), rank=rank, world_size=world_size, timeout=timeout)
