"""Benchmark each step of `project/glyphs` at 1,000 and at 10,000 classes, next to plain PyTorch, pytorch-metric-learning and FAISS.

    for name in glyphs glyphs-2000; do dml data fetch $name && dml data prepare $name; done
    python benchmarks/glyphs.py

The row is `normalised-softmax`. Training is three epochs of its twelve; the network that they leave embeds the test classes, and these
embeddings are scored and clustered. Peers: a plain loop over images in memory with pytorch-metric-learning's loss and sampler
(`benchmarks/independent.py`), a plain loop over the test images, FAISS's exact search of the 1000 nearest, pytorch-metric-learning's MAP@R,
and `faiss.Kmeans` with as many clusters and iterations. Each measurement has its own process and all cores. Memory is the peak of the
process above that before the step. Exponent: e of cost ~ classes^e between the two sizes. Prints Markdown.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import torch
from evaluation import kmeans_of_faiss
from independent import RECIPES, Small, embed_all, fit_plainly, read_images
from measuring import ROOT, exponent, forget_peak, in_a_fresh_process, markdown_table, mebibytes
from numpy.typing import NDArray
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

from dml_core.config import parse
from dml_core.data.store.packed import PackedDataset
from dml_core.evaluation.clustering import kmeans
from dml_core.evaluation.config import EvaluationConfig, KMeansConfig
from dml_core.evaluation.evaluator import EmbeddingShard, evaluate_shards
from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.models.embedder import Embedder
from dml_core.training.config import TrainingConfig
from dml_core.training.loop import fit
from tasks.tables.file import load_table
from tasks.tables.runs import row_training
from tasks.workers.embedding import extract

TABLE, ROW = "project/glyphs", "normalised-softmax"
SIZES = ("glyphs-2000", "glyphs")
NUM_EPOCHS = 3
NUM_ITERATIONS = 10  # of k-means
RECIPE = RECIPES["glyphs-2000"]


class Cost(NamedTuple):
    """Seconds, and MiB of memory at the peak above those before."""

    seconds: float
    memory: float


def main() -> None:
    """Measure all steps at both sizes, and print them."""
    num_classes = [len(PackedDataset(ROOT / "data/packed" / size, "test").class_names) for size in SIZES]
    costs: dict[str, list[Cost]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            for name, step in STEPS.items():
                costs.setdefault(name, []).append(in_a_fresh_process(measured, step, size, Path(folder)))
                print(f"{size}: {name}: {costs[name][-1].seconds:.1f} s", flush=True)
    print(f"\n{torch.get_num_threads()} threads, {' and '.join(f'{number:,}' for number in num_classes)} test classes\n")
    rows = []
    for name, (small, large) in costs.items():
        exponents = [exponent(dict(zip(num_classes, values, strict=True))) for values in zip(small, large, strict=True)]
        rows.append([name, f"{small.seconds:.2f}", f"{large.seconds:.1f}", f"{small.memory:.0f}", f"{large.memory:.0f}", *exponents])
    print(markdown_table(["step", "seconds", "", "MiB", "", "exponent of time", "of memory"], rows))
    for ours, theirs in PAIRS:
        ratios = [f"{mine.seconds / other.seconds:.2f}" for mine, other in zip(costs[ours], costs[theirs], strict=True)]
        print(f"\n{ours} / {theirs}: {' and '.join(ratios)}")


def measured(step: Callable[[str, Path], Callable[[], object]], size: str, folder: Path) -> Cost:
    work = step(size, folder)
    forget_peak()
    before, began = mebibytes("VmRSS"), time.perf_counter()
    work()
    return Cost(time.perf_counter() - began, mebibytes("VmHWM") - before)


# ---------------------------------------------------------------- the steps: each loads its inputs and returns the work to measure


def train(size: str, folder: Path) -> Callable[[], object]:
    """Train, and keep the network for the next steps."""
    config, dataset = _config(size), PackedDataset(ROOT / "data/packed" / size, "train")

    def work() -> None:
        system = fit(config, dataset, 0, folder / size / "run", torch.device("cpu"))
        torch.save(system.model.state_dict(), folder / f"{size}.pt")

    return work


def _config(size: str) -> TrainingConfig:
    values = row_training(TABLE, load_table(TABLE).rows[ROW], size).model_dump(mode="json")
    return parse(TrainingConfig, {**values, "num_epochs": NUM_EPOCHS}, size)


def train_plainly(size: str, folder: Path) -> Callable[[], object]:
    """Train without this project's code."""
    images = read_images(ROOT / "data/raw" / size, RECIPE.side)[0]
    torch.manual_seed(0)
    return lambda: fit_plainly(Small(RECIPE.num_dimensions), images, RECIPE, NUM_EPOCHS)


def embed(size: str, folder: Path) -> Callable[[], object]:
    """Embed the test images, and keep the embeddings for the next steps."""
    config, test = _config(size), PackedDataset(ROOT / "data/packed" / size, "test")
    model = Embedder(config.model, len(test.class_names))
    model.load_state_dict(torch.load(folder / f"{size}.pt", weights_only=True))
    return lambda: extract(model, config.transform, {"test": test}, folder / f"{size}-embeddings", torch.device("cpu"))


def embed_plainly(size: str, folder: Path) -> Callable[[], object]:
    """Embed the test images without this project's code."""
    images = read_images(ROOT / "data/raw" / size, RECIPE.side)[1][0]
    network = Small(RECIPE.num_dimensions).to(memory_format=torch.channels_last).eval()
    return lambda: embed_all(network, images, 128)


def retrieve(size: str, folder: Path) -> Callable[[], object]:
    """Recall@1, 10, 100 and MAP@R."""
    embeddings, labels = _embeddings(size, folder)
    config = EvaluationConfig(recall_at=(1, 10, 100), clustering=False)
    return lambda: evaluate_shards([EmbeddingShard(lambda: embeddings, labels)], config)


def search_with_faiss(size: str, folder: Path) -> Callable[[], object]:
    """Find the nearest 1000 of each."""
    embeddings, _ = _embeddings(size, folder)
    index = faiss.IndexFlatIP(embeddings.shape[1])
    index.add(embeddings)
    return lambda: index.search(embeddings, min(1000, len(embeddings)))


def score_with_pml(size: str, folder: Path) -> Callable[[], object]:
    """Precision@1 and MAP@R."""
    embeddings, labels = map(torch.from_numpy, _embeddings(size, folder))
    calculator = AccuracyCalculator(include=("precision_at_1", "mean_average_precision_at_r"), k="max_bin_count")
    return lambda: calculator.get_accuracy(embeddings, labels)


def cluster(size: str, folder: Path) -> Callable[[], object]:
    """Cluster into as many clusters as classes."""
    embeddings, labels = _embeddings(size, folder)
    num_clusters = len(np.unique(labels))
    return lambda: kmeans(as_points(embeddings, "cosine"), num_clusters, KMeansConfig(num_iterations=NUM_ITERATIONS), seed=0)


def cluster_with_faiss(size: str, folder: Path) -> Callable[[], object]:
    """Cluster with FAISS, then find each point's cluster."""
    embeddings, labels = _embeddings(size, folder)
    num_clusters = len(np.unique(labels))
    return lambda: kmeans_of_faiss(embeddings, num_clusters, NUM_ITERATIONS)


def _embeddings(size: str, folder: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    shards = sorted((folder / f"{size}-embeddings").glob("test-[0-9]*.npy"))
    return np.concatenate([np.load(path) for path in shards]), np.load(folder / f"{size}-embeddings" / "test-labels.npy")


STEPS: dict[str, Any] = {
    "training": train,
    "plain PyTorch, training": train_plainly,
    "embedding": embed,
    "plain PyTorch, embedding": embed_plainly,
    "Recall@K and MAP@R": retrieve,
    "FAISS, top 1000": search_with_faiss,
    "AccuracyCalculator": score_with_pml,
    "k-means": cluster,
    "faiss.Kmeans": cluster_with_faiss,
}
PAIRS = (
    ("training", "plain PyTorch, training"),
    ("embedding", "plain PyTorch, embedding"),
    ("Recall@K and MAP@R", "FAISS, top 1000"),
    ("Recall@K and MAP@R", "AccuracyCalculator"),
    ("k-means", "faiss.Kmeans"),
)

if __name__ == "__main__":
    main()
