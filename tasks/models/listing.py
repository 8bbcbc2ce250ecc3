"""List the trained networks: the standing comparison's runs in the store."""

import logging
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from dml_core.errors import StoreError
from dml_core.training.checkpoints.file import CHECKPOINT_FILE, load_checkpoint, weights_of
from tasks.environment import Project
from tasks.models.lookup import TrainedRun, run_scores, trained_runs
from tasks.runs.best import VALIDATION, best_seed, said_best
from tasks.storage import Store, open_store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListedModel:
    """A trained network in the list.

    Attributes:
        run: its name, as `resolve_model` takes it.
        scores: metric -> fraction or count; empty if it is not scored.
        num_parameters: number of parameters of the network, without the loss.
        num_bytes: size of its checkpoint.
        identity: identity of its training.
        num_seeds: number of trained runs of the same variant.
    """

    run: str
    scores: dict[str, float]
    num_parameters: int
    num_bytes: int
    identity: str
    num_seeds: int


@dataclass(frozen=True)
class Listing:
    """Trained networks, and for each dataset a line about its best run (`tasks.runs.best`)."""

    models: tuple[ListedModel, ...]
    best: dict[str, str]


def list_models(project: Project, dataset: str | None, every_seed: bool) -> Listing:
    """List the trained runs by dataset; per variant either the seed that its name without a seed refers to, or every seed.

    Variants are sorted by mean validation Recall@1, and the seeds of a variant by their own, the highest first; those without this score
    follow in the order of params.yaml, by seed.

    Args:
        project: project whose runs are listed.
        dataset: the only dataset to list; None for all.
        every_seed: list all seeds.
    """
    store = open_store(project)
    by_dataset: dict[str, dict[str, dict[int, tuple[TrainedRun, dict[str, float]]]]] = {}
    for run in trained_runs(project):
        if dataset in (None, run.spec.dataset):
            variants = by_dataset.setdefault(run.spec.dataset, {})
            variants.setdefault(run.spec.variant, {})[run.spec.seed] = (run, _scores(store, run))
    models, best = [], {}
    for name, variants in by_dataset.items():
        scores = {
            variant: {seed: scores[VALIDATION] for seed, (_, scores) in runs.items() if VALIDATION in scores}
            for variant, runs in variants.items()
        }
        best[name] = said_best(scores)
        for variant in sorted(variants, key=lambda variant: -fmean(scores[variant].values()) if scores[variant] else 1.0):
            runs, validation = variants[variant], scores[variant]
            scored = [seed for seed, (run, _) in runs.items() if run.scored is not None] or list(runs)
            seeds = sorted(runs, key=lambda seed: (-validation.get(seed, -1.0), seed)) if every_seed else [best_seed(scored, validation)]
            models += [_listed(store, *runs[seed], len(runs)) for seed in seeds]
    return Listing(tuple(models), best)


def _scores(store: Store, run: TrainedRun) -> dict[str, float]:
    """Return a run's metrics; empty if it is not scored or, with a warning, if they are damaged: other runs are still listed."""
    try:
        return run_scores(store, run)
    except StoreError as error:
        logger.warning("%s", error)
        return {}


def _listed(store: Store, run: TrainedRun, scores: dict[str, float], num_seeds: int) -> ListedModel:
    folder = store.pull(f"train/{run.trained}")
    checkpoint = load_checkpoint(folder)
    weights = weights_of(checkpoint, "last")[0] if checkpoint is not None else {}
    num_parameters = sum(value.numel() for name, value in weights.items() if name.startswith("model."))
    name = f"{run.spec.dataset}/{run.spec.variant}/{run.spec.seed}"
    return ListedModel(name, scores, num_parameters, _size(folder / CHECKPOINT_FILE), run.trained, num_seeds)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
