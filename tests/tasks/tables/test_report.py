"""A table as it is shown, by hand."""

from dml_core.config import parse
from tasks.tables.file import TableFile, load_table, run_label
from tasks.tables.report import as_markdown, lines

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


def test_what_was_measured_stands_below_what_was_printed() -> None:
    measured = {
        (run_label("ours", "as_released"), "cub200"): [{"recall@1": 0.60}, {"recall@1": 0.61}, {"recall@1": 0.605, "nmi": 0.1}],
        (run_label("ours", "as_released"), "sop"): [{"csc": 0.75}],
    }
    assert lines(TABLE, measured) == [
        ["row", "figures", "recall@1 cub200", "csc sop"],
        ["Theirs", "quoted: them", "40", "-"],
        ["Ours", "published, own", "60.5", "7.5"],
        ["", "released", "61", "-"],
        # mean 60.5, standard deviation 0.5: half of the 95 % interval is 4.303 * 0.5 / sqrt(3) = 1.24, of the 90 % one 0.84 < 1
        ["", "as_released, 3 seeds", "60.5 ± 1.2 equal", "0.8 undecided (one seed)"],
    ]


def test_the_page_says_the_tolerance_and_the_notes() -> None:
    page = as_markdown("paper/table1", TABLE, {})
    assert page.startswith("# paper/table1: Two birds\n\nOurs is best.\n")
    assert "| Ours | published, own | 60.5 | 7.5 |" in page
    assert "Tolerance: 1 (one run)." in page
    assert page.endswith("Ours: with a note.\n")


def test_the_common_track_is_a_line_of_its_own_that_is_not_judged() -> None:
    name = "softtriple/table1"
    table = load_table(name)
    scores = {"recall@1": 0.601, "nmi": 0.662}
    measured = {("softtriple as_published", "cub200"): [scores] * 2, ("softtriple common", "cub200"): [scores] * 2}
    rows = {line[1]: line[2:] for line in lines(table, measured)}
    assert rows["as_published, 2 seeds"][0] == "60.1 ± 0.0 equal"
    assert rows["common track, 2 seeds, not judged"] == ["60.1 ± 0.0", "-", "-", "-", "66.2 ± 0.0"]
