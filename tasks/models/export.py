"""Export networks as graphs for other programs; measure the losses on the run's own test images and store them with the graph."""

import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.splits import open_role
from dml_core.errors import ConfigError, EvaluationError
from dml_core.evaluation.evaluator import EmbeddingShard, evaluate_shards
from dml_core.exported import FILES, write_graph
from dml_core.network_description import DESCRIPTION_FILE, WEIGHTS_FILE, GraphFile, read_description, write_description
from dml_core.trained import TrainedModel, load_model, load_network, write_folder
from tasks.environment import Project
from tasks.models.lookup import resolve_model
from tasks.models.trained_runs import TrainedRun, run_of
from tasks.workers.work import scored_datasets

MEASURED_FILE = "measured.json"
LARGEST_DIFFERENCE = 1e-4  # of an fp32 graph's embeddings from the network's
NUM_CALIBRATION = 256
BATCH_SIZE = 64


@dataclass(frozen=True)
class Measured:
    """An exported network compared with the run's own, on the run's test images.

    Attributes:
        run, format, precision: what was exported.
        num_images: number of test images, queries and gallery together.
        recall_at_1, recall_at_1_of_run: of the exported network and of the run's.
        largest_difference: maximum over all components of all embeddings.
        num_bytes, num_bytes_of_run: size of the graph and of the network's weights.
        milliseconds, milliseconds_of_run: per image in batches of 64, on this machine's CPU, without decoding.
    """

    run: str
    format: str
    precision: str
    num_images: int
    recall_at_1: float
    recall_at_1_of_run: float
    largest_difference: float
    num_bytes: int
    num_bytes_of_run: int
    milliseconds: float
    milliseconds_of_run: float


def export(project: Project, text: str, graph_format: str, precision: str, out: Path) -> Measured:
    """Export a run's network to a folder that `load_model` and other programs can read, and measure it on the run's test images.

    `text` is the network as `resolve_model` takes it. An export that is in the output folder is replaced.

    Raises:
        ConfigError: the format or precision is unknown, the folder has other contents, or the network is an export itself.
        EvaluationError: an fp32 graph gives other embeddings than the network.
    """
    if graph_format not in FILES or precision not in ("fp32", "fp16", "int8"):
        raise ConfigError(f"--format {graph_format} --precision {precision}: expected onnx or torch-export, and fp32, fp16 or int8")
    _check_place(out)
    network = resolve_model(text, project)
    description = read_description(network)
    if description.graph is not None:
        raise ConfigError(f"{text}: is an export already, and only a run's network can be exported; name the run")
    own = load_model(network, "cpu")
    run = run_of(project, own.identity)
    if run is None:
        raise ConfigError(
            f"{text}: no run of the standing comparison with test images on this machine, so an export's effect cannot be measured"
        )
    graph = GraphFile(
        format=graph_format,  # type: ignore[arg-type]
        name=FILES[graph_format],
        precision=precision,  # type: ignore[arg-type]
        weights_sha256=own.weights_sha256,
    )
    measured: Measured | None = None

    def write(folder: Path) -> None:
        nonlocal measured
        images = _calibration(run, own) if precision == "int8" else None
        write_graph(folder, load_network(network, description), description.transform, graph, images)
        write_description(folder, description.model_copy(update={"graph": graph}))
        sizes = [(folder / graph.name).stat().st_size, (network / WEIGHTS_FILE).stat().st_size]
        measured = _measure(run, own, load_model(folder, "cpu"), graph, *sizes)
        (folder / MEASURED_FILE).write_text(json.dumps(asdict(measured), indent=1) + "\n")

    write_folder(out.absolute(), write)
    assert measured is not None
    return measured


def _check_place(out: Path) -> None:
    """Reject a file, and a folder with anything but an earlier export, which will be replaced."""
    if not out.exists():
        return
    names = {path.name for path in out.iterdir()} if out.is_dir() else {out.name}
    names = {name for name in names if not name.startswith(".nfs")}  # NFS keeps deleted files that a process has open
    strange = names - {MEASURED_FILE, DESCRIPTION_FILE, *FILES.values()} if MEASURED_FILE in names else names
    if strange:
        raise ConfigError(f"{out}: already exists and is not an exported network ({min(strange)}); name a new folder")


def _calibration(run: TrainedRun, model: TrainedModel) -> list[torch.Tensor]:
    """Return test views of training images from the whole dataset; test images must not influence the graph."""
    dataset = open_role(Path(run.dataset.folder), "train", run.spec.training.validation)
    positions = np.linspace(0, len(dataset) - 1, min(NUM_CALIBRATION, len(dataset))).astype(int)
    return [model.view(dataset.image(index), dataset.box(index)) for index in positions]


def _measure(
    run: TrainedRun, own: TrainedModel, exported: TrainedModel, graph: GraphFile, num_bytes: int, num_bytes_of_run: int
) -> Measured:
    datasets = scored_datasets(Path(run.dataset.folder), run.spec)
    num_images = sum(map(len, datasets.values()))
    rows, seconds = _embedded(exported, datasets)
    expected, expected_seconds = _embedded(own, datasets)
    difference = max(float(np.abs(rows[role] - expected[role]).max()) for role in datasets)
    if graph.precision == "fp32" and not difference <= LARGEST_DIFFERENCE:
        raise EvaluationError(f"the exported network's embeddings differ from the run's by up to {difference:.1e}; export discarded")
    return Measured(
        run=run.spec.title,
        format=graph.format,
        precision=graph.precision,
        num_images=num_images,
        recall_at_1=_recall(run, datasets, rows),
        recall_at_1_of_run=_recall(run, datasets, expected),
        largest_difference=difference,
        num_bytes=num_bytes,
        num_bytes_of_run=num_bytes_of_run,
        milliseconds=1000 * seconds / num_images,
        milliseconds_of_run=1000 * expected_seconds / num_images,
    )


def _embedded(model: TrainedModel, datasets: dict[str, PackedDataset]) -> tuple[dict[str, NDArray[np.float32]], float]:
    """Return the embeddings of each role's images, and the seconds spent in the network."""
    rows, seconds = {}, 0.0
    for role, dataset in datasets.items():
        batches = []
        for start in range(0, len(dataset), BATCH_SIZE):
            views = [model.view(dataset.image(index), dataset.box(index)) for index in range(start, min(start + BATCH_SIZE, len(dataset)))]
            if not start:
                model.embed_views(views)  # warm-up
            began = time.perf_counter()
            batches.append(model.embed_views(views))
            seconds += time.perf_counter() - began
        rows[role] = np.concatenate(batches)
    return rows, seconds


def _recall(run: TrainedRun, datasets: dict[str, PackedDataset], rows: dict[str, NDArray[np.float32]]) -> float:
    """Return Recall@1 as the run's evaluation computes it."""
    shards = {role: EmbeddingShard(partial(rows.__getitem__, role), dataset.labels) for role, dataset in datasets.items()}
    config = run.spec.evaluation.model_copy(update={"recall_at": (1,), "intervals": None, "device": "cpu"})
    gallery = shards.get("gallery") or next(iter(shards.values()))
    return float(evaluate_shards([gallery], config, [shards["query"]] if "query" in shards else None)["recall@1"])
