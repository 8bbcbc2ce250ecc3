"""Disk space and memory that planned runs take, with advice if this machine has less. Imports torch if a run trains."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dml_core.data.readers.shared.contract import OfficialDataset
from dml_core.data.registry import dataset_class
from dml_core.data.store.info import read_info
from dml_core.errors import DataError
from tasks.plans.disk import DiskNeed, dataset_disk, total_bytes
from tasks.plans.local_state import NOT_PREPARED, LocalState
from tasks.plans.plan import PlannedRun, TablePlan
from tasks.runs.rates import input_size, num_images
from tasks.runs.records import DatasetRecord
from tasks.tables.file import load_table
from tasks.tables.runs import named_dataset

if TYPE_CHECKING:
    from tasks.plans.memory import Memory

ENOUGH_CLASSES = 100  # assumed if a dataset's number of classes is unknown
GB = 1e9


@dataclass(frozen=True)
class Resources:
    """Disk space and memory that runs take.

    Attributes:
        disk: space that will be written, part by part.
        disk_free: free bytes on the project's disk.
        memory: that of the run that takes most; None if no run trains or none can be computed.
        memory_of: that run, in words.
        memory_here: bytes that it could use on this machine's device; None if unknown.
        device: "cpu" or "cuda".
    """

    disk: tuple[DiskNeed, ...]
    disk_free: int
    memory: "Memory | None"
    memory_of: str
    memory_here: int | None
    device: str

    def lines(self) -> list[str]:
        """Return a description, with advice if disk space or memory is too small."""
        return [*self._disk_lines(), *self._memory_lines()]

    def _disk_lines(self) -> list[str]:
        known = [need for need in self.disk if need.num_bytes]
        unknown = [need.what for need in self.disk if need.num_bytes is None]
        lines = []
        if known:
            parts = ", ".join(f"{need.what} {shown_bytes(need.num_bytes or 0)}" for need in known)
            lines.append(f"disk: about {shown_bytes(total_bytes(known))} ({parts}); {shown_bytes(self.disk_free)} are free")
        if unknown:
            lines.append(f"disk: unknown for {', '.join(unknown)}: the publisher states no size")
        if total_bytes(known) > self.disk_free:
            lines.append("disk: not enough space: choose another disk (raw in params.yaml, DML_STATE), or remove unpacked archives")
        return lines

    def _memory_lines(self) -> list[str]:
        if self.memory is None:
            return []
        memory, where = self.memory, "GPU memory" if self.device == "cuda" else "memory"
        stepping = memory.gradients + memory.optimiser
        parts = ("activations", memory.activations), ("weights", memory.weights), ("gradients and optimiser", stepping)
        told = ", ".join(f"{what} {shown_bytes(size)}" for what, size in parts)
        lines = [f"{where}: about {shown_bytes(memory.total)} in addition to the libraries' own ({self.memory_of}: {told})"]
        if self.memory_here is not None and memory.total > self.memory_here:
            lines.append(
                f"{where}: only {shown_bytes(self.memory_here)} available for each run: split each batch over more workers "
                "(scale.num_workers), or embed it in parts (embed_at_once: docs/papers-on-a-gpu.md)"
            )
        return lines


def resources_of(local: LocalState, plans: Sequence[TablePlan]) -> Resources:
    """Return the resources of the runs in plans that still have to be trained, and of their datasets."""
    to_train = [(plan.name, run) for plan in plans for run in plan.runs if run.trains]
    disk = list(dict.fromkeys(need for name, run in to_train if (need := _dataset_need(local, name, run)) is not None))
    memories = _memories(local, to_train)
    if memories:
        num_bytes = sum(memory.trained + _embedding_bytes(local, table, run) for memory, table, run in memories)
        disk.append(DiskNeed(f"{len(memories)} trained network{'s' * (len(memories) > 1)} with embeddings", num_bytes))
    largest = max(memories, key=lambda found: found[0].total, default=None)
    device = local.placement.device
    return Resources(
        tuple(disk),
        shutil.disk_usage(local.project.root).free,
        None if largest is None else largest[0],
        "" if largest is None else _in_words(largest[0], largest[2]),
        None if largest is None else _memory_here(device, local.placement.num_groups * local.placement.num_workers),
        device,
    )


def shown_bytes(num_bytes: int) -> str:
    """Format a size: 1.2 GB, 340 MB."""
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= GB else f"{num_bytes / 1e6:.0f} MB"


def _dataset_need(local: LocalState, table: str, run: PlannedRun) -> DiskNeed | None:
    file = load_table(table)
    if local.is_prepared(run.dataset, file):
        return None
    own = named_dataset(local.params, run.dataset, file.dataset_options(run.dataset))
    return dataset_disk(run.dataset, None if own is None else local.project.root / local.params.datasets[own].raw)


def _memories(local: LocalState, to_train: Sequence[tuple[str, PlannedRun]]) -> list[tuple["Memory", str, PlannedRun]]:
    """Return each run's memory if it can be computed; runs that differ only in their seed are computed once."""
    known: dict[tuple[str, str], Memory | None] = {}
    found = []
    for table, run in to_train:
        of = (run.dataset, run.spec.training.model_dump_json())
        if of not in known:
            known[of] = _memory(local, table, run)
        memory = known[of]
        if memory is not None:
            found.append((memory, table, run))
    return found


def _memory(local: LocalState, table: str, run: PlannedRun) -> "Memory | None":
    from tasks.plans.memory import training_memory

    record = local.dataset(run.dataset, load_table(table))
    if not record.counts or not run.spec.training.num_epochs:
        return None
    num_classes = _num_classes(run.dataset, record)
    placement = local.placement
    spec = run.spec
    return training_memory(spec.training, input_size(spec), record.counts["train"], num_classes, placement.device, placement.num_workers)


def _embedding_bytes(local: LocalState, table: str, run: PlannedRun) -> int:
    """Return the bytes of the test images' embeddings in the store and of their copy in MLflow."""
    from tasks.plans.memory import embedding_bytes

    record = local.dataset(run.dataset, load_table(table))
    return 2 * embedding_bytes(run.spec.training, num_images("embed", record.counts), _num_classes(run.dataset, record))


def _num_classes(dataset: str, record: DatasetRecord) -> int:
    """Return the number of classes of a dataset's training part."""
    if not record.digest.startswith(NOT_PREPARED):
        try:
            return read_info(Path(record.folder)).roles["train"].num_classes
        except DataError:
            return ENOUGH_CLASSES
    kind = dataset_class(dataset)
    return kind.published["train"].num_classes if issubclass(kind, OfficialDataset) else ENOUGH_CLASSES


def _in_words(memory: "Memory", run: PlannedRun) -> str:
    size = input_size(run.spec)
    return f"{run.spec.training.model.backbone.name}, {memory.num_images} images of {size} pixels at a time"


def _memory_here(device: str, num_processes: int) -> int | None:
    """Return the bytes available to a training: one GPU's, or this machine's memory divided by the number of training processes."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, num_processes)
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None
