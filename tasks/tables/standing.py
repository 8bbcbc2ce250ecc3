"""The standing comparison of `params.yaml` as a table, variants by datasets. `dml reproduce` runs it and stores its results here.

It has no file: each variant and dataset in `params.yaml` adds a row or a block of columns.
"""

from tasks.runs.specs import Params, row_name
from tasks.tables.file import Columns, Row, TableFile

VARIANT = "standing"
METRICS = ("recall@1", "map@r", "nmi")


def standing_table(params: Params) -> TableFile:
    """Return the table of the standing comparison."""
    comparison = params.comparison
    first = f"recall@{params.evaluation.recall_at[0]}"
    metrics = (first, *METRICS[1:]) if params.evaluation.clustering else (first, METRICS[1])
    columns = tuple(Columns(dataset=dataset, metrics=metrics) for dataset in comparison.datasets)
    nothing = (None,) * (len(metrics) * len(columns))
    rows = {row_name(variant): Row(label=variant, kind="own", published=nothing, variants=(VARIANT,)) for variant in comparison.variants}
    return TableFile(
        title="The standing comparison",
        states="Every loss on one network, one budget and one augmentation, on the datasets of `comparison` in params.yaml.",
        columns=columns,
        rows=rows,
        reference=None if comparison.reference is None else row_name(comparison.reference),
        search=comparison.search,
    )
