"""Scoring one run from its files: `metrics.json`, the training curve, the similarity histogram and a gallery of what was retrieved."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from dml_core.data.split_config import ValidationConfig
from dml_core.data.splits import open_role
from dml_core.data.store import PackedDataset
from dml_core.errors import EvaluationError, StoreError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import evaluate
from dml_core.evaluation.neighbours import nearest
from dml_core.figures.curves import plot_curves
from dml_core.figures.gallery import plot_retrieval_gallery
from dml_core.figures.histograms import plot_similarity_histogram
from tasks.embedding import load_embeddings

METRICS_FILE = "metrics.json"
CURVE_FILE, HISTOGRAM_FILE, GALLERY_FILE = "figures/curve.png", "figures/similarities.png", "figures/gallery.png"
NUM_GALLERY_QUERIES = 8
NUM_GALLERY_NEIGHBOURS = 8


def evaluate_run(
    config: EvaluationConfig,
    seed: int,
    title: str,
    history: list[dict[str, float]],
    dataset: Path,
    embeddings: Path,
    folder: Path,
    validation: ValidationConfig | None = None,
) -> dict[str, float]:
    """Score a run's embeddings and draw its figures into `folder`.

    Args:
        config: what is measured; Recall@K's list also bounds the gallery's neighbours.
        seed: of k-means and of what the figures sample.
        title: over the figures.
        history: the training steps, for the curve.
        dataset: the packed dataset's folder, for the gallery's images.
        embeddings: folder of the extracted embeddings.
        folder: where `metrics.json` and the figures go.
        validation: which training classes the run held out.

    Returns:
        Metric name -> fraction or count.

    Raises:
        EvaluationError: embeddings that cannot be scored.
        StoreError: the folder cannot be written.
    """
    query_role, gallery_role = query_and_gallery(embeddings)
    gallery_ND, labels_N = load_embeddings(embeddings, gallery_role)
    same = query_role == gallery_role
    queries_QD, query_labels_Q = (gallery_ND, labels_N) if same else load_embeddings(embeddings, query_role)
    metrics = evaluate(gallery_ND, labels_N, config, None if same else queries_QD, None if same else query_labels_Q, seed)
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        (folder / METRICS_FILE).write_text(json.dumps(metrics, indent=2) + "\n")
        if history:
            _plot_history(history, folder / CURVE_FILE, title)
        plot_similarity_histogram(gallery_ND, labels_N, folder / HISTOGRAM_FILE, title, config.metric, seed=seed)
        roles = open_role(dataset, query_role, validation), open_role(dataset, gallery_role, validation)
        _plot_gallery(config, seed, roles, (queries_QD, gallery_ND), (query_labels_Q, labels_N), folder / GALLERY_FILE)
    except OSError as error:
        raise StoreError(f"{folder}: scores cannot be written ({error.strerror or error}); free or change the store") from None
    return {name: float(value) for name, value in metrics.items()}


def load_array(path: Path, memory_mapped: bool = False) -> np.ndarray:
    """An array from a `.npy` file; nothing in it is executed. Memory-mapped, only what is looked at is read.

    Raises:
        EvaluationError: no such file, or not a plain array of numbers or strings.
    """
    try:
        return np.asarray(np.load(path, "r" if memory_mapped else None, allow_pickle=False))
    except FileNotFoundError:
        raise EvaluationError(f"{path}: no such file; expected an array saved by numpy.save") from None
    except (ValueError, EOFError, OSError) as error:
        raise EvaluationError(f"{path}: not an array saved by numpy.save ({str(error).splitlines()[0]})") from None


def query_and_gallery(embeddings: Path) -> tuple[str, str]:
    """The roles that ask and that are searched: query and gallery where there are such, else the only one twice."""
    roles = list(json.loads((embeddings / "manifest.json").read_text()))
    return ("query", "gallery") if "query" in roles else (roles[0], roles[0])


def _plot_history(history: list[dict[str, float]], path: Path, title: str) -> None:
    names = [name for name in history[0] if name not in ("epoch", "step", "learning_rate_factor")]
    steps = [row["step"] for row in history]
    plot_curves({name: (steps, [row[name] for row in history]) for name in names}, path, title, "step", "training loss and its parts")


def _plot_gallery(
    config: EvaluationConfig,
    seed: int,
    roles: tuple[PackedDataset, PackedDataset],
    embeddings: tuple[np.ndarray, np.ndarray],
    labels: tuple[np.ndarray, np.ndarray],
    path: Path,
) -> None:
    """The nearest neighbours of a few queries of different classes, drawn with the run's seed."""
    queries, gallery = roles
    order = np.random.default_rng(seed).permutation(len(queries))
    first_of_class = order[np.sort(np.unique(labels[0][order], return_index=True)[1])]
    chosen = first_of_class[:NUM_GALLERY_QUERIES]
    same = queries.role == gallery.role
    # `exclude_self` goes by index, so one item more is asked for and the query's own index is dropped here.
    num_wanted = min(NUM_GALLERY_NEIGHBOURS + same, len(gallery))
    found, _ = nearest(embeddings[1], embeddings[0][chosen], num_wanted, exclude_self=False, metric=config.metric)
    neighbours = [
        [index for index in row if not same or index != query][:NUM_GALLERY_NEIGHBOURS] for query, row in zip(chosen, found, strict=True)
    ]
    plot_retrieval_gallery(
        [_image(queries, query) for query in chosen],
        [[_image(gallery, index) for index in row] for row in neighbours],
        np.array([labels[1][row] == labels[0][query] for query, row in zip(chosen, neighbours, strict=True)]),
        path,
    )


def _image(dataset: PackedDataset, index: int) -> Image.Image:
    return Image.fromarray(dataset.image(int(index)).permute(1, 2, 0).numpy())
