"""What is trained: the standing comparison's runs as the store has them, and what MLflow's registry leads to."""

import json
from dataclasses import dataclass
from pathlib import Path

from dml_core.training.checkpoint import CHECKPOINT_FILE, load_checkpoint, weights_of
from tasks.environment import Project
from tasks.runs.records import METRICS_FILE
from tasks.storage import Store
from tasks.use.models import TrainedRun, trained_runs


@dataclass(frozen=True)
class ListedModel:
    """A trained network as it is listed.

    Attributes:
        run: its name, as `resolve_model` takes it.
        scores: metric -> fraction or count; none where it is not scored.
        num_parameters: of the network, without the loss.
        num_bytes: of its checkpoint.
        identity: of its training.
        num_seeds: trained runs of the same variant.
    """

    run: str
    scores: dict[str, float]
    num_parameters: int
    num_bytes: int
    identity: str
    num_seeds: int


def list_models(project: Project, dataset: str | None, every_seed: bool) -> list[ListedModel]:
    """The trained runs, best Recall@1 first within a dataset; of each variant the best seed, or every one.

    Args:
        project: whose.
        dataset: that one alone; None for all.
        every_seed: list all seeds.
    """
    store = Store(project.store, project.state / "cache")
    by_variant: dict[tuple[str, str], list[tuple[TrainedRun, dict[str, float]]]] = {}
    for run in trained_runs(project):
        if dataset in (None, run.spec.dataset):
            by_variant.setdefault((run.spec.dataset, run.spec.variant), []).append((run, _scores(store, run)))
    found = []
    for runs in by_variant.values():
        best_first = sorted(runs, key=lambda one: -one[1].get("recall@1", -1.0))
        found += [_listed(store, run, scores, len(runs)) for run, scores in (best_first if every_seed else best_first[:1])]
    datasets = list(dict.fromkeys(name for name, _ in by_variant))
    return sorted(found, key=lambda model: (datasets.index(model.run.partition("/")[0]), -model.scores.get("recall@1", -1.0)))


def _scores(store: Store, run: TrainedRun) -> dict[str, float]:
    if run.scored is None:
        return {}
    path = store.pull(f"evaluate/{run.scored}") / METRICS_FILE
    found: dict[str, float] = json.loads(path.read_bytes()) if path.is_file() else {}
    return found


def _listed(store: Store, run: TrainedRun, scores: dict[str, float], num_seeds: int) -> ListedModel:
    folder = store.pull(f"train/{run.trained}")
    checkpoint = load_checkpoint(folder)
    weights = weights_of(checkpoint, "last")[0] if checkpoint is not None else {}
    num_parameters = sum(value.numel() for name, value in weights.items() if name.startswith("model."))
    name = f"{run.spec.dataset}/{run.spec.variant}/{run.spec.seed}"
    return ListedModel(name, scores, num_parameters, _size(folder / CHECKPOINT_FILE), run.trained, num_seeds)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
