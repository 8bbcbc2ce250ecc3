"""Collect the evidence of a finished run from its records and files.

The hashes of initial weights, batches and views are not recorded during training: they are computed again, by the functions that the
training loop calls. A fault in these functions therefore shows in them as well.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dml_core.data.store.splits import open_role
from dml_core.data.views.batches import Loader, TrainView, count_copies
from dml_core.data.views.samplers import epoch_batches
from dml_core.epochs import CURVE, RECALL
from dml_core.evaluation.metric_info import metric_info
from dml_core.training.checkpoints.file import load_checkpoint, weights_of
from dml_core.training.history import read_history
from dml_core.training.loop import build_system
from dml_core.training.mining import nearest_of_other_classes
from dml_core.training.preparing import prepare, training_outputs
from tasks.environment import num_cores
from tasks.git import NO_CODE, run_git
from tasks.plans.times import placement_here
from tasks.runs.comparable import spec_settings
from tasks.runs.finished import read_finished
from tasks.runs.identity import step_identities
from tasks.runs.records import DatasetRecord, ScoreRecord, read_scores
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.runs.surroundings import SURROUNDINGS, gpu, surroundings
from tasks.storage import Store
from tasks.watch.records import Environment, Evidence
from tasks.wording import Say, counted

CURVES = (RECALL["best_validation"], CURVE["test"], CURVE["train"])  # of the history; the first that a run records


def row_of(spec: RunSpec) -> str:
    """Return the name of a run's row: `DATASET/VARIANT` of the standing comparison, or `TABLE:ROW:DATASET` of a table."""
    return f"{spec.dataset}/{spec.variant}" if spec.table is None else f"{spec.table}:{spec.label}:{spec.column}"


def settings_hash(spec: RunSpec) -> str:
    """Return the hash of the settings of training, embedding and scoring, without the seed."""
    without = spec.model_copy(update={"measurements": {}})  # they follow as text, as in the hashes of references accepted earlier
    return hashlib.sha256(f"{spec_settings(without, None)} {sorted(spec.measurements.items())}".encode()).hexdigest()


def collect(spec: RunSpec, dataset: DatasetRecord, store: Store, records: Path, environment: Environment, say: Say) -> Evidence | None:
    """Return the evidence of a run, or None if the present code has not finished it.

    Its files in the store are compared with their records; those of its dataset must have been verified. The number of workers, the kind of
    their device, and whether the training was deterministic, are known from its record, after a training on a cluster also the machine; the
    rest of its surroundings, and on a cluster those of the flow, from `environment`.

    Raises:
        StoreError: a record is damaged, or a file differs from its record.
    """
    identities = step_identities(spec, dataset)
    trained, embedded, scored = (read_finished(records, step, identity) for step, identity in identities.items())
    if trained is None or not isinstance(scored, ScoreRecord) or not scored.is_made_from([trained, embedded]):
        return None
    folder = store.checked(trained)
    history = read_history(folder)
    checkpoint = load_checkpoint(folder, identities["train"])
    assert checkpoint is not None, "its file was just verified"
    metrics = read_scores(scored, store.checked(scored)).metrics
    if spec.measurements:  # some of which are times
        metrics = {name: value for name, value in metrics.items() if metric_info(name).family != "measurement"}
    curve = next((name for name in CURVES if any(name in row for row in history)), CURVES[0])
    points = [(int(row["epoch"]) + 1, row[curve]) for row in history if curve in row]
    initial, batches, pixels = beginning(spec, Path(dataset.folder), say)
    recorded = {"deterministic": bool(trained.facts.get("deterministic")), "workers": trained.facts.get("num_workers", 1)}
    node = trained.facts.get(SURROUNDINGS)
    is_on_cpu = trained.facts.get("device", "cpu") == "cpu"
    if is_on_cpu != (environment.device == "cpu"):  # on a cluster whose machines have other devices than this one
        recorded["device"] = "cpu" if is_on_cpu else gpu()
    return Evidence(
        row=row_of(spec),
        seed=spec.seed,
        settings=settings_hash(spec),
        dataset=dataset.digest,
        initial_weights=initial,
        batches=batches,
        losses=tuple(float(str(np.float32(row["loss"]))) for row in history),  # shortest decimals, which halve a reference's size
        weights=_hash_of_state(weights_of(checkpoint, spec.evaluation.epoch)[0]),
        scores=metrics,
        curve=tuple(value for _, value in points),
        curve_epochs=tuple(epoch for epoch, _ in points),
        seconds=float(trained.facts.get("seconds", 0)),
        environment=environment.model_copy(update=recorded | (node or {})),
        pixels=pixels,
        steps_per_epoch=sum(row["epoch"] == 0 for row in history),
        flow=environment if node else None,
    )


def beginning(spec: RunSpec, packed: Path, say: Say) -> tuple[str, str, str | None]:
    """Return hashes of a run's weights before the first step, of its first epoch's batches, and of the first batch's views.

    A run of no epochs has no batches and no views. Computed on the CPU in one thread.
    """
    config, num_threads = spec.training, torch.get_num_threads()
    dataset = open_role(packed, "train", config.validation)
    torch.set_num_threads(1)
    loader = Loader(dataset)
    try:
        system = build_system(config, len(dataset.class_names), spec.seed, torch.device("cpu"))
        needs_all = config.warm_up_batchnorm or system.loss.needs.initial_embeddings or config.sampler.kind == "mined_triplets"
        if needs_all:  # which may take hours
            images = counted(len(dataset), "training image")
            say(f"{row_of(spec)}, seed {spec.seed}: computing its beginning again, with all {images} in one CPU thread")
        prepare(system, dataset, config, spec.seed, loader)
        weights = _hash_of_state(system.state_dict())
        if not config.num_epochs:
            return weights, hashlib.sha256().hexdigest(), None
        negatives = None
        if config.sampler.kind == "mined_triplets":
            outputs_ND = training_outputs(system, dataset, config, loader)
            negatives = nearest_of_other_classes(outputs_ND, torch.from_numpy(dataset.labels))
        batches = epoch_batches(config.sampler, dataset.labels, spec.seed, 0, negatives)
        samples = hashlib.sha256()
        for batch in batches:
            samples.update(f"{len(batch)}:".encode() + np.asarray(batch, dtype=np.int64).tobytes())
            samples.update(np.asarray(dataset.labels[batch], dtype=np.int64).tobytes())
        view = TrainView(config.transform, spec.seed, 0)
        pixels, _ = next(loader.batches(batches[:1], view, count_copies(batches)[:1]))
        return weights, samples.hexdigest(), _hash_of_state({"pixels": pixels})
    finally:
        loader.close()
        torch.set_num_threads(num_threads)


def environment_here(commit: str, scale: ScaleSpec) -> Environment:
    """Return the surroundings of runs on this machine at a commit (`code_commit`); their device and threads follow from their resources."""
    placement = placement_here(scale)
    threads = max(1, num_cores() // (placement.num_workers * placement.num_groups))
    return Environment(commit=commit, **surroundings(placement.device, threads))


def is_same_code(root: Path, commit: str, other: str) -> bool:
    """Return whether code and settings of two commits are equal; False for a commit with changes, or one that git does not have."""
    if commit.endswith("-dirty") or other.endswith("-dirty"):
        return False
    return commit == other or run_git(root, "diff", "--quiet", commit, other, "--", ".", *NO_CODE) is not None


def _hash_of_state(state: dict[str, Tensor]) -> str:
    """Return a hash of the names, types, shapes and values of tensors, whatever their memory layout."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
