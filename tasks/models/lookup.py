"""Look up trained networks by name: a run, an identity, a folder, a model of MLflow's registry.

A run's network is extracted once from its checkpoint into `state/models/<identity>`, in the format of MLflow's models (`dml_core.trained`):
without the optimiser's state, and with all that is needed to embed an image.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from dml_core.data.store.splits import open_role
from dml_core.errors import ConfigError, StoreError
from dml_core.network_description import DESCRIPTION_FILE
from dml_core.trained import save_network
from dml_core.training.checkpoints.file import CHECKPOINT_FILE, load_checkpoint, weights_of
from tasks.data import read_dataset
from tasks.environment import Project, find_project, open_project
from tasks.locks import alone
from tasks.runs.best import VALIDATION, best_seed
from tasks.runs.finished import finished_scores
from tasks.runs.identity import StepIdentity, embed_step, evaluate_step, train_step
from tasks.runs.provenance import find_older
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import RunSpec, comparison_runs, load_params
from tasks.storage import Store, open_store

REGISTRY_PREFIX = "models:/"
IDENTITY = re.compile(r"[0-9a-f]{32}")
MODEL_FORMS = "a run as dataset/variant or dataset/variant/seed, an identity, a folder, or models:/name@alias"


@dataclass(frozen=True)
class TrainedRun:
    """A finished run of the standing comparison in the store.

    Attributes:
        spec: its specification.
        dataset: its dataset.
        trained, embedded, scored: identities of its steps, made by the current code or older code; None if a step is missing.
    """

    spec: RunSpec
    dataset: DatasetRecord
    trained: str
    embedded: str | None
    scored: str | None


def resolve_model(text: str, project: Project | None = None) -> Path:
    """Return the folder of a network, for `load_model`.

    Args:
        text: a folder, a checkpoint, a run as `dataset/variant[/seed]` (without a seed as `find_run` chooses), the identity of a training,
            or `models:/name@alias` or `models:/name/version` of MLflow's registry.
        project: project of the runs; by default that around the working directory.

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
    if (path / DESCRIPTION_FILE).is_file() or path.name == DESCRIPTION_FILE:
        return path
    project = project or find_project()
    if path.name == CHECKPOINT_FILE or (path / CHECKPOINT_FILE).is_file():
        identity = (path.parent if path.name == CHECKPOINT_FILE else path).resolve().name
        return network_of(project, identity)
    if IDENTITY.fullmatch(text):
        return network_of(project, text)
    return package(project, find_run(project, text))


def find_run(project: Project, text: str) -> TrainedRun:
    """Find the trained run that `dataset/variant[/seed]` names.

    Without a seed it is the scored one with the highest Recall@1 on held-out training classes (`tasks.runs.best`), or the lowest seed if
    the comparison holds out none.

    Raises:
        ConfigError: there is none.
    """
    parts = text.split("/")
    if len(parts) not in (2, 3) or (len(parts) == 3 and not re.fullmatch("[0-9]{1,10}", parts[2])):
        raise ConfigError(f"{text}: does not name a trained network; expected {MODEL_FORMS}")
    dataset, variant, *seed = parts
    params = load_params(project.params_file)
    specs = comparison_runs(params, dataset, (variant,), [int(number) for number in seed] or None)
    record = read_dataset(project, dataset)
    runs = {run.spec.seed: run for spec in specs if (run := as_trained(project, spec, record)) is not None and (seed or run.scored)}
    if runs:
        store = open_store(project)
        scores = {number: run_scores(store, run).get(VALIDATION, -1.0) for number, run in runs.items()} if len(runs) > 1 else {}
        return runs[best_seed(runs, scores)]
    raise ConfigError(f"{text}: not trained here; train it: dml run {dataset} {variant}{f' --seed {seed[0]}' if seed else ''}")


def run_scores(store: Store, run: TrainedRun) -> dict[str, float]:
    """Return a run's metrics; empty if it is not scored.

    Raises:
        StoreError: they are damaged.
    """
    return {} if run.scored is None else finished_scores(store.pull(f"evaluate/{run.scored}"), run.scored) or {}


def trained_runs(project: Project) -> list[TrainedRun]:
    """Return every trained run of the standing comparison, in the order of `params.yaml`."""
    params = load_params(project.params_file)
    found = []
    for dataset in params.comparison.datasets:
        if not (project.packed(dataset) / "dataset.json").is_file():
            continue  # none of its runs can have an identity
        record = read_dataset(project, dataset)
        runs = (as_trained(project, spec, record) for spec in comparison_runs(params, dataset))
        found += [run for run in runs if run is not None]
    return found


def as_trained(project: Project, spec: RunSpec, dataset: DatasetRecord) -> TrainedRun | None:
    """Return the run in the store, made by the current code or older code, or None if it is not trained."""
    trained = _made(project, "train", train_step(spec, dataset))
    if trained is None:
        return None
    embedded = _made(project, "embed", embed_step(spec, trained))
    scored = _made(project, "evaluate", evaluate_step(spec, embedded)) if embedded is not None else None
    return TrainedRun(spec, dataset, trained, embedded, scored)


def run_of(project: Project, identity: str) -> TrainedRun | None:
    """Return the run of the standing comparison whose training has this identity, or None."""
    return next((run for run in trained_runs(project) if run.trained == identity), None)


def network_of(project: Project, identity: str) -> Path:
    """Return the folder of the network trained under this identity.

    Raises:
        ConfigError: no run here has it.
    """
    made = _folder(project, identity, "last")
    if made.exists():
        return made
    run = run_of(project, identity)
    if run is not None:
        return package(project, run)
    fetched = None
    if project.is_tracked:
        from tasks.tracking.registered import Registry

        fetched = Registry(project.tracking_uri).fetch_trained(identity, project.state / "models")
    if fetched is None:
        raise ConfigError(f"{identity}: no trained run has this identity; `dml models` lists all of them")
    return fetched


def package(project: Project, run: TrainedRun) -> Path:
    """Return the folder of a run's network, creating it from the checkpoint if needed.

    Raises:
        StoreError: the checkpoint is damaged, missing, or not of all epochs.
    """
    epoch = run.spec.evaluation.epoch
    folder = _folder(project, run.trained, epoch)
    with alone(folder.parent / ".lock"):
        if not folder.exists():
            kept = open_store(project).pull(f"train/{run.trained}")
            checkpoint = load_checkpoint(kept, run.trained)
            if checkpoint is None or checkpoint["num_epochs_done"] != run.spec.training.num_epochs:
                raise StoreError(f"{kept}: not the checkpoint of a finished training; train it again: dml reproduce")
            weights, _ = weights_of(checkpoint, epoch)
            training = run.spec.training
            num_classes = len(open_role(Path(run.dataset.folder), "train", training.validation).class_names)
            values = training.model_dump(mode="json")
            save_network(folder, values, num_classes, weights, run.trained, run.spec.evaluation.metric, run.spec.title)
    return folder


def _folder(project: Project, identity: str, epoch: str) -> Path:
    return project.state / "models" / (identity if epoch == "last" else f"{identity}-{epoch}")


def _made(project: Project, kind: str, step: StepIdentity) -> str | None:
    """Return the identity under which a step's files are in the store, or None; readers check whether the files are complete."""
    store = open_store(project)
    older = find_older(project.state, step)
    for identity in (step.identity, *([older.identity] if older is not None else [])):
        key = f"{kind}/{identity}"
        if any(True for _ in store.list_objects(key)) if store.is_remote else store.folder(key).is_dir():
            return identity
    return None
