"""How the runs of a flow are laid on the machines that Ray has: on GPUs or CPUs, how many groups of workers, how many workers in each.

Nothing here changes a result, so nothing here is a reason to refuse: `num_workers` and `concurrent_runs` are how many a flow may use at
most, and fewer are taken where the machines have fewer. Only a device is asked for by name: `device: cuda` without a GPU is an error,
`device: auto` then takes CPUs. What was chosen is said at the start.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dml_core.errors import TrainingError
from tasks.runs.specs import ScaleSpec


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
    """

    device: str
    num_workers: int
    num_groups: int
    num_asked: tuple[int, int]
    num_devices: int
    model: str = ""

    @property
    def text(self) -> str:
        """One line for a person: `training on 1 GPU (H100): 1 worker a run (2 allowed)`."""
        devices = _count(self.num_workers * self.num_groups, self.device) + (f" ({self.model})" if self.model else "")
        fewer = f" ({self.num_asked[0]} allowed)" if self.num_workers < self.num_asked[0] else ""
        line = f"training on {devices}: {_count(self.num_workers, 'worker')} a run{fewer}"
        if self.num_asked[1] == 1:
            return line
        fewer = f" ({self.num_asked[1]} allowed)" if self.num_groups < self.num_asked[1] else ""
        return f"{line}, {_count(self.num_groups, 'run')} at a time{fewer}"


def choose(scale: ScaleSpec, resources: Mapping[str, float]) -> Placement:
    """Fit a flow's runs to what Ray has. Runs beside each other come before workers beside each other: they need not wait for one another.

    Args:
        scale: what the parameters allow.
        resources: Ray's resources of the whole cluster, name -> amount.

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
    return Placement(device, num_workers, num_groups, (scale.most_workers, scale.concurrent_runs), num_devices, ", ".join(models))


def _count(number: int, thing: str) -> str:
    name = {"cuda": "GPU", "cpu": "CPU"}.get(thing, thing)
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
