"""Lists of images, in CSV or Parquet: read alike as a dataset and to embed, index and search.

Columns: `path` and `label` (class name), of a dataset also `role`; optional `left`, `top`, `right`, `bottom` (pixels, right and bottom
exclusive; empty if an image has no box). Only an empty cell is empty: "NA" and "null" are names.
"""

from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from dml_core.data.store.rows import Box
from dml_core.errors import DataError, first_line
from dml_core.files import check_regular

TEXT_COLUMNS = ("path", "label", "role")
BOX_COLUMNS = ("left", "top", "right", "bottom")
COLUMNS = (*TEXT_COLUMNS, *BOX_COLUMNS)


class Entry(NamedTuple):
    """A row of a list: the image's path, and its class, role and box, each None if the list does not have it."""

    path: str
    label: str | None
    role: str | None
    box: Box | None


def read_list(path: Path, is_dataset: bool) -> list[Entry]:
    """Return the rows of a list of images.

    Args:
        path: the list; `.parquet` is read as Parquet, anything else as CSV with a header.
        is_dataset: whether classes are required, roles are read, and other columns are refused instead of ignored.

    Raises:
        DataError: it cannot be read, or has a column, cell or box that it must not have.
    """
    table, names = _read_table(path)
    for column in names:
        if names.count(column) > 1:
            raise DataError(f"{path}: column '{column}' appears twice; remove one")
        if is_dataset and column not in COLUMNS:
            raise DataError(f"{path}: unknown column '{column}' (known: {', '.join(COLUMNS)})")
    table = table.select([name for name in names if name in COLUMNS and (is_dataset or name != "role")])
    _check_types(table, path)
    required = ["path", "label"] if is_dataset else ["path"]
    for column in (*required, *(name for name in table.column_names if name not in BOX_COLUMNS)):
        if column not in names or table[column].null_count or "" in table[column].unique().to_pylist():
            raise DataError(f"{path}: column '{column}' is missing or has empty cells")
    if 0 < len({*BOX_COLUMNS} & {*names}) < len(BOX_COLUMNS):
        raise DataError(f"{path}: a box needs all of the columns {', '.join(BOX_COLUMNS)}")
    cells = {name: table[name].to_pylist() if name in table.column_names else [None] * len(table) for name in COLUMNS}
    sides = zip(*(cells[name] for name in BOX_COLUMNS), strict=True)
    for number, label in enumerate(cells["label"], start=1):
        if label is not None and str(label) != str(label).strip():
            raise DataError(f"{path}: row {number} has the label '{label}', which begins or ends with white space; remove it")
        if "\0" in str(label):  # arrays of texts lose it: two classes would become one
            raise DataError(f"{path}: row {number} has the label {label!r} with a NUL character; remove it")
    rows = zip(cells["path"], cells["label"], cells["role"], sides, strict=True)
    return [
        Entry(name, None if label is None else str(label), role, _box(box, name, path, number))
        for number, (name, label, role, box) in enumerate(rows, start=1)
    ]


def _read_table(path: Path) -> tuple[Any, list[str]]:
    """Return a file's table and the names of its columns."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    types = dict.fromkeys(TEXT_COLUMNS, pa.string()) | dict.fromkeys(BOX_COLUMNS, pa.float64())
    cells = csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""])
    lines = csv.ParseOptions(newlines_in_values=True)
    try:
        check_regular(path)
        is_parquet = path.suffix.lower() == ".parquet"
        table = parquet.read_table(path) if is_parquet else csv.read_csv(path, parse_options=lines, convert_options=cells)
        table.validate(full=True)  # texts of a Parquet file may be no UTF-8
        names = table.column_names  # decoded here
        if len(names) == 1 and (other := {";", "\t"} & {*names[0]}):
            raise DataError(f"{path}: its columns are separated by {other.pop()!r}; write CSV in UTF-8 with commas, or Parquet")
        return table, names
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        remedy = "" if isinstance(error, OSError) else "; write CSV in UTF-8 with commas, or Parquet"
        raise DataError(f"{path}: not readable as a table ({reason}){remedy}") from None


def _check_types(table: Any, path: Path) -> None:
    """Reject columns of a Parquet file with other values than the list is made of."""
    from pyarrow import types

    for column, kind in zip(table.column_names, table.schema.types, strict=True):
        values = kind.value_type if types.is_dictionary(kind) else kind
        is_text = types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)
        is_number = types.is_integer(values) or types.is_floating(values) or types.is_decimal(values)
        if column in BOX_COLUMNS:
            expected, fits = "numbers", is_number
        elif column == "label":
            expected, fits = "text or integers", is_text or types.is_integer(values)
        else:
            expected, fits = "text", is_text
        if not (fits or types.is_null(values)):
            raise DataError(f"{path}: column '{column}' has values of type {kind}; write {expected}")


def _box(cells: tuple[Any, ...], name: str, path: Path, number: int) -> Box | None:
    sides = [float(cell) for cell in cells if cell is not None]
    if not sides:
        return None
    if not all(map(isfinite, sides)):
        raise DataError(f"{path}: image '{name}' has a box with a side that is not a finite number; correct or empty it")
    if len(sides) < len(BOX_COLUMNS) or sides[0] >= sides[2] or sides[1] >= sides[3]:
        raise DataError(f"{path}: row {number} has a box that is incomplete or empty")
    return sides[0], sides[1], sides[2], sides[3]
