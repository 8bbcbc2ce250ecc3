"""Verbs that measure embeddings: `evaluate` scores files, outside of any run."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from dml_core.config import parse
from dml_core.errors import ConfigError
from dml_core.evaluation.config import EvaluationConfig, Metric
from flows.cli.app import app, examples
from flows.cli.options import check_file
from tasks.files import check_output, write_output


@app.command(epilog=examples("dml evaluate --embeddings embeddings", "dml evaluate --embeddings e.npy --labels l.npy --metric euclidean"))
def evaluate(
    embeddings: Annotated[
        Path,
        typer.Option(help="Embeddings (N, D): a .npy file, or the output of `dml embed` or a run. Also used as queries if none are given."),
    ],
    labels: Annotated[
        Path | None, typer.Option(help="Labels, .npy, (N,), integers or strings; a folder of embeddings contains its labels.")
    ] = None,
    query_embeddings: Annotated[Path | None, typer.Option(help="Query embeddings, .npy, (Q, D).")] = None,
    query_labels: Annotated[Path | None, typer.Option(help="Query labels, .npy, (Q,).")] = None,
    k: Annotated[str, typer.Option("--k", help="Values of K for Recall@K, separated by commas.")] = "1,2,4,8",
    metric: Annotated[
        Metric | None, typer.Option(help="Similarity of two embeddings. Default: the network's, as `dml embed` records it, else cosine.")
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Hold one shard at a time in memory; computes only the retrieval metrics.")
    ] = False,
    approximate: Annotated[
        Literal["ivf", "pq", "hnsw"] | None, typer.Option(help="Search with an approximate index; computes only Recall@K.")
    ] = None,
    index_option: Annotated[
        list[str] | None, typer.Option(help="Option of the index, for example num_probes=64; repeat for several.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write the metrics to as well.")] = None,
) -> None:
    """Score embeddings from files with every metric.

    Prints the metric of the similarities and the retrieval and clustering metrics, as fractions, as JSON.
    """
    from tasks.runs.embeddings import recorded_network
    from tasks.scores.scoring import Files, approximation_of, is_number, score_files

    if not all(is_number(part.strip()) for part in k.split(",")):
        raise ConfigError(f"--k {k[:100]}: expected whole numbers separated by commas, as in 1,2,4,8")
    if output is not None:
        check_file(output)
        check_output(output, "application/json", b'{\n  "metric": ')
    if index_option and approximate is None:
        raise ConfigError("--index-option requires an index; choose one with --approximate ivf, pq or hnsw")
    used = metric or recorded_network(embeddings).metric
    config = parse(EvaluationConfig, {"recall_at": [int(part) for part in k.split(",")], "metric": used}, "--k")
    approximation = None if approximate is None else approximation_of(approximate, index_option or [])
    metrics = score_files(Files(embeddings, labels, query_embeddings, query_labels), config, stream, approximation)
    if approximate is not None:
        recalls = ", ".join(
            f"{value:.4f} {name.removeprefix('index_recall')}" for name, value in metrics.items() if name.startswith("index_")
        )
        print(
            f"approximate ({approximate}): the index found these shares of the exact nearest neighbours: {recalls}, "
            f"over {metrics['num_sampled_queries']} sampled queries; MAP@R, R-precision and the clustering metrics are not estimated",
            file=sys.stderr,
        )
    text = json.dumps({"metric": used} | metrics, indent=2)
    print(text)
    if output is not None:
        write_output(output, f"{text}\n")
