"""Checks that run before anything is started: of the parameters and, if it is prepared, of the dataset.

`check_settings` and `check_places` do not load torch. `check_parts` does: it builds each loss and network once. Every run of a comparison
is checked before the first one starts.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from dml_core.config import located
from dml_core.data.registry import parse_dataset
from dml_core.data.store.info import INFO_FILE, MANIFEST_FILE, REMEDY, read_info
from dml_core.data.store.split_config import held_out_classes
from dml_core.data.views.samplers import check_sampler, first_batch_size
from dml_core.data.views.transform_config import check_training_crop
from dml_core.errors import ConfigError, DataError, first_line
from dml_core.files import file_sha256
from dml_core.losses.registry import build_loss
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.published import PUBLISHED, fetch_published, is_kept
from dml_core.models.backbones.registry import BACKBONES, TIMM_PREFIX, TRAINED_WITH, backbone_shapes, build_backbone
from dml_core.models.backbones.trained_on import trained_on
from dml_core.training.config import TrainingConfig
from tasks.data import has_new_raw_files, is_by_hand, read_packed
from tasks.dvc_lock import or_pull
from tasks.environment import Project, answers, finished_records, prefect_server, ray_address, ray_cluster, shown
from tasks.runs.identity import train_step
from tasks.runs.specs import Params, RunSpec, ScaleSpec
from tasks.storage import enable_s3_weights, open_store
from tasks.workers.placement import num_gpus

DRAWN = "synthetic"  # reader that needs no files
ENOUGH_CLASSES = 100  # whether parts fit does not depend on the number of classes, and a million would take memory
MIXED_UP = ("pml:LiftedStructureLoss", "pml:NCALoss")  # a memory with the batch, without an error


@dataclass(frozen=True)
class Sizes:
    """Sizes of a prepared dataset that limit a run's settings.

    Attributes:
        num_images, num_classes: training images and classes that are not held out.
        num_retrieved: images that a query is compared with.
        has_tested: whether there are test images, or queries.
    """

    num_images: int
    num_classes: int
    num_retrieved: int
    has_tested: bool


def check_before(project: Project, params: Params, runs: Sequence[RunSpec]) -> Path | None:
    """Check the runs of one dataset as far as possible without starting anything or loading torch.

    Returns:
        The dataset's folder, or None if it has to be prepared first.

    Raises:
        ConfigError: settings do not fit each other.
        DataError: the dataset is not prepared, and its raw files have to be obtained by hand.
    """
    packed = prepared_folder(project, params, name := runs[0].dataset)
    try:
        check_settings(runs, params.scale, packed)
    except (ConfigError, DataError):
        if packed is None or not has_new_raw_files(project, name, params.datasets[name]):
            raise
        packed = None  # the former images do not count
        check_settings(runs, params.scale, packed)
    return packed


def check_settings(runs: Sequence[RunSpec], scale: ScaleSpec, packed: Path | None) -> None:
    """Check the settings of one dataset's runs against each other, the files they name and, if it is prepared, its packed folder.

    Raises:
        ConfigError: a setting does not fit; the error names the first one and its run.
    """
    for run in _one_of_each_variant(runs):
        with located(run.where):
            _check_weights(run.training)
            if run.training.num_epochs > 0:
                check_training_crop(run.training.transform)
            if packed is not None:
                _check_sizes(run, scale, read_sizes(packed, run))


def check_parts(runs: Sequence[RunSpec], packed: Path | None, before_first: Callable[[], None] = lambda: None) -> None:
    """Build the loss, sampler and network of one dataset's runs that were not trained with these settings and this code, to check them.

    Imports torch and the libraries of the losses and networks. `before_first` is called before anything is built, so only if a run has to
    be trained.

    Raises:
        ConfigError: a loss has wrong options, parts do not fit each other, or weights are missing that no run can download.
    """
    to_build = [
        run
        for run in _one_of_each_variant(runs)
        if packed is None or not (finished_records() / train_step(run, read_packed(packed, run.dataset)).identity).is_file()
    ]
    if to_build:
        before_first()
    for run in to_build:
        with located(run.where):
            backbone = run.training.model.backbone
            file = PUBLISHED.get(backbone.name) if backbone.weights == "imagenet" else None
            if file is not None and file.address is None:
                fetch_published(backbone.name)  # made by hand: it is here, where its hash identifies runs, or this raises
            num_classes = ENOUGH_CLASSES if packed is None else read_sizes(packed, run).num_classes
            _build(run.training, min(num_classes, ENOUGH_CLASSES))


def read_sizes(packed: Path, run: RunSpec) -> Sizes:
    """Return the sizes of a prepared dataset for a run, by its validation split and the role that it is scored on.

    Raises:
        ConfigError: fewer than two classes remain for training.
        DataError: the dataset is not prepared, damaged, or without training images.
    """
    info, validation, role = read_info(packed), run.training.validation, run.evaluation.role
    if (train := info.roles.get("train")) is None:
        raise DataError(f"dataset '{run.dataset}' has no training images; give some classes the role train, then prepare it again")
    if role == "test" and not {"test", "gallery"} & set(info.roles):
        raise ConfigError("evaluation.role is 'test', but the dataset has only training images")
    # In a role whose queries are also its gallery, a query is not compared with itself.
    has_tested = not {"test", "query"}.isdisjoint(info.roles)
    searched = next((info.roles[name].num_images - (name == "test") for name in ("gallery", "test") if name in info.roles), 0)
    if validation is None:
        return Sizes(train.num_images, train.num_classes, train.num_images - 1 if role == "train" else searched, has_tested)
    images = Counter(class_names(packed, "="))
    held_out = held_out_classes(list(images), validation)
    num_held_out = sum(images[name] for name in held_out)
    num_trained = train.num_images - num_held_out
    retrieved = {"test": searched, "validation": num_held_out - 1, "train": num_trained - 1}
    return Sizes(num_trained, len(images) - len(held_out), retrieved[role], has_tested)


def class_names(packed: Path, comparison: str) -> list[str]:
    """Return the class of each image of a prepared dataset whose role is train ("=") or another one ("!=").

    Raises:
        DataError: its manifest is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(packed / MANIFEST_FILE, columns=["label_name"], filters=[("role", comparison, "train")])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{packed / MANIFEST_FILE}: damaged ({first_line(error)}); {REMEDY}") from None
    return list(map(str, rows["label_name"].to_pylist()))


def is_prepared(project: Project, params: Params, name: str) -> bool:
    """Return whether a dataset is prepared with the current parameters.

    Raises:
        DataError: it is prepared, but damaged.
    """
    spec, packed = params.datasets[name], project.packed(name)
    options = parse_dataset(spec.reader, spec.options)
    return os.path.lexists(packed / INFO_FILE) and read_info(packed).options == options.model_dump(mode="json")


def is_prepared_or_damaged(project: Project, params: Params, name: str) -> bool:
    """Return whether a dataset is prepared with the current parameters; one that is damaged may be."""
    try:
        return is_prepared(project, params, name)
    except DataError:
        return True


def prepared_folder(project: Project, params: Params, name: str) -> Path | None:
    """Return a dataset's folder if it is prepared with the current parameters, or None if it has to be prepared (again) first.

    Raises:
        DataError: it is damaged; or it is not prepared, its raw files are missing, and they have to be obtained by hand.
    """
    if is_prepared(project, params, name):
        return project.packed(name)
    raw = project.root / (spec := params.datasets[name]).raw
    if not _has_files(raw) and is_by_hand(spec):
        how_to_get = parse_dataset(spec.reader, spec.options).how_to_get
        raise DataError(f"dataset '{name}' is not prepared and {raw} has no raw files; {how_to_get}{or_pull(project, name)}")
    return None


def is_at_hand(project: Project, params: Params, name: str) -> bool:
    """Return whether a dataset is prepared and intact, has raw files here, or is drawn; if not, it is fetched, which can fail."""
    spec = params.datasets[name]
    if spec.reader == DRAWN or _has_files(project.root / spec.raw):
        return True
    with suppress(DataError):
        return is_prepared(project, params, name)
    return False


def prepare_machine(to_train: Sequence[RunSpec], scale: ScaleSpec, say: Callable[[str], None]) -> None:
    """Check that this machine has the GPU that runs need, fetch their weights, and build each network once with them.

    On a cluster its workers do so, except for the scoring, which is always done here.

    Raises:
        ConfigError: there is no GPU, or `scale.device` excludes it; or weights are missing, cannot be downloaded, are damaged, or are those
            of another network.
    """
    for run in to_train:
        if run.evaluation.device == "cuda" and not num_gpus():
            raise ConfigError(f"{run.where}: evaluation.device: cuda needs a GPU on this machine, and torch finds none; set device: cpu")
    if ray_cluster() is not None:
        return
    for run in to_train:
        decoder = run.training.transform.decoder
        if decoder == "nvjpeg" and scale.device == "cpu":
            raise ConfigError(f"{run.where}: transform.decoder is 'nvjpeg', which needs a GPU, but scale.device is cpu; change one of them")
        if (decoder == "nvjpeg" or scale.device == "cuda") and not num_gpus():
            needs_decoder = ("transform.decoder: nvjpeg", "decoder: cpu")
            setting, remedy = needs_decoder if decoder == "nvjpeg" else ("scale.device: cuda", "device: auto")
            raise ConfigError(f"{run.where}: {setting} needs a GPU, and torch finds none; check nvidia-smi, or set {remedy}")
    for run in to_train:
        backbone = run.training.model.backbone
        if backbone.weights == "imagenet" and backbone.name in PUBLISHED and not is_kept(PUBLISHED[backbone.name]):
            say(f"downloading the ImageNet weights of {backbone.name} to {PUBLISHED[backbone.name].path}")
        with located(run.where):
            _build_with_weights(backbone)


@cache
def _build_with_weights(backbone: BackboneConfig) -> None:
    """Build a network that starts from weights; the same network is not built again in this process."""
    if backbone.weights == "none":
        return
    enable_s3_weights()
    build_backbone(backbone)


def check_places(project: Project, scale: ScaleSpec) -> list[str]:
    """Check that the store is writable and that the configured servers accept connections, and Prefect's answers.

    Returns warnings that stop nothing, one line each.

    Raises:
        StoreError: the store is not writable.
        ConfigError: Prefect or Ray is set to an address that does not answer, or Ray to one of Ray Client.
    """
    store = open_store(project)
    if not store.is_remote:  # the flow checks a bucket: its client takes a second to load
        store.check_writable()
    servers = [("PREFECT_API_URL", "Prefect's server", prefect_server()), ("RAY_ADDRESS", "the Ray cluster", ray_address())]
    for variable, what, address in servers:
        if address is not None and not answers(address, is_asked=what == "Prefect's server"):
            remedy = f"start it, or unset {variable} to use one on this machine"
            raise ConfigError(f"{variable}: {what} at {shown(address)} does not answer; {remedy}")
    notes = []
    if store.is_for_nodes:
        notes.append(f"{store.address}: every node of the Ray cluster must reach this folder; if one does not, set DML_STORE to a bucket")
    reports = project.root / "results"
    if not os.access(reports if reports.exists() else project.root, os.W_OK):
        notes.append(f"{reports} cannot be written, where reports and pages of finished runs go; correct its permissions")
    if not answers(project.tracking_uri):
        notes.append(f"MLflow at {shown(project.tracking_uri)} does not answer; runs continue, and `dml sync` delivers their records later")
    if scale.image_cache_gb is not None and not store.is_remote:
        notes.append("scale.image_cache_gb has no effect: the store is a folder, and workers read the packed images where they are")
    return notes


def _one_of_each_variant(runs: Iterable[RunSpec]) -> list[RunSpec]:
    """Return one run of each variant; the seeds of a variant share its settings."""
    return list({(run.table, run.dataset, run.label): run for run in runs}.values())


def _check_weights(training: TrainingConfig) -> None:
    backbone = training.model.backbone
    weights = backbone.weights
    if weights == "imagenet" and backbone.name in BACKBONES and backbone.name not in TRAINED_WITH:
        raise ConfigError(f"model.backbone: '{backbone.name}' has no ImageNet weights; set weights: none, a file or an address")
    if weights == "imagenet" and backbone.name in PUBLISHED:
        is_kept(PUBLISHED[backbone.name])  # refuses a damaged file; a missing one is downloaded
    if weights in ("none", "imagenet") or "://" in weights:
        return
    path = Path(weights)
    if not path.is_absolute():  # workers and `dml verify` have other working directories
        raise ConfigError(f"model.backbone.weights: {weights}: a relative path, which workers do not find; write an absolute one")
    if not path.is_file():
        raise ConfigError(f"model.backbone.weights: {weights}: no such file")
    status = path.stat()
    sha256 = _sha256(path, status.st_size, status.st_mtime_ns)
    if backbone.weights_sha256 is None:
        reason = f"weights_sha256 is missing, and {weights} could be replaced unnoticed"
        raise ConfigError(f"model.backbone: {reason}: add weights_sha256: {sha256}")
    if sha256 != backbone.weights_sha256:
        raise ConfigError(
            f"model.backbone.weights: {weights} has SHA-256 {sha256}, weights_sha256 is {backbone.weights_sha256}: "
            "the file is damaged, or another one"
        )


@cache
def _sha256(path: Path, *_status: int) -> str:
    """Return a file's SHA-256, cached by size and modification time."""
    return file_sha256(path)


def _check_sizes(run: RunSpec, scale: ScaleSpec, sizes: Sizes) -> None:
    if run.training.num_epochs > 0:
        num_first = first_batch_size(run.training.sampler, sizes.num_images, sizes.num_classes)
        if num_first < scale.most_workers:
            raise ConfigError(f"a batch of {num_first} images cannot be spread over {scale.most_workers} workers: lower scale.num_workers")
        memory = run.training.cross_batch_memory
        if memory is not None and memory.size < num_first:
            raise ConfigError(f"cross_batch_memory: size {memory.size} is less than a batch of {num_first}: raise it")
    if not sizes.has_tested:
        if run.training.recall_every_epochs is not None:
            raise ConfigError("recall_every_epochs scores test images, and the dataset has none: set it to null")
        if "oracle" in run.training.keep_epochs:
            raise ConfigError("keep_epochs: oracle scores test images, and the dataset has none: remove oracle")
    largest = run.evaluation.recall_at[-1]
    if largest > sizes.num_retrieved:
        raise ConfigError(f"evaluation.recall_at: {largest} is more than the {sizes.num_retrieved} images that a query is compared with")


def _build(training: TrainingConfig, num_classes: int) -> None:
    """Build head and loss; check that the sampler meets the loss's needs and that the network can be trained with these settings."""
    from dml_core.models.embedder import Embedder
    from dml_core.models.heads import build_head

    _check_pixels(training)
    head = build_head(training.model.head, cast(int, backbone_shapes(training.model.backbone).num_features), num_classes)
    loss = build_loss(training.loss.name, training.loss.options, num_classes, head.output_dim)
    check_sampler(training.sampler, loss.needs, training.loss.name)
    if training.cross_batch_memory is not None:
        from dml_core.training.parallel.cross_batch import CrossBatchMemory

        CrossBatchMemory(loss, training.cross_batch_memory, training.loss.name)
    _check_library_losses(training, loss)
    if training.shard_classes:
        from dml_core.training.parallel.sharded_state import check_shardable

        check_shardable(training.loss.name, loss, num_workers=1)
    if training.embed_at_once is not None:
        from dml_core.training.parallel.grad_cache import check_independent

        check_independent(Embedder(training.without_weights().model, num_classes))
    if training.num_epochs > 0 and training.sampler.kind == "shuffled" and training.sampler.batch_size == 1:
        from dml_core.training.parallel.batchnorm import check_batches

        check_batches(Embedder(training.without_weights().model, num_classes), num_images=1)


def _check_library_losses(training: TrainingConfig, loss: Any) -> None:
    """Refuse losses of pytorch-metric-learning 2.9 that compute something else on such batches, also as terms, or with a memory."""
    import torch

    sampler, name = training.sampler, training.loss.name
    targets = {getattr(getattr(part, "config", None), "target", None) for part in loss.modules()}
    if "InstanceLoss" in targets:
        raise ConfigError("loss 'pml:InstanceLoss' takes numbers of classes for positions in the batch: choose another loss")
    is_square = sampler.kind == "k_by_n" and sampler.num_classes_per_batch == sampler.num_samples_per_class
    if "SmoothAPLoss" in targets and not is_square:
        equal = "set sampler.kind 'k_by_n', and num_classes_per_batch equal to num_samples_per_class"
        raise ConfigError(f"loss 'pml:SmoothAPLoss' needs as many classes in a batch as images of each: {equal}")
    if training.cross_batch_memory is not None:
        batch_ND, labels_N, is_right = torch.eye(4, loss.embedding_dim), torch.tensor([0, 0, 1, 1]), name not in MIXED_UP
        try:  # with a memory of more than the batch, other than at the first steps
            loss.compare(batch_ND, labels_N, batch_ND.repeat(2, 1), labels_N.repeat(2), torch.arange(4), torch.Generator())
        except (IndexError, RuntimeError):  # also of shapes that differ
            is_right = False
        if not is_right:
            raise ConfigError(f"cross_batch_memory: '{name}' takes samples of the memory for those of the batch; remove it")


def _check_pixels(training: TrainingConfig) -> None:
    """Check that the backbone takes images of this size, and a timm model with weights pixels scaled as it was trained with.

    `TrainingConfig` checks the scaling of the other backbones.
    """
    import torch

    backbone, scaling = training.model.backbone, training.transform.scaling
    expected = trained_on(backbone.name) if backbone.name.startswith(TIMM_PREFIX) and backbone.weights != "none" else None
    if expected is not None and scaling != expected.scaling:
        raise ConfigError(f"transform.scaling is '{scaling}', but {backbone.name} was trained with '{expected.scaling}': set that")
    if (side := training.transform.crop_size) is not None:
        try:
            backbone_shapes(backbone)(torch.zeros(2, 3, side, side, device="meta"))
        except RuntimeError as error:
            reason = f"backbone '{backbone.name}' does not take images of {side} x {side} pixels ({first_line(error)})"
            raise ConfigError(f"transform.crop_size: {reason}; set another") from None


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
