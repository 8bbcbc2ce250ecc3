"""The training loop: one run on one or several workers, bit-identical after resuming on the CPU. Uses process groups, never Ray.

A global batch is drawn once for all workers; each worker loads, augments and embeds its contiguous shard. Every draw derives from (seed,
epoch, step, sample, number of its earlier occurrences), so neither the number of workers nor an interruption changes the training data. The
network's own draws (dropout, stochastic depth) derive from (seed, epoch, step, worker). An error on one worker ends all (`Failures`).
Sections: the run and its parts, the epoch, history and checkpoints, the epochs that are kept.
"""

import contextlib
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dml_core.data.store.info import read_info
from dml_core.data.store.packed import PackedDataset
from dml_core.data.views.batches import Loader, TrainView, count_copies
from dml_core.data.views.device_decoding import check_decoder
from dml_core.data.views.samplers import check_sampler, epoch_batches, first_batch_size
from dml_core.data.views.transform_config import check_training_crop
from dml_core.epochs import RECALL, KeptEpoch
from dml_core.errors import ConfigError, TrainingError
from dml_core.float32 import full_float32
from dml_core.losses.class_shards import ClassShard
from dml_core.losses.contract import check_labels
from dml_core.losses.registry import build_loss
from dml_core.models.backbones.registry import unnamed_weights
from dml_core.models.embedder import Embedder
from dml_core.training.checkpoints.file import copied, resumable_checkpoint, save_checkpoint
from dml_core.training.checkpoints.writing import AT_EPOCHS_ENDS, InterruptedRunError, Saving, Watch, Writer
from dml_core.training.config import TrainingConfig
from dml_core.training.history import Progress, Report, write_history
from dml_core.training.mining import nearest_of_other_classes
from dml_core.training.optimisation.averaging import WeightAverage
from dml_core.training.optimisation.optimisers import build_optimiser, set_learning_rates
from dml_core.training.optimisation.schedules import learning_rate_factor
from dml_core.training.parallel.batchnorm import check_batches, synchronise_batchnorm
from dml_core.training.parallel.cross_batch import CrossBatchMemory
from dml_core.training.parallel.grad_cache import ChunkedSystem, backward_in_chunks, check_independent
from dml_core.training.parallel.sharded_state import check_shardable, leave_to_their_worker, own_part, whole_optimiser_state, whole_state
from dml_core.training.parallel.workers import (
    Failures,
    TrainingSystem,
    equal_buffers,
    from_rank_zero,
    rank,
    shard_sizes,
    state_from_rank_zero,
    sum_over_workers,
    world_size,
)
from dml_core.training.preparing import load, prepare, training_outputs
from dml_core.training.pulse import beat, patient
from dml_core.training.seeding import derived_seed, seeded

Validate = Callable[[nn.Module], dict[str, float]]

PROGRESS_SECONDS = 0.5
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kept:
    """Weights of the best epoch so far of one kind, on the CPU, with the number of epochs done and the Recall@1."""

    num_epochs_done: int
    score: float
    weights: dict[str, Tensor]


@dataclass
class _Epoch:
    """State of an unfinished epoch, as in a checkpoint from its middle.

    Attributes:
        rows: loss and its parts of each completed step, averaged over workers.
        rates: learning-rate factor of each completed step.
        negatives: (N, k) hard negatives by the embeddings at the start of the epoch.
        values: this worker's loss and parts, on its device, of completed steps not yet in `rows`.
    """

    rows: list[dict[str, float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    negatives: Tensor | None = None
    values: list[dict[str, Tensor]] = field(default_factory=list)


@dataclass
class _Run:
    """The parts of one run, shared by the sections below.

    Attributes:
        averaged: average of the weights so far, if the run's result is one.
        history: one line per step of the completed epochs.
        kept: kept epochs other than the last; only on rank 0.
        failures: errors of only this worker since the workers last synchronised.
    """

    config: TrainingConfig
    dataset: PackedDataset
    seed: int
    folder: Path
    device: torch.device
    loader: Loader
    report: Report
    system: TrainingSystem
    optimiser: torch.optim.Optimizer
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    identity: str
    validate: Validate | None
    score_test: Validate | None
    score_curve: Validate | None
    saving: Saving
    failures: Failures
    history: list[str] = field(default_factory=list)
    kept: dict[KeptEpoch, _Kept] = field(default_factory=dict)
    parallel: nn.Module = field(init=False)
    averaged: WeightAverage | None = field(init=False, default=None)
    writer: Writer = field(init=False)
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.writer = Writer(self.saving.in_background)
        self.watch = Watch(self.saving, self.device, lambda: self.writer.is_behind, self.failures)
        if self.config.average is not None:
            self.averaged = WeightAverage(self.system, self.config.average)
        self.parallel = self.system if self.config.embed_at_once is None else ChunkedSystem(self.system)
        if world_size() > 1:
            leave_to_their_worker(self.parallel, self.system)
            # A timm network has layers after its features, and a loss of pytorch-metric-learning may use no parameter of it in a step.
            is_foreign = any(type(module).__module__.startswith(("timm.", "pytorch_metric_learning.")) for module in self.system.modules())
            # Without it torch reorders the gradients after the first step. Gloo adds three or more in an order that depends on their
            # place, so a resumed run would differ in its last bits. With it torch reports no parameter that lacks a gradient.
            keeps_places = self.device.type == "cpu" and world_size() > 2
            # Without `device_ids`, which would move labels that a loss needs on the CPU.
            self.parallel = DistributedDataParallel(
                self.parallel,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=is_foreign or keeps_places,
            )

    @property
    def result(self) -> TrainingSystem:
        """The system that the run would return if it ended now."""
        if self.averaged is None or self.averaged.is_empty:
            return self.system
        return self.averaged.module


# ---------------------------------------------------------------- the run and its parts


def fit(
    config: TrainingConfig,
    dataset: PackedDataset,
    seed: int,
    folder: Path,
    device: torch.device,
    num_loader_workers: int = 0,
    report: Report = lambda progress: None,
    identity: str | None = None,
    validate: Validate | None = None,
    score_test: Validate | None = None,
    score_curve: Validate | None = None,
    saving: Saving = AT_EPOCHS_ENDS,
) -> TrainingSystem:
    """Train one system, or resume from the checkpoint in `folder`; every worker of the process group makes the same call.

    Only rank 0 reads the checkpoint, and all resume from it. A damaged one, or another run's, is set aside. An error on one worker (a file,
    an image, a callback) is raised on all when they next synchronise, within a second or a step; nothing is saved in between.

    Args:
        config: the training configuration.
        dataset: its training role.
        seed: the run's seed.
        folder: where rank 0 keeps `checkpoint.pt` and `history.jsonl`.
        device: this worker's device.
        num_loader_workers: processes that load images for this worker during the run; 0 loads in this process.
        report: called on rank 0, about twice a second and at every epoch's end.
        identity: identity of the run; a checkpoint with another identity is not resumed. None derives it from the configuration, the seed,
            a file of weights, and the dataset's class names and labels.
        validate: called on every worker with the model after each epoch; its result is added to the epoch's metrics and its last step's row
            of the history. It must not change the model or the random streams.
        score_test: the same on the test classes, after epochs that `config.keep_epochs` checks. It selects only the oracle.
        score_curve: the same on training and test images, every `config.recall_every_epochs`. It selects nothing.
        saving: checkpoints in the middle of epochs, and requests to stop the run.

    Returns:
        The trained model and loss, the same on every worker.

    Raises:
        ConfigError: loss, sampler, model, dataset, device and number of workers do not fit each other, a scorer of an epoch to keep is
            missing, or a number is negative.
        Exception: an error of `report`, `saving` or image loading, on one or several workers.
        DataError: the dataset's labels are not class indices.
        TrainingError: the loss is not finite, or no epoch of a kind to keep could be scored.
        StoreError: the folder cannot be written, or its checkpoint cannot be opened.
        InterruptedRunError: `saving` stopped the run; the same call resumes it.
    """
    for kind, scorer, name in (("best_validation", validate, "validate"), ("oracle", score_test, "score_test")):
        if kind in config.keep_epochs and scorer is None:
            raise ConfigError(f"keep_epochs: the '{kind}' epoch is chosen by {name}: pass a function that scores the model")
    if not isinstance(seed, int | np.integer) or seed < 0 or num_loader_workers < 0:
        raise ConfigError(f"seed {seed!r} and num_loader_workers {num_loader_workers}: expected whole numbers from 0")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device '{device}': there is no usable GPU here; take 'cpu'")
    check_decoder(config.transform, device)
    if config.num_epochs > 0:
        check_training_crop(config.transform)
    identity = _derived_identity(config, dataset, seed) if identity is None else identity
    arithmetic = full_float32() if config.precision == "float32" else contextlib.nullcontext()
    loading = contextlib.closing(Loader(dataset, num_loader_workers, device))
    with arithmetic, torch.autocast(device.type, enabled=False), loading as loader:  # a caller's autocast is not the run's
        failures = Failures()
        with patient():  # weights may be downloaded, and a checkpoint may be large
            system = build_system(config, len(dataset.class_names), seed, device)
            _check_fit(config, dataset, system)
            checkpoint, is_resumed = _read_checkpoint(folder, identity, config, report, failures)
        if not is_resumed:
            prepare(system, dataset, config, seed, loader)
        with patient():
            if config.shard_classes and world_size() > 1:
                system.loss.shard_classes(ClassShard(tuple(shard_sizes(system.loss.num_classes, world_size())), rank()))
            if config.compile:
                system.model.compile()
                system.loss.compile()
            optimiser = build_optimiser(config.optimiser, system)
            autocast = autocast_of(config.precision, device)
            scorers = (validate, score_test, score_curve)
            run = _Run(
                config, dataset, seed, folder, device, loader, report, system, optimiser, autocast, identity, *scorers, saving, failures
            )
            start, under_way = _resume(run, checkpoint) if is_resumed else (0, None)
        del checkpoint
        return _train(run, start, under_way)


def _derived_identity(config: TrainingConfig, dataset: PackedDataset, seed: int) -> str:
    """Return a hash of all that the result depends on."""
    settings = config.model_dump(mode="json", exclude={"checkpoint_every_epochs"})
    parts = [settings, int(seed), read_info(dataset.folder).fingerprint, dataset.role, dataset.class_names]
    if (sha256 := unnamed_weights(config.model.backbone)) is not None:
        parts.append(sha256)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _check_fit(config: TrainingConfig, dataset: PackedDataset, system: TrainingSystem) -> None:
    """Reject a dataset, sampler or number of workers that does not fit the model and the loss."""
    num_classes = len(dataset.class_names)
    check_sampler(config.sampler, system.loss.needs, config.loss.name)
    check_labels(torch.from_numpy(dataset.labels), num_classes)
    if config.shard_classes:
        check_shardable(config.loss.name, system.loss, world_size())
    if config.embed_at_once is not None:
        check_independent(system.model)
    check_batches(system.model, first_batch_size(config.sampler, len(dataset), num_classes) if config.num_epochs else 0)


def _train(run: _Run, start: int, under_way: _Epoch | None) -> TrainingSystem:
    """Train the epochs from `start` on, the first one from where it was interrupted; return the run's result."""
    if rank() == 0:
        with run.failures.kept():  # drops damaged lines and those of epochs that will be repeated
            write_history(run.folder, run.history)
    try:
        if run.config.num_epochs == 0:
            _keep_best(run, 0, _score(run, 0) if run.config.keep_epochs else {})
            _save(run, 0)
        for epoch in range(start, run.config.num_epochs):
            _train_epoch(run, epoch, under_way)
            under_way = None
        _finish_writing(run)
    finally:
        run.writer.close()
    from_rank_zero(lambda: _check_kept(run))
    run.result.loss.join_classes()
    return run.result.eval()


def _resume(run: _Run, checkpoint: dict[str, Any] | None) -> tuple[int, _Epoch | None]:
    """Restore a checkpoint's state; return the number of completed epochs and the unfinished epoch.

    Args:
        run: the run as built.
        checkpoint: read by rank 0, None on the other workers; it is emptied.
    """
    if rank() == 0:
        assert checkpoint is not None
        run.history = checkpoint.pop("history").splitlines()
        kept = checkpoint.pop("kept")
        run.kept = {kind: _Kept(**kept[kind]) for kind in run.config.keep_epochs if kind in kept}
    state = state_from_rank_zero(checkpoint, run.device, own_part(run.system, run.optimiser))
    run.system.load_state_dict(state["system"])
    run.optimiser.load_state_dict(state["optimiser"])
    if run.averaged is not None and state["averaged"] is not None:
        run.averaged.module.load_state_dict(state["averaged"])
        run.averaged.is_empty = False
    under_way = state.get("under_way")
    return int(state["num_epochs_done"]), under_way and _Epoch(**under_way)


def _read_checkpoint(
    folder: Path, identity: str, config: TrainingConfig, report: Report, failures: Failures
) -> tuple[dict[str, Any] | None, bool]:
    """Return the checkpoint to resume from, on rank 0 only, and on every worker whether there is one; report a rejected checkpoint."""
    checkpoint: dict[str, Any] | None = None

    def read() -> tuple[bool, str | None]:
        nonlocal checkpoint
        checkpoint, note = resumable_checkpoint(folder, identity)
        return checkpoint is not None, note

    is_resumed, note = from_rank_zero(read)
    if note is not None and rank() == 0:
        logger.warning("%s", note)
        with failures.kept():
            report(Progress(0, config.num_epochs, 0, 0, 0.0, {}, note=note))
    return checkpoint, is_resumed


def build_system(config: TrainingConfig, num_classes: int, seed: int, device: torch.device) -> TrainingSystem:
    """Build model and loss with the run's initial weights on `device`, with BatchNorm over all workers.

    Raises:
        ConfigError: an unknown part, or parts that do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "initial weights"))
        model = Embedder(config.model, num_classes)
        loss = build_loss(config.loss.name, config.loss.options, num_classes, int(model.head.output_dim))
        if config.cross_batch_memory is not None:
            loss = CrossBatchMemory(loss, config.cross_batch_memory, config.loss.name)
    synchronised = synchronise_batchnorm(TrainingSystem(model, loss), device)
    assert isinstance(synchronised, TrainingSystem)
    return synchronised.to(device)


def autocast_of(precision: str, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return the context in which a training with this `precision` computes its forward passes; every worker makes the same call."""
    if precision == "auto":
        num_able = sum_over_workers(torch.tensor(int(_has_bfloat16(device)), device=device))  # machines may have different GPUs
        precision = "bfloat16" if int(num_able) == world_size() else "float32"
    if precision == "float32":
        return contextlib.nullcontext
    # Without its cache, which torch empties only when the outermost context ends: within another one, steps would use old weights.
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def _has_bfloat16(device: torch.device) -> bool:
    """Return True if this is a GPU that multiplies bfloat16 itself; before Ampere, torch emulates it slowly."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


# ---------------------------------------------------------------- the epoch


def _train_epoch(run: _Run, epoch: int, under_way: _Epoch | None) -> None:
    """Train one epoch, or the rest of an unfinished one."""
    config = run.config
    done = under_way or _Epoch(negatives=_mine(run) if config.sampler.kind == "mined_triplets" else None)
    equal_buffers(run.system.loss)
    run.system.train()
    run.system.loss.start_epoch(epoch, config.num_epochs)
    negatives_Nk = None if done.negatives is None else done.negatives.numpy()
    batches = epoch_batches(config.sampler, run.dataset.labels, run.seed, epoch, negatives_Nk)
    if len(batches[0]) < world_size():
        raise ConfigError(f"a batch of {len(batches[0])} images cannot be spread over {world_size()} workers: lower scale.num_workers")
    clock = _Clock(run, epoch, len(batches))
    first = len(done.rows)
    beat(patience=True)  # until the first step is done: loaders start, kernels are selected or compiled
    for step, (images, labels_N, sizes) in enumerate(_load(run, batches, epoch, first), first):
        factor = learning_rate_factor(config.schedule, epoch, step, len(batches), config.num_epochs) * run.system.loss.learning_rate_factor
        set_learning_rates(run.optimiser, factor)
        done.rates.append(factor)
        done.values.append(_train_step(run, images, labels_N, sizes, epoch, step))
        if run.averaged is not None and config.average is not None and epoch >= config.average.begins_at(config.num_epochs):
            run.averaged.update()
        beat()
        with run.failures.kept():
            clock.tick(step, sum(sizes), done.values[-1])
        _save_under_way(run, epoch, done, len(batches))
    metrics = _record_epoch(run, epoch, done)
    _keep_best(run, epoch + 1, metrics)
    if _is_due(run, epoch + 1, config.checkpoint_every_epochs):
        _save(run, epoch + 1)
    with run.failures.kept():
        clock.epoch_ended(metrics)


def _mine(run: _Run) -> Tensor:
    """Return hard negatives of every training image by its current embedding, the same on all workers, each of which finds a part."""
    embeddings_ND = training_outputs(run.system, run.dataset, run.config, run.loader)
    with patient():
        return torch.from_numpy(nearest_of_other_classes(embeddings_ND, torch.from_numpy(run.dataset.labels).to(run.device)))


def _train_step(run: _Run, images: Tensor, labels_N: Tensor, sizes: list[int], epoch: int, step: int) -> dict[str, Tensor]:
    run.optimiser.zero_grad(set_to_none=True)
    generator = torch.Generator(run.device).manual_seed(derived_seed(run.seed, "step", epoch, step))  # the same on every worker
    with seeded(derived_seed(run.seed, f"network on worker {rank()}", epoch, step), run.device):
        if run.config.embed_at_once is None:
            with run.autocast():
                output = run.parallel(images, labels_N, sizes, generator)
            output.total.backward()
        else:
            output = backward_in_chunks(run.parallel, images, labels_N, sizes, generator, run.config.embed_at_once, run.autocast)
    run.optimiser.step()
    return {"loss": output.total.detach(), **{name: part.detach() for name, part in output.parts.items()}}


def _load(run: _Run, batches: list[np.ndarray], epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Yield this worker's images, all workers' labels and the shard sizes of each global batch of the epoch, starting at batch `first`."""
    all_sizes = [shard_sizes(len(batch), world_size()) for batch in batches]
    shards, copies = ([np.array_split(rows, world_size())[rank()] for rows in all_rows] for all_rows in (batches, count_copies(batches)))
    labels = torch.from_numpy(run.dataset.labels[np.concatenate(batches)])
    if not run.system.loss.needs.labels_on_cpu:
        labels = labels.to(run.device)  # at once, so that no step waits for a copy
    labels_of = torch.split(labels, list(map(len, batches)))
    loaded = load(run.loader, shards[first:], TrainView(run.config.transform, run.seed, epoch), run.failures, copies[first:])
    yield from zip(loaded, labels_of[first:], all_sizes[first:], strict=True)


class _Clock:
    """Progress messages of rank 0 during an epoch."""

    def __init__(self, run: _Run, epoch: int, num_steps: int) -> None:
        self.run, self.epoch, self.num_steps = run, epoch, num_steps
        self.started = self.reported = time.monotonic()
        self.num_images = 0

    def tick(self, step: int, num_images: int, values: dict[str, Tensor]) -> None:
        self.num_images += num_images
        now = time.monotonic()
        if rank() == 0 and now - self.reported >= PROGRESS_SECONDS:
            self.reported = now
            self._report(step + 1, {"loss": float(values["loss"])})

    def epoch_ended(self, metrics: dict[str, float]) -> None:
        if rank() == 0:
            self._report(self.num_steps, metrics, epoch_ended=True)

    def _report(self, step: int, metrics: dict[str, float], **more: Any) -> None:
        rate = self.num_images / max(time.monotonic() - self.started, 1e-9)
        self.run.report(Progress(self.epoch, self.run.config.num_epochs, step, self.num_steps, rate, metrics, **more))


# ---------------------------------------------------------------- history and checkpoints


def _average_values(run: _Run, epoch: int, done: _Epoch) -> None:
    """Average the values of an epoch's last steps over workers and append them to its rows.

    Raises:
        TrainingError: a value is not finite; every worker raises, and the last good checkpoint is kept.
    """
    if not done.values:
        return
    names = _names_of_all({name for values in done.values for name in values})
    zero = done.values[0]["loss"].new_zeros(())
    table = torch.stack([torch.stack([values.get(name, zero).float() for name in names]) for values in done.values])
    if world_size() > 1:
        tables = [torch.empty_like(table) for _ in range(world_size())]
        dist.all_gather(tables, table)
        table = sum(tables[1:], tables[0]) / world_size()  # by rank: the order of an all-reduce depends on the number of steps
    done.values.clear()
    for step, row in enumerate(table.cpu().tolist(), len(done.rows)):
        if not all(map(math.isfinite, row)):
            values = ", ".join(f"{name} {value}" for name, value in zip(names, row, strict=True))
            raise TrainingError(
                f"the loss '{run.config.loss.name}' is not finite at epoch {epoch}, step {step} ({values}): "
                "lower the learning rate or the loss's scale"
            )
        done.rows.append(dict(zip(names, row, strict=True)))


def _names_of_all(own: set[str]) -> list[str]:
    """Return the names on all workers; a worker without images in a batch has no parts of its loss."""
    names = [own] * world_size()
    if world_size() > 1:
        dist.all_gather_object(names, own)
    return sorted(set().union(*names))


def _record_epoch(run: _Run, epoch: int, done: _Epoch) -> dict[str, float]:
    """Append an epoch's steps to the history and return its means.

    Raises:
        TrainingError: a value is not finite.
    """
    run.failures.raise_together()
    _average_values(run, epoch, done)
    names, num_steps = sorted({name for row in done.rows for name in row}), len(done.rows)
    rows = [{name: row.get(name, 0.0) for name in names} for row in done.rows]
    unseen = _score(run, epoch + 1)
    if rank() == 0:
        for step, (row, rate) in enumerate(zip(rows, done.rates, strict=True)):
            line = {"epoch": epoch, "step": epoch * num_steps + step, "learning_rate_factor": rate, **row}
            run.history.append(json.dumps(line | unseen if step == num_steps - 1 else line))
        history = list(run.history)
        with run.failures.kept():
            run.writer.write(lambda: write_history(run.folder, history))
    return {name: sum(row[name] for row in rows) / num_steps for name in names} | unseen


def _save_under_way(run: _Run, epoch: int, done: _Epoch, num_steps: int) -> None:
    """Write a checkpoint within an epoch, or at its last step, if one is due after this step, and stop the run if requested.

    Raises:
        InterruptedRunError: the run was stopped, with a checkpoint in place.
        Exception: an error of one worker, for example in writing the last checkpoint.
    """
    with run.failures.kept():
        run.writer.check()
    num_done = len(done.rows) + len(done.values)
    due, stop = run.watch.look(epoch * num_steps + num_done)
    is_next = num_done == num_steps and _is_due(run, epoch + 1, run.config.checkpoint_every_epochs)  # the epoch's end saves at once
    if stop or (due and not is_next):
        run.failures.raise_together()
        _average_values(run, epoch, done)
        _save(run, epoch, done)
    if stop:
        _finish_writing(run)
        raise InterruptedRunError


def _finish_writing(run: _Run) -> None:
    """Wait until everything is written, then raise errors of one worker on all."""
    with run.failures.kept():
        run.writer.finish()
    run.failures.raise_together()


def _save(run: _Run, num_epochs_done: int, under_way: _Epoch | None = None) -> None:
    system, optimiser = whole_state(run.system), whole_optimiser_state(run.optimiser, run.system)
    averaged = whole_state(run.result) if run.result is not run.system else None
    run.watch.saved()
    if rank() == 0:
        state = {
            "identity": run.identity,
            "num_epochs_done": num_epochs_done,
            "history": "\n".join(run.history),
            "system": system,
            "averaged": averaged,
            "optimiser": optimiser,
            "kept": {kind: vars(run.kept[kind]) for kind in run.config.keep_epochs if kind in run.kept},
        }
        if under_way is not None:
            state["under_way"] = {"rows": under_way.rows, "rates": under_way.rates, "negatives": under_way.negatives}
        with run.failures.kept():
            run.writer.finish()  # at most one checkpoint waits for the disk
            state = copied(state)
            run.writer.write(lambda: _write_checkpoint(run, state))


def _write_checkpoint(run: _Run, state: dict[str, Any]) -> None:
    save_checkpoint(run.folder, state)
    run.saving.saved()


# ---------------------------------------------------------------- the epochs that are kept


def _is_due(run: _Run, num_epochs_done: int, every: int | None) -> bool:
    return every is not None and (num_epochs_done == run.config.num_epochs or num_epochs_done % every == 0)


def _score(run: _Run, num_epochs_done: int) -> dict[str, float]:
    """Return the metrics of the result so far that are due: on classes unseen in training, and for the curve."""
    due = ((run.validate, 1), (run.score_test, run.config.keep_every_epochs), (run.score_curve, run.config.recall_every_epochs))
    metrics: dict[str, float] = {}
    with patient():
        for score, every in due:
            if score is not None and _is_due(run, num_epochs_done, every):
                metrics |= score(run.result.model)
    return metrics


def _keep_best(run: _Run, num_epochs_done: int, metrics: dict[str, float]) -> None:
    """Copy the weights if they are the best so far; they go into the next checkpoint, which keeps the two consistent."""
    if not run.config.keep_epochs or not _is_due(run, num_epochs_done, run.config.keep_every_epochs):
        return
    state = whole_state(run.result)  # collective, so called even if not the best: only rank 0 knows the best so far
    if rank() != 0:
        return
    for kind in run.config.keep_epochs:
        score = metrics.get(RECALL[kind])
        if score is not None and (kind not in run.kept or score > run.kept[kind].score):
            run.kept[kind] = _Kept(num_epochs_done, score, copied(state))


def _check_kept(run: _Run) -> None:
    for kind in run.config.keep_epochs:
        if kind not in run.kept:
            raise TrainingError(f"no epoch's {RECALL[kind]} could be computed (its embeddings are not finite): lower the learning rate")
