"""Find finished runs in the store by their specification: specification -> identities -> folders.

Neither Prefect nor MLflow is needed. If the current code has not made a run, the latest one made by other code is shown, and marked.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dml_core.data.store.embedded import EmbeddedImages
from dml_core.errors import ConfigError, DmlError, StoreError
from tasks.data import dataset_if_prepared
from tasks.environment import Project
from tasks.plans.results import standing_seeds
from tasks.runs.best import VALIDATION, best_seed
from tasks.runs.embeddings import MANIFEST_FILE
from tasks.runs.finished import finished_scores, parse_run_name, run_identities
from tasks.runs.params.comparison import comparison_runs, runnable_runs
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import Params, RunSpec, comparison_title
from tasks.scores import sides
from tasks.storage import Store, open_store
from tasks.wording import reproduce_command

logger = logging.getLogger(__name__)


class NotRunError(DmlError):
    """The named run does not exist."""


@dataclass(frozen=True)
class FinishedRun:
    """A run with its scores.

    Attributes:
        spec: its specification.
        identity: identity of its scores.
        is_current: whether the current code would make the same run.
        metrics: content of `metrics.json`.
        scores: folder of the scores and figures.
        embeddings: key of the embeddings in the store.
    """

    spec: RunSpec
    identity: str
    is_current: bool
    metrics: dict[str, float]
    scores: Path
    embeddings: str


@dataclass(frozen=True)
class SelectedRuns:
    """The finished runs of a run's page or of a comparison.

    Attributes:
        title: title of the comparison, as in MLflow and reports.
        dataset: its record.
        is_comparison: True for several variants, False for one run.
        runs: every finished run of every selected variant, in the order of `params.yaml`.
        seed: seed of the runs whose pictures are shown.
        missing: variants without a run with that seed.
    """

    title: str
    dataset: DatasetRecord
    is_comparison: bool
    runs: tuple[FinishedRun, ...]
    seed: int
    missing: tuple[str, ...]

    @property
    def shown(self) -> list[FinishedRun]:
        """Runs that have a page."""
        return [run for run in self.runs if run.spec.seed == self.seed]

    def older_code(self, variant: str) -> list[int]:
        """Return the seeds of a variant whose runs older code made; the means over seeds have them, too."""
        return [run.spec.seed for run in self.runs if run.spec.variant == variant and not run.is_current]


def choose(project: Project, params: Params, named: str, seed: int | None = None, overrides: Sequence[str] = ()) -> SelectedRuns:
    """Return the runs of `DATASET/VARIANT[/SEED]`, or of the comparison `DATASET`.

    `params` have the overrides applied. The seed is that of the runs whose pictures are shown; by default the first of `comparison.seeds`
    for a comparison, and the best (`tasks.runs.best`) for a run named without a seed.

    Raises:
        ConfigError: a name is not in params.yaml.
        DataError: the prepared dataset is damaged.
        NotRunError: no run matches, or the dataset is not prepared; the command in the message prepares it, too.
    """
    name = parse_run_name(named.strip("/"))
    if name is None:
        raise ConfigError(f"{named}: write a run as DATASET/VARIANT or DATASET/VARIANT/SEED, and a comparison as DATASET")
    if name.seed is not None and seed is not None:
        raise ConfigError(f"{named} names a seed, and so does --seed; give one of them")
    dataset, is_run = name.dataset, name.variant is not None
    seed = seed if name.seed is None else name.seed
    known = standing_seeds(project, params).get(dataset, params.comparison.seeds)
    seeds = sorted({*known, *([] if seed is None else [seed])})
    runnable = [] if is_run else runnable_runs(params, dataset, seeds, overrides)
    specs = runnable or comparison_runs(params, dataset, None if name.variant is None else (name.variant,), seeds, overrides)
    record, store = dataset_if_prepared(project, dataset), open_store(project)
    found = [_finished(project, store, record, spec) for spec in specs] if record is not None else []
    runs = {(run.spec.variant, run.spec.seed): run for run in found if run is not None}
    if seed is None and is_run and runs:
        validation = {of_seed: run.metrics[VALIDATION] for (_, of_seed), run in runs.items() if VALIDATION in run.metrics}
        seed = best_seed((of_seed for _, of_seed in runs), validation)
    elif seed is None:
        seed = params.comparison.seeds[0]
    variants = list(dict.fromkeys(spec.variant for spec in specs))
    missing = tuple(variant for variant in variants if (variant, seed) not in runs)
    if record is None or len(missing) == len(variants):
        what = f"{missing[0]} on {dataset}" if is_run else f"the comparison on {dataset}"
        command = reproduce_command(dataset, overrides, missing[0] if is_run else None, seed)
        finished = ", ".join(str(of_seed) for of_seed in sorted({of_seed for _, of_seed in runs}))
        others = f" (finished seeds: {finished})" if finished else ""
        raise NotRunError(f"{what} has no finished run with seed {seed}{others}; run {command}")
    shown = tuple(run for (variant, _), run in runs.items() if variant not in missing)
    return SelectedRuns(comparison_title(dataset, params.evaluation.role, overrides), record, not is_run, shown, seed, missing)


def _finished(project: Project, store: Store, dataset: DatasetRecord, spec: RunSpec) -> FinishedRun | None:
    """Return the run by the first of its identities whose scores and embeddings are in the store, or None; damaged scores are warned of."""
    for run in run_identities(project.state, spec, dataset):
        scores = store.pull(f"evaluate/{run.scored}")
        try:
            metrics = finished_scores(scores, trained=run.trained, embedded=run.embedded, scored=run.scored)
        except StoreError as error:  # other runs are still shown
            logger.warning("%s", error)
            continue
        if metrics is not None and (store.is_remote or (store.folder(f"embed/{run.embedded}") / MANIFEST_FILE).is_file()):
            return FinishedRun(spec, run.scored, not run.older_code, metrics, scores, f"embed/{run.embedded}")
    return None


def open_sides(project: Project, run: FinishedRun, dataset: DatasetRecord) -> tuple[EmbeddedImages, EmbeddedImages]:
    """Return queries and gallery of a run: one object if the queries are also the gallery.

    Raises:
        StoreError: the embeddings are missing, or of another dataset.
    """
    folder = open_store(project).pull(run.embeddings)
    if not (folder / MANIFEST_FILE).is_file():
        raise StoreError(f"{folder}: the embeddings of {run.spec.title} are missing; rerun dml reproduce to compute them again")
    queries, gallery = sides.open_sides(folder, Path(dataset.folder), run.spec.training.validation)
    for side in (queries, gallery):
        if not np.array_equal(side.labels, side.dataset.labels):
            raise StoreError(
                f"{folder}: embeddings of other images than those in {dataset.folder}; run dml reproduce --dataset {dataset.name}"
            )
    return queries, gallery
