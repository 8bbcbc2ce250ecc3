"""What a dataset module provides: its options, and how a raw folder becomes a list of rows.

A dataset is a small frozen configuration class. Its fields are the options a person may set in `params.yaml`; `rows` reads the
publisher's own files; `read` adds the checks that hold for every dataset and gives a `Manifest`, which `prepare` packs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from dml_core.config import Config
from dml_core.data.readers.shared.annotations import read_file
from dml_core.data.readers.shared.archives import Archive, Progress, check_md5, download, unpack
from dml_core.data.readers.shared.places import find_folder, names_there
from dml_core.data.readers.shared.rules import check_files, check_published, check_rows
from dml_core.data.store.rows import Counts, Manifest, Row
from dml_core.data.store.sizes import Interpolation, Resize
from dml_core.errors import DataError


class DatasetConfig(Config):
    """Base of every dataset: options as fields, reading as methods.

    Attributes:
        stored_size: pack the images resized (losslessly, without boxes) to this short side, or (height, width), for a protocol that
            begins with this very resize; None packs the original bytes.
        stored_interpolation: of that resize.
        how_to_get: what a person must do by hand where the raw files are missing; one line.
        own_images: a person's own, which are turned upright by their EXIF orientation; others are decoded as they are stored.
        single_image_classes: the publisher's training part has classes with one image (In-shop's has).
    """

    how_to_get: ClassVar[str] = "put the raw files there by hand"
    own_images: ClassVar[bool] = False
    single_image_classes: ClassVar[bool] = False

    stored_size: Resize | None = None
    stored_interpolation: Interpolation = "bilinear"

    @property
    def shares_classes(self) -> bool:
        """Whether train and test have classes in common, because the dataset is split by image; else tested classes are unseen ones."""
        return False

    def rows(self, raw: Path) -> list[Row]:
        """Read the publisher's annotation files under `raw`.

        Raises:
            DataError: a file is missing, damaged, or names something that does not exist.
        """
        raise TypeError(f"{type(self).__name__} does not implement rows")

    def reader(self, raw: Path) -> Callable[[Row], bytes]:
        """How the encoded bytes of one row are read; by default the row's path is a file under `raw`."""
        return lambda row: read_file(raw / row.path)

    def materialise(self, raw: Path) -> None:
        """Make sure that the raw files are in `raw`, never overwriting what is there.

        Raises:
            DataError: they are not, and only a person can fetch them.
        """
        if not raw.is_dir() or not any(raw.iterdir()):
            raise DataError(f"{raw}: no raw files; {self.how_to_get}")

    def fetch(self, raw: Path, progress: Progress | None = None) -> None:
        """Bring the raw files to `raw`; `progress` is called with (bytes done, bytes in all) while something is downloaded."""
        self.materialise(raw)

    def read(self, raw: Path) -> Manifest:
        """The checked manifest of the raw folder.

        Raises:
            DataError: as `rows`, or the rows break a rule that holds for every dataset, or the published counts.
        """
        if not raw.is_dir():
            raise DataError(f"{raw}: no such folder; {self.how_to_get}")
        check_files(raw)
        rows = self.rows(raw)
        check_rows(rows, raw, self.single_image_classes, self.shares_classes)
        manifest = Manifest(rows, self.reader(raw))
        if self.stored_size is None:
            return manifest
        from dml_core.data.store.resized import resized  # torchvision, which parsing a configuration does not need

        return resized(manifest, self.stored_size, self.stored_interpolation, self.own_images)


class OfficialDataset(DatasetConfig):
    """A published dataset: images and classes per role are checked against the published counts, archives against checksums.

    Attributes:
        landmarks: files or folders of the publisher's, relative to the folder that holds the dataset, by any of which that folder is found
            in the raw one or below it.
        published_counts: False for a tree in the official layout that is not the official archive (a generated one).
    """

    published: ClassVar[Mapping[str, Counts]] = {}
    archives: ClassVar[tuple[Archive, ...]] = ()
    landmarks: ClassVar[tuple[str, ...]] = ()
    published_counts: bool = True

    def folder(self, raw: Path) -> Path:
        """The folder below `raw`, or `raw` itself, that holds the dataset.

        Raises:
            DataError: there is none; the line says what is there and what to fetch.
        """
        found = find_folder(raw, self.landmarks)
        if found is None:
            raise DataError(f"{raw}: has {names_there(raw)}, and neither {' nor '.join(self.landmarks)}; {self.how_to_get}")
        return found

    def materialise(self, raw: Path) -> None:
        """Unpack the archives that are in `raw`, checked against their published checksums, unless they are unpacked already."""
        folders = dict.fromkeys((raw, find_folder(raw, self.landmarks) or raw))
        for archive in self.archives:
            for folder in folders:
                self._unpack(archive, folder)
        super().materialise(raw)

    def fetch(self, raw: Path, progress: Progress | None = None) -> None:
        """Download what is missing and has a link that works, then `materialise`."""
        is_nested = raw.is_dir() and find_folder(raw, self.landmarks) is not None
        for archive in self.archives:
            is_there = is_nested or (raw / archive.unpacked).exists() or (raw / archive.file_name).exists()
            if archive.url is not None and not is_there:
                self._download(archive.url, raw / archive.file_name, progress)
        self.materialise(raw)

    def _download(self, url: str, path: Path, progress: Progress | None) -> None:
        try:
            download(url, path, progress)
        except DataError as error:
            raise DataError(f"{error}; or by hand: {self.how_to_get}") from None

    def _unpack(self, archive: Archive, raw: Path) -> None:
        path = raw / archive.file_name
        if not path.is_file() or (archive.unpacked != archive.file_name and (raw / archive.unpacked).exists()):
            return
        if archive.md5 and self.published_counts:
            check_md5(path, archive.md5)
        if archive.unpacked != archive.file_name:
            unpack(path, path.parent)

    def read(self, raw: Path) -> Manifest:
        """As `DatasetConfig.read`, with the published counts checked."""
        manifest = super().read(raw)
        if self.published_counts:
            check_published(manifest.rows, self.published, raw)
        return manifest
