"""Draw a scored run's figures from its files."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dml_core.data.store.split_config import ValidationConfig
from dml_core.evaluation.config import Metric
from dml_core.files import write_errors
from tasks.runs.records import FIGURES_FOLDER, FileRecord
from tasks.scores.figures import draw_figures
from tasks.scores.sides import open_sides


def titled(subject: str, metrics: Mapping[str, float], recall_at: Sequence[int]) -> str:
    """Return the heading of a run's figures: its subject, and its Recall@K for the smallest K."""
    k = min(recall_at)
    return f"{subject}: Recall@{k} {100 * metrics[f'recall@{k}']:.1f} %"


@dataclass(frozen=True)
class Drawing:
    """Contents of a run's figures.

    Attributes:
        title: heading (`titled`).
        metric: of the similarities.
        seed: of the samples.
        dataset, embeddings: folders of the packed dataset and of the extracted embeddings.
        validation: the training classes that the run held out.
    """

    title: str
    metric: Metric
    seed: int
    history: list[dict[str, float]]
    dataset: Path
    embeddings: Path
    validation: ValidationConfig | None = None

    def draw(self, folder: Path) -> None:
        """Draw the figures into `folder / "figures"`.

        Raises:
            EvaluationError: the embeddings cannot be drawn.
            StoreError: the folder cannot be written.
        """
        queries, gallery = open_sides(self.embeddings, self.dataset, self.validation)
        with write_errors(f"{folder}: scores", "free or change the store"):
            (folder / FIGURES_FOLDER).mkdir(parents=True, exist_ok=True)
            draw_figures(queries, gallery, self.metric, self.seed, self.title, self.history, folder / FIGURES_FOLDER)

    def content(self, embedded: Iterable[FileRecord], digest: str, sources: str) -> str:
        """Return a hash of everything that the figures depend on, by contents instead of by places.

        Args:
            embedded: the files of the embeddings, as recorded.
            digest: digest of the dataset's content.
            sources: digest of the code that draws.
        """
        validation = self.validation and self.validation.model_dump(mode="json")
        files = sorted((file.name, file.sha256) for file in embedded)
        parts = [self.title, self.metric, self.seed, self.history, files, digest, validation, sources]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
