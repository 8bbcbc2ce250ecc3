"""The committed reports of the standing comparison are worded as the present templates: they are written again after a change of words."""

import re

import pytest

from tests.conftest import ROOT

TEMPLATES = ROOT / "tasks/reports/templates"
WORDS = 5  # of a line's fixed text, to be recognised


def fixed_lines(template: str) -> list[re.Pattern[str]]:
    """Return a pattern for each line of a template that has enough fixed words."""
    lines = [line for line in (TEMPLATES / template).read_text().splitlines() if not line.startswith("{%")]
    fixed = [re.split(r"\{\{.*?\}\}", line) for line in lines]
    return [re.compile(".+".join(map(re.escape, parts))) for parts in fixed if len(" ".join(parts).split()) >= WORDS]


@pytest.mark.parametrize(("template", "file"), [("differences.md", "differences/differences.md"), ("report.md", "report.md")])
def test_every_fixed_line_of_a_template_is_in_a_committed_report(template: str, file: str) -> None:
    reports = [(ROOT / "results" / dataset / file).read_text() for dataset in ("synthetic", "fashion-mnist")]
    patterns = [pattern for pattern in fixed_lines(template) if "only" not in pattern.pattern]  # a line for comparisons of one variant
    assert patterns
    assert [pattern.pattern for pattern in patterns if not any(pattern.search(report) for report in reports)] == []
