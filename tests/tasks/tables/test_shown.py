"""What is shown of a table: lines, verdicts with each column's tolerance, and what waits."""

import json

import pytest

from dml_core.config import parse
from dml_core.errors import ConfigError
from tasks.tables.file import TableFile
from tasks.tables.result import TableResult
from tasks.tables.shown import ShownTable, shown_table
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


def shown(*runs, file=FILE, waiting=None, **result) -> ShownTable:
    return shown_table("paper/table1", parse(TableFile, file, "table"), TableResult(name="paper/table1", runs=runs, **result), waiting)


def rows(table: ShownTable):
    return {row.name: row for row in table.rows}


def seeds(row: str, **scores) -> list:
    """Three seeds around the scores, 1 point apart: half of the 90 % interval is 1.686, of the 95 % one 2.484."""
    return [
        run(row, seed, **{name: value + (seed - 1) / 100 for name, value in scores.items()}, variant="as_published") for seed in range(3)
    ]


def test_the_tolerance_is_the_row_s_or_the_metric_s_or_the_table_s():
    table = shown(*seeds("ours", recall_at_1=0.605, nmi=0.6025), *seeds("wide", recall_at_1=0.605, nmi=0.6025))
    ours, wide = rows(table)["ours"].lines[0], rows(table)["wide"].lines[0]
    assert [cell.tolerance for cell in ours.cells[:2]] == [1.0, 4.0]
    assert [cell.verdict for cell in ours.cells[:2]] == ["undecided", "equal"], "1.686 is within 4 and not within 1"
    assert [cell.tolerance for cell in wide.cells[:2]] == [9.0, 9.0]
    assert table.verdicts == {"equal": 3, "undecided": 1}
    assert [(found.of, found.value) for found in table.tolerances] == [("every column", 1.0), ("nmi", 4.0), ("row Wide", 9.0)]


def test_a_tolerance_of_a_metric_that_no_column_has_is_refused():
    wrong = FILE | {"tolerances": {"nmj": {"value": 1.0, "reason": "a slip"}}}
    with pytest.raises(ConfigError, match="tolerances: no column is of metric 'nmj'"):
        parse(TableFile, wrong, "table")


def test_a_figure_has_the_decimals_of_its_column():
    recall, nmi, csc = shown().columns
    assert [recall.printed(40), nmi.printed(60.25), csc.printed(7.5), csc.printed(None)] == ["40.0", "60.25", "7.5", "-"]
    assert [recall.measured(61.234), nmi.measured(61.234), csc.measured(7.51234)] == ["61.2", "61.23", "7.512"]


def test_what_is_measured_far_below_one_keeps_two_digits():
    def measured(csc: float) -> str:
        column = shown(run("ours", 0, "sop", csc=csc, variant="as_published")).columns[2]
        return column.measured(csc)

    assert [measured(csc) for csc in (12.0, 0.123, 0.0142, 0.000527, 1e-9, 0.0)] == [
        "12.000", "0.123", "0.014", "0.00053", "0.000", "0.000",
    ]  # fmt: skip
    column = shown(*seeds("ours", recall_at_1=0.0001)).columns[0]
    assert column.measured(0.012) == "0.0", "per cent have theirs"


def test_lines_stand_in_the_file_s_order_of_variants_then_by_epoch():
    runs = [
        run("ours", 0, variant=variant, epoch=epoch, recall_at_1=0.6)
        for variant, epoch in (("common", "last"), ("as_released", "last"), ("as_published", "oracle"), ("as_published", "last"))
    ]
    lines = rows(shown(*runs))["ours"].lines
    assert [line.label for line in lines] == [
        "as_published, 1 seed",
        "as_published, oracle epoch (chosen on the test classes), 1 seed",
        "as_released, 1 seed",
        "common track, not judged, 1 seed",
    ]


def test_an_oracle_s_verdicts_are_not_counted():
    assert shown(*[run("ours", seed, epoch="oracle", variant="as_published", recall_at_1=0.605) for seed in range(3)]).verdicts == {}


def test_a_row_says_what_it_waits_for():
    table = shown(run("ours", 0, variant="as_published", recall_at_1=0.6), waiting={("wide", "cub200"): "cub200 is not here"})
    found = rows(table)
    assert (found["theirs"].status, found["theirs"].waits) == ("quoted", {})
    assert (found["never"].status, found["never"].waits) == ("not run", {"cub200": "a loss"})
    assert found["wide"].waits == {"cub200": "cub200 is not here"}
    assert (found["ours"].status, found["ours"].waits) == (
        "partly measured",
        {"sop": "dml reproduce paper/table1 --row ours --dataset sop runs it"},
    )
    assert rows(shown())["ours"].waits["sop"] == "dml reproduce paper/table1 --row ours runs it"
    assert (table.num_measured, table.num_to_run) == (1, 3)


def test_older_code_failures_and_rows_that_are_gone_are_kept_in_sight():
    old = run("ours", 0, variant="as_published", recall_at_1=0.6).model_copy(update={"older_code": ("dml_core/b.py", "dml_core/a.py")})
    table = shown(old, run("was", 0, recall_at_1=0.5), failures={"ours as_released, cub200, seed 3": "no memory"})
    assert rows(table)["ours"].lines[0].older_code == ("dml_core/a.py", "dml_core/b.py")
    assert rows(table)["ours"].failures == {"as_released, cub200, seed 3": "no memory"}
    assert table.gone == ("was",)


def test_the_json_holds_each_seed_s_value_and_is_read_back_the_same():
    table = shown(*seeds("ours", recall_at_1=0.605))
    text = table.model_dump_json()
    cell = json.loads(text)["rows"][1]["lines"][0]["cells"][0]
    assert cell["values"] == {"0": pytest.approx(59.5), "1": pytest.approx(60.5), "2": pytest.approx(61.5)}
    assert (cell["mean"], cell["half_width"]) == (pytest.approx(60.5), pytest.approx(2.484, abs=1e-3))
    assert (cell["verdict"], cell["seeds_to_decide"]) == ("undecided", 5), (
        "2.132 / sqrt(5) = 0.953 is within 1, 2.353 / sqrt(4) = 1.18 is not"
    )
    assert ShownTable.model_validate_json(text) == table


def test_a_published_figure_that_is_changed_by_hand_changes_the_verdict():
    changed = FILE | {"rows": FILE["rows"] | {"ours": FILE["rows"]["ours"] | {"published": [50.0, 60.25, 7.5]}}}
    assert rows(shown(*seeds("ours", recall_at_1=0.605), file=changed))["ours"].lines[0].cells[0].verdict == "above"


def test_a_k_that_was_not_scored_is_no_figure():
    changed = FILE | {"columns": [{"dataset": "cub200", "metrics": ["recall@16", "nmi"]}, FILE["columns"][1]]}
    assert rows(shown(*seeds("ours", recall_at_1=0.605), file=changed))["ours"].lines[0].cells == (None, None, None)
