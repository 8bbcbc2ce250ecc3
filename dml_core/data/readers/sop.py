"""Stanford Online Products: 120,053 images of 22,634 products (Oh Song et al., 2016); the publisher's own split is class-disjoint."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from dml_core.data.readers.shared.annotations import read_file, read_lines
from dml_core.data.readers.shared.archives import Archive
from dml_core.data.readers.shared.contract import OfficialDataset
from dml_core.data.store.rows import Counts, Role, Row
from dml_core.errors import DataError

FOLDER = "Stanford_Online_Products"
_HEADER = "image_id class_id super_class_id path"


class Sop(OfficialDataset):
    """The official archive, unpacked: `Stanford_Online_Products/{Ebay_train.txt, Ebay_test.txt, bicycle_final/, ...}`.

    The raw folder may be that folder or contain it, one or two levels down.
    """

    published: ClassVar[Mapping[str, Counts]] = {"train": Counts(59_551, 11_318), "test": Counts(60_502, 11_316)}
    archives: ClassVar[tuple[Archive, ...]] = (Archive("Stanford_Online_Products.zip", FOLDER, md5="7f73d41a2f44250d4779881525aea32e"),)
    landmarks: ClassVar[tuple[str, ...]] = ("Ebay_train.txt", "Ebay_test.txt")
    how_to_get: ClassVar[str] = (
        "get Stanford_Online_Products.zip (md5 7f73d41a2f44250d4779881525aea32e) from cvgl.stanford.edu/projects/lifted_struct; unpack it"
    )

    def rows(self, raw: Path) -> list[Row]:
        """Return rows of the training list, then of the test list; a class is named by its folder and number."""
        folder = self.folder(raw)
        return _read_list(folder / "Ebay_train.txt", "train") + _read_list(folder / "Ebay_test.txt", "test")

    def reader(self, raw: Path) -> Callable[[Row], bytes]:
        """Return a reader of image paths relative to the archive's folder."""
        folder = self.folder(raw)
        return lambda row: read_file(folder / row.path)


def _read_list(path: Path, role: Role) -> list[Row]:
    header, *lines = read_lines(path) or [""]
    if header != _HEADER:
        raise DataError(f"{path}: does not begin with '{_HEADER}'; unpack the archive again")
    rows = []
    for number, line in enumerate(lines, start=2):
        columns = line.split()
        if len(columns) != 4 or not columns[1].isdecimal():
            raise DataError(f"{path}: line {number} is not 'image_id class_id super_class_id path'; unpack the archive again")
        super_class = columns[3].split("/")[0].removesuffix("_final")
        rows.append(Row(columns[3], int(columns[1]), f"{super_class}/{columns[1]}", role))
    return rows
