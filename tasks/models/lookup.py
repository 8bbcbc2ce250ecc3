"""Look up trained networks by name: a run, an identity, a folder, a model of MLflow's registry.

A run's network is extracted from its checkpoint into `state/models/<identity>`, in the format of MLflow's models (`dml_core.trained`):
without the optimiser's state, and with all that is needed to embed an image. It is extracted again if the folder is damaged, or if the
training ran again, which may give other weights under the same identity.
"""

from pathlib import Path

import torch

from dml_core.data.store.splits import open_role
from dml_core.errors import ConfigError, DmlError, StoreError, TrackingError
from dml_core.files import write_errors
from dml_core.models.embedder import network_weights
from dml_core.network_description import DESCRIPTION_FILE, intact_description, read_description
from dml_core.trained import load_network, save_network
from dml_core.training.checkpoints.file import CHECKPOINT_FILE, load_checkpoint, weights_of
from tasks.data import dataset_if_prepared
from tasks.environment import Project, find_project, open_project, set_environment
from tasks.files import write_whole
from tasks.locks import alone
from tasks.models.trained_runs import TrainedRun, run_of, run_scores, trained_among
from tasks.plans.results import standing_seeds
from tasks.runs.best import VALIDATION, best_seed
from tasks.runs.finished import intact_record, parse_run_name
from tasks.runs.identity import NETWORK_IDENTITY
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import StepRecord, hash_of_files
from tasks.sealed import read_bytes
from tasks.storage import open_store
from tasks.tracking.versions import FETCHED, REGISTRY_PREFIX

MADE_FROM_FILE = "made_from"  # which checkpoint a network was extracted from: hash of the recorded files, or its version in the store
MODEL_FORMS = "a run as dataset/variant or dataset/variant/seed, an identity, a folder, or models:/name@alias"


def resolve_model(text: str, project: Project | None = None) -> Path:
    """Return the folder of a network, for `load_model`.

    The text is a folder or its `network.json`, a checkpoint, a run as `dataset/variant[/seed]` (without a seed as `find_run` chooses), the
    identity of a training or network, or `models:/name@alias` or `models:/name/version` of MLflow's registry. A checkpoint and a training
    stand for the epoch that their run scores. The project of the runs is by default that around the working directory; of a checkpoint it
    is the one around it, if there is one.

    Raises:
        ConfigError: there is no such network; the message lists what is available.
        StoreError: it is damaged.
        TrackingError: MLflow does not answer.
    """
    if text.startswith(REGISTRY_PREFIX):
        from tasks.tracking.registered import Registry

        project = project or open_project()
        return Registry(project.tracking_uri).fetch(text, project.state / "models")
    path = Path(text)
    if (path / DESCRIPTION_FILE).is_file():
        return path
    if path.name == DESCRIPTION_FILE:
        return path.parent
    training = _training_folder(path)
    if training is not None:
        return _network_of_checkpoint(training.resolve(), project)
    project = project or find_project()
    if NETWORK_IDENTITY.fullmatch(text):
        return network_of(project, text)
    return package(project, find_run(project, text))


def find_network(text: str) -> Path | None:
    """Return the folder of the network that `dml_core.load_model` is asked for, or None if the text has no form that `resolve_model` knows.

    The project is the one around the run's files if the text is their path, otherwise around the working directory, otherwise the checkout
    with this code: a script in any folder finds the runs by name. `pyproject.toml` registers this function.

    Raises:
        ConfigError, StoreError, TrackingError: as in `resolve_model`.
    """
    training = _training_folder(Path(text).absolute())
    if not (training or text.startswith(REGISTRY_PREFIX) or NETWORK_IDENTITY.fullmatch(text) or parse_run_name(text)):
        return None
    project = find_project(*([training] if training else []), Path.cwd(), Path(__file__).parent)
    set_environment(project)  # MLflow reads it when it is imported, and it says where the records of trainings are
    return resolve_model(text, project)


def _training_folder(path: Path) -> Path | None:
    """Return the folder of a training, given its path or that of its checkpoint; None for other paths."""
    if path.name == CHECKPOINT_FILE:
        return path.parent
    return path if (path / CHECKPOINT_FILE).is_file() else None


def find_run(project: Project, text: str) -> TrainedRun:
    """Find the trained run that `dataset/variant[/seed]` names.

    Without a seed it is the scored one with the highest Recall@1 on held-out training classes (`tasks.runs.best`), or the lowest seed if
    the comparison holds out none.

    Raises:
        ConfigError: there is none.
    """
    name = parse_run_name(text)
    if name is None or name.variant is None:
        raise ConfigError(f"{text}: does not name a trained network; expected {MODEL_FORMS}")
    params = load_params(project.params_file)
    seeds = standing_seeds(project, params).get(name.dataset) if name.seed is None else (name.seed,)
    specs = comparison_runs(params, name.dataset, (name.variant,), seeds)
    dataset = dataset_if_prepared(project, name.dataset)
    trained = [] if dataset is None else trained_among(project, ((spec, dataset) for spec in specs))
    runs = {run.spec.seed: run for run in trained if name.seed is not None or run.scored}
    if not runs:
        option = "" if name.seed is None else f" --seed {name.seed}"
        raise ConfigError(f"{text}: not trained here; train it: dml run {name.dataset} {name.variant}{option}")
    store = open_store(project)
    scores = {seed: run_scores(store, run).get(VALIDATION, -1.0) for seed, run in runs.items()} if len(runs) > 1 else {}
    return runs[best_seed(runs, scores)]


def network_of(project: Project, identity: str) -> Path:
    """Return the folder of the network with this identity, or of the epoch that a training's run scores.

    A network that is no longer a run's, because its images or settings have changed, is in `state/models` or fetched from MLflow. One that
    MLflow no longer has under its identity, as that of a former champion whose run was superseded, may be there by another name.

    Raises:
        ConfigError: no run here has it.
        TrackingError: MLflow does not answer.
    """
    run = run_of(project, identity)
    if run is not None:
        return package(project, run)
    folder = project.state / "models" / identity
    if intact_description(folder) is not None:
        return folder
    missing: DmlError = ConfigError(f"{identity}: no trained run has this identity; `dml models` lists all of them")
    fetched = None
    if project.is_tracked:
        from tasks.tracking.registered import Registry

        try:
            fetched = Registry(project.tracking_uri).fetch_trained(identity, project.state / "models")
        except TrackingError as error:
            missing = error
    fetched = fetched or _fetched_by_address(project.state / "models", identity)
    if fetched is None:
        raise missing
    return fetched


def _network_of_checkpoint(training: Path, project: Project | None) -> Path:
    """Return the folder of the network in a training's checkpoint, whose run a project knows.

    Raises:
        ConfigError: there is no checkpoint, no run has it, or its run has other weights by now: another machine may train the same run, and
            this one again.
        StoreError: it is damaged, or another run's.
    """
    checkpoint = load_checkpoint(training, training.name)
    if checkpoint is None:
        raise ConfigError(f"{training / CHECKPOINT_FILE}: no such file; expected {MODEL_FORMS}")
    project = project or find_project(training, Path.cwd())
    if open_store(project).folder(f"train/{training.name}").resolve() != training:
        project = find_project(training, project.root)
    network = network_of(project, training.name)
    own = load_network(network, read_description(network)).state_dict()
    weights = [network_weights(weights_of(checkpoint, epoch)[0]) for epoch in ("last", *checkpoint.get("kept", {}))]
    if not any(all(torch.equal(value, state[name]) for name, value in own.items()) for state in weights):
        raise ConfigError(
            f"{training}: its run was trained again since, or elsewhere, and {network} has other weights; name the run for these, or "
            "open the project with this checkpoint's records"
        )
    return network


def _fetched_by_address(cache: Path, identity: str) -> Path | None:
    """Return the folder of a network with this identity that was fetched as `models:/...`, the last one; None if there is none."""
    for folder in sorted(cache.glob(f"{FETCHED}*"), key=lambda path: path.stat().st_mtime, reverse=True):
        description = intact_description(folder)
        if description is not None and description.identity == identity:
            return folder
    return None


def package(project: Project, run: TrainedRun) -> Path:
    """Return the folder of a run's network, extracted from the present checkpoint.

    Raises:
        StoreError: the checkpoint is damaged, missing, not of all epochs, or of a training that was killed before its record.
    """
    folder = project.state / "models" / run.network
    record = intact_record("train", run.trained)
    made_from = _version(project, run.trained) if record is None else hash_of_files([record])
    wanted = (run.network, run.spec.evaluation.metric, run.spec.title)  # params.yaml may name another metric, and rename the dataset
    with alone(folder.parent / ".lock"):
        made = intact_description(folder)
        is_current = made is not None and (made.identity, made.metric, made.title) == wanted
        if not is_current or made_from.encode() not in (b"", read_bytes(folder / MADE_FROM_FILE)):
            _extract(project, run, record, folder)
            with write_errors(f"{folder}:", "free or change the place"):
                write_whole(folder / MADE_FROM_FILE, made_from)
    return folder


def _version(project: Project, trained: str) -> str:
    """Return a text for the checkpoint of another machine's training that differs once it was replaced; empty if there is none."""
    store, key = open_store(project), f"train/{trained}"
    if store.is_remote:
        return store.list_objects(key).get(CHECKPOINT_FILE, "")
    checkpoint = store.folder(key) / CHECKPOINT_FILE
    return str(checkpoint.stat().st_mtime_ns) if checkpoint.is_file() else ""


def _extract(project: Project, run: TrainedRun, record: StepRecord | None, folder: Path) -> None:
    """Write a run's network from its checkpoint, which must be the recorded one, into a folder, replacing an existing one."""
    store = open_store(project)
    trained = store.pull(f"train/{run.trained}") if record is None else store.checked(record)
    checkpoint = load_checkpoint(trained, run.trained)
    if checkpoint is None or checkpoint["num_epochs_done"] != run.spec.training.num_epochs:
        raise StoreError(f"{trained}: not the checkpoint of a finished training; train it again: dml reproduce")
    training, evaluation = run.spec.training, run.spec.evaluation
    weights, _ = weights_of(checkpoint, evaluation.epoch)
    num_classes = len(open_role(Path(run.dataset.folder), "train", training.validation).class_names)
    save_network(folder, training.model_dump(mode="json"), num_classes, weights, run.network, evaluation.metric, run.spec.title)
