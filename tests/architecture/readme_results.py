"""The README's results are exact copies of the reports in `results/`.

python tests/architecture/readme_results.py    writes them into README.md
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = re.compile(r"(<!-- results: .*? -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


def results_text() -> str:
    """Return title and table of every report."""
    reports = [path.read_text().partition("![")[0].strip() for path in sorted((ROOT / "results").glob("*/report.md"))]
    return "".join(f"\n#{'#' * 2}{report.removeprefix('#')}\n\n" for report in reports)


def readme_with(results: str) -> str:
    """Return the README with its results replaced by the given ones."""
    return PLACE.sub(lambda found: found[1] + results + found[3], (ROOT / "README.md").read_text())


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme_with(results_text()))
