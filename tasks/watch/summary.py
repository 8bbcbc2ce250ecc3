"""Sentences about a verification, for the terminal, pages and flow runs."""

from collections import Counter
from collections.abc import Iterable

from tasks.reports.kit import markdown_table
from tasks.watch.records import REPRODUCED, Receipt, Reference, Verdict, Verification
from tasks.wording import counted


def first_sentence(verification: Verification, reference: Reference | None) -> str:
    """Return whether a reference is reproduced, with the number of rows of each verdict."""
    left = set(verification.skipped) - set(verification.too_long)
    skipped = f"; {len(left)} left for another time" if left else ""
    too_long = f"; longer than the budget: {', '.join(verification.too_long)}" if verification.too_long else ""
    verdicts = [row.verdict for row in verification.rows]
    if any(row.is_bad for row in verification.rows):
        result = "NOT reproduced"
    elif any(verdict in REPRODUCED for verdict in verdicts):
        result = "reproduced"
    else:
        result = "nothing is accepted" if reference is None else "nothing was compared"
    since = ""
    if reference is not None:
        accepted = "last accepted" if reference.earlier else "accepted"  # other rows may have been accepted before
        source = f"receipt of {reference.who}" if isinstance(reference, Receipt) else accepted
        since = f" ({source}, {reference.accepted_at:%Y-%m-%d}, commit {reference.commit[:10]})"
    part = f"; {_share_trained(verification, reference)}" if isinstance(reference, Receipt) else ""
    return f"{verification.name}: {result}{since}: {verdict_counts(verdicts) or 'no run'}{part}{skipped}{too_long}."


def _share_trained(verification: Verification, receipt: Receipt) -> str:
    """Return how many runs of a receipt were trained again, as "12 of 132 runs trained"."""
    runs = {(one.row, one.seed) for one in receipt.evidence}
    return f"{len(runs & {(one.row, one.seed) for one in verification.trained})} of {counted(len(runs), 'run')} trained"


def verdict_counts(verdicts: Iterable[Verdict]) -> str:
    """Return the number of verdicts of each kind, as "3 identical, 1 drifted"."""
    counts = Counter(verdicts)
    words = {Verdict.NEW: "without a reference"}
    return ", ".join(f"{counts[verdict]} {words.get(verdict, verdict)}" for verdict in Verdict if counts[verdict])


def as_markdown(verification: Verification, reference: Reference | None) -> str:
    """Return a verification as a page: its sentence, a table of its rows, and what differs from the accepted environment."""
    rows = [
        [row.row, str(row.seed) if row.evidence is not None else "", row.verdict, row.recall, row.recall_band, row.reason]
        for row in verification.rows
    ]
    table = [markdown_table([["row", "seed", "verdict", "R@1", "band", "comparison"], *rows]), ""] if rows else []
    changed = dict.fromkeys(line for row in verification.rows for line in row.changed)
    differs = ["Differs from the accepted environment:", "", *(f"- {line}" for line in changed), ""] if changed else []
    return "\n".join([f"# {first_sentence(verification, reference)}", "", *table, *differs])
