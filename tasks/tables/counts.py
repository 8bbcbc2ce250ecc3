"""What was measured of a table on its paper's own datasets, and what on stand-ins for them: counted apart."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tasks.runs.records import Record

VERDICTS = ("compatible", "above", "below", "undecided")


class Counted(Record):
    """What was measured on one kind of data.

    Attributes:
        rows: how many rows were measured there, in part at least.
        verdicts: how many cells have each, of the epoch that is judged.
        claims: how many claims have each judgement, those that are not decided left out.
    """

    rows: int = 0
    verdicts: dict[str, int] = {}
    claims: dict[str, int] = {}


def counted(
    measured: Sequence[set[str]], verdicts: Sequence[tuple[str, str]], claims: Sequence[tuple[str, str]], datasets: Mapping[str, bool]
) -> Counted:
    """The counts of what stands on some datasets.

    Args:
        measured: of each row the datasets that it was measured on.
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
