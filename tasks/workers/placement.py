"""How the runs of a flow are laid on the machines that Ray has: on GPUs or CPUs, how many groups of workers, how many workers in each.

Nothing here changes a result, so nothing here is a reason to refuse: `num_workers` and `concurrent_runs` are how many a flow may use at
most, and fewer are taken where the machines have fewer. Only a device is asked for by name: `device: cuda` without a GPU is an error,
`device: auto` then takes CPUs. What was chosen is said at the start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dml_core.errors import TrainingError
from tasks.runs.specs import ScaleSpec

MOST_LOADERS = 16  # of a worker by "auto": more decode faster than a network trains, and each keeps pixels of its own


@dataclass(frozen=True)
class Placement:
    """Where the runs of a flow train.

    Attributes:
        device: "cuda" (one GPU a worker) or "cpu".
        num_workers: training processes of one run; of one that may lose and gain some, as many as there is room for now.
        num_groups: runs that train at the same time.
        num_asked: workers of one run and runs at the same time that the parameters allow.
        num_devices: GPUs, or CPUs, that Ray has.
        model: what the GPUs are called; empty on CPUs, and where Ray does not know.
        num_loaders: image-loading processes of each worker.
        num_cores: CPUs that Ray keeps for each worker, its loaders included.
    """

    device: str
    num_workers: int
    num_groups: int
    num_asked: tuple[int, int]
    num_devices: int
    model: str = ""
    num_loaders: int = 0
    num_cores: int = 1

    @property
    def resources(self) -> dict[str, int]:
        """What Ray is asked for, for each worker."""
        return {"CPU": self.num_cores} | ({"GPU": 1} if self.device == "cuda" else {})

    @property
    def text(self) -> str:
        """One line for a person: `training on 1 GPU (H100): 1 worker a run (2 allowed)`."""
        devices = _count(self.num_workers * self.num_groups, self.device) + (f" ({self.model})" if self.model else "")
        fewer = f" ({self.num_asked[0]} allowed)" if self.num_workers < self.num_asked[0] else ""
        loaders = f", {_count(self.num_loaders, 'loader')} each" if self.num_loaders else ""
        line = f"training on {devices}: {_count(self.num_workers, 'worker')} a run{fewer}{loaders}"
        if self.num_asked[1] == 1:
            return line
        fewer = f" ({self.num_asked[1]} allowed)" if self.num_groups < self.num_asked[1] else ""
        return f"{line}, {_count(self.num_groups, 'run')} at a time{fewer}"


def choose(scale: ScaleSpec, resources: Mapping[str, float], nodes: Sequence[Mapping[str, float]] | None = None) -> Placement:
    """Fit a flow's runs to what Ray has. Runs beside each other come before workers beside each other: they need not wait for one another.

    Args:
        scale: what the parameters allow.
        resources: Ray's resources of the whole cluster, name -> amount.
        nodes: those of each machine; one machine where they are not given.

    Raises:
        TrainingError: `device: cuda` and no GPU, or no CPU at all.
    """
    num_gpus, num_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    if scale.device == "cuda" and num_gpus == 0:
        raise TrainingError("scale: device is cuda and Ray has no GPU; set device: auto to train on CPUs, or look at nvidia-smi")
    device = "cuda" if scale.device != "cpu" and num_gpus > 0 else "cpu"
    num_devices = num_gpus if device == "cuda" else num_cpus
    if num_devices == 0:
        raise TrainingError("scale: Ray has no CPU for a worker; start a node with `ray start --num-cpus`")
    num_groups = max(1, min(scale.concurrent_runs, num_devices // scale.fewest_workers))
    num_workers = max(min(scale.most_workers, num_devices // num_groups), scale.fewest_workers)
    models = sorted(name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")) if device == "cuda" else []
    num_asked = (scale.most_workers, scale.concurrent_runs)
    num_placed = num_devices if scale.num_loader_workers == "auto" else num_workers * num_groups  # another flow may want the other GPUs
    num_loaders, num_cores = _loaders(scale, device, num_placed, [resources] if nodes is None else nodes)
    return Placement(device, num_workers, num_groups, num_asked, num_devices, ", ".join(models), num_loaders, num_cores)


def _loaders(scale: ScaleSpec, device: str, num_workers: int, nodes: Sequence[Mapping[str, float]]) -> tuple[int, int]:
    """Loader processes of a worker, and the CPUs that are kept for it: as many as it has use for and every worker can have."""

    def places(num_cores: int) -> int:
        """Workers of so many CPUs that the machines have room for."""
        by_cores = [int(node.get("CPU", 0)) // num_cores for node in nodes]
        by_device = by_cores if device == "cpu" else [int(node.get("GPU", 0)) for node in nodes]
        return sum(map(min, by_cores, by_device))

    asked = scale.num_loader_workers
    wanted = asked if asked != "auto" else MOST_LOADERS if device == "cuda" else 0
    num_cores = next((number for number in range(1 + wanted, 0, -1) if places(number) >= num_workers), 0)
    return (max(0, num_cores - 1) if asked == "auto" else asked), num_cores


def _count(number: int, thing: str) -> str:
    name = {"cuda": "GPU", "cpu": "CPU"}.get(thing, thing)
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
