"""The page of verifications answers: still reproduced, since when not, what changed."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks.environment import Project
from tasks.reports.table_pages import HISTORY, SITE
from tasks.watch.history import MOST_RUNS, RowHistory, rows_of, write_history
from tasks.watch.records import RowVerdict, Verdict, Verification
from tasks.watch.storage import read_references, write_verification
from tasks.watch.summary import as_markdown

FIRST = datetime(2026, 11, 1, 4, tzinfo=UTC)
SAME, BAND, DRIFT, FAILED, NEW = Verdict.IDENTICAL, Verdict.WITHIN_BAND, Verdict.DRIFTED, Verdict.FAILED, Verdict.NEW


def history(*days: Sequence[Verdict]) -> RowHistory:
    """Return the history of a row with one verification each day, whose commits are 0000..., 1111..., of seeds 0, 1 and so on."""
    past = [
        Verification(
            name="synthetic",
            started_at=FIRST + timedelta(days=day),
            seconds=1,
            commit=str(day) * 40,
            rows=tuple(
                RowVerdict(row="synthetic/sgsl", seed=seed, verdict=verdict, reason="", changed=(f"torch {day}",))
                for seed, verdict in enumerate(verdicts)
            ),
        )
        for day, verdicts in enumerate(days)
    ]
    (row,) = rows_of(past, None, 0.01)
    return row


@pytest.mark.parametrize(
    ("verdicts", "answer"),
    [
        ((SAME, BAND), "reproduced on 2026-11-02 at commit 1111111111"),
        ((DRIFT, SAME), "reproduced on 2026-11-02 at commit 1111111111"),
        ((NEW,), "no reference"),
        ((NEW, DRIFT), "NOT reproduced since 2026-11-02, commit 1111111111; changed: torch 1"),
        ((DRIFT,), "NOT reproduced since 2026-11-01, commit 0000000000; changed: torch 0"),
        (
            (SAME, DRIFT, FAILED),
            "NOT reproduced since 2026-11-02, commit 1111111111; reproduced before on 2026-11-01 at commit 0000000000; changed: torch 1",
        ),
        (
            (DRIFT, SAME, FAILED),
            "NOT reproduced since 2026-11-03, commit 2222222222; reproduced before on 2026-11-02 at commit 1111111111; changed: torch 2",
        ),
    ],
)
def test_the_answer_is_of_the_newest_spell(verdicts: tuple[Verdict, ...], answer: str) -> None:
    assert history(*([verdict] for verdict in verdicts)).answer == answer


def test_a_row_is_reproduced_only_with_every_seed_of_a_verification() -> None:
    row = history((SAME, SAME), (SAME, DRIFT, SAME), (DRIFT, SAME))
    assert row.is_bad
    since, before = "NOT reproduced since 2026-11-02, commit 1111111111", "reproduced before on 2026-11-01 at commit 0000000000"
    assert row.answer == f"{since}; {before}; changed: torch 1"


def test_a_spell_longer_than_the_page_shows_has_its_true_beginning() -> None:
    row = history([SAME], *([[DRIFT, DRIFT]] * MOST_RUNS))
    assert row.answer.startswith("NOT reproduced since 2026-11-02, commit 1111111111; reproduced before on 2026-11-01 at commit 0000000000")


def test_rows_that_are_not_reproduced_come_first() -> None:
    rows = [RowVerdict(row=row, seed=0, verdict=verdict, reason="") for row, verdict in (("a", SAME), ("b", DRIFT), ("c", SAME))]
    rows.append(RowVerdict(row="b", seed=1, verdict=SAME, reason=""))
    past = [Verification(name="synthetic", started_at=FIRST, seconds=1, commit="0" * 40, rows=tuple(rows))]
    assert [row.row for row in rows_of(past, None, 0.01)] == ["b", "a", "c"]


def test_a_bar_in_a_reason_stays_in_its_cell() -> None:
    """Readers of Markdown drop what follows in cells that the header has not."""
    row = RowVerdict(row="d/softmax", seed=0, verdict=Verdict.FAILED, reason="a|b: no such file")
    verification = Verification(name="d", started_at=datetime.now(UTC), seconds=1, commit="c", rows=(row,))
    [line] = [line for line in as_markdown(verification, None).splitlines() if "softmax" in line]
    assert [cell.strip() for cell in re.split(r"(?<!\\)\|", line)] == ["", "d/softmax", "", "failed", "", "", r"a\|b: no such file", ""]


def test_commands_in_reasons_are_code_on_the_page(tmp_path: Path) -> None:
    row = RowVerdict(row="synthetic/sgsl", seed=0, verdict=FAILED, reason="no <data>; run `dml data prepare synthetic`")
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path}/none.db")
    write_verification(project.state, Verification(name="synthetic", started_at=FIRST, seconds=1, commit="0" * 40, rows=(row,)))
    write_history(project, read_references(project))
    assert "<td>no &lt;data&gt;; run <code>dml data prepare synthetic</code></td>" in (tmp_path / SITE / HISTORY).read_text()
