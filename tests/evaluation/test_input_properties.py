"""Embeddings and labels of any type: the numbers of a slow loop over plain Python values, or a one-line error."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dml_core.errors import EvaluationError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import evaluate
from dml_core.evaluation.retrieval.outcomes import query_outcomes
from tests.evaluation.oracles import slow_scores

DRAWS = settings(derandomize=True, deadline=None, max_examples=40)
CONFIG = EvaluationConfig(clustering=False)
NUM_SAMPLES = 8
POOLS: dict[str, list[Any]] = {  # labels; those of one pool are distinct in Python
    "small": [0, 1, 2],
    "negative": [-3, -1, 5],
    "beyond 2^53": [2**53, 2**53 + 1, 2**53 + 2],
    "beyond int64": [2**63, 2**63 + 1, 2**64 - 1],
    "words": ["a", "b", "ab"],
    "words of digits": ["1", "01", "1.0"],
    "odd words": ["", " ", "\ud800", "é", "e\u0301"],
    "bytes": [b"a", b"b", b"\xff"],
}
REFUSED: dict[str, list[Any]] = {  # rejected in part or entirely: numpy would merge them, or they are no labels
    "both signs of 64 bits": [2**63, -1, 0],
    "beyond 64 bits": [2**64, 2**70, 1],
    "numbers and words": [1, "1", 2],
    "words and bytes": ["a", b"a", "b"],
    "truths": [True, False],
    "truths and numbers": [True, 1, 2],
    "floats": [1.0, 2.5],
    "none": [None, 1],
    "lists": [[0], [1]],
    "ends in NUL": ["a", "a\0"],
}
UNKNOWN_TO_TORCH = set(POOLS) - {"small", "negative"}
CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "objects": lambda labels: np.array([*labels, None], dtype=object)[:-1],
    "strided": lambda labels: np.repeat(np.array(labels), 2)[::2],
    "tensor": torch.tensor,
    "big-endian": lambda labels: (array := np.array(labels)).astype(array.dtype.newbyteorder(">")),
}
FLOATS = (
    "f2",
    "f4",
    "f8",
    "g",
    ">f4",
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "requires_grad",
    "column order",
    "reversed",
    "read-only",
)


def of_type(values_ND: Any, kind: str) -> Any:
    """Return small integers and halves, which every floating-point type represents exactly, as that type."""
    if kind == "requires_grad":
        return torch.tensor(values_ND, requires_grad=True)
    if kind == "column order":
        return np.asfortranarray(values_ND)
    if kind == "reversed":
        return np.ascontiguousarray(values_ND[::-1])[::-1]
    if kind == "read-only":
        values_ND.flags.writeable = False
        return values_ND
    if hasattr(torch, kind):
        return torch.tensor(values_ND, dtype=getattr(torch, kind))
    return values_ND.astype(kind)


@st.composite
def points(draw: st.DrawFn) -> Any:
    """Draw points (N, 3) of small halves, without a row of zeros, with ties and duplicates."""
    numbers = draw(st.lists(st.integers(-4, 4), min_size=2 * NUM_SAMPLES, max_size=2 * NUM_SAMPLES))
    return np.column_stack([np.array(numbers, float).reshape(NUM_SAMPLES, 2) / 2, np.ones(NUM_SAMPLES)])


def expected_of(embeddings: Any, labels: list[Any], metric: str, queries: tuple[Any, list[Any]] | None) -> dict[str, float] | None:
    """Return averages of the slow loop, whose labels are compared by Python; None if no query has a positive."""
    names: dict[Any, int] = {}
    codes = np.array([names.setdefault(label, len(names)) for label in labels])
    asked = None if queries is None else np.array([names.setdefault(label, len(names)) for label in queries[1]])
    rows = slow_scores(embeddings, codes, None if queries is None else queries[0], asked, metric)
    scored = np.array([row[1:] for row in rows if row[0] > 0])
    if not len(scored):
        return None
    return {"recall@1": (scored[:, 0] == 1).mean(), "map@r": scored[:, 1].mean(), "r_precision": scored[:, 2].mean()}


@pytest.mark.parametrize("pool", POOLS)
@DRAWS
@given(data=st.data())
def test_labels_and_embeddings_of_any_type_give_the_slow_loops_numbers(pool: str, data: st.DataObject) -> None:
    metric = data.draw(st.sampled_from(["cosine", "euclidean"]))
    config = CONFIG.model_copy(update={"metric": metric})
    made = []
    for _ in range(data.draw(st.integers(1, 2))):
        values_ND, labels = data.draw(points()), data.draw(st.lists(st.sampled_from(POOLS[pool]), min_size=8, max_size=8))
        container = data.draw(st.sampled_from([name for name in CONTAINERS if name != "tensor" or pool not in UNKNOWN_TO_TORCH]))
        made.append((of_type(values_ND.copy(), data.draw(st.sampled_from(FLOATS))), CONTAINERS[container](labels), values_ND, labels))
    (embeddings, given_labels, values_ND, labels), *rest = made
    queries = rest[0][:2] if rest else (None, None)
    expected = expected_of(values_ND, labels, metric, rest[0][2:] if rest else None)
    if expected is None:
        with pytest.raises(EvaluationError, match="nothing can be found"):
            evaluate(embeddings, given_labels, config, *queries)
        return
    values = evaluate(embeddings, given_labels, config, *queries)
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    everything = values_ND if not rest else np.concatenate([values_ND, rest[0][2]])
    all_labels = labels if not rest else [*labels, *rest[0][3]]
    means = [everything[[label == name for label in all_labels]].mean(axis=0) for name in all_labels]
    assert values["csc_trace_within"] == pytest.approx(np.square(everything - means).sum(axis=1).mean())


@pytest.mark.parametrize("signs", [("uint64", "int64"), ("int64", "uint64"), ("uint64", "int8")])
def test_integers_of_two_types_are_compared_exactly(signs: tuple[str, str]) -> None:
    """numpy converts uint64 and int64 together to float64, in which 2^53 and 2^53 + 1 are one class."""
    big = 0 if "int8" in signs else 2**53
    embeddings = np.array([[1, 0], [0, 1], [1, 0.1], [0.1, 1]])
    labels = np.array([big, big + 1, big, big + 1])
    gallery, queries = (embeddings, labels.astype(signs[0])), (embeddings[:2], labels[:2].astype(signs[1]))
    values = evaluate(*gallery, CONFIG, *queries)
    assert values["csc_trace_between"] > 10 * values["csc_trace_within"], "two classes, each in its corner"
    outcomes = query_outcomes(*gallery, CONFIG, 3, *queries)
    assert outcomes.is_right.tolist() == [[True, True, False]] * 2
    assert outcomes.scores.num_positives.tolist() == [2, 2]


MERGED_BY_THE_CALLER = ("numbers and words", "words and bytes", "truths and numbers", "ends in NUL")  # the array has lost the difference
HOW_REFUSED = [(pool, container) for pool in REFUSED for container in ("list", "tuple", "objects")]
HOW_REFUSED += [(pool, "array") for pool in REFUSED if pool not in MERGED_BY_THE_CALLER]


@pytest.mark.parametrize(("pool", "container"), HOW_REFUSED)
def test_labels_that_numpy_would_merge_and_what_is_no_label_are_refused_in_one_line(pool: str, container: str) -> None:
    labels = (REFUSED[pool] * NUM_SAMPLES)[:NUM_SAMPLES]
    with pytest.raises(EvaluationError, match=r"^labels: ") as refusal:
        evaluate(np.eye(NUM_SAMPLES), CONTAINERS[container](labels), CONFIG)
    assert "\n" not in str(refusal.value)


NO_EMBEDDINGS: dict[str, Any] = {
    "integers": np.eye(8, dtype=int),
    "complex": np.eye(8, dtype=complex),
    "truths": np.eye(8, dtype=bool),
    "words": np.full((8, 2), "a"),
    "objects": np.full((8, 2), None),
    "ragged": [[1.0, 2.0], [1.0]] * 4,
    "three dimensions": np.ones((8, 2, 2)),
    "a number": 3.0,
    "nothing": None,
    "no dimensions": np.ones((8, 0)),
    "masked": np.ma.masked_array(np.eye(8), mask=np.eye(8)),
    "structured": np.zeros(8, dtype=[("a", "f4"), ("b", "f4")]),
    "sparse tensor": torch.eye(8).to_sparse(),
    "integer tensor": torch.eye(8, dtype=torch.int32),
    "NaN": np.full((8, 2), np.nan, "f2"),
    "tiny": np.eye(8) * 1e-170,
    "nearly tiny": np.eye(8) * 1e-158,
    "huge": np.eye(8) * 1e25,
    "NaN tensor": torch.full((8, 2), torch.nan, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("case", NO_EMBEDDINGS)
def test_what_is_no_embedding_is_refused_in_one_line_by_every_reader(case: str) -> None:
    given_ND, labels = NO_EMBEDDINGS[case], [0, 0, 1, 1, 2, 2, 3, 3]
    for call in (
        lambda: evaluate(given_ND, labels, CONFIG),
        lambda: evaluate(np.ones((8, 2)), labels, CONFIG, given_ND, labels),
    ):
        with pytest.raises(EvaluationError) as refusal:
            call()
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("scale", [1e-140, 1e-30, 1e-20, 1e-3, 1e15])
def test_the_length_of_embeddings_does_not_matter_to_cosines(scale: float) -> None:
    embeddings, labels = np.random.default_rng(0).normal(size=(40, 4)), np.arange(40) % 5
    assert evaluate(scale * embeddings, labels, CONFIG)["map@r"] == evaluate(embeddings, labels, CONFIG)["map@r"]
