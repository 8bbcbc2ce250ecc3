"""Draw a scored run's figures from its files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dml_core.data.store.split_config import ValidationConfig
from dml_core.evaluation.config import Metric
from dml_core.files import write_errors
from tasks.runs.records import FIGURES_FOLDER
from tasks.scores.figures import draw_figures
from tasks.scores.sides import open_sides


def titled(subject: str, metrics: Mapping[str, float], recall_at: Sequence[int]) -> str:
    """Return the heading of a run's figures: its subject, and its Recall@K for the smallest K."""
    k = min(recall_at)
    return f"{subject}: Recall@{k} {100 * metrics[f'recall@{k}']:.1f} %"


def draw_run(
    title: str,
    metric: Metric,
    seed: int,
    history: list[dict[str, float]],
    dataset: Path,
    embeddings: Path,
    folder: Path,
    validation: ValidationConfig | None = None,
) -> None:
    """Draw a run's figures into `folder / "figures"`.

    Args:
        title: heading (`titled`).
        metric: of the similarities.
        seed: of the samples.
        dataset, embeddings: folders of the packed dataset and of the extracted embeddings.
        validation: the training classes that the run held out.

    Raises:
        EvaluationError: the embeddings cannot be drawn.
        StoreError: the folder cannot be written.
    """
    queries, gallery = open_sides(embeddings, dataset, validation)
    with write_errors(f"{folder}: scores", "free or change the store"):
        (folder / FIGURES_FOLDER).mkdir(parents=True, exist_ok=True)
        draw_figures(queries, gallery, metric, seed, title, history, folder / FIGURES_FOLDER)
