"""Sentences about a verification, for the terminal, pages and flow runs."""

from collections import Counter

from tasks.watch.records import BAD, Receipt, Reference, RowVerdict, Verdict, Verification

WORDS = {
    Verdict.IDENTICAL: "identical",
    Verdict.WITHIN_BAND: "within the band",
    Verdict.DRIFTED: "drifted",
    Verdict.FAILED: "failed",
    Verdict.VANISHED: "vanished",
    Verdict.NEW: "without a reference",
}


def first_sentence(verification: Verification, reference: Reference | None) -> str:
    """Return whether a reference is reproduced, with the number of rows of each verdict."""
    counts = Counter(row.verdict for row in verification.rows)
    parts = [f"{counts[verdict]} {words}" for verdict, words in WORDS.items() if counts[verdict]]
    skipped = f"; {len(verification.skipped)} left for another time" if verification.skipped else ""
    too_long = f"; longer than the budget: {', '.join(verification.too_long)}" if verification.too_long else ""
    bad = [row.row for row in verification.rows if row.verdict in BAD]
    if bad:
        result = "NOT reproduced"
    elif counts[Verdict.IDENTICAL] or counts[Verdict.WITHIN_BAND]:
        result = "reproduced"
    else:
        result = "nothing is accepted" if reference is None else "nothing was compared"
    source = f"receipt of {reference.who}" if isinstance(reference, Receipt) else "accepted"
    since = "" if reference is None else f" ({source}, {reference.accepted_at:%Y-%m-%d}, commit {reference.commit[:10]})"
    return f"{verification.name}: {result}{since}: {', '.join(parts) or 'no run'}{skipped}{too_long}."


def first_recall(row: RowVerdict) -> str:
    """Return the first Recall@K of a run in per cent; empty without a run."""
    name = None if row.evidence is None else row.evidence.first_recall
    return "" if row.evidence is None or name is None else f"{100 * row.evidence.scores[name]:.1f}"


def as_markdown(verification: Verification, reference: Reference | None) -> str:
    """Return a verification as a page: its sentence, a table of its rows, and what differs from the accepted environment."""
    rows = [
        f"| {row.row} | {row.seed if row.evidence is not None else ''} | {row.verdict} | {first_recall(row)} | {row.reason} |"
        for row in verification.rows
    ]
    table = ["| row | seed | verdict | R@1 | comparison |", "|---|---|---|---|---|", *rows, ""] if rows else []
    changed = dict.fromkeys(line for row in verification.rows for line in row.changed)
    differs = ["Differs from the accepted environment:", "", *(f"- {line}" for line in changed), ""] if changed else []
    return "\n".join([f"# {first_sentence(verification, reference)}", "", *table, *differs])
