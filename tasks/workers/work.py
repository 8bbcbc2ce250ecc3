"""The steps of a job in the workers of a group: training and embedding. This module knows process groups and the store, not Ray.

Every worker of the group makes the same calls. Checkpoints are verified before use: `fit` resumes from the run's own intact checkpoint or
starts from the beginning, and embedding needs one that is intact, of this run and of all its epochs.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dml_core.data.store.info import IMAGES_FILE, read_info
from dml_core.data.store.packed import EncodedImages, PackedDataset
from dml_core.data.store.splits import open_role, save_split
from dml_core.data.views.batches import Batch
from dml_core.errors import StoreError
from dml_core.files import remove_leftovers
from dml_core.models.embedder import Embedder, network_weights
from dml_core.training.checkpoints.file import CHECKPOINT_FILE, load_checkpoint, weights_of
from dml_core.training.checkpoints.writing import Saving
from dml_core.training.history import Progress, Report
from dml_core.training.loop import fit
from dml_core.training.parallel.workers import failing_together, from_rank_zero, rank, state_from_rank_zero, sum_over_workers, wait_for_all
from dml_core.training.pulse import beat, patient
from dml_core.training.validation import ScoredImages, scorers
from tasks.locks import FileLock, running
from tasks.project_copies import datasets_of, ended_copies
from tasks.remote_images.reading import RemoteImages
from tasks.runs.embeddings import save_kept_epoch
from tasks.runs.specs import RunSpec
from tasks.storage import Store
from tasks.workers import stopping
from tasks.workers.embedding import extract
from tasks.workers.jobs import Job

LOCK_SECONDS, TOGETHER_SECONDS = 0.5, 60.0  # between looks at what another run fetches, and exchanges of workers that wait for a transfer
StopWanted = Callable[[], bool]
Work = Callable[[Job, torch.device, Report, int, StopWanted | None], dict[str, object]]


def train(job: Job, device: torch.device, report: Report, local_rank: int = 0, stop_wanted: StopWanted | None = None) -> dict[str, object]:
    """Train the job's run into its folder of the store, from its last intact checkpoint if there is one.

    Args:
        report: receives every progress message, on rank 0.
        local_rank: this worker's number on its machine.
        stop_wanted: returns whether the run should stop; see `Saving`.

    Returns:
        Facts other than the step's time: `taken_up`, whether it resumed from a checkpoint, so that the time is not of the whole training;
        `num_parameters` of the network, batch statistics included.

    Raises:
        ConfigError: the best epoch is to be kept but cannot be determined, because no class has two images; or the published weights are
            missing or damaged.
        InterruptedRunError: the run was stopped; its checkpoint is in the store.
    """
    store = _store(job.store, job.cache)
    (packed, source), validation = _dataset(job, store, local_rank, device), job.spec.training.validation
    dataset = open_role(packed, "train", validation, source)
    with patient():
        folder = from_rank_zero(lambda: store.pull(job.train_key))
    taken_up = (folder / CHECKPOINT_FILE).exists()

    def reported(progress: Progress) -> None:
        nonlocal taken_up
        taken_up &= progress.note is None  # the note of a rejected checkpoint
        report(progress)

    if rank() == 0:
        remove_leftovers(folder)  # of a killed worker; this one holds the folder's lock
        if validation is not None:
            save_split(packed, validation, folder)
    training, num_loaders = job.spec.training, job.num_loader_workers
    scored = _BeatingImages(device, num_loaders)
    epoch_scorers = scorers(packed, training, scored, source)
    saving = Saving(
        job.scale.checkpoint_every_steps,
        job.scale.checkpoint_every_minutes,
        in_background=True,
        saved=lambda: store.push(job.train_key),
        stop_wanted=stop_wanted,
    )
    with stopping.training():
        system = fit(training, dataset, job.spec.seed, folder, device, num_loaders, reported, _identity(job), *epoch_scorers, saving)
    scored.close()
    _while_others_wait(lambda: store.push(job.train_key, sent=_sent), rank() == 0, device)
    return {"taken_up": taken_up, "num_parameters": sum(value.numel() for value in system.model.state_dict().values())}


def embed(job: Job, device: torch.device, report: Report, local_rank: int = 0, stop_wanted: StopWanted | None = None) -> dict[str, object]:
    """Extract the embeddings of the images that the job's run is scored on, into their folder of the store; arguments as for `train`.

    Raises:
        StoreError: the run's checkpoint is missing, damaged, or not of all its epochs.
    """
    store = _store(job.store, job.cache)
    (folder, source), validation = _dataset(job, store, local_rank, device), job.spec.training.validation
    roles = scored_datasets(folder, job.spec, source)
    with patient():
        weights, num_epochs = _trained_weights(job, store, device)
        store.pull(job.embed_key)  # this machine's cache may hold files of an earlier attempt
    model = Embedder(job.spec.training.without_weights().model, len(open_role(folder, "train", validation).class_names)).to(device)
    model.load_state_dict(weights)
    wait_for_all()
    if rank() == 0 and job.spec.evaluation.epoch != "last":
        save_kept_epoch(store.folder(job.embed_key), num_epochs)
    extract(model, job.spec.training.transform, roles, store.folder(job.embed_key), device, job.num_loader_workers)
    # Rank 0 says when the job is done: then the shards of all machines are in the store.
    _while_others_wait(lambda: store.push(job.embed_key, sent=_sent), local_rank == 0, device)
    return {}


def scored_datasets(folder: Path, spec: RunSpec, source: EncodedImages | None = None) -> dict[str, PackedDataset]:
    """Return the images that a run is scored on, by role, from the folder of its packed dataset or another source of its images."""
    role = spec.evaluation.role
    roles = [role] if role != "test" else [role for role in read_info(folder).roles if role != "train"] or ["test"]
    return {role: open_role(folder, role, spec.training.validation, source) for role in roles}


@cache
def _store(address: str, cache_folder: str) -> Store:
    """Return the process's store, shared by all jobs: it remembers which files of the packed dataset it has verified."""
    return Store(address, Path(cache_folder))


def _identity(job: Job) -> str:
    """Return the identity of the job's training, which is the name of its folder in the store."""
    return job.train_key.rpartition("/")[2]


def _trained_weights(job: Job, store: Store, device: torch.device) -> tuple[dict[str, Tensor], int]:
    """Return the network's weights and their number of epochs; rank 0 reads them and sends them one by one to the others."""
    weights: dict[str, Tensor] | None = None

    def read() -> int:
        nonlocal weights
        folder = store.pull(job.train_key)
        checkpoint = load_checkpoint(folder, _identity(job))
        if checkpoint is None or checkpoint["num_epochs_done"] != job.spec.training.num_epochs:
            which = "the checkpoint of the trained network is missing, or another flow with this store trains it again"
            raise StoreError(f"{folder}: {which}; rerun the command")
        of_system, num_epochs = weights_of(checkpoint, job.spec.evaluation.epoch)
        weights = network_weights(of_system)
        return num_epochs

    num_epochs = from_rank_zero(read)
    return state_from_rank_zero(weights, device, lambda _, whole: whole), num_epochs


class _BeatingImages(ScoredImages):
    """Images of a run's scorers whose batches beat: scoring an epoch may take longer than workers may be silent."""

    def batches(self, *which: Any) -> Iterator[Batch]:
        for batch in super().batches(*which):
            beat(patience=True)
            yield batch


def _dataset(job: Job, store: Store, local_rank: int, device: torch.device) -> tuple[Path, EncodedImages | None]:
    """Return the folder of the packed data on this machine, and the source of its images if they stay in the bucket.

    The folder is the driver's own one, or fetched from a remote store once per machine.
    """
    if not store.is_remote:
        return Path(job.dataset_folder), None
    store, cache_gb = datasets_of(store), job.scale.image_cache_gb
    folder = store.folder(job.dataset_key)

    def fetch() -> None:
        lock = FileLock(store.locks / f".{job.dataset_key.replace('/', '-')}")
        while not lock.acquire(wait=False):  # one of a machine's runs fetches it for all
            beat(patience=True)
            time.sleep(LOCK_SECONDS)
        try:
            remove_leftovers(folder)  # of a killed worker
            store.pull(job.dataset_key, without=() if cache_gb is None else (IMAGES_FILE,))
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)  # the time of its last use, for `dml gc`
        finally:
            lock.release()

    _while_others_wait(fetch, local_rank == 0, device)
    images = None if cache_gb is None else RemoteImages(store.address, store.cache, job.dataset_key, cache_gb)
    return folder, images


def _sent(_: int) -> None:
    beat(patience=True)


def _while_others_wait(transfer: Callable[[], None], is_mine: bool, device: torch.device) -> None:
    """Make a transfer in the workers whose it is. It takes as long as it does: a collective, in which others would wait, half an hour."""
    with patient(), ThreadPoolExecutor(1) as pool:
        transfers = [pool.submit(transfer)] if is_mine else []
        while sum_over_workers(torch.tensor(len(wait(transfers, TOGETHER_SECONDS).not_done), device=device)):
            pass
        with failing_together():
            for own in transfers:
                own.result()


def _using_cache(work: Work) -> Work:
    """Mark what this machine has of a bucket as in use while a job is done, and remove what ended verifications left here."""

    def marked(job: Job, device: torch.device, report: Report, local_rank: int = 0, stop: StopWanted | None = None) -> dict[str, object]:
        store = _store(job.store, job.cache)
        locks = [running(one.locks) for one in {store, datasets_of(store)}] if local_rank == 0 and store.is_remote else []
        try:
            for copy in ended_copies(datasets_of(store).cache.parent) if locks else ():
                shutil.rmtree(copy, ignore_errors=True)
            return work(job, device, report, local_rank, stop)
        finally:
            for lock in locks:
                lock.release(remove=True)

    return marked


WORK: dict[str, Work] = {"train": _using_cache(train), "embed": _using_cache(embed)}
