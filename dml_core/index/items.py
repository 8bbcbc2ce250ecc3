"""Names, classes and thumbnails of an index's items, in a memory-mapped Arrow file: a million items open at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from dml_core.errors import StoreError, first_line
from dml_core.index.layout import REMEDY

SCHEMA = pa.schema([("name", pa.large_string()), ("class_name", pa.large_string()), ("thumbnail", pa.large_binary())])


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


def open_items(path: Path) -> Any:
    """Return the items of a file as a memory-mapped Arrow table, without reading its thumbnails.

    Raises:
        FileNotFoundError: no such file.
        StoreError: not a file of items.
    """
    try:
        items = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        items.validate(full=True)  # of a million items 30 ms; unchecked, Arrow would read any memory that the file's offsets lead to
        if items.schema != SCHEMA:
            raise pa.ArrowInvalid("other columns than an index has")
        return items
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{path}: damaged ({first_line(error)}); {REMEDY}") from None


def as_table(items: Sequence[Item]) -> Any:
    """Return items as an Arrow table."""
    return pa.Table.from_pylist([item._asdict() for item in items], schema=SCHEMA)
