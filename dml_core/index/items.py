"""Names, classes and thumbnails of an index's items, in a memory-mapped Arrow file: a million items open at once."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dml_core.errors import StoreError
from dml_core.index.layout import REMEDY

SCHEMA = pa.schema([("name", pa.large_string()), ("class_name", pa.large_string()), ("thumbnail", pa.large_binary())])
NUM_ITEMS_AT_ONCE = 8192


class Item(NamedTuple):
    """One image of an index.

    Attributes:
        name: unique name of the item, for example its path in the indexed folder.
        class_name: its class, if known.
        thumbnail: a small WebP, if there is one.
    """

    name: str
    class_name: str | None = None
    thumbnail: bytes | None = None


class Items:
    """The items of a file.

    Raises:
        StoreError: not a file of items.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
            self._batches = [self._reader.get_batch(number) for number in range(self._reader.num_record_batches)]
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise StoreError(f"{path}: damaged ({str(error).splitlines()[0]}); {REMEDY}") from None
        self._firsts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, position: int) -> Item:
        """Return the item at a position, 0 to N - 1."""
        if not 0 <= position < len(self):
            raise IndexError(position)
        number = int(np.searchsorted(self._firsts, position, side="right")) - 1
        row = self._batches[number].slice(position - int(self._firsts[number]), 1).to_pylist()[0]
        return Item(**row)

    def names(self) -> list[str]:
        """Return every name, in order."""
        return [name for batch in self._batches for name in batch["name"].to_pylist()]

    def batches(self, kept_N: NDArray[np.bool_] | None = None) -> Iterator[Any]:
        """Yield the record batches, only with the rows in `kept_N` if given."""
        for first, batch in zip(self._firsts.tolist(), self._batches, strict=False):
            yield batch if kept_N is None else batch.filter(pa.array(kept_N[first : first + batch.num_rows]))


class ItemWriter:
    """Writes a file of items, batch by batch."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def add(self, items: Sequence[Item]) -> None:
        """Append items."""
        self._writer.write_batch(pa.RecordBatch.from_pylist([item._asdict() for item in items], schema=SCHEMA))

    def copy(self, batches: Iterable[Any]) -> None:
        """Append the items of another file."""
        for batch in batches:
            self._writer.write_batch(batch)


@contextmanager
def writing_items(path: Path) -> Iterator[ItemWriter]:
    """Yield a writer whose file is complete at the end."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        yield ItemWriter(writer)
