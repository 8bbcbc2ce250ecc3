"""Choice of an index type and its settings by the number of items. Light to import except for FAISS's settings.

An exact search reads every vector for each query: about 10 GB/s per core. Lists of whole vectors (ivf) are faster in proportion to the
share searched, and take the same space again; compressed vectors (pq) are for data larger than memory. A graph (hnsw) finds most in the
least time, but is built slowly, and rebuilt after every removal: it is used only on request.
"""

from typing import Literal, NamedTuple, cast

from dml_core.errors import ConfigError
from dml_core.evaluation.retrieval.approximate import ApproximateConfig
from dml_core.index.layout import IndexInfo, Kind

EXACT_BYTES = 2**28  # size of the vectors: about 25 ms a query
WHOLE_BYTES = 2**33
FAISS_NAMES: dict[Kind, Literal["ivf_flat", "ivf_pq", "hnsw"]] = {"ivf": "ivf_flat", "pq": "ivf_pq", "hnsw": "hnsw"}
CHOICES = (*FAISS_NAMES, "auto")
NUM_CODE_BYTES = 64  # maximum for a compressed vector


class Chosen(NamedTuple):
    """A kind of index, its settings if approximate, and the reason if it was chosen automatically."""

    kind: Kind
    approximation: ApproximateConfig | None
    reason: str | None


def choose(requested: str | None, num_items: int, num_dimensions: int) -> Chosen:
    """Return the requested kind: None is exact, "auto" chooses by size.

    An approximate index gets about sqrt(N) lists, of which a sixteenth, and at least 8, are searched.

    Raises:
        ConfigError: no such kind.
    """
    if requested is not None and requested not in CHOICES:
        raise ConfigError(f"--approximate {requested}: expected one of {', '.join(CHOICES)}")
    kind, reason = _by_size(num_items, num_dimensions) if requested == "auto" else (cast(Kind, requested or "exact"), None)
    if kind == "exact":
        return Chosen(kind, None, reason)
    num_lists = 1 << num_items.bit_length() // 2
    most = min(NUM_CODE_BYTES, max(1, num_dimensions // 2))
    approximation = ApproximateConfig(
        index=FAISS_NAMES[kind],
        num_lists=num_lists,
        num_probes=max(8, num_lists // 16),
        num_code_bytes=next(number for number in range(most, 0, -1) if num_dimensions % number == 0),
    )
    return Chosen(kind, approximation, reason)


def outgrown(info: IndexInfo) -> list[str]:
    """Return how an index of this number of items would be built now, where it is another way: as another kind, or with other lists."""
    lines, now = [], choose("auto", info.num_items, info.num_dimensions)
    if now.kind != info.kind and info.reason is None:  # the reason of one that `auto` chose names it
        lines.append(f"--approximate auto would choose {now.kind} for them: {now.reason}")
    if info.kind in ("ivf", "pq") and info.approximation is not None:
        same = choose(info.kind, info.num_items, info.num_dimensions).approximation
        if same is not None and same.num_lists != info.approximation.num_lists:
            lines.append(f"it has {info.approximation.num_lists} lists; built again with --force it would have {same.num_lists}")
    return lines


def _by_size(num_items: int, num_dimensions: int) -> tuple[Kind, str]:
    num_bytes = 4 * num_items * num_dimensions
    size = f"{num_items:,} items of {num_dimensions} dimensions are {num_bytes / 2**20:,.0f} MiB"
    if num_bytes <= EXACT_BYTES:
        return "exact", f"{size}, which an exact search reads in at most some 30 ms: nothing need be missed"
    if num_bytes <= WHOLE_BYTES:
        return "ivf", f"{size}, too many to read for each query ({EXACT_BYTES >> 20} MiB) and few enough to be kept whole in lists"
    return (
        "pq",
        f"{size}, too many to be kept whole in lists ({WHOLE_BYTES >> 20:,} MiB): compressed, and reordered by the whole vectors",
    )
