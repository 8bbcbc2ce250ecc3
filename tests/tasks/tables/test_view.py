"""Display of a table: lines, verdicts with each column's tolerance, and what unfinished rows need."""

import json

import pytest

from dml_core.config import parse
from dml_core.errors import ConfigError
from tasks.reports.table_text import TERMINAL, as_markdown, lines
from tasks.runs.comparable import UNKNOWN, Today
from tasks.tables import view
from tasks.tables.file import TableFile
from tasks.tables.result import FailedRun, TableResult
from tasks.tables.shown import ShownTable
from tasks.tables.view import shown_table
from tests.tasks.tables.test_claims import run

FILE = {
    "title": "Two birds",
    "page": 3,
    "states": "Ours is best.",
    "columns": [{"dataset": "cub200", "metrics": ["recall@1", "nmi"]}, {"dataset": "sop", "metrics": ["csc"], "unit": "share"}],
    "tolerance": {"value": 1.0, "reason": "one run"},
    "tolerances": {"nmi": {"value": 4.0, "reason": "k-means"}},
    "rows": {
        "theirs": {"label": "Theirs", "kind": "quoted", "source": "them", "published": [40, None, None]},
        "ours": {"label": "Ours", "kind": "own", "published": [60.5, 60.25, 7.5], "variants": ["as_published", "as_released"]},
        "wide": {
            "label": "Wide",
            "kind": "own",
            "published": [60.5, 60.25, None],
            "variants": ["as_published"],
            "tolerance": {"value": 9.0, "reason": "guessed"},
        },
        "never": {"label": "Never", "kind": "own", "published": [1, None, None], "lacks": "a loss"},
    },
}


@pytest.fixture(autouse=True)
def of_this_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take made-up runs for runs of this code, unless their files are named."""
    monkeypatch.setattr(view, "is_of_other_code", lambda run: bool(run.older_code))


def shown(*runs, file=FILE, waiting=None, today=UNKNOWN, **result) -> ShownTable:
    return shown_table(
        "project/table1", parse(TableFile, file, "table"), TableResult(name="project/table1", runs=runs, **result), waiting, today
    )


def rows(table: ShownTable):
    return {row.name: row for row in table.rows}


def seeds(row: str, **scores) -> list:
    """Return three seeds around the scores, 1 point apart: half width 1.686 of the 90 % interval, 2.484 of the 95 % one."""
    return [
        run(row, seed, **{name: value + (seed - 1) / 100 for name, value in scores.items()}, variant="as_published") for seed in range(3)
    ]


def test_the_tolerance_is_the_row_s_or_the_metric_s_or_the_table_s():
    table = shown(*seeds("ours", recall_at_1=0.605, nmi=0.6025), *seeds("wide", recall_at_1=0.605, nmi=0.6025))
    ours, wide = rows(table)["ours"].lines[0], rows(table)["wide"].lines[0]
    assert [cell.tolerance for cell in ours.cells[:2]] == [1.0, 4.0]
    assert [cell.is_equal for cell in ours.cells[:2]] == [False, True], "1.686 is within 4 and not within 1"
    assert [cell.tolerance for cell in wide.cells[:2]] == [9.0, 9.0]
    assert table.own_data.verdicts == {"compatible": 4}
    assert [(found.of, found.value) for found in table.tolerances] == [("every column", 1.0), ("nmi", 4.0), ("row Wide", 9.0)]


def test_a_line_with_different_numbers_of_seeds_in_its_columns_says_so():
    three = seeds("ours", recall_at_1=0.605)
    two = [run("ours", seed, csc=7.5, variant="as_published", dataset="sop") for seed in range(2)]
    assert rows(shown(*three))["ours"].lines[0].label == "as_published, 3 seeds"
    assert rows(shown(*three, *two))["ours"].lines[0].label == "as_published, 2 to 3 seeds"
    assert rows(shown(*two[:1]))["ours"].lines[0].label == "as_published, 1 seed"


def test_a_tolerance_of_a_metric_that_no_column_has_is_refused():
    wrong = FILE | {"tolerances": {"nmj": {"value": 1.0, "reason": "a slip"}}}
    with pytest.raises(ConfigError, match="tolerances: no column is of metric 'nmj'"):
        parse(TableFile, wrong, "table")


def test_a_figure_has_the_decimals_of_its_column():
    recall, nmi, csc = shown().columns
    assert [recall.printed(40), nmi.printed(60.25), csc.printed(7.5), csc.printed(None)] == ["40.0", "60.25", "7.5", "-"]
    assert [recall.measured(61.234), nmi.measured(61.234), csc.measured(7.51234)] == ["61.2", "61.23", "7.512"]
    columns = [FILE["columns"][0], {"dataset": "sop", "metrics": ["csc"], "unit": "distance"}]
    assert shown(file=FILE | {"columns": columns}).columns[2].measured(7.51234) == "7.512"


def test_what_is_measured_far_below_one_keeps_two_digits():
    def measured(csc: float) -> str:
        column = shown(run("ours", 0, "sop", csc=csc, variant="as_published")).columns[2]
        return column.measured(csc)

    assert [measured(csc) for csc in (12.0, 0.123, 0.0142, 0.000527, 1e-9, 0.0)] == [
        "12.000", "0.123", "0.014", "0.00053", "0.000", "0.000",
    ]  # fmt: skip
    column = shown(*seeds("ours", recall_at_1=0.0001)).columns[0]
    assert column.measured(0.012) == "0.0", "per cent have theirs"


def test_lines_are_in_the_file_s_order_of_variants_then_by_epoch():
    runs = [
        run("ours", 0, variant=variant, epoch=epoch, recall_at_1=0.6)
        for variant, epoch in (("common", "last"), ("as_released", "last"), ("as_published", "oracle"), ("as_published", "last"))
    ]
    lines = rows(shown(*runs))["ours"].lines
    assert [line.label for line in lines] == [
        "as_published, 1 seed",
        "as_published, oracle epoch (chosen on the test classes), 1 seed",
        "as_released, 1 seed",
        "common track (only the row's loss), not judged, 1 seed",
    ]


def test_a_row_of_the_common_track_alone_is_not_measured_and_names_the_command_that_runs_it():
    """Only the row's loss is trained there, with other settings than the paper's."""
    failed = FailedRun(row="ours", variant="common", dataset="sop", seed=0, reason="no memory")
    table = shown(run("ours", 0, variant="common", recall_at_1=0.6), failed=(failed,))
    ours, command = rows(table)["ours"], "start it with dml reproduce project/table1"
    assert [line.variant for line in ours.lines] == ["common"]
    assert (ours.status, ours.waits) == ("not run", {"cub200": command, "sop": command})
    assert (table.own_data.rows, table.in_part) == (0, "")


def test_tuned_settings_are_not_judged_and_do_not_measure_the_row():
    """They were found by this project's search: a published value is of other settings."""
    tuned = [one.model_copy(update={"variant": "tuned", "training": {}}) for one in seeds("ours", recall_at_1=0.605)]
    failed = FailedRun(row="wide", variant="tuned", dataset="cub200", seed=0, reason="no memory")
    table = shown(*tuned, failed=(failed,))
    ours, command = rows(table)["ours"], "start it with dml reproduce project/table1"
    assert [(line.variant, line.cells[0].verdict) for line in ours.lines] == [("tuned", None)]
    assert (ours.status, ours.waits) == ("not run", {"cub200": command, "sop": command})
    assert (rows(table)["wide"].status, table.own_data.rows, table.own_data.verdicts) == ("not run", 0, {})
    assert "Tuned lines are not judged: the paper has other settings." in as_markdown(table)
    both = shown(*tuned, *seeds("ours", recall_at_1=0.605))
    assert (both.own_data.rows, both.own_data.verdicts) == (1, {"compatible": 1})
    assert "Tuned" not in as_markdown(shown(*seeds("ours", recall_at_1=0.605)))


def test_one_training_in_two_rows_is_one_system():
    """A paper prints a system in two parts of a table: both rows are judged, and one is compared and ranked."""
    values = {"ours": 0.6, "wide": 0.6, "third": 0.5, "fourth": 0.4}
    runs = [run(row, seed, variant="as_published", recall_at_1=values[row] + seed**2 / 1000) for row in values for seed in range(3)]
    runs = [one.model_copy(update={"training": {}}) if one.row in ("ours", "wide") else one for one in runs]
    more = {name: FILE["rows"]["wide"] | {"label": name} for name in ("third", "fourth")}
    file = FILE | {"rows": FILE["rows"] | more}
    table = shown(*runs, file=file)
    (found,) = table.comparisons
    assert list(found.means) == ["Ours", "third", "fourth"]
    assert table.ranking is not None
    assert list(table.ranking.mean_ranks) == list(found.means)
    lines = {row.name: row.lines[0] for row in table.rows if row.lines}
    assert [lines[row].repeated for row in values] == ["", "settings of Ours: not compared", "", ""]
    assert sum(table.own_data.verdicts.values()) == 4, "each row's published value is judged"
    table = shown(*runs, file=file | {"reference": "wide"})
    (found,) = table.comparisons
    assert (list(found.means), found.reference, found.is_named) == (["Wide", "third", "fourth"], "Wide", True)
    assert [row.name for row in table.rows] == [*file["rows"]]
    assert rows(table)["ours"].lines[0].repeated == "settings of Wide: not compared"


def of_epochs(name: str) -> ShownTable:
    """Return a table with 0.55 after the last epoch and 0.605 at the best one; 60.5 is printed."""
    file = FILE | {"claims": [{"says": "Above 58.", "row": "ours", "metric": "recall@1", "reference": 0.58, "side": "above"}]}
    runs = [
        run("ours", seed, epoch=epoch, variant="as_published", recall_at_1=value + (seed - 1) / 1000)
        for epoch, value in (("last", 0.55), ("oracle", 0.605))
        for seed in range(3)
    ]
    return shown_table(name, parse(TableFile, file, "table"), TableResult(name=name, runs=tuple(runs)))


@pytest.mark.parametrize(
    ("name", "epoch", "verdict", "claim"),
    [("softtriple/table1", "last", "below", "refuted"), ("tuplet_margin/table1", "oracle", "compatible", "holds")],
)
def test_verdicts_and_claims_are_of_the_epoch_that_the_paper_prints(name: str, epoch: str, verdict: str, claim: str):
    """Tuplet margin's section 4: "report the performance at the best epoch"."""
    table = of_epochs(name)
    assert {line.epoch: line.cells[0].verdict for line in rows(table)["ours"].lines} == {"last": None, "oracle": None} | {epoch: verdict}
    assert table.own_data.verdicts == {verdict: 1}
    assert table.own_data.claims == {claim: 1}
    assert bool(table.judged) == (epoch == "oracle")
    assert table.judged in as_markdown(table)


def test_stand_ins_are_marked_and_counted_separately():
    """The paper's birds, drawn replacements, and a row measured only on the drawn ones."""
    file = FILE | {
        "columns": [
            {"dataset": "cub200", "metrics": ["recall@1"]},
            {"dataset": "drawn-cub200", "stands_in_for": "cub200", "metrics": ["recall@1"]},
        ],
        "tolerances": {},
        "rows": {
            "ours": {"label": "Ours", "kind": "own", "published": [60.5, 60.5], "variants": ["as_published"]},
            "both": {"label": "Both", "kind": "own", "published": [60.5, 60.5], "variants": ["as_published"]},
            "never": {"label": "Never", "kind": "own", "published": [60.5, 60.5], "variants": ["as_published"]},
        },
        "claims": [
            {"says": f"Above on {on}.", "row": "both", "metric": "recall@1", "reference": 0.1, "side": "above", "dataset": on}
            for on in ("cub200", "drawn-cub200")
        ],
    }
    runs = [
        run(row, seed, dataset, variant="as_published", recall_at_1=0.605 + (seed - 1) / 10_000)
        for row, dataset in (("ours", "drawn-cub200"), ("both", "cub200"), ("both", "drawn-cub200"))
        for seed in range(3)
    ]
    table = shown(*runs, file=file)
    assert table.own_data.model_dump() == {"rows": 1, "verdicts": {"compatible": 1}, "claims": {"holds": 1}}
    assert table.stand_in.model_dump() == {"rows": 2, "verdicts": {"compatible": 2}, "claims": {"holds": 1}}
    assert {name: row.status for name, row in rows(table).items()} == {"ours": "stand-in only", "both": "measured", "never": "not run"}
    page = as_markdown(table)
    assert "recall@1 drawn-cub200 (stand-in for cub200)" in page
    assert "Measured on the paper's datasets: 1 of 3 rows. Verdicts on published values: 1 compatible." in page
    assert "Measured on stand-ins (drawn-cub200 for cub200): 2 rows. Verdicts on published values: 2 compatible." in page


def test_columns_of_one_dataset_stand_in_for_one():
    blocks = [{"dataset": "drawn", "metrics": ["nmi"], "stands_in_for": name} for name in ("cub200", "cars196")]
    with pytest.raises(ConfigError, match="columns of dataset 'drawn' stand in for different datasets"):
        parse(TableFile, FILE | {"columns": [*blocks, FILE["columns"][1]]}, "table")


def test_an_unmeasured_row_has_a_reason():
    table = shown(run("ours", 0, variant="as_published", recall_at_1=0.6), waiting={("wide", "cub200"): "cub200 is not here"})
    found = rows(table)
    assert (found["theirs"].status, found["theirs"].waits) == ("quoted", {})
    assert (found["never"].status, found["never"].waits) == ("not run", {"cub200": "a loss"})
    assert found["wide"].waits == {"cub200": "cub200 is not here"}
    assert (found["ours"].status, found["ours"].waits) == (
        "partly measured",
        {"sop": "start it with dml reproduce project/table1 --dataset sop"},
    )
    assert rows(shown())["ours"].waits["sop"] == "start it with dml reproduce project/table1"
    assert (table.own_data.rows, table.num_to_run) == (1, 3)


def test_older_code_failures_and_removed_rows_are_shown():
    old = run("ours", 0, variant="as_published", recall_at_1=0.6).model_copy(update={"older_code": ("dml_core/b.py", "dml_core/a.py")})
    failed = FailedRun(row="ours", variant="as_released", dataset="cub200", seed=3, reason="no memory")
    table = shown(old, run("was", 0, recall_at_1=0.5), failed=(failed,))
    assert rows(table)["ours"].lines[0].older_code == ("dml_core/a.py", "dml_core/b.py")
    assert rows(table)["ours"].failures == {"as_released, cub200, seed 3": "no memory"}
    assert rows(table)["ours"].waits == {"sop": "start it with dml reproduce project/table1 --dataset sop"}
    assert table.gone == ("was",)


def test_a_row_whose_run_failed_is_not_listed_as_one_to_start():
    failed = FailedRun(row="ours", variant="as_released", dataset="cub200", seed=3, reason="no memory")
    row = rows(shown(failed=(failed,)))["ours"]
    assert (row.status, row.failures) == ("failed", {"as_released, cub200, seed 3": "no memory"})
    assert row.waits == {"sop": "start it with dml reproduce project/table1"}
    unprepared = rows(shown(failed=(failed,), waiting={("ours", "cub200"): "cub200 is not here"}))["ours"]
    assert unprepared.waits["cub200"] == "cub200 is not here", "what to get before it can be run again"


def test_the_json_holds_each_seed_s_value_and_is_read_back_the_same():
    table = shown(*seeds("ours", recall_at_1=0.605))
    text = table.model_dump_json()
    cell = json.loads(text)["rows"][1]["lines"][0]["cells"][0]
    assert cell["values"] == {"0": pytest.approx(59.5), "1": pytest.approx(60.5), "2": pytest.approx(61.5)}
    assert (cell["mean"], cell["half_width"]) == (pytest.approx(60.5), pytest.approx(2.484, abs=1e-3))
    low = 60.5 - 4.303 * (4 / 3) ** 0.5 - 0.05  # the figure is printed with one decimal
    assert (cell["verdict"], cell["is_equal"], cell["low"]) == ("compatible", False, pytest.approx(low, abs=1e-3))
    assert ShownTable.model_validate_json(text) == table


def test_a_published_figure_that_is_changed_by_hand_changes_the_verdict():
    changed = FILE | {"rows": FILE["rows"] | {"ours": FILE["rows"]["ours"] | {"published": [50.0, 60.25, 7.5]}}}
    assert rows(shown(*seeds("ours", recall_at_1=0.605), file=changed))["ours"].lines[0].cells[0].verdict == "above"


def test_a_k_that_was_not_scored_is_no_figure():
    changed = FILE | {"columns": [{"dataset": "cub200", "metrics": ["recall@16", "nmi"]}, FILE["columns"][1]]}
    assert rows(shown(*seeds("ours", recall_at_1=0.605), file=changed))["ours"].lines[0].cells == (None, None, None)


def test_measured_lines_are_compared_by_each_dataset_s_first_metric_and_the_leaders_are_bold():
    """Differences are 1, 2 and 3 points, and 10, 9.8 and 10.2, as in tests/evaluation/test_comparing.py."""
    values = {
        ("ours", "as_published"): (0.50, 0.52, 0.54),
        ("ours", "as_released"): (0.49, 0.50, 0.51),
        ("wide", "as_published"): (0.40, 0.422, 0.438),
    }
    runs = [
        run(row, seed, variant=variant, recall_at_1=value) for (row, variant), three in values.items() for seed, value in enumerate(three)
    ]
    table = shown(*runs)
    (found,) = table.comparisons
    assert (found.dataset, found.metric) == ("cub200", "recall@1")
    assert table.conclusions == [
        "cub200: Best mean R@1: Ours, as_published, 52.0. The best is one of Ours, as_published and Ours, as_released (95 % confidence). "
        "Significantly worse than Ours, as_published: Wide (-10.0 ± 0.9). 3 seeds."
    ]
    by_system = {line.system: line for row in table.rows for line in row.lines}
    assert {name: table.is_bold(line, 0) for name, line in by_system.items()} == {
        "Ours, as_published": True,
        "Ours, as_released": True,
        "Wide": False,
    }
    assert not any(table.is_bold(line, 1) for line in by_system.values()), "the second metric is not compared"
    page = as_markdown(table)
    assert page.splitlines()[2] == table.conclusions[0]
    assert "| **52.0 ± 5.0** " in page
    assert "| 42.0 ± 4.7 " in page
    assert TERMINAL.format("50.0 ± 2.5") in [
        cell.partition(" undecided")[0].partition(" below")[0] for line in lines(table, TERMINAL) for cell in line
    ]
    assert table.ranking is not None
    assert table.ranking.over == "seeds", "of the other dataset no metric has a best"
    assert json.loads(table.model_dump_json())["comparisons"][0]["sentence"] == found.sentence


def test_a_tuned_line_with_the_row_s_own_settings_is_shown_and_is_no_second_system():
    """A search that confirmed nothing leaves the settings as they are. What is measured twice would be a tie for the best."""

    def measured(row: str, variant: str, score: float, *, own: bool, dataset: str = "cub200") -> list:
        runs = [run(row, seed, dataset, variant=variant, recall_at_1=score + seed**2 / 1000) for seed in range(3)]
        return [one.model_copy(update={"training": {"of": f"{row} {'own' if own else variant}"}}) for one in runs]

    everything = [*measured("ours", "as_published", 0.6, own=True), *measured("wide", "as_published", 0.5, own=True)]
    table = shown(*everything, *measured("ours", "tuned", 0.61, own=True), *measured("wide", "tuned", 0.55, own=False))
    (found,) = table.comparisons
    assert list(found.means) == ["Ours, as_published", "Wide, tuned", "Wide, as_published"]
    published, tuned = rows(table)["ours"].lines
    assert (published.label, tuned.label) == ("as_published, 3 seeds", "tuned, 3 seeds, settings of as_published: not compared")
    assert tuned.cells[0].mean == pytest.approx(61 + 5 / 30)
    assert not table.is_bold(tuned, 0)
    elsewhere = [{"dataset": "sop", "metrics": ["recall@1", "nmi"]}, {"dataset": "cub200", "metrics": ["recall@1"]}]
    both = [
        *everything,
        *measured("wide", "tuned", 0.55, own=True),
        *(one for variant in ("as_published", "tuned") for one in measured("wide", variant, 0.5, own=False, dataset="sop")),
    ]
    table = shown(*both, file=FILE | {"columns": elsewhere})
    assert [(found.dataset, len(found.means)) for found in table.comparisons] == [("sop", 2), ("cub200", 2)], "settings are of a dataset"
    assert rows(table)["wide"].lines[1].label == "tuned, 3 seeds, settings of as_published on some datasets: not compared"


@pytest.mark.parametrize("num_own", [1, 2, 3])
def test_of_lines_with_equal_settings_the_one_with_most_seeds_is_compared(num_own: int):
    """A few runs of a second line must not remove five measured seeds from a comparison."""

    def measured(row: str, variant: str, score: float, num_seeds: int, of: str) -> list:
        runs = [run(row, seed, variant=variant, recall_at_1=score + seed**2 / 1000) for seed in range(num_seeds)]
        return [one.model_copy(update={"training": {"of": of}}) for one in runs]

    tuned, rival = measured("ours", "tuned", 0.6, 5, "o"), measured("wide", "as_published", 0.5, 5, "w")
    file = FILE | {"reference": "ours"}
    table = shown(*measured("ours", "as_published", 0.6, num_own, "o"), *tuned, *rival, file=file)
    (found,) = table.comparisons
    assert (list(found.means), found.reference) == (["Ours, tuned", "Wide"], "Ours, tuned")
    assert found.sentence.endswith("5 seeds.")
    assert [line.repeated for line in rows(table)["ours"].lines] == ["settings of tuned: not compared", ""]
    assert sum(table.own_data.verdicts.values()) == 2, "published values are judged by the runs of the paper's settings"
    other_row = measured("wide", "as_published", 0.6, 5, "o")
    more = {"third": FILE["rows"]["wide"] | {"label": "Third"}}
    third = [one.model_copy(update={"row": "third"}) for one in rival]
    file["rows"] = FILE["rows"] | more
    table = shown(*measured("ours", "as_published", 0.6, num_own, "o"), *other_row, *third, file=file)
    (found,) = table.comparisons
    assert (list(found.means), found.reference, found.is_named) == (["Wide", "Third"], "Wide", True)
    assert rows(table)["ours"].lines[0].repeated == "settings of Wide: not compared"


def test_a_lone_line_is_named_by_its_variant_if_that_is_not_the_row_s_first():
    runs = [run("ours", seed, variant="tuned", recall_at_1=0.6 + seed**2 / 1000) for seed in range(3)]
    table = shown(*runs, *seeds("wide", recall_at_1=0.5), file=FILE | {"reference": "ours"})
    (found,) = table.comparisons
    assert (list(found.means), found.reference) == (["Ours, tuned", "Wide"], "Ours, tuned")


@pytest.mark.parametrize(("name", "is_oracle"), [("softtriple/table1", False), ("tuplet_margin/table1", True)])
def test_systems_are_compared_at_the_printed_epoch_alone(name: str, is_oracle: bool) -> None:
    """Others are the same trainings; one chosen on the test classes would always be the best."""
    runs = [
        run(row, seed, epoch=epoch, variant="as_published", recall_at_1=value + add + seed**2 / 1000)
        for epoch, add in (("last", 0.0), ("oracle", 0.05))
        for row, value in (("ours", 0.6), ("wide", 0.5))
        for seed in range(3)
    ]
    table = shown_table(name, parse(TableFile, FILE, "table"), TableResult(name=name, runs=tuple(runs)))
    (found,) = table.comparisons
    assert [(system.partition(",")[0], "oracle" in system) for system in found.means] == [("Ours", is_oracle), ("Wide", is_oracle)]
    assert table.ranking is None or len(table.ranking.mean_ranks) == 2
    only_last = TableResult(name=name, runs=tuple(run for run in runs if run.epoch == "last"))
    assert list(shown_table(name, parse(TableFile, FILE, "table"), only_last).comparisons[0].means) == ["Ours", "Wide"]


def test_a_published_value_has_the_decimals_of_its_metric_in_any_column() -> None:
    """YAML reads 33.0 as 33; other columns of the metric tell that the paper prints a decimal, so half of it is its rounding."""
    columns = [{"dataset": dataset, "metrics": ["recall@1"]} for dataset in ("cub200", "sop")]
    rows_of = {"ours": {"label": "Ours", "kind": "own", "published": [33.0, 40.5], "released": [33.25, None], "variants": ["as_published"]}}
    file = {key: value for key, value in FILE.items() if key != "tolerances"} | {"columns": columns, "rows": rows_of}
    table = shown(*(run("ours", seed, variant="as_published", recall_at_1=0.334 + 0.0001 * seed) for seed in range(3)), file=file)
    assert [column.printed(33.0) for column in table.columns] == ["33.00", "33.0"]
    cell = rows(table)["ours"].lines[0].cells[0]
    # mean 33.41, standard deviation 0.01; t(2) 4.303: 4.303 * 0.01 * sqrt(4 / 3) = 0.0497, and 0.05 of rounding
    assert (cell.low, cell.verdict) == (pytest.approx(33.41 - 0.0497 - 0.05, abs=1e-3), "above")
    rows_of["ours"] |= {"published": [1234567.0, 0.00012], "released": None}
    table = shown(file=file)
    assert [column.printed(1234567.0) for column in table.columns] == ["1234567.00000", "1234567.00000"], "2 of 0.00012 is the 5th"


def test_one_seed_or_one_row_has_no_conclusions():
    assert shown(*seeds("ours", recall_at_1=0.605)).conclusions == []
    assert (
        shown(run("ours", 0, variant="as_published", recall_at_1=0.5), run("wide", 0, variant="as_published", recall_at_1=0.6)).conclusions
        == []
    )


def test_a_named_reference_is_a_row_that_is_run():
    table = shown(*seeds("ours", recall_at_1=0.605), *seeds("wide", recall_at_1=0.5), file=FILE | {"reference": "wide"})
    assert (table.comparisons[0].reference, table.comparisons[0].is_named) == ("Wide", True)
    for name in ("theirs", "nobody"):
        with pytest.raises(ConfigError, match=f"no row that is run is called '{name}'"):
            parse(TableFile, FILE | {"reference": name}, "table")


def test_over_two_datasets_with_the_same_metric_systems_are_ranked():
    columns = [{"dataset": dataset, "metrics": ["recall@1"]} for dataset in ("cub200", "sop")]
    rows_of = {name: {"label": "Alike", "kind": "own", "published": [None, None], "variants": ["as_published"]} for name in "abc"}
    file = {key: value for key, value in FILE.items() if key != "tolerances"} | {"columns": columns, "rows": rows_of}
    runs = [
        run(row, seed, dataset=dataset, variant="as_published", recall_at_1=0.5 + 0.1 * place + 0.01 * seed)
        for place, row in enumerate("abc")
        for dataset in ("cub200", "sop")
        for seed in range(3)
    ]
    table = shown(*runs, file=file)
    assert table.ranking is not None
    assert (table.ranking.over, list(table.ranking.mean_ranks)) == ("datasets", ["Alike (c)", "Alike (b)", "Alike (a)"])
    assert len(table.comparisons) == 2
    assert table.conclusions[-1] == table.ranking.sentence
    assert shown(*(run for run in runs if run.seed == 0), file=file).conclusions == []
    columns[0]["tuned_on"] = "sop"
    ranking = shown(*runs, file=file).ranking
    assert ranking is not None
    assert ranking.over == "seeds", "a dataset and the part of it on which settings were searched are no two independent datasets"
    assert ranking.sentence not in shown(*runs, file=file).conclusions
    alone = shown(*(run for run in runs if run.dataset == "sop"), file=file).ranking
    assert alone is not None
    assert alone.over == "seeds", "the part is ranked where nothing else is measured"


def on(digest: str | None, found: list, **changes) -> list:
    """Return runs as if measured on data with this digest, with changed training settings."""
    return [one.model_copy(update={"digest": digest, "training": {**one.training, **changes}}) for one in found]


def test_runs_on_other_data_are_not_averaged_nor_paired_and_are_named():
    old = on("1", [*seeds("ours", recall_at_1=0.3), *seeds("wide", recall_at_1=0.2)])
    rerun = on("2", seeds("ours", recall_at_1=0.6))
    now = {run.place: run for run in (*old, *rerun)}.values()  # as a result stores them: ours was run again, wide was not
    table = shown(*now, today=Today({"cub200": "2"}))
    found = rows(table)
    assert found["ours"].lines[0].cells[0].mean == pytest.approx(60)
    assert (found["wide"].lines, found["wide"].status) == ((), "not run")
    assert table.comparisons == (), "new data are not compared with old"
    assert table.left_out == ("left out: wide as_published on cub200, seeds 0, 1, 2: measured on other data than the present",)
    assert f"- {table.left_out[0]}" in as_markdown(table)
    assert json.loads(table.model_dump_json())["left_out"] == list(table.left_out)
    assert rows(shown(*on(None, seeds("ours", recall_at_1=0.3)), today=Today({"cub200": "2"})))["ours"].lines == ()


def test_seeds_of_other_settings_are_not_averaged():
    """One of three seeds with one epoch was run again with three epochs."""
    short, long = (on("1", seeds("ours", recall_at_1=value), num_epochs=number) for value, number in ((0.3, 1), (0.6, 3)))
    mixed = [*short[1:], long[0]]
    settings = {number: on("1", [run("ours", 0, variant="as_published")], num_epochs=number)[0].facts.settings for number in (1, 3, 9)}

    def cell(asked: int, is_one_protocol: bool = False):
        today = Today({"cub200": "1"}, {("cub200", "ours as_published"): settings[asked]}, is_one_protocol)
        table = shown(*mixed, today=today)
        return [found.cells[0].values for found in rows(table)["ours"].lines], table.left_out

    assert cell(3) == ([{0: pytest.approx(59)}], ("left out: ours as_published on cub200, seeds 1, 2: measured with other settings",))
    assert cell(1)[0] == [{1: pytest.approx(30), 2: pytest.approx(31)}]
    assert cell(9)[0] == cell(1)[0], "of the present settings there is no run: the settings of most runs, and that is reported"
    former = "shown: ours as_published on cub200, seeds 1, 2: measured with former settings; no run has the present ones"
    assert set(cell(9)[1]) == {"left out: ours as_published on cub200, seed 0: measured with other settings", former}
    assert cell(9, is_one_protocol=True)[0] == [], "systems under one protocol are compared under it alone"
    assert shown(*mixed).left_out == ("left out: ours as_published on cub200, seed 0: measured with other settings",)


def test_seeds_with_other_options_of_a_measurement_are_not_averaged():
    runs = [one.model_copy(update={"measurements": {"m": {"count": 9 if one.seed == 2 else 1}}}) for one in seeds("ours", recall_at_1=0.3)]
    table = shown(*runs)
    assert list(rows(table)["ours"].lines[0].cells[0].values) == [0, 1]
    assert table.left_out == ("left out: ours as_published on cub200, seed 2: measured with other settings",)


def test_claims_and_verdicts_are_over_the_same_runs():
    claims = [{"says": "ours is better", "row": "ours", "metric": "recall@1", "reference": "wide", "side": "above"}]
    runs = [*on("2", seeds("ours", recall_at_1=0.6)), *on("1", seeds("wide", recall_at_1=0.2))]
    table = shown(*runs, file=FILE | {"claims": claims}, today=Today({"cub200": "2"}))
    assert (table.claims[0].judgement, table.claims[0].why) == ("not decided", "no runs of 'wide'")
    both = shown(*on("2", runs), file=FILE | {"claims": claims}, today=Today({"cub200": "2"}))
    assert (both.claims[0].judgement, both.claims[0].difference) == ("not shown", pytest.approx(40)), "the same difference three times"
    assert sum(table.own_data.verdicts.values()) == 1
