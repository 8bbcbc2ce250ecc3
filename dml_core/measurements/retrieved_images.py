"""Images retrieved by every system for the same queries (SoftTriple, Figure 5; tuplet margin, Figure 6): pictures and their record.

No paper names its queries. Here a rule selects them from the dataset only, so that rows of a table are comparable and nobody selects what
looks good: it takes evenly spaced classes, in the dataset's order, among those in which a query has an image to retrieve, and the middle
image of each.

Shapes: Q queries, S of them shown, k neighbours.
"""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dml_core.config import Config
from dml_core.errors import EvaluationError
from dml_core.evaluation.config import EvaluationConfig, Metric
from dml_core.evaluation.retrieval.outcomes import query_outcomes
from dml_core.figures.gallery import plot_retrieval_gallery, retrieved_row
from dml_core.measurements.contract import FinishedRun

METRICS = ("right_among_shown", "right_among_nearest")
RULE = "queries: the middle image of evenly spaced classes, the same for every system"


class Options(Config):
    """Options of the measurement.

    Attributes:
        num_queries: S; fewer if there are fewer classes.
        num_neighbours: k.
        metric: metric of the similarities.
    """

    num_queries: int = Field(default=8, ge=1)
    num_neighbours: int = Field(default=4, ge=1)
    metric: Metric = "cosine"


def measure(run: FinishedRun, options: Options, folder: Path) -> dict[str, float]:
    """Return the share of right images among the neighbours shown, and among as many neighbours of every query.

    `retrieved.png` shows them, `retrieved.json` lists their indices in the role.

    Raises:
        EvaluationError: no query has an image of its class to retrieve.
    """
    queries, gallery = run.queries, run.gallery
    same = queries is gallery
    shown_S = fixed_queries(queries.labels, gallery.labels, same, options.num_queries)
    if len(shown_S) == 0:
        raise EvaluationError(f"{run.title}: no query has another image of its class to find")
    separate = () if same else (queries.embeddings, queries.labels)
    config = EvaluationConfig(metric=options.metric)
    outcomes = query_outcomes(gallery.embeddings, gallery.labels, config, options.num_neighbours, *separate)
    found_Qk, right_Qk = outcomes.neighbours, outcomes.is_right
    rows = [retrieved_row(queries, gallery, query, outcomes, query) for query in shown_S]
    right_Sk = right_Qk[shown_S]
    shares = right_Sk.mean(), right_Qk.mean()
    note = f"{RULE}\n{right_Sk.sum()} of the {right_Sk.size} images shown are right, {100 * shares[1]:.1f} % over all queries"
    plot_retrieval_gallery(rows, folder / "retrieved.png", run.title, note)
    record = [
        {
            "query": int(query),
            "class": queries.class_name(query),
            "found": found_Qk[query].tolist(),
            "classes": [gallery.class_name(index) for index in found_Qk[query]],
            "right": right_Qk[query].tolist(),
        }
        for query in shown_S
    ]
    (folder / "retrieved.json").write_text(json.dumps({"rule": RULE, "queries": record}, indent=1) + "\n")
    return dict(zip(METRICS, map(float, shares), strict=True))


def fixed_queries(labels_Q: NDArray[np.int64], gallery_labels_N: NDArray[np.int64], same: bool, num_queries: int) -> NDArray[np.int64]:
    """Return (S,) indices of the queries to show, by the module's rule: at most one of each class with an image to retrieve.

    If queries and gallery are the `same` role, an image does not retrieve itself.
    """
    classes, sizes = np.unique(gallery_labels_N, return_counts=True)
    findable = np.intersect1d(classes[sizes > same], labels_Q)
    num_shown = min(num_queries, len(findable))
    chosen = findable[(2 * np.arange(num_shown) + 1) * len(findable) // (2 * max(num_shown, 1))]
    members = [np.flatnonzero(labels_Q == label) for label in chosen]
    return np.array([places[len(places) // 2] for places in members], dtype=np.int64)
