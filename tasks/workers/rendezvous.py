"""The rendezvous of a group's workers and their setup, and trainers without some of Ray Train's processes.

Only this module is loaded in Ray Train's controller, which starts sooner because nothing here loads torch.

Ray Train's rendezvous is a torch `TCPStore`, which listens on every interface of the machine and needs no token. On one machine, the nodes
of a local stack included, a file replaces it. Workers of several machines share no files and use Ray Train's rendezvous.
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from tasks.workers.stopping import heed_sigterm


@dataclass
class Rendezvous(BackendConfig):  # type: ignore[misc]
    """Ray Train's configuration of a torch process group that a flow can end.

    Attributes:
        board: receives the group's controller and its placement group.
        meeting_file: where workers of one machine meet, as long as the group lives; None for workers of several machines.
        timeout_seconds: of an operation of the process group.
    """

    board: Any
    meeting_file: Path | None
    timeout_seconds: int

    @property
    def backend_cls(self) -> type:
        """The backend class that Ray Train uses when workers have started."""
        return _Backend


class _Backend(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True  # as Ray Train's own for torch

    def on_start(self, worker_group: Any, backend_config: Rendezvous) -> None:
        """Join all workers."""
        placement_group = worker_group.execute_single(0, ray.util.get_current_placement_group)
        ray.get(backend_config.board.hold.remote(ray.get_runtime_context().current_actor, placement_group))
        worker_group.execute(heed_sigterm)
        meeting_file = backend_config.meeting_file
        if meeting_file is None:
            from ray.train.torch.config import TorchConfig, _TorchBackend

            _TorchBackend().on_start(worker_group, TorchConfig(timeout_s=backend_config.timeout_seconds))
            return
        backend = "nccl" if worker_group.get_resources_per_worker().get("GPU", 0) > 0 else "gloo"
        meeting_file.parent.mkdir(parents=True, exist_ok=True)
        size, timeout = len(worker_group), timedelta(seconds=backend_config.timeout_seconds)
        ray.get([worker_group.execute_single_async(rank, _join, backend, meeting_file, rank, size, timeout) for rank in range(size)])

    def on_shutdown(self, worker_group: Any, backend_config: Rendezvous) -> None:
        """Do nothing: the processes end with the group, and a shutdown would wait for one that hangs."""


def _join(backend: str, meeting_file: Path, rank: int, world_size: int, timeout: timedelta) -> None:
    import torch.distributed as dist

    # Pass the path: torch does not decode the %20 of a file:// address.
    store = dist.FileStore(str(meeting_file), world_size)  # type: ignore[attr-defined]  # torch exports it at run time
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


class Trainer(DataParallelTrainer):  # type: ignore[misc]
    """A trainer without the processes that serve datasets of Ray Data, and placement groups whose controller was killed.

    The latter are removed by `WorkerGroup`, and by Ray with their driver. Ray Train's process asks the dashboard whether the controller is
    alive: on a cluster without one it delayed a group's end by 12 s, and remained for ever after a kill.
    This overrides methods that Ray may rename: tests/tasks/workers/test_group.py and test_elastic.py name the processes of a group.
    """

    def _create_default_callbacks(self) -> list[Any]:
        unused = DatasetsCallback, PlacementGroupCleanerCallback
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, unused)]


class LocalTrainer(Trainer):
    """A trainer of one machine, also without the process for clusters that grow: these starts take longer than that of the workers."""

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        policy = _OneMachine(self.scaling_config, self.backend_config.board)
        return super()._initialize_and_run_controller(**settings | {"scaling_policy": policy})


class _OneMachine(FixedScalingPolicy):  # type: ignore[misc]
    def __init__(self, scaling_config: Any, board: Any) -> None:
        super().__init__(scaling_config)
        self._board = board

    def after_controller_start(self, train_run_context: Any) -> None:
        """Register with no autoscaler; let the driver end a group whose workers are still starting."""
        self._board.hold.remote(ray.get_runtime_context().current_actor)

    def _maybe_send_resource_request(self) -> None:
        pass
