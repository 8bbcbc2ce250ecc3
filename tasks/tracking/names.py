"""Names in MLflow: experiments, tags, metrics; and a published run as they describe it."""

from dataclasses import dataclass, field

from tasks.runs.comparable import Facts

EXPERIMENT_PREFIX = "dml-repro/"
PARENT_TAG, IDENTITY_TAG, PUBLISHED_TAG, COMPARISON_TAG, PART_TAG, VARIANT_TAG, SEED_TAG, PROCESS_TAG = (
    "mlflow.parentRunId",
    "dml.identity",
    "dml.published",
    "dml.comparison",
    "dml.part_of",
    "dml.variant",
    "dml.seed",
    "dml.process",
)
OLDER_CODE_TAG = "dml.older_code"
SETTINGS_TAG, DIGEST_TAG = "dml.settings", "dml.dataset_digest"  # which runs may be averaged and compared (`tasks.runs.comparable`)
SUMMARY_TAG = "dml.summary_of"  # comparison whose means over seeds a variant's run has
TRAINED_TAG = "dml.trained"  # identity of the training, which runs of several comparisons may share
DETAIL = "detail/"  # prefix of metrics that explain the others
OUTBOX = "outbox"


@dataclass
class PublishedRun:
    """A run in MLflow: its last metrics and its tags."""

    run_id: str
    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def variant(self) -> str:
        """Variant of the comparison."""
        return self.tags[VARIANT_TAG]

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.tags[SEED_TAG])

    def facts(self, dataset: str) -> Facts:
        """Return the facts that decide which other runs on the dataset it may be averaged and compared with."""
        return Facts(dataset, self.variant, self.seed, self.tags.get(DIGEST_TAG), self.tags.get(SETTINGS_TAG))


def experiment_name(dataset: str) -> str:
    """Return the MLflow experiment of a dataset; the prefix marks this project's experiments on a shared server."""
    return f"{EXPERIMENT_PREFIX}{dataset}"


def metric_name(name: str) -> str:
    """Return a metric's name in MLflow, which allows no @."""
    return name.replace("@", "_at_")


def plain_name(name: str) -> str:
    """Return a metric's own name from its name in MLflow."""
    return name.replace("_at_", "@")


def current_runs_filter(comparison: str) -> str:
    """Return MLflow's filter for the comparison's complete runs; superseded runs are deleted there and not found."""
    return f"tags.`{PART_TAG}` = '{comparison}' and tags.`{PUBLISHED_TAG}` = 'true'"
