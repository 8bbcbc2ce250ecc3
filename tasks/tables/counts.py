"""Counts of what was measured of a table, separately for its paper's own datasets and for stand-ins."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tasks.runs.records import Record

VERDICTS = ("compatible", "above", "below", "undecided")


class Counted(Record):
    """Counts for one kind of data.

    Attributes:
        rows: number of rows measured there, at least in part.
        verdicts: verdict -> number of cells, at the judged epoch.
        claims: judgement -> number of claims, without undecided ones.
    """

    rows: int = 0
    verdicts: dict[str, int] = {}
    claims: dict[str, int] = {}


def counted(
    measured: Sequence[set[str]], verdicts: Sequence[tuple[str, str]], claims: Sequence[tuple[str, str]], datasets: Mapping[str, bool]
) -> Counted:
    """Return the counts for some datasets.

    Args:
        measured: for each row, the datasets that it was measured on.
        verdicts, claims: (dataset, verdict or judgement) of each.
        datasets: dataset -> whether it counts here.
    """

    def of(found: Sequence[tuple[str, str]]) -> Counter[str]:
        return Counter(judged for dataset, judged in found if datasets.get(dataset))

    shown, judged = of(verdicts), of(claims)
    return Counted(
        rows=sum(any(datasets.get(dataset) for dataset in on) for on in measured),
        verdicts={verdict: shown[verdict] for verdict in VERDICTS if shown[verdict]},
        claims={judgement: judged[judgement] for judgement in sorted(judged) if judgement != "not decided"},
    )
