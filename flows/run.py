"""One run: train -> embed -> evaluate -> publish, each a Prefect task. The chain is written here and nowhere else.

A step's identity (`tasks.identity`) is its cache key. A finished step is reused when the files of its record are still in the store with
the bytes that were recorded; otherwise, or with `force`, it runs again.
"""

import contextlib
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow, get_client, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.results import get_result_store
from prefect.settings import PREFECT_API_URL
from prefect.task_runners import ThreadPoolTaskRunner

from dml_core.errors import ConfigError, DmlError, TrainingError
from dml_core.training.history import Progress, read_history
from tasks import identity
from tasks.data import dvc_digest, update_dataset
from tasks.environment import Project, git_tags, open_project
from tasks.jobs import Job
from tasks.progress import ProgressDisplay
from tasks.records import CheckpointRecord, DatasetRecord, EmbeddingRecord, MetricRecord, RunReport, describe_folder
from tasks.specs import RunSpec, ScaleSpec, comparison_runs, load_params
from tasks.storage import Store
from tasks.tracking import Tracker
from tasks.training import Workers

WORKERS_LIMIT = "dml-workers"
STEPS_AT_ONCE: Any = ThreadPoolTaskRunner(max_workers=8)


class Services:
    """What the steps of a flow work with; made once a flow, closed at its end.

    Raises:
        StoreError: the store cannot be written.
        ConfigError: the server's limit on workers is below what a run takes.
    """

    def __init__(self, project: Project, scale: ScaleSpec) -> None:
        self.project = project
        self.scale = scale
        self.store = Store(project.store, project.state / "cache")
        self.store.check_writable()
        if PREFECT_API_URL.value():
            ensure_limit(scale.num_workers, scale.num_workers * scale.concurrent_runs)
        self.tracker = Tracker(project.tracking_uri, project.state, self.store)
        self.display = ProgressDisplay()
        self.workers = Workers(scale, project.state / "ray")
        self.tags = git_tags(project)

    def close(self) -> None:
        """End the workers and clear the display."""
        self.workers.close()
        self.display.close()


@dataclass(frozen=True)
class Outcome:
    """What one run came to.

    Attributes:
        scores: its metrics, with the files behind them.
        ran: step -> whether it ran; False where a finished one was reused.
        delivered: whether MLflow has it; if not, it waits in the outbox.
    """

    spec: RunSpec
    scores: MetricRecord
    ran: dict[str, bool]
    delivered: bool


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
        train_id, embed_id, evaluate_id = (
            of(spec, dataset) for of in (identity.train_identity, identity.embed_identity, identity.evaluate_identity)
        )
        checkpoint = _step(train, train_id, services, force).submit(train_id, spec, dataset, evaluate_id, services)
        embeddings = _step(embed, embed_id, services, force).submit(embed_id, spec, dataset, checkpoint, services)
        scores = _step(evaluate, evaluate_id, services, force).submit(evaluate_id, spec, dataset, checkpoint, embeddings, services)
        self._steps = {"train": checkpoint, "embed": embeddings, "evaluate": scores}
        self._publishing = []
        if evaluate_id not in published:
            self._publishing.append(publish.submit(spec, dataset, checkpoint, embeddings, scores, services))

    def wait(self) -> Exception | None:
        """Wait until every step has ended; the error of the first that failed, if one did."""
        for future in (*self._steps.values(), *self._publishing):
            future.wait()
            if future.state.is_failed() or future.state.is_crashed():
                error = future.state.result(raise_on_failure=False)
                return error if isinstance(error, Exception) else TrainingError(f"{self.spec.title}: {future.state.message}")
        return None

    def outcome(self) -> Outcome:
        """What a run that did not fail came to."""
        ran = {step: future.state.name != "Cached" for step, future in self._steps.items()}
        delivered = all(future.result() is not None for future in self._publishing)
        return Outcome(self.spec, self._steps["evaluate"].result(), ran, delivered)


def comparison_title(dataset: str, role: str) -> str:
    """How a dataset's standing comparison is called, in MLflow and in reports; runs scored on validation classes are one of their own."""
    return f"comparison on {dataset}" if role == "test" else f"comparison on {dataset}, {role} classes"


# ---------------------------------------------------------------- the flow


@flow(name="run", task_runner=STEPS_AT_ONCE)
def run(dataset: str, variant: str, seed: int = 0, force: bool = False) -> Outcome:
    """One run of the standing comparison.

    Args:
        dataset: a dataset of the comparison.
        variant: one of its variants.
        seed: any seed.
        force: run every step again.
    """
    project = open_project()
    params = load_params(project.params_file)
    (spec,) = comparison_runs(params, dataset, (variant,), (seed,))
    title = comparison_title(dataset, spec.evaluation.role)
    with closing(Services(project, params.scale)) as services:
        chain = Chain(spec, prepare(project, dataset), services, force, services.tracker.published(title))
        error = chain.wait()
    if error is not None:
        raise error
    return chain.outcome()


# ---------------------------------------------------------------- the steps


def _by_identity(context: Any, parameters: dict[str, Any]) -> str:
    return str(parameters["identity"])


def _may_go_better(failed: Any, run: Any, state: Any) -> bool:
    """Whether a failed step is worth another try: not where a person has to mend something."""
    return not isinstance(state.result(raise_on_failure=False), DmlError)


_STEP_OPTIONS: dict[str, Any] = {
    "cache_key_fn": _by_identity,
    "persist_result": True,
    "result_serializer": "json",
    "retries": 1,
    "retry_delay_seconds": 5,
    "retry_condition_fn": _may_go_better,
}


@task(cache_policy=NO_CACHE, retries=1, retry_delay_seconds=5, retry_condition_fn=_may_go_better)
def prepare(project: Project, dataset: str) -> DatasetRecord:
    """Bring a dataset up to date through DVC."""
    return update_dataset(project, dataset)


@task(**_STEP_OPTIONS)
def train(identity: str, spec: RunSpec, dataset: DatasetRecord, evaluate_id: str, services: Services) -> CheckpointRecord:
    """Train the run on the flow's workers, from its last checkpoint if it was interrupted."""
    key = f"train/{identity}"
    live = services.tracker.live(comparison_title(spec.dataset, spec.evaluation.role), evaluate_id, spec)

    def watch(message: Progress) -> None:
        services.display(spec.title, message)
        live(message)

    with _worker_slots(services):
        facts = services.workers.run(_job("train", spec, dataset, key, "", services), watch)
    return CheckpointRecord(step="train", identity=identity, key=key, files=describe_folder(services.store.pull(key)), facts=facts)


@task(**_STEP_OPTIONS)
def embed(identity: str, spec: RunSpec, dataset: DatasetRecord, checkpoint: CheckpointRecord, services: Services) -> EmbeddingRecord:
    """Extract the embeddings of the images that the run is scored on, on the same workers."""
    key = f"embed/{identity}"
    with _worker_slots(services):
        facts = services.workers.run(_job("embed", spec, dataset, checkpoint.key, key, services), watch=lambda message: None)
    return EmbeddingRecord(step="embed", identity=identity, key=key, files=describe_folder(services.store.pull(key)), facts=facts)


@task(**_STEP_OPTIONS)
def evaluate(
    identity: str, spec: RunSpec, dataset: DatasetRecord, checkpoint: CheckpointRecord, embeddings: EmbeddingRecord, services: Services
) -> MetricRecord:
    """Score the embeddings and draw the run's figures."""
    from tasks.evaluation import evaluate_run  # scikit-learn and matplotlib, which a flow that reuses everything does not need

    key = f"evaluate/{identity}"
    store = services.store
    history = read_history(store.pull(checkpoint.key))
    folder = store.folder(key)
    packed, extracted = Path(dataset.folder), store.pull(embeddings.key)
    metrics = evaluate_run(spec.evaluation, spec.seed, spec.title, history, packed, extracted, folder, spec.training.validation)
    store.push(key)
    return MetricRecord(step="evaluate", identity=identity, key=key, files=describe_folder(folder), metrics=metrics)


@task(cache_policy=NO_CACHE)
def publish(
    spec: RunSpec,
    dataset: DatasetRecord,
    checkpoint: CheckpointRecord,
    embeddings: EmbeddingRecord,
    scores: MetricRecord,
    services: Services,
) -> str | None:
    """Bring the run to MLflow unless it is there; its MLflow run id, or None where it waits in the outbox. Runs always, adds once."""
    report = RunReport(
        comparison=comparison_title(dataset.name, spec.evaluation.role),
        identity=scores.identity,
        dataset=dataset,
        variant=spec.variant,
        seed=spec.seed,
        parameters=spec.model_dump(mode="json", include={"training", "evaluation"}),
        tags=services.tags,
        dvc_digest=dvc_digest(services.project, dataset.name),
        checkpoint=checkpoint,
        embeddings=embeddings,
        scores=scores,
    )
    return services.tracker.publish(report)


def _step(step: Any, key: str, services: Services, force: bool) -> Any:
    """The step's task for one identity; it runs again on `force`, or where what its record names is no longer whole."""
    kept: Any = get_result_store().update_for_task(step)
    usable = not force and kept.exists(key) and services.store.is_intact(kept.read(key).result)
    return step.with_options(task_run_name=f"{step.name} {key[:8]}", refresh_cache=not usable)


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


def ensure_limit(num_workers: int, capacity: int) -> None:
    """Create the server's limit on workers where it has none; one that an administrator set is respected.

    Raises:
        ConfigError: the limit is below what one run takes, so that no run could ever start.
    """
    with get_client(sync_client=True) as client:
        limits = {limit.name: limit.limit for limit in client.read_global_concurrency_limits(limit=200)}
        if WORKERS_LIMIT not in limits:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=WORKERS_LIMIT, limit=capacity))
        elif limits[WORKERS_LIMIT] < num_workers:
            raise ConfigError(
                f"Prefect's limit '{WORKERS_LIMIT}' is {limits[WORKERS_LIMIT]}, a run takes {num_workers} workers; "
                f"raise it: prefect gcl update {WORKERS_LIMIT} --limit {capacity}"
            )
