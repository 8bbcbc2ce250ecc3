"""Rebuild a damaged result file of a table from the finished runs in the store."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dml_core.errors import DataError, DmlError
from dml_core.training.epochs import EPOCHS
from tasks.data import read_dataset
from tasks.environment import Project, finished_records
from tasks.plans.local_state import LocalState
from tasks.runs.finished import read_finished
from tasks.runs.identity import StepIdentity, embed_step, evaluate_step, train_step
from tasks.runs.provenance import find_older
from tasks.runs.records import DatasetRecord, ScoreRecord, read_scores
from tasks.runs.specs import Params, RunSpec, comparison_runs, load_params, row_name
from tasks.runs.tuned import STANDING, TUNED
from tasks.storage import open_store
from tasks.tables.choice import Choice
from tasks.tables.file import STANDING_VARIANT, TableFile, load_table
from tasks.tables.result import MeasuredRun
from tasks.tables.runs import asked_runs, datasets_of

FIRST_SEEDS = 10
_SEED = re.compile(rb'seed\\?": ?(\d{1,9})\b')


def rebuilt_runs(project: Project, name: str, damaged: Path) -> tuple[MeasuredRun, ...]:
    """Return the runs of a table that are finished in the store with the current settings and data; their code may be older.

    Args:
        project: its store is read; its environment is set.
        name: the table.
        damaged: the damaged file. Only the seeds that it names are used, in addition to the first ten.
    """
    seeds = sorted({*range(FIRST_SEEDS), *_seeds(damaged)})
    try:
        params = load_params(project.params_file)
        runs = list(_standing(project, params, seeds) if name == STANDING else _of_table(project, params, name, seeds))
    except DmlError:
        return ()  # the parameters or the table's file are wrong; the command that uses them reports it
    found = (_measured(project, *run) for run in runs)
    return tuple(run for run in found if run is not None)


def _seeds(damaged: Path) -> set[int]:
    return {int(seed) for seed in _SEED.findall(damaged.read_bytes())} if damaged.is_file() else set()


Named = tuple[str, str, str, RunSpec, DatasetRecord]  # row, variant, dataset in the columns, run, record of the dataset


def _standing(project: Project, params: Params, seeds: list[int]) -> Iterator[Named]:
    seeds = sorted({*seeds, *params.comparison.seeds})
    for dataset in params.comparison.datasets:
        try:
            record = read_dataset(project, dataset)
        except DataError:
            continue  # not prepared: no run of it has an identity
        for spec in comparison_runs(params, dataset, seeds=seeds):
            yield row_name(spec.variant), STANDING_VARIANT, dataset, spec, record


def _of_table(project: Project, params: Params, name: str, seeds: list[int]) -> Iterator[Named]:
    local, table = LocalState(project, params), load_table(name)
    seen: set[tuple[str, str, int]] = set()
    for choice in _choices(table, tuple(seeds)):
        try:
            asked = asked_runs([name], choice)
        except DmlError:
            continue  # the row is only quoted, the variant is not tuned, or the protocol does not have the dataset
        for (_, dataset), specs in asked.runs.items():
            record = local.dataset(dataset, table)
            for spec in specs:
                if (dataset, spec.label, spec.seed) not in seen:
                    seen.add((dataset, spec.label, spec.seed))
                    yield str(spec.row), spec.variant, dataset, spec.model_copy(update={"dataset": record.name}), record


def _choices(table: TableFile, seeds: tuple[int, ...]) -> Iterator[Choice]:
    """Yield every choice that selects a run of the table: by row, dataset, variant, track and epoch."""
    for row, entry in table.rows.items():
        for dataset in datasets_of(table):
            one = Choice((row,), (dataset,), seeds=seeds)
            yield one
            yield from (replace(one, variant=variant) for variant in (*entry.variants, TUNED))
            yield replace(one, track="common")
            yield replace(one, epochs=EPOCHS)


def _measured(project: Project, row: str, variant: str, dataset: str, spec: RunSpec, record: DatasetRecord) -> MeasuredRun | None:
    """Return a run as its flow would add it to the result; None if its scores in the store are missing or damaged."""
    for trained, scored, older_code in _identities(project, spec, record):
        try:
            kept = read_finished(finished_records(), "evaluate", scored)
            if not isinstance(kept, ScoreRecord):
                continue
            scores = read_scores(kept, open_store(project).pull(kept.key))
        except DmlError:
            continue
        return MeasuredRun(
            row=row,
            variant=variant,
            epoch=spec.evaluation.epoch,
            dataset=dataset,
            project_dataset=spec.dataset,
            seed=spec.seed,
            identity=scored,
            digest=record.digest,
            scores=scores.metrics,
            figures=kept.key,
            training=spec.training.model_dump(mode="json"),
            evaluation=spec.evaluation.model_dump(mode="json"),
            seconds=_training_seconds(trained),
            older_code=older_code,
        )
    return None


def _training_seconds(trained: str) -> float | None:
    """Return a run's training time in seconds; None if its record is missing or damaged, which affects no score."""
    try:
        record = read_finished(finished_records(), "train", trained)
    except DmlError:
        return None
    return None if record is None else record.facts.get("seconds")


def _identities(project: Project, spec: RunSpec, record: DatasetRecord) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield identities of a run's network and scores, those of the current code first, and the code files that differ."""
    for trained, of_training in _made(project, train_step(spec, record)):
        for embedded, of_embedding in _made(project, embed_step(spec, trained)):
            for scored, of_scoring in _made(project, evaluate_step(spec, embedded)):
                yield trained, scored, tuple(sorted({*of_training, *of_embedding, *of_scoring}))


def _made(project: Project, step: StepIdentity) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield step.identity, ()
    older = find_older(project.state, step)
    if older is not None:
        yield older.identity, older.files
