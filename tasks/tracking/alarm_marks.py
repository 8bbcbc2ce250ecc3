"""Alarms of the verification on the comparisons that MLflow shows: the tag `dml.alarm`, and a line before the description."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from tasks.locks import alone
from tasks.runs.records import ComparisonReport
from tasks.runs.specs import comparison_title, table_comparison
from tasks.tracking.connection import LOCKS, one_line_errors, open_client, project_runs, set_tags
from tasks.tracking.tags import Tag

NOTE = "Not reproduced: "
REST = " ... (results/site/verification.html has all)"
MOST_LETTERS = 8000  # of a tag; MLflow cuts off the rest
ALARM_LETTERS = 1000  # of these


def with_alarm(note: str, alarm: str) -> str:
    """Return a description with the line of an alarm before it; unchanged for an empty text."""
    return f"{NOTE}{alarm}\n\n{note}" if alarm else note


def mark_comparisons(uri: str, state: Path, name: str, texts: Sequence[str]) -> int:
    """Mark the comparisons of a table, or of a dataset of the standing comparison, with its alarms, a sentence each.

    Without alarms the marks are removed. Return how many comparisons were changed.

    Raises:
        TrackingError: MLflow cannot be used.
    """
    num_changed, alarm = 0, shorten(" ".join(texts), ALARM_LETTERS, placeholder=REST)
    with one_line_errors(uri):
        client = open_client(uri, state)
        for run in project_runs(client, {Tag.COMPARISON: None}):
            title = run.data.tags[Tag.COMPARISON]
            if title != comparison_title(name, "test") and not title.startswith(table_comparison(name, "")):
                continue
            with alone(state / LOCKS / ComparisonReport.model_construct(comparison=title).outbox_name):  # a flow may be publishing it
                tags = client.get_run(run.info.run_id).data.tags
                note = tags.get(Tag.NOTE, "")
                plain = note.partition("\n\n")[2] if note.startswith(NOTE) else note
                marked = with_alarm(plain, alarm)
                if marked == note and (Tag.ALARM in tags) == bool(alarm):
                    continue
                num_changed += 1
                set_tags(client, run.info.run_id, {Tag.NOTE: marked} | ({Tag.ALARM: alarm} if alarm else {}))
                if not alarm:
                    client.delete_tag(run.info.run_id, Tag.ALARM)
    return num_changed
