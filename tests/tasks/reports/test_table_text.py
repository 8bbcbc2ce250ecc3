"""A table's display, computed by hand."""

from typing import Any

from dml_core.config import parse
from tasks.reports.table_text import TERMINAL, as_markdown, as_note, conclusion_lines, lines, remark_lines
from tasks.tables.file import TableFile
from tasks.tables.result import FailedRun, MeasuredRun, TableResult
from tasks.tables.shown import ShownTable
from tasks.tables.view import shown_table
from tests.tasks.tables.test_claims import run

SIDES = ("above", "below")

TABLE = parse(
    TableFile,
    {
        "title": "Two birds",
        "page": 3,
        "states": "Ours is best.",
        "columns": [{"dataset": "cub200", "metrics": ["recall@1"]}, {"dataset": "sop", "metrics": ["csc"], "unit": "share"}],
        "tolerance": {"value": 1.0, "reason": "one run"},
        "rows": {
            "theirs": {"label": "Theirs", "kind": "quoted", "source": "them", "published": [40, None]},
            "ours": {
                "label": "Ours",
                "kind": "own",
                "published": [60.5, 7.5],
                "released": [61, None],
                "variants": ["as_published", "as_released"],
                "note": "with a note",
            },
        },
    },
    "table",
)


def shown(*runs: MeasuredRun, file: TableFile = TABLE, **result: Any) -> ShownTable:
    return shown_table("project/table1", file, TableResult(name="project/table1", runs=runs, **result))


def test_measured_values_are_below_published_ones() -> None:
    runs = [run("ours", seed, variant="as_released", recall_at_1=value) for seed, value in enumerate((0.60, 0.61, 0.605))]
    runs.append(run("ours", 0, "sop", "as_released", csc=0.75))
    assert lines(shown(*runs)) == [
        ["row", "values", "recall@1 cub200", "csc sop"],
        ["Theirs", "quoted: them", "40.0", "-"],
        ["Ours", "published, own", "60.5", "7.5"],
        ["", "released", "61.0", "-"],
        # mean 60.5, standard deviation 0.5: half width of the 95 % interval 4.303 * 0.5 / sqrt(3) = 1.24, of the 90 % one 0.84 < 1
        ["", "as_released, 1 to 3 seeds", "60.5 ± 1.2 compatible, mean equal", "0.750 undecided (1 seed; at least 3 needed)"],
    ]


def test_measured_columns_come_first_and_columns_without_any_value_are_left_out() -> None:
    columns = [{"dataset": "cub200", "metrics": ["recall@1", "recall@2"]}, {"dataset": "sop", "metrics": ["csc"], "unit": "share"}]
    row = {"label": "Ours", "kind": "own", "published": [60.5, None, None], "variants": ["ours"]}
    file = parse(TableFile, {**TABLE.model_dump(mode="json"), "columns": columns, "rows": {"ours": row}}, "table")
    assert lines(shown(file=file)) == [["row", "values", "recall@1 cub200"], ["Ours", "published, own", "60.5"]]
    assert lines(shown(run("ours", 0, "sop", "ours", csc=0.75), file=file)) == [
        ["row", "values", "csc sop", "recall@1 cub200"],
        ["Ours", "published, own", "-", "60.5"],
        ["", "ours, 1 seed", "0.750", "-"],
    ]


def test_a_row_without_published_values_has_no_line_for_them() -> None:
    rows = TABLE.model_dump(mode="json")["rows"]
    for name in ("run", "not-run"):
        rows[name] = {"label": f"Row {name}", "kind": "own", "published": [None, None], "variants": ["ours"]}
    table = shown(
        run("run", 0, variant="ours", recall_at_1=0.5), file=parse(TableFile, TABLE.model_dump(mode="json") | {"rows": rows}, "table")
    )
    for found in (lines(table), lines(table, TERMINAL)):
        at = [line[0] for line in found].index("Row run")
        assert found[at][1:] == ["ours, 1 seed", "50.0", "-"]
        assert [line for line in found if line[0] == "Row not-run"] == [["Row not-run", "not run", "", ""]]
    assert remark_lines(table)[-1] == "Row not-run: not run: start it with dml reproduce project/table1 --row not-run"


def test_a_failed_run_is_reported_once() -> None:
    failed = FailedRun(row="ours", variant="as_released", dataset="cub200", seed=1, reason="no memory")
    row = {"label": "Ours", "kind": "own", "published": [None, None], "variants": ["as_released"], "runs_on": ["cub200"]}
    table = shown(file=parse(TableFile, TABLE.model_dump(mode="json") | {"rows": {"ours": row}}, "table"), failed=(failed,))
    assert lines(table)[1][:2] == ["Ours", "failed"]
    assert remark_lines(table) == ["Ours: FAILED, as_released, cub200, seed 1: no memory"]


def test_the_markdown_has_tolerances_and_notes() -> None:
    page = as_markdown(shown())
    assert page.startswith("# project/table1: Two birds\n\nMeasured on the paper's datasets: 0 of 1 rows.")
    assert "\n\nOurs is best.\n" in page
    assert "| Ours | published, own | 60.5 | 7.5 |" in page
    assert "\n- Ours: not run: start it with dml reproduce project/table1\n" in page
    assert "- Tolerance of every column: 1 (one run)." in page
    assert page.endswith("Ours: with a note.\n")


def test_claims_older_code_and_failures_are_in_the_page() -> None:
    claims = [{"says": f"Ours is {side} 0.5.", "row": "ours", "metric": "recall@1", "reference": 0.5, "side": side} for side in SIDES]
    claims.append({"says": "And on products.", "row": "ours", "metric": "csc", "reference": 1.0, "side": "above", "dataset": "sop"})
    file = parse(TableFile, TABLE.model_dump(mode="json") | {"claims": claims}, "table")
    runs = [run("ours", seed, variant="as_published", recall_at_1=0.6 + seed / 100) for seed in range(3)]
    runs[0] = runs[0].model_copy(update={"older_code": ("dml_core/losses/a.py",)})
    failed = FailedRun(row="ours", variant="as_released", dataset="sop", seed=1, reason="no memory | left")
    page = as_markdown(shown(*runs, file=file, failed=(failed,)))
    assert "- holds: Ours is above 0.5. (R@1 on cub200: 61 vs 50, difference +11 ± 2.48, 3 seeds, p = 0.0055 (Holm))" in page
    assert "- refuted: Ours is below 0.5." in page
    assert "- 1 claim not decided: runs or scores missing" in page
    assert "as_published, 3 seeds, 1 of 3 runs made by other code" in page
    assert "- Ours, as_published: made by other code: dml_core/losses/a.py." in page
    assert "\n- Ours: FAILED, as_released, sop, seed 1: no memory | left\n" in page


def test_the_detectable_difference_follows_the_conclusions() -> None:
    rows = TABLE.model_dump(mode="json")["rows"]
    other = {"label": "Other", "kind": "own", "published": [None, None], "variants": ["as_released"]}
    file = parse(TableFile, TABLE.model_dump(mode="json") | {"rows": {**rows, "other": other}}, "table")
    values = {"ours": (0.6, 0.61, 0.62), "other": (0.5, 0.52, 0.51)}
    table = shown(
        *[run(row, n, variant="as_released", recall_at_1=value) for row in values for n, value in enumerate(values[row])], file=file
    )
    (found,) = table.comparisons
    assert found.limits is not None
    assert conclusion_lines(table)[0] == table.conclusions[0]
    assert conclusion_lines(table)[-1].endswith(found.limits)
    assert conclusion_lines(shown()) == []


def test_the_note_describes_the_table_and_its_progress() -> None:
    note = as_note(shown(*[run("ours", seed, variant="as_published", recall_at_1=0.605) for seed in range(3)]))
    assert note.startswith("project/table1, page 3 of the paper: Two birds.")
    assert "The paper states: Ours is best." in note
    assert "Measured on the paper's datasets: 1 of 1 rows, 1 of them in part. Verdicts on published values: 1 compatible." in note
    assert "`dml reproduce project/table1`" in note


def test_a_published_value_counts_once_for_variants_with_the_same_settings() -> None:
    """A protocol's variants may differ on other datasets only: both lines are shown, and one system was judged."""
    runs = [run("ours", seed, recall_at_1=0.6 + seed / 100) for seed in range(3)]
    table = shown(*(one.model_copy(update={"variant": variant}) for variant in ("as_published", "as_released") for one in runs))
    assert [line.repeated for line in table.rows[1].lines] == ["", "settings of as_published: not compared"]
    assert "Verdicts on published values: 1 compatible." in as_markdown(table)


def test_a_value_that_rounds_to_zero_has_no_sign() -> None:
    column = shown().columns[1]
    assert [column.measured(value) for value in (-0.0004, 0.0004, -0.0006)] == ["0.000", "0.000", "-0.001"]
