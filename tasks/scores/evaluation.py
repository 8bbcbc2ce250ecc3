"""Score one run from its files: write `metrics.json` and Recall@1 by class and by epoch."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

from dml_core.epochs import CURVE, RECALL
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import ClassRecall, evaluate
from dml_core.files import write_errors
from tasks.files import write_whole
from tasks.runs.best import VALIDATION
from tasks.runs.embeddings import KEPT_EPOCH, kept_epoch, load_embeddings, query_and_gallery
from tasks.runs.records import BY_EPOCH_FILE, CLASSES_FILE, METRICS_FILE


def evaluate_run(
    config: EvaluationConfig,
    seed: int,
    history: list[dict[str, float]],
    embeddings: Path,
    folder: Path,
    measured: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Score a run's embeddings.

    Args:
        seed: seed of k-means.
        history: the training steps, with the Recall@1 that was measured while training.
        embeddings: folder of the extracted embeddings.
        folder: output folder of `metrics.json`, `class_recalls.json` and `recall_by_epoch.json` (if the run measured it).
        measured: further measurements (`tasks.scores.measuring`) to store with the scores.

    Returns:
        Metric name -> fraction or count; a measurement without a finite value (of pairs that do not exist) is omitted.

    Raises:
        EvaluationError: the embeddings cannot be scored.
        StoreError: the folder cannot be written.
    """
    query_role, gallery_role = query_and_gallery(embeddings)
    gallery_ND, labels_N = load_embeddings(embeddings, gallery_role)
    queries_QD, query_labels_Q = (None, None) if query_role == gallery_role else load_embeddings(embeddings, query_role)
    by_class: dict[int, ClassRecall] = {}
    metrics = evaluate(gallery_ND, labels_N, config, queries_QD, query_labels_Q, seed, by_class)
    epoch = kept_epoch(embeddings)
    metrics |= epoch | held_out_recall(history, epoch.get(KEPT_EPOCH)) | dict(measured or {})
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    with write_errors(f"{folder}: scores", "free or change the store"):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / METRICS_FILE, json.dumps(metrics, indent=2) + "\n")
        write_whole(folder / CLASSES_FILE, json.dumps({label: scored.recall for label, scored in by_class.items()}) + "\n")
        if curves := recall_by_epoch(history):
            write_whole(folder / BY_EPOCH_FILE, json.dumps(curves) + "\n")
    return {name: float(value) for name, value in metrics.items()}


def held_out_recall(history: Sequence[Mapping[str, float]], num_epochs: float | None = None) -> dict[str, float]:
    """Return the run's Recall@1 on its held-out training classes as a score (`tasks.runs.best`); empty if it held out none.

    Args:
        history: the training steps; the last of each epoch has the measurements after it.
        num_epochs: number of epochs that trained the scored weights; None selects the last scored epoch.
    """
    by_epoch = {row["epoch"] + 1: row[RECALL["best_validation"]] for row in history if RECALL["best_validation"] in row}
    epoch = max(by_epoch, default=None) if num_epochs is None else num_epochs
    return {VALIDATION: by_epoch[epoch]} if epoch in by_epoch else {}


def recall_by_epoch(history: Sequence[Mapping[str, float]]) -> dict[str, dict[int, float]]:
    """Return Recall@1 of training and of test images by completed epochs; empty if the run did not measure it."""
    curves = {role: {int(row["epoch"]) + 1: row[name] for row in history if name in row} for role, name in CURVE.items()}
    return {role: curve for role, curve in curves.items() if curve}


def limit_threads(num_threads: int) -> None:
    """Limit torch, BLAS and OpenMP to `num_threads` from now on, in a process that scores several runs at the same time.

    BLAS has one limit for the whole process, which `threadpoolctl` lets only the first of its threads change; OpenMP has one per thread,
    which torch uses, too, unless `torch.set_num_threads` was called. So every scoring thread calls this function, with the same number. The
    limit is never lifted: the first of two concurrent scorings to end would lift it for the other.
    """
    torch.get_num_threads()  # the first call in a thread sets that thread's number
    threadpool_limits(num_threads)
