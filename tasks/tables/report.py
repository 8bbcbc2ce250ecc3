"""A table as text: lines for the terminal, and a Markdown page for files, Prefect and MLflow."""

from collections.abc import Sequence

from tasks.tables.claims import JudgedClaim
from tasks.tables.counts import Counted
from tasks.tables.view import ShownCell, ShownColumn, ShownLine, ShownRow, ShownTable

MARKDOWN, RICH = "**{}**", "[bold]{}[/bold]"
STAND_IN = "stand-in for"
UNRESOLVED = "Printed figures that the tolerance cannot tell apart"


def lines(table: ShownTable, bold: str = MARKDOWN) -> list[list[str]]:
    """Return the whole table: a header, then for each row its published values, values from other sources, and its measured lines.

    Args:
        table: the table to show.
        bold: format of values in the confidence set of the best.
    """
    return [["row", "figures", *(f"{column.metric} {_dataset(column)}" for column in table.columns)]] + [
        line for row in table.rows for line in _row_lines(row, table, bold)
    ]


def independent_lines(table: ShownTable) -> list[str]:
    """Return the sources of independent values, and what was found for the other rows."""
    sources = [f"Independent figures of {row.label}: {row.independent_source}." for row in table.rows if row.independent is not None]
    return [*sources, *([f"Independent figures of the rows to be run: {table.independent}"] if table.independent else [])]


def _dataset(column: ShownColumn) -> str:
    """Return a column's dataset; for a stand-in, with the paper's dataset that it replaces."""
    return column.dataset if column.stands_in_for is None else f"{column.dataset} ({STAND_IN} {column.stands_in_for})"


def count_lines(table: ShownTable) -> list[str]:
    """Return the counts on the paper's own datasets and on stand-ins, a line each; only the first for the project's own tables."""
    own = "" if table.page is None else " on the paper's own data"
    judged = _judged(table.own_data, has_prints=table.page is not None)
    lines = [f"Measured{own}: {table.own_data.rows} of the {table.num_to_run} rows that are to be run{judged}"]
    if table.stand_ins:
        names = ", ".join(f"{dataset} for {paper}" for dataset, paper in table.stand_ins.items())
        lines.append(f"On stand-ins ({names}), which are not the paper's: {table.stand_in.rows} rows{_judged(table.stand_in)}")
    return [*lines, *([table.judged] if table.judged else [])]


def _judged(found: Counted, has_prints: bool = True) -> str:
    """Return verdicts and claims in words, as the end of a sentence.

    Args:
        found: the counts.
        has_prints: whether the table has published values to judge; the project's own tables have none.
    """
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in found.verdicts.items())
    plural = {"holds": "hold"}
    claims = ", ".join(
        f"{count} {judgement if count == 1 else plural.get(judgement, judgement)}" for judgement, count in found.claims.items()
    )
    on_prints = f" Verdicts on printed figures: {verdicts or 'none yet'}." if has_prints else ""
    return f".{on_prints}" + (f" Claims: {claims}." if claims else "")


def told_lines(table: ShownTable) -> list[str]:
    """Return the statistical statements about the measured rows, and the meaning of bold."""
    if not table.comparisons:
        return []
    limits = [f"{found.dataset}: {found.limits}" if len(table.comparisons) > 1 else found.limits for found in table.comparisons]
    return [*table.told, " ".join([table.comparisons[0].bold_says, *(limit for limit in limits if limit)])]


def as_markdown(table: ShownTable) -> str:
    """Return the table as a Markdown page."""
    header, *rows = ([cell.replace("|", "/") for cell in row] for row in lines(table))
    grid = "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])
    tolerances = [f"Tolerance of {found.of}: {found.says} ({found.reason})." for found in table.tolerances]
    tolerances += [f"{UNRESOLVED}: {line}." for line in table.unresolved]
    paragraphs = [f"# {table.name}: {table.title}", *told_lines(table), *count_lines(table), table.states, table.note or "", grid]
    paragraphs.append(_bullets(claim_lines(table)))
    paragraphs.append(_bullets(independent_lines(table)))
    paragraphs += [_bullets(tolerances), _bullets(_older_code(table)), *(f"{row.label}: {row.note}." for row in table.rows if row.note)]
    paragraphs.append(_bullets(table.left_out))
    if table.gone:
        paragraphs.append(f"Not shown: runs of rows that the file no longer has ({', '.join(table.gone)}).")
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def claim_line(claim: JudgedClaim) -> str:
    """Return a judged claim as one line."""
    if claim.mean is None or claim.reference_mean is None or claim.difference is None:
        return f"{claim.judgement}: {claim.says} ({claim.why})"
    spread = f" ± {claim.half_width:.3g}" if claim.half_width is not None else ""
    ratio = f", ratio {claim.ratio:.3g}," if claim.ratio is not None else ""
    seeds = f"over {len(claim.seeds)} seeds" if len(claim.seeds) > 1 else "over one seed"
    p_value = f", p {claim.p_holm:.2g} (Holm)" if claim.p_holm is not None else f", {claim.why}"
    means = f"{claim.metric} {claim.mean:.4g} against {claim.reference_mean:.4g}"
    figures = f"{means}, difference {claim.difference:+.3g}{spread}{ratio} {seeds}{p_value}"
    exploratory = " (exploratory)" if claim.exploratory else ""
    return f"{claim.judgement}{exploratory}: {claim.says} ({figures})"


def claim_lines(table: ShownTable) -> list[str]:
    """Return a line for each claim with runs on both sides, and one with the number of the others."""
    begun = [claim_line(claim) for claim in table.claims if claim.seeds]
    left = len(table.claims) - len(begun)
    return [*begun, *([f"{left} claim{'s' if left > 1 else ''} undecided: runs missing"] if left else [])]


def as_note(table: ShownTable) -> str:
    """Return the description of a table and its results for MLflow's page."""
    page = f", page {table.page} of the paper" if table.page is not None else ""
    parts = [
        f"**{table.name}**{page}: {table.title}.",
        f"What it shows: {table.states}",
        *count_lines(table),
        *table.told,
        f"Run with `dml reproduce {table.name}`, shown with `dml tables show {table.name}`; page, Markdown and JSON are artifacts here.",
    ]
    return "\n\n".join([*parts, *([table.note] if table.note else [])])


def measured_text(cell: ShownCell, column: ShownColumn) -> str:
    """Return the mean and half-width of a cell."""
    spread = f" ± {column.measured(cell.half_width)}" if cell.half_width is not None else ""
    return f"{column.measured(cell.mean)}{spread}"


def _row_lines(row: ShownRow, table: ShownTable, bold: str) -> list[list[str]]:
    columns = table.columns
    kind = f"quoted: {row.source}" if row.kind == "quoted" else f"published, {row.kind}"
    found = [
        [label, what, *(column.printed(value) for column, value in zip(columns, values, strict=True))]
        for label, what, values in ((row.label, kind, row.published), ("", "released", row.released), ("", "independent", row.independent))
        if values is not None
    ]
    found += [["", line.label, *_measured(line, table, bold)] for line in row.lines]
    empty = [""] * len(columns)
    for why, datasets in row.waiting.items():
        on = f" on {', '.join(datasets)}" if row.lines else ""
        found.append(["", f"not run{on}: {why}", *empty])
    return found + [["", f"FAILED, {run}: {why}", *empty] for run, why in row.failures.items()]


def _measured(line: ShownLine, table: ShownTable, bold: str) -> list[str]:
    found = []
    for index, (cell, column) in enumerate(zip(line.cells, table.columns, strict=True)):
        if cell is None:
            found.append("-")
            continue
        figure = measured_text(cell, column)
        found.append(f"{bold.format(figure) if table.is_bold(line, index) else figure} {cell.says}".rstrip())
    return found


def _older_code(table: ShownTable) -> list[str]:
    return [
        f"Made by older code: {row.label}, {line.variant}; these files differ: {', '.join(line.older_code)}."
        for row in table.rows
        for line in row.lines
        if line.older_code
    ]


def _bullets(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
