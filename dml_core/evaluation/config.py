"""Settings of the evaluator; light to import."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dml_core.config import Config, parse
from dml_core.epochs import Epoch

Positive = Annotated[int, Field(ge=1)]
Metric = Literal["cosine", "euclidean"]
Device = Literal["cpu", "cuda"]


class KMeansConfig(Config):
    """Settings of k-means for NMI, AMI and F1.

    Attributes:
        num_iterations: Lloyd iterations of each run.
        num_runs: runs from different first centres; the one with the lowest inertia is used.
    """

    num_iterations: Positive = 25
    num_runs: Positive = 1


class IntervalConfig(Config):
    """Intervals over queries and over classes.

    Attributes:
        confidence: coverage of the intervals.
    """

    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95


class EvaluationConfig(Config):
    """Settings of the evaluation. `role` and `epoch` select the embeddings that a run scores; `evaluate` reads neither.

    Attributes:
        role: "test" scores the dataset's test classes (query against gallery if it has those); "validation" the training classes held out
            by the run, for choosing settings without the test classes; "train" the training images, which shows what the network has
            learned but not how well it retrieves unseen classes.
        epoch: epoch whose weights are scored: the last, or one that the run also keeps (`training.keep_epochs`), chosen by cosines.
        recall_at: the K of Recall@K.
        metric: "cosine" (angles) or "euclidean" (distances of unchanged embeddings).
        clustering: run k-means and report NMI, AMI and F1.
        kmeans: settings of k-means.
        intervals: intervals over queries and over classes; none by default.
        max_block_bytes: memory limit of one block of similarities and of the state of one group of queries, each.
        device: device of the flow's machine that computes similarities and the distances of k-means; a missing one is an error.
    """

    role: Literal["test", "validation", "train"] = "test"
    epoch: Epoch = "last"
    recall_at: tuple[Positive, ...] = (1, 2, 4, 8)
    metric: Metric = "cosine"
    clustering: bool = True
    kmeans: KMeansConfig = KMeansConfig()
    intervals: IntervalConfig | None = None
    max_block_bytes: Annotated[int, Field(ge=65_536)] = 256 * 2**20
    device: Device = "cpu"

    @field_validator("recall_at")
    @classmethod
    def _increasing(cls, recall_at: tuple[int, ...]) -> tuple[int, ...]:
        if not recall_at or list(recall_at) != sorted(set(recall_at)):
            raise ValueError(f"must be increasing and not empty, found {list(recall_at)}")
        return recall_at

    @model_validator(mode="after")
    def _epoch_fits(self) -> "EvaluationConfig":
        if self.role == "validation" and self.epoch == "oracle":
            raise ValueError("epoch 'oracle' is the best on the test classes, which role 'validation' does not look at; use role: test")
        if self.metric != "cosine" and self.epoch != "last":
            raise ValueError(f"epoch '{self.epoch}' is chosen by cosines, whatever the metric is; use metric: cosine, or epoch: last")
        return self


def as_config(config: EvaluationConfig | Mapping[str, Any] | None) -> EvaluationConfig:
    """Return settings given as plain values, or None for the defaults, as a configuration.

    Raises:
        ConfigError: an unknown setting, or a value outside its range.
    """
    return config if isinstance(config, EvaluationConfig) else parse(EvaluationConfig, {} if config is None else config, "config")
