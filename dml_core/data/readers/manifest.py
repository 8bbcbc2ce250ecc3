"""`manifest`: the user's own images, listed in a CSV or Parquet file.

Columns: `path` (relative to the raw folder) and `label` (class name); optional `role` (train, test, query, gallery) and
`left`, `top`, `right`, `bottom` (pixels, right and bottom exclusive; empty if an image has no box). Without roles the first half
of the classes, by name, is for training and the rest for test.
"""

from pathlib import Path
from typing import Any, ClassVar, get_args

from dml_core.data.readers.shared.contract import DatasetConfig
from dml_core.data.readers.shared.own import split_by_class
from dml_core.data.store.rows import Box, Role, Row, as_role
from dml_core.errors import DataError

_BOX_COLUMNS = ("left", "top", "right", "bottom")
_COLUMNS = ("path", "label", "role", *_BOX_COLUMNS)


class ManifestFile(DatasetConfig):
    """A list of images.

    Attributes:
        file: the list, relative to the raw folder; `.parquet` is read as Parquet, anything else as CSV with a header.
    """

    own_images: ClassVar[bool] = True
    how_to_get: ClassVar[str] = "put the images and a manifest.csv with the columns path and label there"
    file: str = "manifest.csv"

    def rows(self, raw: Path) -> list[Row]:
        """Return rows in the file's order; classes are numbered by name."""
        path = raw / self.file
        records = _read_records(path)
        names = {record["label"] for record in records}
        numbers = {name: number for number, name in enumerate(sorted(names))}
        given = "role" in records[0] if records else False
        by_class = split_by_class(names)
        return [
            Row(
                record["path"],
                numbers[record["label"]],
                record["label"],
                _role(record["role"], path, number) if given else by_class[record["label"]],
                _box(record, path, number),
            )
            for number, record in enumerate(records, start=1)
        ]


def _read_records(path: Path) -> list[dict[str, Any]]:
    """Return rows as dictionaries; path, label and role are always text."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a file; name a list (.csv, .parquet)")
    try:
        table = parquet.read_table(path) if path.suffix == ".parquet" else csv.read_csv(path, convert_options=_text_columns(csv))
        columns = table.column_names
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {ManifestFile.how_to_get}") from None
    except (pa.ArrowInvalid, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path}: not readable as a table ({str(error).splitlines()[0]})") from None
    for column in columns:
        if columns.count(column) > 1:
            raise DataError(f"{path}: column '{column}' is there twice; remove one")
        if column not in _COLUMNS:
            raise DataError(f"{path}: unknown column '{column}' (known: {', '.join(_COLUMNS)})")
    _check_types(table, path)
    for column in ("path", "label"):
        if column not in columns or table[column].null_count or "" in table[column].unique().to_pylist():
            raise DataError(f"{path}: column '{column}' is missing or has empty cells")
    boxes = [column for column in _BOX_COLUMNS if column in columns]
    if boxes and len(boxes) < len(_BOX_COLUMNS):
        raise DataError(f"{path}: a box needs all of the columns {', '.join(_BOX_COLUMNS)}")
    records: list[dict[str, Any]] = table.to_pylist()
    return [{**record, "label": str(record["label"])} for record in records]


def _check_types(table: Any, path: Path) -> None:
    """Reject columns of a Parquet file with other values than the list is made of."""
    from pyarrow import types

    for column, kind in zip(table.column_names, table.schema.types, strict=True):
        values = kind.value_type if types.is_dictionary(kind) else kind
        is_text = types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)
        is_number = types.is_integer(values) or types.is_floating(values) or types.is_decimal(values)
        if column in _BOX_COLUMNS:
            expected, fits = "numbers", is_number
        elif column == "label":
            expected, fits = "text or integers", is_text or types.is_integer(values)
        else:
            expected, fits = "text", is_text
        if not (fits or types.is_null(values)):
            raise DataError(f"{path}: column '{column}' has values of type {kind}; write {expected}")


def _text_columns(csv: Any) -> Any:
    import pyarrow as pa

    types = dict.fromkeys(("path", "label", "role"), pa.string()) | dict.fromkeys(_BOX_COLUMNS, pa.float64())
    return csv.ConvertOptions(column_types=types, strings_can_be_null=True)


def _role(text: Any, path: Path, number: int) -> Role:
    found = as_role(text)
    if found is None:
        raise DataError(f"{path}: row {number} has role '{text}', which is none of {', '.join(get_args(Role))}")
    return found


def _box(record: dict[str, Any], path: Path, number: int) -> Box | None:
    sides = [float(record[column]) for column in _BOX_COLUMNS if record.get(column) is not None]
    if not sides:
        return None
    if len(sides) < len(_BOX_COLUMNS) or sides[0] >= sides[2] or sides[1] >= sides[3]:
        raise DataError(f"{path}: row {number} has a box that is incomplete or empty")
    return sides[0], sides[1], sides[2], sides[3]
