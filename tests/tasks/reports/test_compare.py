"""A comparison's report: numbers by hand, and the same bytes from the same scores."""

import csv
import json
from pathlib import Path

import pytest

from dml_core.evaluation.config import EvaluationConfig
from tasks.reports import compare, kit
from tasks.reports.compare import write_report
from tasks.runs.records import MetricRecord
from tasks.runs.specs import RunSpec
from tasks.tracking.child_run import PublishedRun
from tasks.tracking.published import compare_published, comparison_rows
from tasks.tracking.tags import Tag
from tests.conftest import small_training


def run(variant: str, seed: int, recall: float) -> tuple[RunSpec, MetricRecord]:
    spec = RunSpec(dataset="d", variant=variant, seed=seed, training=small_training(), evaluation=EvaluationConfig())
    metrics = {"recall@1": recall, "recall@1_class_mean": 0.0, "recall@10": 0.9, "nmi": 0.5, "num_queries": 1e6}
    return spec, MetricRecord(step="evaluate", identity=f"{variant}{seed}", key="k", files=(), metrics=metrics)


def test_only_plain_recalls_are_drawn_in_ascending_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(
        "dml_core.figures.recalls.plot_recalls", lambda values, path, title: drawn.append((list(values["a"].items()), path))
    )
    spec, record = run("a", 0, 0.4)
    metrics = {"recall@10": 0.9, "recall@2": 0.4, "recall@1_class_mean": 0.1, "nmi": 0.3}
    write_report("title", [(spec, record.model_copy(update={"metrics": metrics}))], tmp_path)
    assert drawn == [([(2, [0.4]), (10, [0.9])], tmp_path / "recall.png")]


def test_a_report_twice_is_the_same_bytes(tmp_path: Path) -> None:
    runs = [run("a", seed, value) for seed, value in enumerate((0.25, 0.5, 0.75))] + [run("b", seed, 0.1) for seed in range(3)]
    text = write_report("title", runs, tmp_path / "one")
    write_report("title", runs, tmp_path / "other")
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert [str(path) for path in files] == [
        "differences/differences.md", "metrics/a.json", "metrics/b.json", "recall.png", "report.md", "scores.csv"
    ]  # fmt: skip
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "other" / path).read_bytes(), path
    # Only metrics with a column in `dvc metrics show`; MAP@R was not measured.
    assert json.loads((tmp_path / "one/metrics/a.json").read_text()) == {"recall@1": 0.5, "nmi": 0.5}
    # t(0.975, 2) = 4.303, standard deviation 0.25, over sqrt(3): 62.1 points
    assert "50.0 ± 62.1" in text


def test_recall_over_epochs_is_drawn_only_if_runs_measured_it(tmp_path: Path) -> None:
    plain = [run(variant, seed, 0.1) for variant in ("a", "b") for seed in (0, 1)]
    curve = {"train": {1: 0.2, 2: 0.9}, "test": {1: 0.1, 2: 0.3}}
    curved = [(spec, record.model_copy(update={"recall_by_epoch": curve})) for spec, record in plain]
    assert "(epochs.png)" in write_report("title", curved, tmp_path)
    assert (tmp_path / "epochs.png").stat().st_size > 10_000
    assert "epochs.png" not in write_report("title", plain, tmp_path)
    assert not (tmp_path / "epochs.png").exists()


def test_variants_are_compared_with_the_named_reference(tmp_path: Path) -> None:
    runs = [run(name, seed, 0.1 * place + 0.01 * seed * place) for place, name in enumerate(("a", "b", "c"), 1) for seed in range(3)]
    text = write_report("title", runs, tmp_path, reference="a")
    assert "difference to a (95 %, simultaneous)" in text
    # b minus a: 10, 11, 12 points; t(2) at 0.05 / 4 = 6.205, standard deviation 1, over sqrt(3): 3.6
    assert "+11.0 ± 3.6" in text
    assert "+22.0 ± 7.2" in text  # c minus a, not c minus b


def test_variants_with_different_numbers_of_seeds_say_so(tmp_path: Path) -> None:
    runs = [run("a", seed, 0.5) for seed in range(5)] + [run("b", 3, 0.1)]
    assert "95 % interval over 1 to 5 seeds." in write_report("title", runs, tmp_path)


def test_all_scores_are_kept_with_their_seeds(tmp_path: Path) -> None:
    runs = [run("a", 0, 0.4), run("a", 2, 0.5), run("a", 1, 0.6), run("b", 2, 0.1)]
    write_report("title", runs, tmp_path)
    rows = list(csv.DictReader((tmp_path / "scores.csv").read_text().splitlines()))
    assert [row["metric"] for row in rows] == ["recall@1", "recall@1_class_mean", "recall@10", "nmi", "num_queries"] * 2
    # t(0.975, 2) = 4.303, standard deviation 0.1, over sqrt(3)
    assert rows[0].pop("half_width").startswith("0.2484")
    assert rows[0] == {
        "variant": "a", "metric": "recall@1", "mean": "0.500000", "seed_0": "0.400000", "seed_1": "0.600000", "seed_2": "0.500000"
    }  # fmt: skip
    assert (rows[5]["mean"], rows[5]["half_width"], rows[5]["seed_0"], rows[5]["seed_2"]) == ("0.100000", "", "", "0.100000")


def test_a_removed_variant_is_removed_from_dvc_s_metrics(tmp_path: Path) -> None:
    write_report("title", [run("a", 0, 0.4), run("b", 0, 0.4)], tmp_path)
    write_report("title", [run("a", 0, 0.4)], tmp_path)
    assert [path.name for path in (tmp_path / "metrics").iterdir()] == ["a.json"]


def test_a_row_that_older_code_made_is_marked_with_the_files(tmp_path: Path) -> None:
    runs = [run("a", 0, 0.25), run("b", 0, 0.1)]
    text = write_report("title", runs, tmp_path, {"a": ["dml_core/losses/a.py", "dml_core/training/loop.py"]})
    assert [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")] == ["variant", "a (other code)", "b"]
    assert "\na: made by other code: dml_core/losses/a.py, dml_core/training/loop.py.\n" in text
    assert (tmp_path / "metrics/a.json").is_file()


SEEDS = {"a": (0.50, 0.52, 0.54), "b": (0.49, 0.50, 0.51), "c": (0.40, 0.422, 0.438)}  # computed in tests/evaluation/test_comparing.py


def test_significant_differences_come_first_with_the_best_in_bold_and_every_pair_in_a_file(tmp_path: Path) -> None:
    runs = [run(variant, seed, value) for variant, values in SEEDS.items() for seed, value in enumerate(values)]
    text = write_report("title", runs, tmp_path)
    lines = text.splitlines()
    said = "Best mean R@1: a, 52.0. The best is one of a and b (95 % confidence). Significantly worse than a: c (-10.0 ± 0.9). 3 seeds. "
    assert lines[2].startswith(f"{said}This comparison detects differences of ")
    assert lines[4].endswith("Bold: the 95 % confidence set of the best.")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert rows[0][0::4] == ["variant", "difference to the best (95 %, simultaneous)"]
    assert [row[0] for row in rows[1:]] == ["**a**", "**b**", "c"]
    assert [row[1] for row in rows[1:]] == ["**52.0 ± 5.0**", "**50.0 ± 2.5**", "42.0 ± 4.7"]
    assert [row[4] for row in rows[1:]] == ["-0.5 to +4.5", "-4.5 to +0.5", "-10.5 to +0.0"]
    differences = (tmp_path / "differences/differences.md").read_text()
    matrix = [[cell.strip() for cell in line.split("|")[1:-1]] for line in differences.splitlines() if line.startswith("| ")]
    assert matrix == [
        ["row - column", "a", "b", "c"],
        ["a", "", "+2.0 ± 4.4", "**+10.0 ± 0.9**"],
        ["b", "-2.0 ± 4.4", "", "**+8.0 ± 4.0**"],
        ["c", "**-10.0 ± 0.9**", "**-8.0 ± 4.0**", ""],
        ["system", "P(better)", "P(practically equal)", "P(worse)"],
        # t(2): (-2 ± 1) / (1 / sqrt 3) and (-10 ± 1) / (0.2 / sqrt 3)
        ["b", "0.02", "0.10", "0.89"],
        ["c", "0.00", "0.00", "1.00"],
    ]
    assert "By ranks of R@1 over 3 seeds of one dataset, a is first (mean rank 1); systems differ (Friedman, p = 0.05)" in differences
    assert (tmp_path / "differences/ranks.png").is_file()
    write_report("title", [entry for entry in runs if entry[0].variant != "c"], tmp_path)
    assert not (tmp_path / "differences/ranks.png").exists(), "two variants have no ranks"


def test_intervals_for_other_classes_are_listed_with_those_on_these_classes(tmp_path: Path) -> None:
    """One system finds 10 or 30 points more by class: about 20 ± 6 for other classes, but a narrow interval for these twelve."""
    runs = []
    for seed in range(4):
        for variant, gains in (("a", (0.1, 0.3)), ("b", (0.0, 0.0))):
            recalls = {str(label): 0.4 + gains[label % 2] + 0.001 * seed * (variant == "a") for label in range(12)}
            spec, record = run(variant, seed, sum(recalls.values()) / 12)
            runs.append(
                (spec, record.model_copy(update={"class_recalls": recalls, "metrics": record.metrics | {"num_query_classes": 12.0}}))
            )
    text = write_report("title", runs, tmp_path, reference="b")
    assert text.splitlines()[2].startswith("Best mean R@1 on these 12 classes: a, 60.1.")
    assert (
        " For other classes of the same kind (mean over classes, each with equal weight; interval over seeds and classes): a - b = +20.1"
        in text
    )
    differences = (tmp_path / "differences/differences.md").read_text()
    # standard deviation of the classes' differences 10.45 over sqrt(12), t(11) = 2.201: 6.6; over seeds 0.129 / 2, t(3) = 3.182: 0.2
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in differences.splitlines() if line.startswith("| ")]
    assert rows[-2:] == [
        ["system", "on these 12 classes, mean over queries", "over seeds and classes, mean over classes"],
        ["a", "+20.1 ± 0.2", "+20.1 ± 6.6"],
    ]
    counted = [record.model_copy(update={"metrics": record.metrics | {"num_query_classes": 5.0}}) for _, record in runs]
    text = write_report("title", [(spec, record) for (spec, _), record in zip(runs, counted, strict=True)], tmp_path)
    assert " No conclusion about other classes: 5 test classes are too few. " in text


@pytest.mark.parametrize("num_seeds", [1, 2, 3])
def test_pairs_are_shown_only_if_some_were_tested(num_seeds: int, tmp_path: Path) -> None:
    runs = [run(variant, seed, SEEDS[variant][seed]) for variant in SEEDS for seed in range(num_seeds)]
    write_report("title", runs, tmp_path)
    comparison = compare.compare_runs([(spec, record.metrics) for spec, record in runs])
    template = kit._environment().from_string(
        '{% from "parts.html" import differences with context %}{{ differences([], [one], none, none) }}'
    )
    for text in (template.render(one=comparison), (tmp_path / "differences/differences.md").read_text()):
        assert "None" not in text
        assert " 0 pairs" not in text
        assert ("corrected" in text) == ("This comparison detects" in text) == (num_seeds == 3)


def test_scores_that_do_not_vary_have_no_limit_beside_their_pairs(tmp_path: Path) -> None:
    runs = [run(variant, seed, recall) for variant, recall in (("a", 0.5), ("b", 0.25)) for seed in range(3)]
    runs = [(spec, record.model_copy(update={"metrics": {"nmi": record.metrics["recall@1"]}})) for spec, record in runs]
    comparison = compare.compare_runs([(spec, record.metrics) for spec, record in runs])
    assert comparison is not None
    assert comparison.limits is None
    template = kit._environment().from_string(
        '{% from "parts.html" import differences with context %}{{ differences([], [one], none, none) }}'
    )
    assert '<p class="small">Each cell is the row minus the column' in template.render(one=comparison)


@pytest.mark.parametrize(("reference", "num_tests"), [("c", 2), (None, 3)])
def test_intervals_for_other_classes_hold_at_once(
    reference: str | None, num_tests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A best that the scores chose may be any system, so its intervals are corrected for every pair."""
    levels = []
    monkeypatch.setattr(compare, "difference_over_classes", lambda values, references, level: levels.append(level))
    runs = [run(name, seed, 0.1 * place + 0.01 * seed**place) for place, name in enumerate("abc", 1) for seed in range(3)]
    runs = [(spec, record.model_copy(update={"class_recalls": {"0": 0.5, "1": 0.5}})) for spec, record in runs]
    write_report("title", runs, tmp_path, reference=reference)
    assert levels == [pytest.approx(0.05 / num_tests)] * 2


def test_one_seed_compares_nothing_and_nothing_is_bold(tmp_path: Path) -> None:
    text = write_report("title", [run("a", 0, 0.25), run("b", 0, 0.1)], tmp_path)
    assert "Best mean R@1: a, 25.0. Nothing is compared: fewer than 3 shared seeds." in text
    assert "**" not in text
    assert "difference" not in text.replace("differences", "")
    assert "Nothing" in write_report("title", [run("a", 0, 0.25), run("b", 0, 0.1)], tmp_path)
    assert write_report("title", [run("a", 0, 0.25), run("a", 1, 0.1)], tmp_path).splitlines()[2].startswith("Per cent, ")


def published(variant: str, seed: int, **metrics: float) -> PublishedRun:
    return PublishedRun(f"{variant}{seed}", metrics, {Tag.VARIANT: variant, Tag.SEED: str(seed)})


def test_the_rows_of_a_comparison_have_each_variant_and_the_best_first() -> None:
    runs = [
        *(published("a", seed, recall_at_10=0.5, recall_at_1=0.1, recall_at_1_class_mean=0.0) for seed in range(3)),
        published("b", 0, recall_at_1=0.2),
    ]
    assert comparison_rows(runs) == [
        ["variant", "seeds", "recall@1", "recall@10"],
        ["b", "1", "20.0", "-"],  # not measured at that K
        ["a", "3", "10.0 ± 0.0", "50.0 ± 0.0"],
    ]


def test_the_differences_are_the_last_column() -> None:
    runs = [
        published(variant, seed, recall_at_1=value, recall_at_2=0.9)
        for variant, values in SEEDS.items()
        for seed, value in enumerate(values)
    ]
    found = compare_published("d", runs)
    assert found is not None
    assert found.sentence.startswith("Best mean R@1: a, 52.0. The best is one of a and b (95 % confidence).")
    assert found.best_set == {"a", "b"}
    header, *rows = comparison_rows(runs, found)
    assert header == ["variant", "seeds", "recall@1", "recall@2", "difference to the best (95 %, simultaneous)"]
    assert [row[0] for row in rows] == ["a", "b", "c"]
    assert any("-10.5 to +0.0" in row for row in rows)
    assert compare_published("d", runs[:3]) is None
