"""What did tuning change in the order of a table's losses?

    .venv/bin/python benchmarks/tuned_order.py [docs/pages/project/fashion_mnist.json] [METRIC ...]

Reads a table's page as it was written (`dml reproduce` writes `results/site/<paper>/<table>.json`), whose rows ran as `ours` and as
`tuned`. For each metric: both means with half of their 95 % interval over seeds (Student's t), the difference paired by seed, and the
place among the rows; then Kendall's tau between the two orders, and of each row with a twin (`<row>-pml`) the row less its twin. Per cent.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from dml_core.evaluation.confidence import mean_over_seeds
from dml_core.evaluation.statistics import paired_difference

PAGE, METRICS = Path("docs/pages/project/fashion_mnist.json"), ("recall@1", "map@r", "nmi")
TWIN = "-pml"
Values = dict[str, float]  # seed -> per cent


def values_of(page: dict[str, Any], metric: str) -> dict[tuple[str, str], Values]:
    """(row, variant) -> what each seed measured."""
    column = next(number for number, column in enumerate(page["columns"]) if column["metric"] == metric)
    lines = ((row["name"], line) for row in page["rows"] for line in row["lines"])
    return {(name, line["variant"]): line["cells"][column]["values"] for name, line in lines if line["cells"][column] is not None}


def interval(values: Values) -> str:
    """Mean and half of the 95 % interval."""
    mean, half_width = mean_over_seeds(list(values.values()))
    return f"{mean:.1f} ± {half_width:.1f}"


def difference(values: Values, others: Values) -> str:
    """Paired by seed, with half of its 95 % interval."""
    seeds = sorted(values.keys() & others.keys())
    found = paired_difference([values[seed] for seed in seeds], [others[seed] for seed in seeds])
    return f"{found.mean:+.1f} ± {found.half_width:.1f}"


def places(means: dict[str, float]) -> dict[str, int]:
    """1 for the highest."""
    return {name: 1 + sum(other > mean for other in means.values()) for name, mean in means.items()}


def show(page: dict[str, Any], metric: str) -> None:
    """One metric's tables."""
    values = values_of(page, metric)
    rows = [row for row, variant in values if variant == "tuned"]
    means = {variant: {row: float(np.mean(list(values[row, variant].values()))) for row in rows} for variant in ("ours", "tuned")}
    before, after = places(means["ours"]), places(means["tuned"])
    print(f"\n{metric}\n\n| loss | one guess for all | tuned | tuned less guess | place before | place tuned |\n|---|---|---|---|---|---|")
    for row in sorted(rows, key=after.__getitem__):
        old, new = values[row, "ours"], values[row, "tuned"]
        print(f"| {row} | {interval(old)} | {interval(new)} | {difference(new, old)} | {before[row]} | {after[row]} |")
    tau = kendalltau([means["ours"][row] for row in rows], [means["tuned"][row] for row in rows])
    ours, tuned = (max(found.values()) - min(found.values()) for found in (means["ours"], means["tuned"]))
    print(f"\nKendall's tau of the two orders {tau.statistic:.2f}; best less worst {ours:.1f} before, {tuned:.1f} tuned.")
    twins = [row for row, variant in values if variant == "ours" and (row + TWIN, "ours") in values]
    if twins:
        print("\n| row | row less its twin |\n|---|---|")
    for row in twins:
        print(f"| {row} | {difference(values[row, 'ours'], values[row + TWIN, 'ours'])} |")


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    found = json.loads(path.read_text(encoding="utf-8"))
    for name in sys.argv[2:] or METRICS:
        show(found, name)
