"""Assign the runs of a flow to Ray's machines: GPUs or CPUs, the number of worker groups, and the workers in each.

Nothing here changes a result in more than its last bits, except `precision: auto`, so a lack of resources is no error: `num_workers` and
`concurrent_runs` are upper limits, and smaller machines run fewer. Only an explicit device is required: `device: cuda` without a GPU is an
error, while `device: auto` then uses CPUs. The choice is printed at the start.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.runs.specs import MOST_CONCURRENT_RUNS, ScaleSpec
from tasks.wording import counted
from tasks.workers.jobs import InfrastructureError

DEVICES = Path("/dev")
MOST_LOADERS = 16  # of a worker by "auto": more decode faster than a network trains, and each keeps its own pixels


@dataclass(frozen=True)
class Placement:
    """Placement of a flow's training runs.

    Attributes:
        device: "cuda" or "cpu".
        num_workers: training processes of one run; for an elastic run, as many as there is room for now.
        num_groups: runs that train at the same time.
        model: name of the GPUs; empty on CPUs, and if Ray does not know it.
        num_loaders: image-loading processes of each worker.
        num_cores: CPUs that Ray reserves for each worker, its loaders included.
        runs_per_gpu: workers that share a GPU.
        num_unused: GPUs that further runs of the flow would use if `concurrent_runs` were higher.
    """

    device: str
    num_workers: int
    num_groups: int
    model: str = ""
    num_loaders: int = 0
    num_cores: int = 1
    runs_per_gpu: int = 1
    num_unused: int = 0

    @property
    def resources(self) -> dict[str, float]:
        """Resources requested from Ray for each worker; a part of a GPU in the four decimals that Ray counts, so that all parts fit."""
        return {"CPU": self.num_cores} | ({"GPU": 10_000 // self.runs_per_gpu / 10_000} if self.device == "cuda" else {})

    @property
    def num_sharing(self) -> int:
        """Runs that share a GPU, or on CPUs all cores: a rate that was measured with another number is not that of these runs."""
        return self.runs_per_gpu if self.device == "cuda" else self.num_groups

    @property
    def num_devices(self) -> int:
        """GPUs or CPUs that the flow uses."""
        return -(-self.num_workers * self.num_groups // self.runs_per_gpu)

    def num_places(self, nodes: Sequence[Mapping[str, float]]) -> int:
        """Return the number of workers that fit on machines with these resources."""
        units = 10_000 // self.runs_per_gpu  # of a GPU's 10,000, a part of which may be free
        in_units = [divmod(round(10_000 * node.get("GPU" if self.device == "cuda" else "CPU", 0)), 10_000) for node in nodes]
        by_device = [self.runs_per_gpu * whole + part // units for whole, part in in_units]
        by_cores = [int(node.get("CPU", 0)) // self.num_cores if self.num_cores else sys.maxsize for node in nodes]
        return sum(map(min, by_device, by_cores))

    def describe(self, scale: ScaleSpec) -> str:
        """Return the placement as one line, with the limits by which it was chosen: `training on 1 GPU: 1 worker a run (2 allowed)`."""
        devices = counted(self.num_devices, {"cuda": "GPU", "cpu": "CPU"}[self.device]) + (f" ({self.model})" if self.model else "")
        fewer = f" ({scale.most_workers} allowed)" if self.num_workers < scale.most_workers else ""
        loaders = f", {counted(self.num_loaders, 'loader')} each" if self.num_loaders else ""
        line = f"training on {devices}: {counted(self.num_workers, 'worker')} a run{fewer}{loaders}"
        unused = f"; this flow leaves {counted(self.num_unused, 'GPU')} unused: raise scale.concurrent_runs" if self.num_unused else ""
        if scale.concurrent_runs == 1:
            return f"{line}{unused}"
        fewer = f" ({scale.concurrent_runs} allowed)" if self.num_groups < scale.concurrent_runs else ""
        return f"{line}, {counted(self.num_groups, 'run')} at a time{fewer}{unused}"


def choose(scale: ScaleSpec, nodes: Sequence[Mapping[str, float]], num_runs: int | None = None) -> Placement:
    """Fit a flow's runs to Ray's resources. Concurrent runs take precedence over more workers, because runs do not wait for each other.

    Args:
        nodes: Ray's resources of each machine, name -> amount.
        num_runs: number of runs to train; if it is smaller than the number that could train at a time, each run gets more workers. None if
            unknown.

    Raises:
        InfrastructureError: `device: cuda` and no GPU, or no CPU at all.
    """
    nodes = [node for node in nodes if node.get("CPU", 0) >= 1] or nodes  # a head without CPUs may have GPUs
    num_gpus, num_cpus = (int(sum(node.get(kind, 0) for node in nodes)) for kind in ("GPU", "CPU"))
    if scale.device == "cuda" and num_gpus == 0:
        raise InfrastructureError("scale: device is cuda and Ray has no GPU; set device: auto to train on CPUs, or check nvidia-smi")
    device = "cuda" if scale.device != "cpu" and num_gpus > 0 else "cpu"
    runs_per_gpu = scale.runs_per_gpu if device == "cuda" else 1
    num_devices = num_gpus * runs_per_gpu if device == "cuda" else num_cpus
    if num_devices == 0:
        raise InfrastructureError("scale: Ray has no CPU for a worker; start a node with `ray start --num-cpus`")
    num_groups = max(1, min(scale.concurrent_runs, num_devices // scale.fewest_workers))
    if num_runs is not None and num_runs < num_groups:
        num_groups = max(1, num_runs, min(num_groups, num_devices // scale.most_workers))  # embeddings use the rest
    num_workers = max(min(scale.most_workers, num_devices // num_groups), scale.fewest_workers)
    models = {name.partition(":")[2] for node in nodes for name in node if name.startswith("accelerator_type:") and device == "cuda"}
    num_placed = num_devices if scale.num_loader_workers == "auto" else num_workers * num_groups  # another flow may want the other GPUs
    placement = Placement(device, num_workers, num_groups, ", ".join(sorted(models)), runs_per_gpu=runs_per_gpu)
    most_groups = min(MOST_CONCURRENT_RUNS, num_devices // scale.fewest_workers)
    if device == "cuda" and num_runs is not None and num_groups < min(num_runs, most_groups):
        placement = replace(placement, num_unused=num_gpus - placement.num_devices)
    requested = scale.num_loader_workers
    wanted = requested if requested != "auto" else MOST_LOADERS if device == "cuda" else 0
    fitting = (number for number in range(1 + wanted, 0, -1) if replace(placement, num_cores=number).num_places(nodes) >= num_placed)
    num_cores = next(fitting, 0)  # as many as a worker can use and every worker can have
    return replace(placement, num_cores=num_cores, num_loaders=max(0, num_cores - 1) if requested == "auto" else requested)


def num_gpus() -> int:
    """Return the number of this machine's GPUs that torch can use; Ray counts those whose driver is too old for torch, too."""
    if not any(file for name in ("nvidia[0-9]*", "dxg") for file in DEVICES.glob(name)):
        return 0
    import torch  # takes seconds

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
