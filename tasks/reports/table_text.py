"""A table as text: lines for the terminal, and Markdown for files, Prefect and MLflow."""

from collections import defaultdict
from collections.abc import Sequence

from dml_core.evaluation.statistics.comparing import BOLD
from tasks.runs.finished import made_by_older_code
from tasks.tables.shown import Counted, JudgedClaim, ShownColumn, ShownLine, ShownRow, ShownTable
from tasks.wording import counted

MARKDOWN, TERMINAL = "**{}**", "\x1b[1m{}\x1b[0m"  # bold
STAND_IN = "stand-in for"
UNRESOLVED = "Published values that differ by no more than their tolerance"


def lines(table: ShownTable, bold: str = MARKDOWN) -> list[list[str]]:
    """Return a header, then for each row its values; `remark_lines` has the reasons for missing ones."""
    header = ["row", "values", *(f"{column.metric} {_dataset(column)}" for column in map(table.columns.__getitem__, table.order))]
    return [header, *(line for row in table.rows for line in _value_lines(row, table, bold))]


def remark_lines(table: ShownTable) -> list[str]:
    """Return why values are missing: a line for each reason, with the rows that it concerns."""
    labels: defaultdict[str, list[str]] = defaultdict(list)
    for row in table.rows:
        remarks = [f"not run on {', '.join(datasets)}: {why}" if row.lines else f"not run: {why}" for why, datasets in row.waiting.items()]
        for remark in [*remarks, *(f"FAILED, {run}: {why}" for run, why in row.failures.items())]:
            labels[remark].append(row.label)
    every = len(table.rows) if len(table.rows) > 1 else None
    return [f"{'all rows' if len(rows) == every else ', '.join(dict.fromkeys(rows))}: {remark}" for remark, rows in labels.items()]


def _dataset(column: ShownColumn) -> str:
    """Return a column's dataset; for a stand-in, with the paper's dataset that it replaces."""
    return column.dataset if column.stands_in_for is None else f"{column.dataset} ({STAND_IN} {column.stands_in_for})"


def _value_lines(row: ShownRow, table: ShownTable, bold: str) -> list[list[str]]:
    """Return a row's published values, values from other sources and measured lines, or its status; the first has the row's label.

    A source without a single value has no line. `bold` formats the confidence set of the best.
    """
    kind = f"quoted: {row.source}" if row.kind == "quoted" else f"published, {row.kind}"
    sources = {kind: row.published, "released": row.released, "independent": row.independent}
    rows = [
        [what, *(table.columns[index].printed(values[index]) for index in table.order)]
        for what, values in sources.items()
        if values is not None and any(value is not None for value in values)
    ]
    rows += [[line.label, *_measured(line, table, bold)] for line in row.lines]
    rows = rows or [[row.status, *("" for _ in table.order)]]
    return [["" if place else row.label, *cells] for place, cells in enumerate(rows)]


def _measured(line: ShownLine, table: ShownTable, bold: str) -> list[str]:
    """Return the mean, half-width and verdict of each cell."""
    texts = []
    for index in table.order:
        cell, column = line.cells[index], table.columns[index]
        if cell is None:
            texts.append("-")
            continue
        spread = f" ± {column.measured(cell.half_width)}" if cell.half_width is not None else ""
        value = f"{column.measured(cell.mean)}{spread}"
        texts.append(f"{bold.format(value) if table.is_bold(line, index) else value} {cell.says}".rstrip())
    return texts


def conclusion_lines(table: ShownTable) -> list[str]:
    """Return the statistical conclusions about the measured rows, and the meaning of bold."""
    if not table.comparisons:
        return []
    has_several = len(table.comparisons) > 1
    limits = [
        (f"{comparison.dataset}: " if has_several else "") + comparison.limits for comparison in table.comparisons if comparison.limits
    ]
    return [*table.conclusions, " ".join([BOLD, *limits])]


def count_lines(table: ShownTable) -> list[str]:
    """Return the counts on the paper's own datasets and on stand-ins, a line each; only the first for the project's own tables."""
    is_paper = table.page is not None
    where = " on the paper's datasets" if is_paper else ""
    counts = [f"Measured{where}: {table.own_data.rows} of {table.num_to_run} rows{table.in_part}.{_judged(table.own_data, is_paper)}"]
    if table.stand_ins:
        names = ", ".join(f"{dataset} for {paper}" for dataset, paper in table.stand_ins.items())
        counts.append(f"Measured on stand-ins ({names}): {counted(table.stand_in.rows, 'row')}.{_judged(table.stand_in, True)}")
    return [*counts, *filter(None, [table.judged])]


def _judged(counts: Counted, has_published: bool) -> str:
    """Return verdicts (if the table has published values) and claims as sentences."""
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in counts.verdicts.items())
    claims = ", ".join(
        f"{number} {'hold' if judgement == 'holds' and number > 1 else judgement}" for judgement, number in counts.claims.items()
    )
    return (f" Verdicts on published values: {verdicts or 'none'}." if has_published else "") + (f" Claims: {claims}." if claims else "")


def claim_lines(table: ShownTable) -> list[str]:
    """Return a line for each claim with runs on both sides, and one with the number of the others."""
    lines = [claim_line(claim) for claim in table.claims if claim.seeds]
    others = len(table.claims) - len(lines)
    if others:
        lines.append(f"{counted(others, 'claim')} not decided: runs or scores missing")
    return lines


def claim_line(claim: JudgedClaim) -> str:
    """Return a judged claim as one line."""
    exploratory = " (exploratory)" if claim.exploratory else ""
    return f"{claim.judgement}{exploratory}: {claim.says} ({claim.numbers})"


def as_markdown(table: ShownTable) -> str:
    """Return the table as a Markdown page."""
    header, *rows = ([cell.replace("|", "/") for cell in row] for row in lines(table))
    independent = [f"Independent values of {row.label}: {row.independent_source}." for row in table.rows if row.independent is not None]
    independent += [f"Independent values of other rows: {table.independent}"] if table.independent else []
    tolerances = [f"Tolerance of {given.of}: {given.says} ({given.reason})." for given in table.tolerances]
    older_code = [
        f"{row.label}, {line.variant}: {made_by_older_code(line.older_code)}."
        for row in table.rows
        for line in row.lines
        if line.older_code
    ]
    paragraphs = [
        f"# {table.name}: {table.title}",
        *conclusion_lines(table),
        *count_lines(table),
        table.states,
        table.note or "",
        "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows]),
        _bullets(remark_lines(table)),
        _bullets(claim_lines(table)),
        _bullets(independent),
        _bullets([*tolerances, *(f"{UNRESOLVED}: {line}." for line in table.unresolved)]),
        _bullets(older_code),
        *(f"{row.label}: {row.note}." for row in table.rows if row.note),
        _bullets(table.left_out),
        f"Not shown: runs of rows that were removed from the table ({', '.join(table.gone)})." if table.gone else "",
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def as_note(table: ShownTable) -> str:
    """Return the description of a table and its results for MLflow's page."""
    page = f", page {table.page} of the paper" if table.page is not None else ""
    paragraphs = [
        f"{table.name}{page}: {table.title}.",
        table.states if table.page is None else f"The paper states: {table.states}",
        *count_lines(table),
        *table.conclusions,
        f"Run: `dml reproduce {table.name}`. Show: `dml tables show {table.name}`. Page, Markdown and JSON are artifacts of this run.",
        table.note or "",
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _bullets(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
