"""One run: train -> embed -> evaluate -> publish, each a Prefect task. The chain is written here and nowhere else.

A step's identity (`tasks.runs.identity`) is its cache key. A finished step is reused when the files of its record are still in the store
with the bytes that were recorded; otherwise, or with `force`, it runs again.
"""

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.concurrency.sync import concurrency
from prefect.settings import PREFECT_API_URL
from prefect.task_runners import ThreadPoolTaskRunner

from dml_core.errors import DmlError, TrainingError
from dml_core.training.checkpoint import CHECKPOINT_FILE
from dml_core.training.history import Progress, read_history
from flows.choices import DatasetName, VariantName
from flows.kept import SealedJSON, is_finished
from flows.outcomes import Outcome, RunsFailedError, finish
from flows.services import WORKERS_LIMIT, Services
from tasks.checks import check_before, check_parts, check_settings
from tasks.data import dvc_digest, update_dataset
from tasks.environment import Project, open_project
from tasks.runs import identity
from tasks.runs.identity import published_identity
from tasks.runs.records import (
    CheckpointRecord,
    DatasetRecord,
    EmbeddingRecord,
    RunReport,
    ScoreRecord,
    describe_folder,
    read_scores,
)
from tasks.runs.specs import Params, RunSpec, comparison_runs, load_params
from tasks.storage import Store
from tasks.workers.jobs import Job

STEPS_AT_ONCE: Any = ThreadPoolTaskRunner(max_workers=8)


class Chain:
    """One run's steps, submitted; each starts when the one before it is done.

    Args:
        spec: the run.
        dataset: what it reads.
        services: the flow's.
        force: run every step, done or not.
        published: identities of runs that MLflow has whole and as current: publishing them again would add nothing.
    """

    def __init__(self, spec: RunSpec, dataset: DatasetRecord, services: Services, force: bool, published: frozenset[str]) -> None:
        self.spec = spec
        self._services = services
        self._force = force
        self._own: set[str] = set()
        self.must_train = False
        train_id, embed_id, evaluate_id = (
            of(spec, dataset) for of in (identity.train_identity, identity.embed_identity, identity.evaluate_identity)
        )
        published_id = published_identity(spec, evaluate_id)
        checkpoint = self._once(train, train_id, spec, dataset, published_id, services, anew=force)
        embeddings = self._once(embed, embed_id, spec, dataset, checkpoint, services)
        scores = self._once(evaluate, evaluate_id, spec, dataset, checkpoint, embeddings, services)
        self._steps = {"train": checkpoint, "embed": embeddings, "evaluate": scores}
        self._publishing = []
        if published_id not in published:
            key = f"publish {published_id}"
            if key not in services.submitted:
                services.submitted[key] = publish.submit(spec, dataset, checkpoint, embeddings, scores, services)
            self._publishing.append(services.submitted[key])

    def _once(self, step: Any, identity: str, *inputs: Any, **options: Any) -> Any:
        """A step, submitted; where another run of this flow has the very same, that one."""
        submitted = self._services.submitted
        if identity not in submitted:
            named = _step(step, identity, self.spec, self._services.store, self._force)
            self._own.add(step.name)
            self.must_train |= step is train and bool(named.refresh_cache)
            submitted[identity] = named.submit(identity, *inputs, **options)
        return submitted[identity]

    def wait(self) -> Exception | None:
        """Wait until every step has ended; the error of the first that failed, if one did."""
        for future in (*self._steps.values(), *self._publishing):
            future.wait()
            if future.state.is_failed() or future.state.is_crashed():
                error = future.state.result(raise_on_failure=False)
                return error if isinstance(error, Exception) else TrainingError(f"{self.spec.title}: {future.state.message}")
        return None

    def outcome(self) -> Outcome:
        """What a run that did not fail came to, its numbers from the file whose hash was recorded.

        Raises:
            StoreError: that file was changed since.
        """
        ran = {step: step in self._own and future.state.name != "Cached" for step, future in self._steps.items()}
        delivered = all(future.result() is not None for future in self._publishing)
        trained, extracted, scores = (future.result() for future in self._steps.values())
        seconds = sum(float(record.facts.get("seconds", 0)) for record in (trained, extracted) if ran[record.step])
        network, figures = (str(self._services.store.folder(record.key)) for record in (trained, scores))
        metrics = read_scores(scores, self._services.store.pull(scores.key))
        return Outcome(self.spec, metrics, ran, delivered, network, figures, seconds, trained.facts.get("seconds"))


# ---------------------------------------------------------------- the flow


@flow(name="run", flow_run_name="{dataset} / {variant} / seed {seed}", task_runner=STEPS_AT_ONCE)
def run(dataset: DatasetName, variant: VariantName, seed: int = 0, force: bool = False, overrides: list[str] | None = None) -> Outcome:
    """One run of the standing comparison.

    Args:
        dataset: a dataset of the comparison.
        variant: one of its variants.
        seed: any seed.
        force: run every step again.
        overrides: settings laid over `params.yaml` for this run, each `dotted.path=value`.
    """
    project = open_project()
    params = load_params(project.params_file, overrides or ())
    runs = comparison_runs(params, dataset, (variant,), (seed,), overrides or ())
    check_parts(runs, check_before(project, params, runs))
    with closing(Services(project, params.scale)) as services:
        record = prepare_checked(runs, params, services)
        chain = Chain(runs[0], record, services, force, services.tracker.published(runs[0].comparison))
        services.announce(1, int(chain.must_train))
        outcomes, failures = finish([chain], services)
    if failures:
        raise RunsFailedError(failures, 1, ())
    create_markdown_artifact(_page(outcomes[0], project), key="run", description=runs[0].title)
    return outcomes[0]


def _page(outcome: Outcome, project: Project) -> str:
    """A run's scores and where things are, as Markdown for Prefect's page of it."""
    scores = [f"| {name} | {value:.4f} |" for name, value in outcome.scores.metrics.items()]
    steps = ", ".join(f"{step} {'ran' if did_run else 'reused'}" for step, did_run in outcome.ran.items())
    places = [f"- network: `{outcome.network}`", f"- scores and figures: `{outcome.figures}`", f"- MLflow: {project.tracking_uri}"]
    return "\n".join([f"# {outcome.spec.title}", "", steps, "", "| metric | value |", "|---|---|", *scores, "", *places, ""])


def prepare_checked(runs: Sequence[RunSpec], params: Params, services: Services) -> DatasetRecord:
    """Bring the dataset of these runs up to date, and check the runs against what it is then, before any worker starts.

    Raises:
        ConfigError: settings that do not fit the dataset.
        DataError: it cannot be prepared.
    """
    dataset = runs[0].dataset
    if "DVC_STAGE" not in os.environ:
        services.display.say(f"preparing {dataset}: bringing it up to date through DVC")
    record = prepare(services.project, dataset)
    check_settings(runs, params.scale, Path(record.folder))
    check_parts(runs, Path(record.folder))
    return record


# ---------------------------------------------------------------- the steps


def _by_identity(context: Any, parameters: dict[str, Any]) -> str:
    return str(parameters["identity"])


def _may_go_better(failed: Any, run: Any, state: Any) -> bool:
    """Whether a failed step is worth another try: not where a person has to mend something."""
    return not isinstance(state.result(raise_on_failure=False), DmlError)


_STEP_OPTIONS: dict[str, Any] = {
    "cache_key_fn": _by_identity,
    "persist_result": True,
    "result_serializer": SealedJSON(),
    "retries": 1,
    "retry_delay_seconds": 5,
    "retry_condition_fn": _may_go_better,
}


@task(task_run_name="prepare {dataset}", cache_policy=NO_CACHE, retries=1, retry_delay_seconds=5, retry_condition_fn=_may_go_better)
def prepare(project: Project, dataset: str) -> DatasetRecord:
    """Bring a dataset up to date through DVC."""
    return update_dataset(project, dataset)


@task(**_STEP_OPTIONS)
def train(
    identity: str, spec: RunSpec, dataset: DatasetRecord, published_id: str, services: Services, anew: bool = False
) -> CheckpointRecord:
    """Train the run on the flow's workers: from its last whole checkpoint if it was interrupted, or `anew` from the initial weights."""
    services.begin(spec, "training")
    key = f"train/{identity}"
    store = services.store
    live = services.tracker.live(spec.comparison, published_id, spec)

    def watch(message: Progress) -> None:
        if message.note is not None:
            services.display.say(f"{spec.title}: {message.note}")
            return
        services.display(spec.title, message)
        live(message)

    with _worker_slots(services):
        store.clear(key, keep=() if anew else (CHECKPOINT_FILE,))
        facts = services.workers.run(_job("train", spec, dataset, key, "", services), watch)
    return CheckpointRecord(step="train", identity=identity, key=key, files=describe_folder(store.pull(key)), facts=facts)


@task(**_STEP_OPTIONS)
def embed(identity: str, spec: RunSpec, dataset: DatasetRecord, checkpoint: CheckpointRecord, services: Services) -> EmbeddingRecord:
    """Extract the embeddings of the images that the run is scored on, on the same workers."""
    services.begin(spec, "embedding")
    key = f"embed/{identity}"
    store = services.store
    with _worker_slots(services):
        store.clear(key)
        facts = services.workers.run(_job("embed", spec, dataset, checkpoint.key, key, services), watch=lambda message: None)
    return EmbeddingRecord(step="embed", identity=identity, key=key, files=describe_folder(store.pull(key)), facts=facts)


@task(**_STEP_OPTIONS)
def evaluate(
    identity: str, spec: RunSpec, dataset: DatasetRecord, checkpoint: CheckpointRecord, embeddings: EmbeddingRecord, services: Services
) -> ScoreRecord:
    """Score the embeddings and draw the run's figures."""
    services.begin(spec, "evaluating")
    from tasks.scores.evaluation import evaluate_run  # scikit-learn and matplotlib, which a flow that reuses everything does not need

    key = f"evaluate/{identity}"
    store = services.store
    trained, extracted = store.checked(checkpoint), store.checked(embeddings)
    store.clear(key)
    folder, packed, training = store.folder(key), Path(dataset.folder), spec.training
    measured: dict[str, float] = {}
    if spec.measurements:
        from tasks.scores.measuring import measure_run

        measured = measure_run(spec.measurements, training, spec.seed, spec.title, packed, trained, extracted, checkpoint.facts, folder)
    history = read_history(trained)
    evaluate_run(spec.evaluation, spec.seed, spec.title, history, packed, extracted, folder, training.validation, measured)
    store.push(key)
    return ScoreRecord(step="evaluate", identity=identity, key=key, files=describe_folder(folder))


@task(task_run_name="publish {spec.short}", cache_policy=NO_CACHE)
def publish(
    spec: RunSpec,
    dataset: DatasetRecord,
    checkpoint: CheckpointRecord,
    embeddings: EmbeddingRecord,
    scores: ScoreRecord,
    services: Services,
) -> str | None:
    """Bring the run to MLflow unless it is there; its MLflow run id, or None where it waits in the outbox. Runs always, adds once."""
    services.begin(spec, "publishing to MLflow")
    report = RunReport(
        comparison=spec.comparison,
        identity=published_identity(spec, scores.identity),
        dataset=dataset,
        variant=spec.variant,
        seed=spec.seed,
        parameters=spec.model_dump(mode="json", include={"training", "evaluation", "measurements"}),
        tags=services.tags,
        dvc_digest=dvc_digest(services.project, dataset.name),
        checkpoint=checkpoint,
        embeddings=embeddings,
        scores=read_scores(scores, services.store.checked(scores)),
    )
    return services.tracker.publish(report)


def _step(step: Any, identity: str, spec: RunSpec, store: Store, force: bool) -> Any:
    """The step's task for one identity; it runs again on `force`, or where its record or what that names is no longer whole."""
    usable = not force and is_finished(step, identity, store, spec.title)
    return step.with_options(task_run_name=f"{step.name} {{spec.short}}", refresh_cache=not usable)


def _job(step: str, spec: RunSpec, dataset: DatasetRecord, train_key: str, embed_key: str, services: Services) -> Job:
    if services.store.is_remote:
        services.store.push_folder(Path(dataset.folder), f"data/{dataset.digest}")
    return Job(
        id=str(uuid.uuid4()),
        step=step,
        spec=spec,
        dataset_key=f"data/{dataset.digest}",
        dataset_folder=dataset.folder,
        train_key=train_key,
        embed_key=embed_key,
        store=services.store.address,
        cache=str(services.store.cache.absolute()),
        num_loader_workers=services.scale.num_loader_workers,
    )


@contextlib.contextmanager
def _worker_slots(services: Services) -> Iterator[None]:
    """Hold as many slots of the server's `dml-workers` limit as a run has workers; flows on one server share them.

    Without a server this flow is the only one, and its worker groups are the limit.
    """
    if not PREFECT_API_URL.value():
        yield
        return
    with concurrency(WORKERS_LIMIT, occupy=services.scale.num_workers, strict=True, raise_on_lease_renewal_failure=False):
        yield
