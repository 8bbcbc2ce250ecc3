"""The page `results/site/verification.html`: is each accepted result still reproduced, since when not, and what changed."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from dml_core.evaluation.metric_info import metric_info
from dml_core.figures.canvas import COLOURS, DOTS_PER_INCH, WRONG, new_figure, style_axes
from tasks.environment import Project
from tasks.files import write_whole
from tasks.reports.kit import render
from tasks.reports.table_pages import HISTORY, INDEX, SITE
from tasks.watch.bands import bands_of, shared_level
from tasks.watch.receipts import read_receipts
from tasks.watch.records import REPRODUCED, Band, Evidence, Reference, RowVerdict, Verdict, Verification
from tasks.watch.storage import read_verifications

MOST_RUNS = 60  # of a row that are shown, the newest


@dataclass(frozen=True)
class VerifiedRun:
    """One verified run of a row."""

    at: datetime
    commit: str
    verdict: RowVerdict


@dataclass(frozen=True)
class RowHistory:
    """The verified runs of a row, oldest first, and a picture of the first score of the newest ones."""

    row: str
    runs: tuple[VerifiedRun, ...]
    picture: str | None

    @property
    def is_bad(self) -> bool:
        """True if the last verification raised an alarm for the row, with any of its seeds."""
        return any(run.verdict.is_bad for run in self.runs if run.at == self.runs[-1].at)

    @property
    def answer(self) -> str:
        """Answer to whether the row is still reproduced, and if not, since when and what changed."""
        last = self.runs[-1]
        if not self.is_bad:
            is_reproduced = last.verdict.verdict in REPRODUCED
            return f"reproduced on {last.at:%Y-%m-%d} at commit {last.commit[:10]}" if is_reproduced else "no reference"
        bad = [run for run in self.runs if run.verdict.is_bad]
        bad_times = {run.at for run in bad}
        fine = [run for run in self.runs if run.at not in bad_times]
        first = next(run for run in bad if not fine or run.at > fine[-1].at)
        good = next((run for run in reversed(fine) if run.verdict.verdict in REPRODUCED), None)
        before = "" if good is None else f"; reproduced before on {good.at:%Y-%m-%d} at commit {good.commit[:10]}"
        changed = f"; changed: {', '.join(first.verdict.changed)}" if first.verdict.changed else ""
        return f"NOT reproduced since {first.at:%Y-%m-%d}, commit {first.commit[:10]}{before}{changed}"


def write_history(project: Project, references: dict[str, Reference]) -> None:
    """Write the page from all verifications of the state folder; `references` are all that are accepted."""
    names: dict[str, list[Verification]] = {}
    for verification in read_verifications(project.state):
        names.setdefault(verification.name, []).append(verification)
    level = shared_level(references.values())
    histories = {name: rows_of(past, references.get(name), level) for name, past in names.items()}
    receipts = read_receipts(project, references, level)
    folder = project.root / SITE
    index = INDEX if (folder / INDEX).is_file() else None
    page = render("verification.html", index=index, histories=histories, references=references, receipts=receipts, most=MOST_RUNS)
    write_whole(folder / HISTORY, page)


def rows_of(past: Sequence[Verification], reference: Reference | None, level: float) -> list[RowHistory]:
    """Return the history of each row, those that are not reproduced first.

    Left out are rows that were not reproduced and are no longer accepted: accepting without them ended their alarms. `past` are the
    verifications of one table or dataset, oldest first; `level` is that of the bands drawn (`tasks.watch.bands.shared_level`).
    """
    runs: dict[str, list[VerifiedRun]] = {}
    for verification in past:
        for verdict in verification.rows:
            runs.setdefault(verdict.row, []).append(VerifiedRun(verification.started_at, verification.commit, verdict))
    histories = []
    for row, of_row in runs.items():
        accepted = [] if reference is None else reference.of_row(row)
        history = RowHistory(row, tuple(of_row), _picture(of_row[-MOST_RUNS:], accepted, level))
        is_unwatched = reference is not None or of_row[-1].verdict.verdict is Verdict.VANISHED
        if accepted or not (history.is_bad and is_unwatched):
            histories.append(history)
    return sorted(histories, key=lambda history: not history.is_bad)


def _picture(runs: Sequence[VerifiedRun], accepted: Sequence[Evidence], level: float) -> str | None:
    """Return the first score of the runs, with the band of the accepted seeds, as a data URI; None if no run has the score."""
    evidence = [run.verdict.evidence for run in runs]
    name = next((one.first_recall for one in evidence if one is not None and one.first_recall is not None), None)
    if name is None:
        return None
    figure = new_figure(7.2, 2.2)
    axes = figure.subplots()
    style_axes(axes)
    band: Band | None = bands_of(accepted, level).get(name)
    if band is not None:
        axes.axhspan(100 * band.low, 100 * band.high, color=COLOURS[0], alpha=0.12, lw=0, label="band of the accepted seeds")
    scores = [None if one is None else one.scores.get(name) for one in evidence]
    points = [(at, 100 * score, runs[at].verdict.is_bad) for at, score in enumerate(scores) if score is not None]
    for is_bad, colour, marker, label in ((False, COLOURS[0], "o", "reproduced"), (True, WRONG, "X", "not reproduced")):
        of_kind = [(at, score) for at, score, bad in points if bad == is_bad]
        if of_kind:
            axes.plot(*zip(*of_kind, strict=True), linestyle="", marker=marker, color=colour, label=label)
    axes.set_xticks(range(len(runs)), [f"{run.at:%m-%d}" for run in runs], fontsize=7, rotation=90 if len(runs) > 12 else 0)
    axes.set_ylabel(f"{metric_info(name).title}, %")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS_PER_INCH)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
