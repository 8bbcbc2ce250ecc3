"""A table as it is shown, by hand."""

from dml_core.config import parse
from tasks.tables.file import TableFile, label_parts, run_label
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


def test_an_oracle_has_a_line_of_its_own_that_says_so_and_a_verdict() -> None:
    seeds = [{"recall@1": 0.60}, {"recall@1": 0.61}, {"recall@1": 0.605}]
    measured = {
        (run_label("ours", "as_published"), "cub200"): [{"recall@1": 0.5}],
        (run_label("ours", "as_published", "oracle"), "cub200"): seeds,
        (run_label("ours", "as_published", "best_validation"), "cub200"): [{"recall@1": 0.55}],
    }
    assert lines(TABLE, measured)[4:] == [
        ["", "as_published, 1 seed", "50.0 undecided (one seed)", "-"],
        ["", "as_published, best epoch on held-out training classes, 1 seed", "55.0 undecided (one seed)", "-"],
        ["", "as_published, oracle epoch (chosen on the test classes), 3 seeds", "60.5 ± 1.2 equal", "-"],
    ]
    assert label_parts(run_label("ours", "as_published", "oracle")) == label_parts(run_label("ours", "as_published"))


def test_the_page_says_the_tolerance_and_the_notes() -> None:
    page = as_markdown("paper/table1", TABLE, {})
    assert page.startswith("# paper/table1: Two birds\n\nOurs is best.\n")
    assert "| Ours | published, own | 60.5 | 7.5 |" in page
    assert "Tolerance: 1 (one run)." in page
    assert page.endswith("Ours: with a note.\n")
