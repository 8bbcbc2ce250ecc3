"""Retrieval metrics as functions of ranks: Recall@K, MAP@R, R-precision and MRR, per query and on average.

A query's positives are the gallery items of its class, except itself; R is their number. The rank of a positive is 1 + the number of items
before it; negatives at the same distance count as before it, so that a tie never helps: if all embeddings were equal, Recall@1 would be 0
and not 1. Hence every number depends only on the distances, not on the order of the gallery.

Example: a query with R = 2 whose positives have ranks 1 and 3 has Recall@1 = 1, reciprocal rank 1, R-precision 1/2 and average precision at
R of (1/1) / 2 = 1/2 (Musgrave et al. 2020, A Metric Learning Reality Check, section 2.3).

Shapes: Q queries.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class QueryScores:
    """Ranks and precisions of each query.

    Attributes:
        num_positives: R of each query; if it is 0 the other values are 0 and not counted.
        first_rank: rank of the nearest positive.
        average_precision: average precision at R.
        r_precision: share of positives among the first R.
    """

    num_positives: NDArray[np.int64]
    first_rank: NDArray[np.int64]
    average_precision: NDArray[np.float64]
    r_precision: NDArray[np.float64]

    @property
    def is_scored(self) -> NDArray[np.bool_]:
        """Queries that have a positive: only these count in averages."""
        return self.num_positives > 0


def per_query_metrics(scores: QueryScores, recall_at: tuple[int, ...]) -> dict[str, NDArray[np.float64]]:
    """Return each metric's value for each query that has a positive, by the metric's name, in the order of the queries."""
    first_rank_S = scores.first_rank[scores.is_scored]
    recalls = {f"recall@{k}": (first_rank_S <= k).astype(np.float64) for k in recall_at}
    return recalls | {
        "precision@1": (first_rank_S == 1).astype(np.float64),
        "map@r": scores.average_precision[scores.is_scored],
        "r_precision": scores.r_precision[scores.is_scored],
        "mrr": 1.0 / first_rank_S,
    }


def concatenate(parts: Sequence[QueryScores]) -> QueryScores:
    """Return the scores of several sets of queries as one."""
    return QueryScores(*(np.concatenate(columns) for columns in zip(*(astuple(part) for part in parts), strict=True)))
