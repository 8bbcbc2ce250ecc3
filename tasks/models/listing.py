"""List the trained networks: the runs of the standing comparison, or of a table, in the store."""

import logging
from dataclasses import dataclass
from statistics import fmean

from dml_core.errors import StoreError
from tasks.environment import Project, finished_records
from tasks.models.trained_runs import TrainedRun, run_scores, trained_runs, trained_runs_of_table
from tasks.runs.best import VALIDATION, best_seed, said_best
from tasks.runs.finished import read_finished
from tasks.storage import Store, open_store

CHECKPOINT_FILE = "checkpoint.pt"  # that of `dml_core.training.checkpoints.file`, which imports torch
BySeed = dict[int, tuple[TrainedRun, dict[str, float]]]  # a run and its scores
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListedModel:
    """A trained network in the list.

    Attributes:
        run: its name; `resolve_model` takes those of the standing comparison, and the identity of a table's run.
        scores: metric -> fraction or count; empty if it is not scored.
        num_parameters: number of parameters of the network, without the loss.
        num_bytes: size of its checkpoint.
        identity: its own; of the last epoch's network it is that of the training.
        num_seeds: number of trained runs of the same variant.
        older_code: source files that differ from those that made the run.
    """

    run: str
    scores: dict[str, float]
    num_parameters: int
    num_bytes: int
    identity: str
    num_seeds: int
    older_code: tuple[str, ...] = ()


def is_table_name(name: str | None) -> bool:
    """Return whether a name is a table's, `<paper>/<file>`, and not a dataset's."""
    return name is not None and "/" in name


def list_models(project: Project, name: str | None, every_seed: bool) -> tuple[list[ListedModel], dict[str, str]]:
    """List the trained runs by dataset; per variant either the seed that its name without a seed refers to, or every seed.

    Of the standing comparison each dataset also has a line about its best run (`tasks.runs.best`).

    Variants are sorted by mean validation Recall@1, and the seeds of a variant by their own, the highest first; those without this score
    follow in the order of params.yaml, by seed.

    `name` is the only dataset of the standing comparison to list, or a table; None lists all of the standing comparison.

    Raises:
        ConfigError: as `trained_runs` and `trained_runs_of_table`.
    """
    store, is_table = open_store(project), is_table_name(name)
    runs = trained_runs_of_table(project, str(name)) if is_table else trained_runs(project, name)
    by_dataset: dict[str, dict[str, BySeed]] = {}
    for run in runs:
        variants = by_dataset.setdefault(run.spec.dataset, {})
        variants.setdefault(run.spec.label, {})[run.spec.seed] = (run, _scores(store, run))
    models, best = list[ListedModel](), dict[str, str]()
    for dataset, variants in by_dataset.items():
        validation = {
            variant: {seed: scores[VALIDATION] for seed, (_, scores) in by_seed.items() if VALIDATION in scores}
            for variant, by_seed in variants.items()
        }
        if not is_table:
            best[dataset] = said_best(validation)
        for variant in sorted(variants, key=lambda variant: -fmean(validation[variant].values()) if validation[variant] else 1.0):
            by_seed, scores = variants[variant], validation[variant]
            if every_seed:
                seeds = sorted(by_seed, key=lambda seed: (-scores.get(seed, -1.0), seed))
            else:
                scored = [seed for seed, (run, _) in by_seed.items() if run.scored is not None]
                seeds = [best_seed(scored or by_seed, scores)]
            models += [_listed(store, *by_seed[seed], len(by_seed)) for seed in seeds]
    return models, best


def _scores(store: Store, run: TrainedRun) -> dict[str, float]:
    """Return a run's metrics; empty if it is not scored or, with a warning, if they are damaged: other runs are still listed."""
    try:
        return run_scores(store, run)
    except StoreError as error:
        logger.warning("%s", error)
        return {}


def _listed(store: Store, run: TrainedRun, scores: dict[str, float], num_seeds: int) -> ListedModel:
    name = f"{run.spec.dataset}/{run.spec.label}/{run.spec.seed}"
    num_parameters, num_bytes = _recorded_sizes(run.trained) or _measured_sizes(store, run.trained)
    return ListedModel(name, scores, num_parameters, num_bytes, run.network, num_seeds, run.older_code)


def _recorded_sizes(trained: str) -> tuple[int, int] | None:
    """Return number of parameters and checkpoint size by the record of a training; None if it is missing, damaged or lacks the number."""
    try:
        record = read_finished(finished_records(), "train", trained)
    except StoreError as error:
        logger.warning("%s", error)
        return None
    if record is None or "num_parameters" not in record.facts:
        return None
    return record.facts["num_parameters"], sum(file.num_bytes for file in record.files if file.name == CHECKPOINT_FILE)


def _measured_sizes(store: Store, trained: str) -> tuple[int, int]:
    """Return number of parameters and size by the checkpoint, as for a run that another machine left in a bucket."""
    from dml_core.models.embedder import network_weights
    from dml_core.training.checkpoints.file import load_checkpoint, weights_of

    folder = store.pull(f"train/{trained}")
    checkpoint = load_checkpoint(folder)
    if checkpoint is None:
        return 0, 0
    weights, _ = weights_of(checkpoint, "last")
    num_parameters = sum(value.numel() for value in network_weights(weights).values())
    return num_parameters, (folder / CHECKPOINT_FILE).stat().st_size
