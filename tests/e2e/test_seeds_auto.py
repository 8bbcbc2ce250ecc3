"""The standing comparison with as many seeds as its differences require."""

import re
from pathlib import Path

import pytest

from tests.e2e.conftest import make_project


@pytest.mark.slow
@pytest.mark.proof
def test_the_standing_comparison_gets_seeds_until_it_is_sure_and_is_reported_beside_the_standing_one(tmp_path: Path) -> None:
    project = make_project(tmp_path, ("untrained", "softmax"))
    printed = project.run("dml", "reproduce", "--seeds", "auto", "--resolve", "0.1", "--max-seeds", "4")
    assert re.search(
        r"comparison on synthetic: 3 seeds; the least precise difference is \w+ - \w+, ± \d+\.?\d* points; continuing with 4", printed
    )
    assert "comparison on synthetic: 4 seeds; " in printed
    assert printed.count("starting Ray") == 1
    assert re.search(r"Best mean R@1 on these \d+ classes: (softmax|untrained).* 4 seeds\.", printed)
    (report,) = (project.root / "state/reports/synthetic").glob("*/report.md")
    assert re.search(rf"^report: .*{report.parent.name}/report\.md$", printed, re.MULTILINE)
    assert "every pair" not in printed.lower(), "links to files beside the report are left out of the terminal"
    assert not (project.root / "results").exists() or not list((project.root / "results").glob("synthetic/report.md"))
    shown = project.run("dml", "compare", "synthetic")
    assert "4 seeds." in shown.splitlines()[0]
    planned = project.run("dml", "plan", "project/claims", "--dataset", "fashion-mnist-200", "--seeds", "auto", code=0)
    assert "how many more are needed depends on their results" in planned
