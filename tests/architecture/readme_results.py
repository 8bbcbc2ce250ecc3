"""The README's table is that of the committed page of `project/finetuned`.

python tests/architecture/readme_results.py    writes it into README.md
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/pages/project/finetuned.json"
PLACE = re.compile(r"(<!-- results: .*? -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)
TITLES = {"recall@1": "R@1", "recall@10": "R@10", "map@r": "MAP@R", "nmi": "NMI"}


def summary(page: dict[str, Any]) -> str:
    """Return a caption and a table: a row per loss, a column per metric."""
    rows = [(row["label"].removesuffix(" (pytorch-metric-learning)"), row["lines"][0]) for row in page["rows"]]
    (num_seeds,) = {len(line["seeds"]) for _, line in rows}
    caption = f"Per cent, test classes, mean ± half of the 95 % interval over {num_seeds} seeds."
    cells = [["", *(TITLES[column["metric"]] for column in page["columns"])]]
    cells += [[label, *(f"{cell['mean']:.1f} ± {cell['half_width']:.1f}" for cell in line["cells"])] for label, line in rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(cells[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return f"\n{caption}\n\n" + "\n".join(lines) + "\n\n"


def readme_with(page: dict[str, Any]) -> str:
    """Return the README with its table replaced by that of a page."""
    return PLACE.sub(lambda match: match[1] + summary(page) + match[3], (ROOT / "README.md").read_text())


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme_with(json.loads(PAGE.read_text())))
