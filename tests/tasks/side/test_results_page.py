"""`flows/tables/fashion_mnist.yaml`: every row and twin builds, and the table says what was measured."""

from pathlib import Path

import pytest
import torch

from dml_core.config import parse, read_yaml
from dml_core.losses.registry import LOSSES
from dml_core.training.loop import build_system
from flows.side.results import SPEC
from tasks.side import results
from tasks.side.results import ResultsSpec, against_untrained, measure, table
from tests.conftest import small_training

NUM_TRAIN_CLASSES = 5  # of Fashion-MNIST
SPECIFICATION = parse(ResultsSpec, read_yaml(SPEC), SPEC.name)
PROTOCOL = small_training(num_epochs=1).model_dump(exclude={"loss"})
BUILDS = [(row, twin) for row, settings in SPECIFICATION.rows.items() for twin in (False, True) if not twin or settings.twin]


@pytest.mark.parametrize(("row", "twin"), BUILDS)
def test_rows_and_twins_build_and_twins_are_the_other_library(row, twin):
    config = SPECIFICATION.training_config(row, twin)
    system = build_system(config, NUM_TRAIN_CLASSES, 0, torch.device("cpu"))
    labels = torch.arange(20) % NUM_TRAIN_CLASSES
    assert system(torch.randn(20, 3, 28, 28), labels, [20]).total.isfinite()
    used = {config.loss.name, *(term["name"] for term in config.loss.options.get("terms", ()))} - {"combined"}
    assert all(name.startswith("pml:") == twin for name in used)


def test_all_systems_and_baselines_have_a_row():
    not_alone = {"combined", "center_loss", "ring_loss"}  # terms beside a softmax
    variants = {"hardtriple", "l2_constrained_softmax"}
    assert {SPECIFICATION.training_config(row).loss.name for row in SPECIFICATION.rows} == set(LOSSES) - not_alone - variants


def test_every_row_has_the_same_budget():
    budgets = {
        SPECIFICATION.training_config(row, twin).model_copy(update={"loss": None, "model": None}).model_dump_json()
        for row, twin in BUILDS
        if not row.startswith("untrained")
    }
    assert len(budgets) == 1


def test_rows_are_measured_and_set_beside_their_twins(packed: Path, monkeypatch):
    monkeypatch.setattr(results, "side_by_side", lambda work, jobs: ((job, work(job)) for job in jobs))
    values = {
        "chosen": "by nobody",
        "dataset": {"reader": "synthetic", "raw": "unused"},
        "seeds": [0, 1],
        "protocol": PROTOCOL,
        "rows": {
            "untrained": {"training": {"loss": {"name": "softmax"}, "num_epochs": 0}},
            "softmax": {"training": {"loss": {"name": "softmax"}}, "twin": {"loss": {"name": "softmax"}}},
        },
    }
    spec = parse(ResultsSpec, values, "test")
    heard: list[str] = []
    found = measure(spec, packed, heard.append)
    names = ["untrained", "softmax", "softmax (twin)"]
    assert [line.split(": ")[1] for line in heard] == [f"{name}, seed {seed}" for seed in (0, 1) for name in names]
    assert found["softmax", True] == found["softmax", False]  # the same loss from the same seeds is the same run
    assert found["untrained", False] != found["softmax", False]
    assert table(spec, found).splitlines()[-1].endswith("| +0.0 ± 0.0 | yes |")


def test_the_table_by_hand():
    values = {
        "chosen": "by nobody",
        "dataset": {"reader": "synthetic", "raw": "unused"},
        "seeds": [0, 1],
        "protocol": PROTOCOL,
        "rows": {"a": {"training": {"loss": {"name": "softmax"}}, "twin": {"loss": {"name": "softmax"}}, "twin_differs": "it is slower."}},
    }
    scores = {"recall@1": [0.5, 0.7], "map@r": [0.2, 0.2], "nmi": [0.1, 0.1]}
    twins = {**scores, "recall@1": [0.3, 0.498]}
    # Two seeds: t = 12.706, so half the interval of the differences (0.2, 0.202) is 12.706 * 0.001 = 1.3 %, and of (0.5, 0.7) 127 %.
    expected = "| a | 60.0 ± 127.1 | 20.0 ± 0.0 | 10.0 ± 0.0 | 39.9 ± 125.8 (1) | +20.1 ± 1.3 | no |"
    spec = parse(ResultsSpec, values, "test")
    *_, row, _, note = table(spec, {("a", False): scores, ("a", True): twins}).splitlines()
    assert row == expected
    assert note == "(1) Not the same loss: it is slower."


def test_rows_are_counted_against_the_untrained_network():
    """Differences (10, 11, 12) leave 0 out, (-1, 0, 1) do not, (-5, -6, -7) leave it out below."""
    spec = SPECIFICATION.model_copy(update={"rows": dict.fromkeys(("untrained", "a", "b", "c"), SPECIFICATION.rows["softmax"])})
    values = {"untrained": (50, 50, 50), "a": (60, 61, 62), "b": (49, 50, 51), "c": (45, 44, 43)}
    found = {(row, False): {key: [*scores] for key in results.METRICS} for row, scores in values.items()}
    assert "Of 3 rows" in against_untrained(spec, found)
    assert "in R@1 1 better and 1 worse" in against_untrained(spec, found)
