"""Finished runs of the project's store, from which a reference is accepted."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tasks.data import dataset_if_prepared, read_dataset
from tasks.environment import Project, finished_records
from tasks.plans.results import load_result
from tasks.runs.finished import read_finished
from tasks.runs.identity import step_identities
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import BY_DEFAULT, Params, RunSpec
from tasks.storage import open_store
from tasks.watch.evidence import collect
from tasks.watch.records import Environment, Evidence


@dataclass(frozen=True)
class Candidates:
    """Finished runs of rows, and the runs that a reference of these rows needs besides.

    Attributes:
        finished: row -> seed -> seconds of its training; rows without a finished run are missing.
        unfinished: (row, seed) of the others.
    """

    finished: dict[str, dict[int, float]]
    unfinished: tuple[tuple[str, int], ...]


def find_candidates(project: Project, params: Params, name: str, specs: Mapping[str, RunSpec]) -> Candidates:
    """Return the runs that the present code has finished on the present data, of a dataset's standing comparison or a table.

    Of the standing comparison the default variants must be finished, of a table all rows; each with every seed that any row has. `specs`
    is row -> run with seed 0.

    Raises:
        DataError: a prepared dataset is damaged.
    """
    is_standing = name in params.comparison.datasets
    seeds = params.comparison.seeds if is_standing else sorted({run.seed for run in load_result(project, name).runs})
    finished: dict[str, dict[int, float]] = {}
    for row, spec in specs.items():
        if (dataset := dataset_if_prepared(project, spec.dataset)) is None:
            continue
        for seed in seeds:
            seconds = _finished_seconds(spec.model_copy(update={"seed": seed}), dataset)
            if seconds is not None:
                finished.setdefault(row, {})[seed] = seconds
    used = sorted({seed for by_seed in finished.values() for seed in by_seed})
    variants = params.comparison.variants
    needed = [row for row, spec in specs.items() if row in finished or not is_standing or variants[spec.variant].get(BY_DEFAULT, True)]
    return Candidates(finished, tuple((row, seed) for row in needed for seed in used if seed not in finished.get(row, {})))


def candidate_evidence(project: Project, runs: Iterable[RunSpec], environment: Environment) -> list[Evidence]:
    """Return the evidence of runs of `Candidates.finished`, with the environment in which a verification trained the same.

    Raises:
        StoreError: a file of a run differs from its record.
    """
    store, records = open_store(project), finished_records()
    collected = [collect(spec, read_dataset(project, spec.dataset), store, records, environment) for spec in runs]
    return [evidence for evidence in collected if evidence is not None]


def _finished_seconds(spec: RunSpec, dataset: DatasetRecord) -> float | None:
    """Return the seconds of a finished run's training; None if one of its steps is not finished."""
    records = finished_records()
    steps = [read_finished(records, step, identity) for step, identity in step_identities(spec, dataset).items()]
    return None if None in steps or steps[0] is None else float(steps[0].facts.get("seconds", 0))
