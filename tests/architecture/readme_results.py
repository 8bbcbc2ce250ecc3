"""The README's results are a summary of the reports in `results/`.

python tests/architecture/readme_results.py    writes it into README.md
"""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = re.compile(r"(<!-- results: .*? -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)
REPORT = re.compile(r"^### comparison on (\S+)\n\n(.+)\n\n(.+)\n\n((?:\|.*\n)+)", re.MULTILINE)
SENTENCES_SHOWN = ("Best mean", "The best is", "Compared with", "Nothing is claimed", "This comparison detects")


def results_text() -> str:
    """Return title, verdict and table of every report."""
    reports = [path.read_text().partition("![")[0].strip() for path in sorted((ROOT / "results").glob("*/report.md"))]
    return "".join(f"\n#{'#' * 2}{report.removeprefix('#')}\n\n" for report in reports)


def summary(results: str) -> str:
    """Return each report's verdict, shortened, and one table of Recall@1: a row per variant, a column per dataset; drawn images first."""
    reports = sorted(REPORT.findall(results), key=lambda report: report[0] != "synthetic")
    verdicts, captions, columns = [], [], []
    for dataset, verdict, caption, table in reports:
        sentences = re.split(r"(?<=\.) (?=[A-Z0-9])", verdict)
        shown = f"- `{dataset}`: " + " ".join(sentence for sentence in sentences if sentence.startswith(SENTENCES_SHOWN))
        verdicts.append(textwrap.fill(shown, 160, subsequent_indent="  ", break_on_hyphens=False))
        captions.append(caption)
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        at = rows[0].index("recall@1")
        columns.append((dataset, {row[0].strip("*"): row[at] for row in rows[2:]}))
    variants = list(dict.fromkeys(variant for _, column in columns for variant in column))
    header = ["variant", *(f"{dataset} R@1" for dataset, _ in columns)]
    cells = [header, *([variant, *(column.get(variant, "") for _, column in columns)] for variant in variants)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n" + "\n".join(verdicts) + "\n\n" + "\n".join(dict.fromkeys(captions)) + "\n\n" + "\n".join(lines) + "\n\n"


def readme_with(results: str) -> str:
    """Return the README with its summary replaced by that of the given reports."""
    return PLACE.sub(lambda found: found[1] + summary(results) + found[3], (ROOT / "README.md").read_text())


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme_with(results_text()))
