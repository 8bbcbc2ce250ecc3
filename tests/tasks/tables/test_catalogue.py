"""Every table's file loads, its rows give runs, and its numbers are those of the paper's text; an error in a file is one line."""

import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest

from dml_core.config import merge
from dml_core.errors import ConfigError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.evaluator import evaluate
from dml_core.measurements.registry import measurement, parse_measurement
from tasks.runs.protocols import load_protocol
from tasks.tables import file
from tasks.tables.file import Row, TableFile, Value, load_table, paper_tables
from tasks.tables.runs import row_training
from tasks.tables.tolerances import common_tolerance

NAMES = paper_tables()
PAPERS = ("discriminative", "heated_up_softmax", "sgsl", "softtriple", "tuplet_margin")

# shared/PROTOCOLS.md, section 7: the Ks depend on the dataset, and tuplet margin prints one more.
BIRDS_AND_CARS = (1, 2, 4, 8)
KS = {
    "cub200": BIRDS_AND_CARS,
    "cars196": BIRDS_AND_CARS,
    "sop": (1, 10, 100, 1000),
    "inshop": (1, 10, 20, 30, 40, 50),
}
MORE_KS = {"tuplet_margin": {"cub200": (16,), "cars196": (16,)}}

SHARED = Path(__file__).parents[4] / "shared"
NEAR = 25  # maximum number of lines between a caption and a line of its table
# Rows whose numbers the PDF's text joins on one line, in any order.
GARBLED = {"softtriple/table4": {"hdc", "margin", "htl"}}

DRAWN = "drawn-"  # prefix of the dataset that drawn images replace

Grid = list[list[Value]]
Position = tuple[int, int]


def filled(table: TableFile, row: Row):
    """Return the columns for which the paper prints a number of this row."""
    return [column for column, value in zip(table.flat_columns, row.published, strict=True) if value is not None]


def datasets_run(table: TableFile, row: Row):
    """Return the datasets of the row's numbers, or all of the table's if the row has none (a plot)."""
    return {column.dataset for column in filled(table, row)} or set(table.datasets)


# ---------------------------------------------------------------- files


def test_all_five_papers_have_tables():
    assert {name.partition("/")[0] for name in NAMES} == set(PAPERS)


@pytest.fixture(scope="module")
def known_metrics():
    rng = np.random.default_rng(0)
    every_k = sorted({k for ks in KS.values() for k in ks} | {k for more in MORE_KS.values() for ks in more.values() for k in ks})
    config = EvaluationConfig(recall_at=tuple(every_k))
    return set(evaluate(rng.standard_normal((12, 3)), np.repeat(range(3), 4), config))


def test_what_a_table_claims_its_own_printed_figures_show():
    num_shown = 0
    for name in NAMES:
        table = load_table(name)
        columns = [(column.dataset, column.metric) for column in table.flat_columns]
        for claim in table.claims:
            place = (claim.dataset or columns[0][0], claim.metric)
            if place not in columns or isinstance(claim.reference, float):
                continue
            value, reference = (table.rows[row].published[columns.index(place)] for row in (claim.row, claim.reference))
            if value is not None and reference is not None:
                num_shown += 1
                assert (value > reference) == (claim.side == "above"), f"{name}: {claim.says}"
    assert num_shown > 100


@pytest.mark.parametrize("name", NAMES)
def test_every_row_to_be_run_is_a_training_that_can_be_scored_or_measured(name, known_metrics):
    table = load_table(name)
    of_any_row = set()
    for key, row in table.rows.items():
        if not row.is_run:
            continue
        measured = {metric for one in merge(table.measurements, row.measurements) for metric in measurement(one).METRICS}
        of_any_row |= measured
        assert {column.metric for column in filled(table, row)} <= known_metrics | measured, key
        assert not measured & known_metrics, "a measurement would take the place of a score"
        load_protocol(row.protocol or name.partition("/")[0])
        for one, options in merge(table.measurements, row.measurements).items():
            parse_measurement(one, options)
        for dataset in datasets_run(table, row):
            for variant in row.variants:
                row_training(name, row, dataset, variant, key)
    assert {column.metric for column in table.flat_columns} <= known_metrics | of_any_row


@pytest.mark.parametrize("name", NAMES)
def test_the_ks_are_the_datasets(name):
    more = MORE_KS.get(name.partition("/")[0], {})
    for block in load_table(name).columns:
        ks = [int(metric.partition("@")[2]) for metric in block.metrics if metric.startswith("recall@")]
        assert ks == sorted(set(ks))
        if block.dataset in KS:
            assert set(ks) <= {*KS[block.dataset], *more.get(block.dataset, ())}


# ---------------------------------------------------------------- numbers compared with the papers' texts
# The rule: within 25 lines above or below the table's caption, up to the next caption, a row's numbers of one block of columns are
# adjacent (a null where the text has no number), and blocks of a row, and rows, are in the file's order; or all of it by column
# instead of by line.


@pytest.fixture(scope="module")
def texts():
    folder = SHARED / "papers"
    if not folder.is_dir():
        pytest.skip("no texts of the papers here")
    return {paper: next(folder.glob(f"{paper}*.txt")).read_text(encoding="utf-8").splitlines() for paper in PAPERS}


def is_table_line(line):
    return "\t" in line or line.startswith("|")


def parts(line) -> list[str]:
    """Return a table line's cells, or another line's words."""
    separator = "\t" if "\t" in line else "|" if is_table_line(line) else None
    return [part.strip() for part in re.sub(r"<[^>]*>", "", line).split(separator)]


def cells(line) -> list[Value]:
    """Return the line's parts as numbers, with None for other text."""
    return [float(part) if re.fullmatch(r"\d+(\.\d+)?", part) else None for part in parts(line)]


def captions(lines: Sequence[str]) -> dict[int, int]:
    """Return number of a table -> line of its caption."""
    return {int(found[1]): place for place, line in enumerate(lines) if (found := re.match(r"\s*Table (\d+)[.:]", line))}


def beside_caption(lines: Sequence[str], table_number: int) -> tuple[Grid, Grid]:
    """Return the text's cells above the caption (near it, after the previous caption), with all others empty, and the same below it."""
    own = captions(lines)[table_number]
    others = [place for place in captions(lines).values() if place != own]
    first = max([own - NEAR, *(place + 1 for place in others if place < own)])
    last = min([own + NEAR, *(place - 1 for place in others if place > own)])
    above, below = (
        [cells(line) if low <= place <= high else [] for place, line in enumerate(lines)] for low, high in ((first, own), (own, last))
    )
    return above, below


def by_column(grid: Grid) -> Grid:
    return [list(column) for column in zip_longest(*grid)]


def blocks_of(table: TableFile, row: Row) -> Iterator[list[Value]]:
    """Yield the row's numbers by dataset; those of drawn images are None, as the paper prints them for the original dataset."""
    values = iter(row.published)
    for block in table.columns:
        figures = [next(values) for _ in block.metrics]
        yield [None] * len(figures) if block.dataset.startswith(DRAWN) else figures


def find(grid: Grid, wanted: list[Value], after: Position) -> Position | None:
    """Return line and last position of the first run of cells after `after` that equals `wanted`."""
    for line in range(max(after[0], 0), len(grid)):
        for place in range(after[1] + 1 if line == after[0] else 0, len(grid[line]) - len(wanted) + 1):
            if grid[line][place : place + len(wanted)] == wanted:
                return line, place + len(wanted) - 1
    return None


def look_up(grid: Grid, table: TableFile, garbled: set[str]) -> tuple[list[str], set[Position]]:
    """Return the rows that violate the rule, and the positions of all numbers that follow it."""
    misplaced, places = [], set()
    last: list[Position] = [(-1, -1)] * len(table.columns)
    for key, row in table.rows.items():
        if key in garbled:
            if not any(filled_figures(row) <= set(line) for line in grid):
                misplaced.append(key)
            continue
        after: Position = (-1, -1)
        for index, wanted in enumerate(blocks_of(table, row)):
            if any(value is not None for value in wanted):
                position = find(grid, wanted, max(after, last[index]))
                if position is None:
                    misplaced.append(key)
                    break
                after = last[index] = position
                places |= {(position[0], position[1] - back) for back in range(len(wanted))}
    return misplaced, places


def filled_figures(row: Row):
    return {value for value in row.published if value is not None}


def look_up_table(name: str, table: TableFile, lines: Sequence[str]) -> tuple[list[str], set[Position]]:
    """Apply `look_up` to four readings and return the first without a violation, or the best; positions are (line, cell)."""
    readings = []
    for grid in beside_caption(lines, int(name.partition("/table")[2])):
        for turned in (False, True):
            misplaced, places = look_up(by_column(grid) if turned else grid, table, GARBLED.get(name, set()))
            readings.append((misplaced, {place[::-1] for place in places} if turned else places))
            if not misplaced:
                return readings[-1]
    return min(readings, key=lambda reading: len(reading[0]))


@pytest.mark.parametrize("name", [name for name in NAMES if "/table" in name])
def test_a_tables_figures_are_the_papers_in_its_order(name, texts):
    misplaced, _ = look_up_table(name, load_table(name), texts[name.partition("/")[0]])
    assert not misplaced


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_beside_drawn_images_is_printed_of_the_dataset_in_whose_place_they_are(name):
    table = load_table(name)
    for key, row in table.rows.items():
        figures = {(column.dataset, column.metric): value for column, value in zip(table.flat_columns, row.published, strict=True)}
        drawn = {place: value for place, value in figures.items() if place[0].startswith(DRAWN) and value is not None}
        assert drawn == {(dataset, metric): figures[dataset.removeprefix(DRAWN), metric] for dataset, metric in drawn}, key


@pytest.mark.parametrize("name", [name for name in NAMES if "/figure" in name])
def test_a_figures_numbers_stand_where_the_text_speaks_of_it(name, texts):
    paper, _, figure = name.partition("/figure")
    spoken = "\n".join(line for line in texts[paper] if re.search(rf"\bFig(ure|\.) ?{figure}(?!\d)", line))
    said = {float(text) for text in re.findall(r"\d+(?:\.\d+)?", spoken)}
    for key, row in load_table(name).rows.items():
        assert filled_figures(row) <= said, key


@pytest.mark.parametrize("paper", PAPERS)
def test_no_figure_of_a_papers_tables_is_left_out(paper, texts):
    lines = texts[paper]
    printed = {
        (line, place)
        for line, text in enumerate(lines)
        if is_table_line(text)
        for place, part in enumerate(parts(text))
        if place > 0 and re.fullmatch(r"\d+\.\d+", part)  # whole numbers are dimensions or images per class; minutes are not checked
    }
    for name in NAMES:
        if name.startswith(f"{paper}/table"):
            printed -= look_up_table(name, load_table(name), lines)[1]
    assert not sorted(f"{lines[line]!r}, cell {place}" for line, place in printed)


@pytest.mark.parametrize("name", NAMES)
def test_figures_from_elsewhere_are_in_our_notes(name):
    notes = SHARED / "PROTOCOLS.md"
    if not notes.is_file():
        pytest.skip("no notes on released code here")
    noted = {float(text) for text in re.findall(r"\d+(?:\.\d+)?", notes.read_text(encoding="utf-8"))}
    for key, row in load_table(name).rows.items():
        for values in (row.released, row.independent):
            assert {value for value in values or () if value is not None} <= noted, key


def changed(table: TableFile, **published):
    rows = {key: row.model_copy(update={"published": published.get(key, row.published)}) for key, row in table.rows.items()}
    return table.model_copy(update={"rows": rows})


def test_the_rule_notices_slips(texts):
    name = "discriminative/table4"
    table, lines = load_table(name), texts["discriminative"]
    softmax, clustering = table.rows["softmax"].published, table.rows["clustering"].published
    assert look_up_table(name, table, lines)[0] == []
    assert look_up_table(name, changed(table, softmax=(57.2, *softmax[1:])), lines)[0] == ["softmax"]
    assert look_up_table(name, changed(table, softmax=(*softmax[:3], softmax[4], softmax[3])), lines)[0] == ["softmax"]
    assert look_up_table(name, changed(table, softmax=(None, *softmax[1:])), lines)[0] == ["softmax"]
    assert look_up_table(name, changed(table, softmax=clustering, clustering=softmax), lines)[0]


# ---------------------------------------------------------------- refusals


@pytest.fixture
def altered(tmp_path, monkeypatch):
    """Return a function that changes one piece of text in a copy of discriminative/table4."""
    copy = tmp_path / "tables"
    shutil.copytree(file.TABLES, copy)
    monkeypatch.setattr(file, "TABLES", copy)
    path = copy / "discriminative" / "table4.yaml"

    def alter(old, new):
        text = path.read_text(encoding="utf-8")
        assert re.search(old, text)
        path.write_text(re.sub(old, new, text, count=1), encoding="utf-8")

    return alter


def refused(name="discriminative/table4", key="discriminative"):
    with pytest.raises(ConfigError) as caught:
        row_training(name, load_table(name).rows[key], "cub200")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r"59\.92, ", "", "discriminative/table4.yaml: row 'discriminative': 4 published figures for 5 columns"),
        (r"    published: \[59\.92.*\n", "", "row 'discriminative': 0 published figures for 5 columns"),
        (r', source: "reported for \[40\]"', "", "rows.histogram: a quoted row must name its source, and no other row may"),
        (r"kind: own", "kind: own\n    source: us", "rows.discriminative: a quoted row must name its source, and no other row may"),
        (r"source: \"reported for \[40\]\"", r"\g<0>, lacks: a loss", "rows.histogram: a quoted row is never run"),
        (r"metrics: \[nmi, ", "metrics: [ami, ", "row 'softmax' has no tolerance for ami on cub200, and neither has the table"),
        (r"    variants: \[as_published\]\n", "", "row 'softmax' must name variants of the protocol, unless the table does, or set lacks"),
        (r"    loss: ", "    losses: ", "did you mean 'loss'"),
        (r"(?s)(kind: own.*)as_published", r"\1as_publishd", "did you mean 'as_published'"),
        (r"(?s)(kind: own.*)as_published\]", r"\g<0>\n    training: {num_epoch: 1}", "did you mean 'num_epochs'"),
        (r"(?s)(kind: own.*)as_published\]", r"\g<0>\n    datasets: {sop: {}}", "row 'discriminative': no column is of dataset 'sop'"),
    ],
)
def test_a_slip_in_a_file_is_one_line(old, new, said, altered):
    altered(old, new)
    assert said in refused()


def test_a_table_that_is_not_there_is_named_with_the_nearest():
    assert "unknown table 'discriminative/tabel4'; did you mean 'discriminative/table4'" in refused("discriminative/tabel4")


def test_a_row_that_is_not_run_says_why(altered):
    assert "'Histogram' is not run: the paper quotes it from elsewhere" in refused(key="histogram")
    altered(r"(?s)(kind: own.*)as_published\]", r"\g<0>\n    lacks: a loss that nobody has written")
    assert "'Discriminative' is not run: a loss that nobody has written" in refused()


def test_a_metric_s_own_tolerance_goes_before_that_of_metric_and_dataset_and_minutes_have_none():
    table = load_table("discriminative/table3")
    row, columns = table.rows["k-means"], {(column.dataset, column.metric): column for column in table.flat_columns}
    assert table.tolerance_of(row, columns["cub200", "recall@1"]) == common_tolerance("recall@1", "cub200")
    of_std, of_min = (table.tolerance_of(row, columns["drawn-cub200", f"{what}_centroid_distance"]) for what in ("std", "min"))
    assert of_std.value < of_min.value < 0.1
    of_its_own = row.model_copy(update={"tolerance": of_std})
    assert table.tolerance_of(of_its_own, columns["cub200", "min_centroid_distance"]) == of_std
    table = load_table("discriminative/table7")
    assert {table.tolerance_of(row, column) for row in table.rows.values() for column in table.flat_columns} == {None}
