"""The steps of a run, and which of them are finished: decided from records and files before anything is started, without Prefect."""

import logging
import os
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from tasks.environment import finished_records
from tasks.runs.finished import Code, finished_identities, read_finished, record_provenance
from tasks.runs.identity import StepIdentity, embed_step, evaluate_step, published_identity, train_step
from tasks.runs.records import DatasetRecord, ScoreRecord, StepRecord, read_scores
from tasks.runs.specs import RunSpec
from tasks.sealed import or_set_aside
from tasks.storage import HEADS_AT_ONCE, READS_AT_ONCE, Store
from tasks.tracking.published import CurrentRuns

PLANNED_AT_ONCE = READS_AT_ONCE // HEADS_AT_ONCE  # runs whose files are compared: as many as a bucket's client has connections for
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedStep:
    """A step: its identity, its record if it is finished, and the source files that differ from those that made it."""

    of: StepIdentity
    record: StepRecord | None = None
    older_code: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSteps:
    """The three steps of a run."""

    spec: RunSpec
    train: PlannedStep
    embed: PlannedStep
    evaluate: PlannedStep

    @property
    def steps(self) -> tuple[PlannedStep, PlannedStep, PlannedStep]:
        """The steps in their order."""
        return self.train, self.embed, self.evaluate

    @property
    def records(self) -> list[StepRecord] | None:
        """The records of the three steps, or None if one has to run."""
        records = [step.record for step in self.steps if step.record is not None]
        return records if len(records) == 3 else None

    @property
    def older_code(self) -> tuple[str, ...]:
        """The source files that differ from those that made the run."""
        return tuple(sorted({file for step in self.steps for file in step.older_code}))

    @property
    def published_id(self) -> str:
        """The identity under which the run is published to MLflow."""
        return published_identity(self.spec, self.evaluate.of.identity)

    def is_in(self, published: CurrentRuns, store: Store) -> bool:
        """Return whether the run is finished, and is one of its comparison's published runs with the same scores."""
        run, scores = published.get((self.published_id, self.spec.label)), self.evaluate.record
        if run is None or self.records is None or not isinstance(scores, ScoreRecord):
            return False
        return run.has_scores(read_scores(scores, store.checked(scores)).metrics)


def plan_runs(
    runs: Sequence[RunSpec],
    prepared: Mapping[str, DatasetRecord],
    state: Path,
    store: Store,
    code: Code = "strict",
    force: bool = False,
    known: Mapping[str, Any] = {},
) -> Generator[RunSteps]:
    """Yield the steps of each run in order, while the files of the next runs are compared; what several runs share, once.

    Close it after an error, or the process does not end before all runs are compared.

    Args:
        store: store of the steps' files, which are compared with their hashes.
        code: "keep" to accept a step made by other code, if the present code has made none.
        force: run every step, finished or not.
        known: identity -> record of a step whose files were compared before, or anything else for a step that runs already.

    Raises:
        NewerFormatError: a newer version of the program wrote a record.
    """
    compared, turns = dict(known), dict[str, Lock]()

    def plan_step(spec: RunSpec, name: str, of: StepIdentity, *read: PlannedStep) -> PlannedStep:
        if force or spec.is_smoke:
            return PlannedStep(of)
        if of.identity in compared:
            record = compared[of.identity]
            return PlannedStep(of, record if isinstance(record, StepRecord) else None)
        inputs = [step.record for step in read if step.record is not None]
        if len(inputs) < len(read):
            finished_record(name, of.identity, store, spec.title)  # warns of damage
            return PlannedStep(of)  # whether it is finished depends on what its inputs become: `StepLock` decides
        record = finished_record(name, of.identity, store, spec.title, inputs)
        if record is not None:
            record_provenance(state, of)
            return PlannedStep(of, record)
        older = finished_identities(state, of) if code == "keep" else {}
        for identity, files in older.items():
            if identity != of.identity and (record := finished_record(name, identity, store, spec.title, inputs)) is not None:
                return PlannedStep(replace(of, identity=identity), record, files)
        return PlannedStep(of)

    def plan_run(spec: RunSpec) -> RunSteps:
        train = train_step(spec, prepared[spec.dataset])
        with turns.setdefault(train.identity, Lock()):
            trained = plan_step(spec, "train", train)
            embedded = plan_step(spec, "embed", embed_step(spec, trained.of.identity), trained)
            scored = plan_step(spec, "evaluate", evaluate_step(spec, embedded.of.identity), trained, embedded)
            compared.update({step.of.identity: step.record for step in (trained, embedded, scored)})
        return RunSteps(spec, trained, embedded, scored)

    with ThreadPoolExecutor(PLANNED_AT_ONCE) as pool:
        contexts = [copy_context() for _ in runs]  # of the flow, for its log
        yield from pool.map(lambda inside, spec: inside.run(plan_run, spec), contexts, runs)


def finished_record(
    step: str, identity: str, store: Store, title: str, inputs: Sequence[StepRecord] = (), warn: bool = True
) -> StepRecord | None:
    """Return a step's stored record of this identity if every file is as recorded, or None, with a warning about damage.

    Records of older versions have no `inputs` and are accepted with any. A damaged record is renamed; its rerun step does not overwrite it.
    The folder of a finished step gets the current time.

    Args:
        title: title of the run for the warning.
        inputs: records of the steps that it reads: it must have been made from their files. Without them, from any.

    Raises:
        NewerFormatError: a newer version of the program wrote the record.
    """
    records = finished_records()
    read = partial(read_finished, records, step, identity)
    record = or_set_aside(records / identity, read, f"; {step} of {title} runs again")
    if record is None:
        return None
    if inputs and not record.is_made_from(inputs):
        fault = f"the files that {step} read were made again with other content; it runs again"
    elif changed := store.changed_files(record):
        fault = f"{', '.join(changed)} changed or missing in {store.folder(record.key)}; {step} runs again"
    else:
        with suppress(OSError):  # a remote store may have no folder here
            os.utime(store.folder(record.key))  # `dml gc` keeps what was used recently
        return record
    if warn:
        logger.warning("%s: %s", title, fault)
    return None
