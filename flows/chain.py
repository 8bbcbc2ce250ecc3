"""One run: train -> embed -> evaluate -> publish, each a Prefect task. The chain is defined only here.

A finished step (`flows.reuse.planned`) has no task: its record takes the place of the task's result. Others run, all with `force`. A step
shared by several chains runs once: chains of one flow wait for the same task, and flows of several processes for its lock
(`flows.reuse.step_lock`).
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ThreadPoolTaskRunner

from dml_core.errors import DmlError, StoreError
from dml_core.training.checkpoints.file import CHECKPOINT_FILE
from dml_core.training.history import Progress, read_history
from flows.outcomes import Add, Failure, Outcome
from flows.reuse.planned import PlannedStep, RunSteps, plan_runs
from flows.reuse.step_cache import SealedJSON, forget_failure
from flows.reuse.step_lock import StepLock
from flows.services import SCORED_AT_ONCE, Services
from tasks.checks import prepare_machine
from tasks.environment import finished_records, num_cores
from tasks.locks import alone
from tasks.plans.times import TimedStep, note_rate, placement_here, read_rates, step_estimate
from tasks.project_copies import datasets_of
from tasks.remote_images.reading import push_ranges
from tasks.runs import identity
from tasks.runs.finished import finished_identities
from tasks.runs.identity import DRAWING_MODULES, published_identity, source_digest
from tasks.runs.records import (
    CheckpointRecord,
    DatasetRecord,
    EmbeddingRecord,
    RunReport,
    ScoreRecord,
    StepRecord,
    describe_folder,
    hash_of_files,
    read_scores,
)
from tasks.runs.replaced_data import of_same_data
from tasks.runs.specs import MOST_CONCURRENT_RUNS, RunSpec
from tasks.scores.earlier_figures import CONTENT
from tasks.tracking.live import LiveCurves
from tasks.wording import counted
from tasks.workers.group import WorkerGroup
from tasks.workers.jobs import InfrastructureError, Job

# A step that waits for the previous one also holds a thread. Worker groups and `Services` limit how many train and are scored at a time.
STEPS_AT_ONCE: Any = ThreadPoolTaskRunner(max_workers=4 * MOST_CONCURRENT_RUNS)
logger = logging.getLogger(__name__)


class Chain:
    """One run's submitted steps; each starts when the previous one is done.

    A smoke run always runs again, since it tests whether the chain runs now.

    Args:
        planned: its steps, and which of them are finished.
    """

    def __init__(self, planned: RunSteps, dataset: DatasetRecord, services: Services) -> None:
        spec = self.spec = planned.spec
        self._digest = dataset.digest
        self._services = services
        self._force = services.force or spec.is_smoke
        self._locks: dict[str, StepLock] = {}
        self.must_train = planned.train.record is None and planned.train.of.identity not in services.submitted
        self.network_key = f"train/{planned.train.of.identity}"
        self._older_code, self._published_id = planned.older_code, planned.published_id
        must_publish = services.is_first_smoke(spec) if spec.is_smoke else not planned.is_in(services.published(spec), services.store)
        checkpoint = self._submit(train, planned.train, spec, dataset, self._published_id, services)
        embeddings = self._submit(embed, planned.embed, spec, dataset, checkpoint, services)
        scores = self._submit(evaluate, planned.evaluate, spec, dataset, checkpoint, embeddings, services)
        self._steps = {"train": checkpoint, "embed": embeddings, "evaluate": scores}
        self._publishing: Any = None
        if must_publish or self._older_code:
            key = f"publish {spec.comparison} / {spec.label} / {self._published_id}"
            if key not in services.submitted:
                services.submitted[key] = publish.submit(spec, dataset, checkpoint, embeddings, scores, services, self._older_code)
            self._publishing = services.submitted[key]
        parts = (*self._steps.values(), self._publishing)
        self._futures = [part for part in parts if part is not None and not isinstance(part, StepRecord)]

    def _submit(self, step: Any, planned: PlannedStep, *inputs: Any) -> Any:
        """Return a finished step's record; else submit it, whose lock is released when its record is stored, once in this flow."""
        submitted, key = self._services.submitted, planned.of.identity
        if planned.record is not None:
            submitted.setdefault(key, planned.record)
        if key not in submitted:
            lock = self._locks[step.name] = StepLock(step, planned.of, self.spec.title, self._services, self._force)
            # Named, since a worker's process has read Prefect's settings before the project sets them.
            named = step.with_options(task_run_name=f"{step.name} {{spec.short}}", result_storage=finished_records())
            submitted[key] = named.submit(key, *inputs, lock=lock)
            submitted[key].add_done_callback(lock.release)
        return submitted[key]

    def when_ended(self, then: Callable[[], object]) -> None:
        """Call `then` in some thread once the last step, which waits for the others, has ended; this may be now."""
        if self._futures:
            self._futures[-1].add_done_callback(lambda _: then())
        else:
            then()

    def wait(self) -> Outcome | Exception:
        """Wait until every step has ended; return the run's result, or the error of the first step that failed.

        Its numbers are from the file whose hash was recorded; a file that has changed since, or cannot be read, is an error too.
        """
        for future in self._futures:
            future.wait()
            if future.state.is_failed() or future.state.is_crashed():
                self._services.tracker.end_failed(self.spec.comparison, self._published_id)
                error = future.state.result(raise_on_failure=False)
                return error if isinstance(error, Exception) else InfrastructureError(f"{self.spec.title}: {future.state.message}")
        # not if it was done before, by another run of this flow, or by another process meanwhile
        ran = {step: step in self._locks and not self._locks[step].taken_over for step in self._steps}
        delivered = self._publishing is None or self._publishing.result() is not None
        records = [step if isinstance(step, StepRecord) else step.result() for step in self._steps.values()]
        try:
            return Outcome.of(self.spec, records, ran, delivered, self._services.store, self._digest, self._older_code)
        except DmlError as error:
            return error


def run_chains(
    runs: Sequence[RunSpec], prepared: Mapping[str, DatasetRecord], services: Services, add: Add = lambda *_: None
) -> tuple[list[Outcome], list[Failure]]:
    """Submit the chain of every run, of any comparison on any of the prepared datasets, and wait for all (`finish`).

    Raises:
        ConfigError: weights that a run starts from are missing, damaged or of another network; nothing has been started.
    """
    prepare_machine(runs_to_train(runs, prepared, services), services.scale, services.display.say)
    chains = submit_chains(runs, prepared, services)
    services.announce(len(chains), sum(chain.must_train for chain in chains))
    return finish(chains, services, add)


def submit_chains(runs: Sequence[RunSpec], prepared: Mapping[str, DatasetRecord], services: Services) -> list[Chain]:
    """Submit and return the chain of every run: first some untrained ones, for the workers, while files of the others are compared.

    Not all of them, as they would hold the threads in which trained ones are scored.
    """
    untrained = [number for number, spec in enumerate(runs) if not _is_trained(spec, prepared[spec.dataset], services)]
    order = [*untrained[: 2 * services.scale.concurrent_runs]]
    order += sorted({*range(len(runs))}.difference(order))
    ordered, state = [runs[number] for number in order], services.project.state
    with contextlib.closing(
        plan_runs(ordered, prepared, state, services.store, services.code, services.force, services.submitted)
    ) as planned:
        chains = {number: Chain(steps, prepared[steps.spec.dataset], services) for number, steps in zip(order, planned, strict=True)}
    return [chains[number] for number in range(len(runs))]


def finish(chains: Sequence[Chain], services: Services, add: Add = lambda *_: None) -> tuple[list[Outcome], list[Failure]]:
    """Wait for every run, show each as it ends, and `add` those that have ended, together if others end meanwhile.

    With `fail_fast`, none starts after a failure. The network of smoke runs is deleted after its last use: a hundred would fill a disk.
    """
    outcomes: dict[int, Outcome] = {}
    failures: list[Failure] = []
    num_users = Counter(chain.network_key for chain in chains if chain.spec.is_smoke)
    ended: SimpleQueue[int] = SimpleQueue()  # the numbers of the runs, in the order in which they end
    for number, chain in enumerate(chains):
        chain.when_ended(partial(ended.put, number))
    added = 0, 0
    for _ in chains:
        chain = chains[number := ended.get()]
        result = chain.wait()
        if isinstance(result, Outcome):
            outcomes[number] = result
            if chain.spec.is_smoke:
                num_users[chain.network_key] -= 1
                if not num_users[chain.network_key]:
                    services.store.clear(chain.network_key)
            _show(result, chain.must_train, services)
        elif not services.stopping.is_set():
            failures.append(Failure.of(chain.spec, result))
            services.display.finished(chain.spec.title, chain.must_train, failures[-1].line)
            if services.fail_fast:
                services.stop()
        if ended.empty():
            add([*outcomes.values()][added[0] :], failures[added[1] :])
            added = len(outcomes), len(failures)
    if reused := sum(not any(outcome.ran.values()) for outcome in outcomes.values()):
        services.display.say(f"{reused} of {counted(len(chains), 'run')} reused")
    return [outcomes[number] for number in sorted(outcomes)], failures


def _show(outcome: Outcome, trained: bool, services: Services) -> None:
    """Print one line for a run if any of its steps ran, and log all its scores and folders."""
    services.display.finished(outcome.spec.title, trained, outcome.line if any(outcome.ran.values()) else None)
    scores = ", ".join(f"{name} {value:.4f}" for name, value in outcome.scores.metrics.items())
    logger.info("%s: %s; network in %s, figures in %s", outcome.spec.title, scores, outcome.network, outcome.figures)


def runs_to_train(runs: Sequence[RunSpec], prepared: Mapping[str, DatasetRecord], services: Services) -> list[RunSpec]:
    """Return the runs that have to be trained; runs on a dataset that is not prepared all have to."""
    return [
        spec for spec in runs if services.force or spec.dataset not in prepared or not _is_trained(spec, prepared[spec.dataset], services)
    ]


def _is_trained(spec: RunSpec, dataset: DatasetRecord, services: Services) -> bool:
    """Return whether a run's training has a record; its files are checked when its chain is created."""
    step = identity.train_step(spec, dataset)
    has_record = (finished_records() / step.identity).is_file()
    return has_record or (services.code == "keep" and len(finished_identities(services.project.state, step)) > 1)


# ---------------------------------------------------------------- the steps


def _may_be_retried(failed: Any, run: Any, state: Any) -> bool:
    """Return whether a failed step is retried: not if the user has to fix something."""
    return not isinstance(state.result(raise_on_failure=False), DmlError)


_STEP_OPTIONS: dict[str, Any] = {
    "cache_key_fn": lambda context, parameters: parameters["identity"],  # the name of its record; a finished step is not submitted
    "refresh_cache": True,
    "persist_result": True,
    "on_failure": [forget_failure],
    "result_serializer": SealedJSON(),
    "retries": 1,
    "retry_delay_seconds": 5,
    "retry_condition_fn": _may_be_retried,
}


@task(task_run_name="prepare {dataset}", cache_policy=NO_CACHE, retries=1, retry_delay_seconds=5, retry_condition_fn=_may_be_retried)
def prepare(services: Services, dataset: str) -> DatasetRecord:
    """Update a dataset through DVC, and keep it as it is until the end of the flow."""
    return services.use_dataset(dataset)


@task(**_STEP_OPTIONS)
def train(identity: str, spec: RunSpec, dataset: DatasetRecord, published_id: str, services: Services, lock: StepLock) -> CheckpointRecord:
    """Train the run on the flow's workers: from its last intact checkpoint if it was interrupted, else from the initial weights."""
    key, store = f"train/{identity}", services.store

    def work(group: WorkerGroup) -> CheckpointRecord:
        with services.meter.step("train", identity, _predicted("train", spec, dataset, services), lock.from_start, waits=True) as meter:
            logger.info("%s: training", spec.title)
            live = LiveCurves(services.tracker, spec.comparison, published_id, spec)
            store.clear(key, keep=() if lock.from_start else (CHECKPOINT_FILE,))
            lock.from_start = False

            def watch(message: Progress) -> None:
                if message.note is not None:
                    services.display.say(f"{spec.title}: {message.note}")
                    return
                meter.reached(message.epoch * message.num_steps + message.step)
                services.display(spec.title, message)
                live(message)

            with of_same_data(dataset, partial(store.clear, key)), contextlib.closing(live):
                facts = group.run(_job("train", spec, dataset, key, "", services, lock), watch, meter.workers)
            files = describe_folder(store.pull(key))
            facts |= services.meter.facts(meter)
        if spec.training.num_epochs:
            note_rate(services.project.state, "train", spec, dataset, facts)
        return CheckpointRecord(step="train", identity=identity, key=key, files=files, facts=facts)

    return lock.run_once(work, partial(services.turn, is_to_embed=False))


@task(**_STEP_OPTIONS)
def embed(
    identity: str, spec: RunSpec, dataset: DatasetRecord, checkpoint: CheckpointRecord, services: Services, lock: StepLock
) -> EmbeddingRecord:
    """Extract the embeddings of the images that the run is scored on, on the same workers."""
    key, store = f"embed/{identity}", services.store

    def work(group: WorkerGroup) -> EmbeddingRecord:
        services.display.step(spec.title, "embedding")
        store.clear(key)
        with services.meter.step("embed", identity, _predicted("embed", spec, dataset, services), lock.is_forced, waits=True) as meter:
            with of_same_data(dataset, partial(store.clear, key)):
                facts = group.run(_job("embed", spec, dataset, checkpoint.key, key, services, lock), lambda _: None, meter.workers)
            files = describe_folder(store.pull(key))
            if store.is_remote and CHECKPOINT_FILE in store.changed_files(checkpoint):  # by a host that does not know this one's locks
                how = "another flow trained this run meanwhile, to another network, or its checkpoint is gone"
                raise StoreError(f"{spec.title}: {how}; rerun the command")
            facts |= services.meter.facts(meter)
        note_rate(services.project.state, "embed", spec, dataset, facts)
        return EmbeddingRecord(step="embed", identity=identity, key=key, files=files, facts=facts, inputs=hash_of_files([checkpoint]))

    return lock.run_once(work, partial(services.turn, is_to_embed=True), [checkpoint])


@task(**_STEP_OPTIONS)
def evaluate(
    identity: str,
    spec: RunSpec,
    dataset: DatasetRecord,
    checkpoint: CheckpointRecord,
    embeddings: EmbeddingRecord,
    services: Services,
    lock: StepLock,
) -> ScoreRecord:
    """Score the embeddings and draw the run's figures."""
    key, store = f"evaluate/{identity}", services.store

    def work(_: object) -> ScoreRecord:
        services.display.step(spec.title, "evaluating")
        with services.meter.step("evaluate", identity, is_forced=lock.is_forced) as meter:
            # scikit-learn, matplotlib: only if something is scored
            from tasks.scores.drawing import Drawing, titled
            from tasks.scores.evaluation import evaluate_run, limit_threads
            from tasks.scores.measuring import measure_run

            trained, extracted = store.checked(checkpoint), store.checked(embeddings)
            store.clear(key)
            folder, packed, training, config = store.folder(key), Path(dataset.folder), spec.training, spec.evaluation
            limit_threads(max(1, num_cores() // SCORED_AT_ONCE))
            of = (training, spec.seed, spec.subject, packed, trained, extracted, checkpoint.facts, folder, config.epoch)
            history, facts = read_history(trained), dict[str, Any]()
            with of_same_data(dataset, partial(store.clear, key)):
                measured = measure_run(spec.measurements, *of) if spec.measurements else {}
                metrics = evaluate_run(config, spec.seed, history, extracted, folder, measured)
                if spec.trial is None:  # a search scores hundreds of runs
                    title = titled(spec.subject, metrics, config.recall_at)
                    drawing = Drawing(title, config.metric, spec.seed, history, packed, extracted, training.validation)
                    facts[CONTENT] = drawing.content(embeddings.files, dataset.digest, source_digest(DRAWING_MODULES))
                    if services.force or not services.earlier_figures.copy(embeddings.identity, facts[CONTENT], folder):
                        drawing.draw(folder)
            store.push(key)
            files, facts = describe_folder(folder), facts | services.meter.facts(meter)
        inputs = hash_of_files([checkpoint, embeddings])
        return ScoreRecord(step="evaluate", identity=identity, key=key, files=files, facts=facts, inputs=inputs)

    return lock.run_once(work, lambda: services.scorings, [checkpoint, embeddings])


@task(task_run_name="publish {spec.short}", cache_policy=NO_CACHE)
def publish(
    spec: RunSpec,
    dataset: DatasetRecord,
    checkpoint: CheckpointRecord,
    embeddings: EmbeddingRecord,
    scores: ScoreRecord,
    services: Services,
    older_code: tuple[str, ...],
) -> str | None:
    """Publish the run to MLflow unless it is there; return its MLflow run id, or None if it waits in the outbox. Always runs, adds once."""
    services.check_going_on()
    services.display.step(spec.title, "publishing to MLflow")
    report = RunReport(
        comparison=spec.comparison,
        identity=published_identity(spec, scores.identity),
        dataset=dataset,
        variant=spec.label,
        seed=spec.seed,
        parameters=spec.model_dump(mode="json", include={"training", "evaluation", "measurements"}),
        tags=services.tags | spec.tags | ({"older_code": ", ".join(older_code)} if older_code else {}),
        dvc_digest=services.dvc_digests.get(dataset.name),
        checkpoint=checkpoint,
        embeddings=embeddings,
        scores=read_scores(scores, services.store.checked(scores)),
        scores_only=spec.trial is not None,
    )
    with services.meter.phase("publish"):
        return services.tracker.publish(report)


def _predicted(step: TimedStep, spec: RunSpec, dataset: DatasetRecord, services: Services) -> float | None:
    """Return the estimated seconds of a step, from what was measured before it."""
    return step_estimate(step, spec, dataset.counts, read_rates(services.project.state), placement_here(services.scale)).seconds


def _job(step: str, spec: RunSpec, dataset: DatasetRecord, train_key: str, embed_key: str, services: Services, lock: StepLock) -> Job:
    packed, dataset_key = Path(dataset.folder), f"data/{dataset.digest}"
    store = datasets_of(services.store)
    with alone(store.step_lock("data", dataset.digest)):  # the first of several runs pushes it
        store.push(dataset_key, packed)
        if services.scale.image_cache_gb is not None:
            push_ranges(store, packed, dataset_key)
    return Job(
        step=step,
        spec=spec,
        dataset_key=dataset_key,
        dataset_folder=dataset.folder,
        train_key=train_key,
        embed_key=embed_key,
        store=services.store.address,
        cache=str(services.store.cache.absolute()),
        scale=services.scale,
        sources=lock.of.sources(),
    )
