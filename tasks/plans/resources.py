"""Disk space and memory that planned runs take, with advice if this machine has less.

Imports torch if the memory of a run that trains is not known from an earlier plan.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dml_core.data.registry import published_dataset
from dml_core.data.store.info import read_info
from tasks.environment import memory_bytes, ray_cluster
from tasks.plans.known_memory import KnownMemory, Memory
from tasks.plans.plan import LocalState, PlannedRun, TablePlan
from tasks.plans.times import input_size, num_images
from tasks.runs.records import DatasetRecord
from tasks.tables.file import load_table
from tasks.tables.runs import named_dataset
from tasks.wording import counted

GB = 1e9


@dataclass(frozen=True)
class DiskNeed:
    """Additional disk space that `what` will need; None if the publisher states no size, and the files are not on this machine."""

    what: str
    num_bytes: int | None


@dataclass(frozen=True)
class Resources:
    """Disk space and memory that runs take.

    Attributes:
        disk: space that will be written, part by part.
        disk_free: free bytes on the project's disk.
        memory: that of the run that takes most; None if no run trains or none can be computed.
        memory_of: that run, in words.
        memory_here: bytes that it could use on this machine's device; None if unknown, as on a cluster.
        device: "cpu" or "cuda".
    """

    disk: tuple[DiskNeed, ...]
    disk_free: int
    memory: Memory | None
    memory_of: str
    memory_here: int | None
    device: str

    @property
    def disk_bytes(self) -> int:
        """Sum of the known sizes."""
        return sum(need.num_bytes or 0 for need in self.disk)

    def lines(self) -> list[str]:
        """Return a description, with advice if disk space or memory is too small."""
        return [*self._disk_lines(), *self._memory_lines()]

    def _disk_lines(self) -> list[str]:
        parts = ", ".join(f"{need.what} {_shown_bytes(need.num_bytes)}" for need in self.disk if need.num_bytes)
        unknown = ", ".join(need.what for need in self.disk if need.num_bytes is None)
        lines = []
        if parts:
            lines.append(f"disk: about {_shown_bytes(self.disk_bytes)} ({parts}); {_shown_bytes(self.disk_free)} are free")
        if unknown:
            lines.append(f"disk: unknown for {unknown}: the publisher states no size")
        if self.disk_bytes > self.disk_free:
            lines.append("disk: not enough space: choose another disk (raw in params.yaml, DML_STATE), or remove unpacked archives")
        return lines

    def _memory_lines(self) -> list[str]:
        if self.memory is None:
            return []
        memory, where = self.memory, "GPU memory" if self.device == "cuda" else "memory"
        stepping = memory.gradients + memory.optimiser
        sizes = ("activations", memory.activations), ("weights", memory.weights), ("gradients and optimiser", stepping)
        parts = ", ".join(f"{what} {_shown_bytes(size)}" for what, size in sizes)
        lines = [f"{where}: about {_shown_bytes(memory.total)} in addition to the libraries' own ({self.memory_of}: {parts})"]
        if self.memory_here is not None and memory.total > self.memory_here:
            lines.append(
                f"{where}: only {_shown_bytes(self.memory_here)} available for each run: split each batch over more workers "
                "(scale: {num_workers: 2, concurrent_runs: 1}), or embed it in parts (embed_at_once: docs/how-to/papers-on-a-gpu.md)"
            )
        return lines


def resources_of(local: LocalState, plans: Sequence[TablePlan]) -> Resources:
    """Return the resources of the runs in plans that still have to be trained or embedded, and of their datasets."""
    disk: dict[DiskNeed, None] = {}  # each once, in this order
    memories: list[tuple[Memory, PlannedRun]] = []
    num_bytes = 0
    known = KnownMemory(local.project.state)
    of_training: dict[tuple[str, str], Memory | None] = {}  # runs that differ only in their seed share one
    for table_name, run in [(plan.name, run) for plan in plans for run in plan.runs if "run" in (run.steps["train"], run.steps["embed"])]:
        table = load_table(table_name)
        record = local.dataset(run.dataset, table)
        if not record.folder:
            name = named_dataset(local.params, run.dataset, table.dataset_options(run.dataset))
            need = dataset_disk(run.dataset, None if name is None else local.project.root / local.params.datasets[name].raw)
            if need is not None:
                disk[need] = None
        key = run.dataset, run.spec.training.model_dump_json()
        if key not in of_training:
            of_training[key] = _memory(local, run, record, known)
        memory = of_training[key]
        if memory is not None:
            memories += [(memory, run)] if run.trains else []
            # Of another epoch only the checkpoint in the store is shared. The embeddings, float32, are in the store and in MLflow.
            num_bytes += memory.trained - (0 if run.trains else memory.weights + memory.optimiser)
            num_bytes += 2 * 4 * num_images("embed", run.spec, record.counts) * memory.embedding_dim
    known.save()
    disk_free, device = shutil.disk_usage(local.project.root).free, local.placement.device
    if num_bytes:
        networks = f"{counted(len(memories), 'trained network')} with embeddings"
        disk[DiskNeed(networks if memories else "embeddings, and their runs in MLflow", num_bytes)] = None
    if not memories:
        return Resources(tuple(disk), disk_free, None, "", None, device)
    memory, run = max(memories, key=lambda of_run: of_run[0].total)
    backbone, size = run.spec.training.model.backbone.name, input_size(run.spec)
    memory_of = f"{backbone}, {memory.num_images} images of {size} pixels at a time"
    num_processes = local.placement.num_groups * local.placement.num_workers
    memory_here = _memory_here(device, min(num_processes, local.placement.runs_per_gpu) if device == "cuda" else num_processes)
    return Resources(tuple(disk), disk_free, memory, memory_of, memory_here, device)


def dataset_disk(reader: str, raw: Path | None) -> DiskNeed | None:
    """Return the disk space that an unprepared dataset needs: its archive, unpacked, packed and in DVC's cache.

    Packing keeps the files' bytes, and archives do not shrink JPEGs. DVC keeps a copy of the packed data in its cache; a file system that
    can share blocks (not ext4) stores both once.

    Args:
        reader: the dataset's reader.
        raw: its raw folder; None if params.yaml does not name one.

    Returns:
        None unless the reader is that of a published dataset with archives.
    """
    kind = published_dataset(reader)
    if kind is None or not kind.archives:
        return None
    sizes = {path: path.stat().st_size for path in raw.rglob("*") if path.is_file()} if raw is not None and raw.is_dir() else {}
    names = {archive.file_name.rpartition("/")[2] for archive in kind.archives if archive.unpacked != archive.file_name}
    of_archives = sum(size for path, size in sizes.items() if path.name in names)
    unpacked = sum(sizes.values()) - of_archives
    if unpacked > of_archives // 2:  # annotations alone are smaller
        return DiskNeed(f"{reader} packed, and DVC's copy", 2 * unpacked)
    if of_archives:
        return DiskNeed(f"{reader} unpacked, packed, and DVC's copy", 3 * of_archives)
    known = [archive.num_bytes for archive in kind.archives if archive.num_bytes is not None]
    num_bytes = 4 * sum(known) if len(known) == len(kind.archives) else None
    return DiskNeed(f"{reader} as archive, unpacked, packed, and DVC's copy", num_bytes)


def _memory(local: LocalState, run: PlannedRun, record: DatasetRecord, known: KnownMemory) -> Memory | None:
    training, placement, size = run.spec.training, local.placement, input_size(run.spec)
    if "train" not in record.counts or not training.num_epochs or not size:
        return None
    sizes = size, record.counts["train"], _num_classes(run.dataset, record)

    def compute() -> Memory | None:
        from tasks.plans.memory import training_memory

        return training_memory(training, *sizes, placement.device, placement.num_workers)

    return known.of([training.model_dump(mode="json"), *sizes, placement.device, placement.num_workers], compute)


def _num_classes(dataset: str, record: DatasetRecord) -> int:
    """Return the number of classes of a dataset's training part."""
    if record.folder:
        return read_info(Path(record.folder)).roles["train"].num_classes
    kind = published_dataset(dataset)
    assert kind is not None  # only published counts are known of a dataset that is not prepared
    return kind.published["train"].num_classes


def _memory_here(device: str, num_processes: int) -> int | None:
    """Return the bytes available to a training: a GPU's or this machine's or container's memory, divided by the processes that share it."""
    if ray_cluster() is not None:
        return None
    if device == "cpu":
        return memory_bytes() // max(1, num_processes)
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) // num_processes if torch.cuda.is_available() else None


def _shown_bytes(num_bytes: int) -> str:
    """Format a size: 1.2 GB, 340 MB."""
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= GB else f"{num_bytes / 1e6:.0f} MB"
