"""Interface of a dataset module: its options, and the conversion of a raw folder to a list of rows.

A dataset is a small frozen configuration class. Its fields are the options for `params.yaml`; `rows` reads the publisher's files;
`read` adds the checks common to all datasets and returns a `Manifest`, which `prepare` packs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from dml_core.config import Config
from dml_core.data.readers.shared.annotations import read_file
from dml_core.data.readers.shared.archives import Archive, Progress, check_md5, download, unpack
from dml_core.data.readers.shared.places import find_folder, names_there
from dml_core.data.readers.shared.rules import check_files, check_rows, published_differences
from dml_core.data.store.rows import Counts, Manifest, Row
from dml_core.data.store.sizes import Interpolation, Resize
from dml_core.errors import DataError


class DatasetConfig(Config):
    """Base of every dataset: options as fields, reading as methods.

    Attributes:
        stored_size: pack the images resized (losslessly, without boxes) to this short side, or (height, width), for a protocol that
            starts with this resize; None packs the original bytes.
        stored_interpolation: interpolation of that resize.
        how_to_get: one-line instructions for the user if the raw files are missing.
        own_images: the user's own images are rotated upright by their EXIF orientation; others are decoded as stored.
        single_image_classes: the publisher's training part has classes with one image (as in In-shop).
    """

    how_to_get: ClassVar[str] = "put the raw files there by hand"
    own_images: ClassVar[bool] = False
    single_image_classes: ClassVar[bool] = False

    stored_size: Resize | None = None
    stored_interpolation: Interpolation = "bilinear"

    @property
    def shares_classes(self) -> bool:
        """True if train and test share classes, because the dataset is split by image; else test classes are unseen in training."""
        return False

    def rows(self, raw: Path) -> list[Row]:
        """Read the publisher's annotation files under `raw`.

        Raises:
            DataError: a file is missing, damaged, or names something that does not exist.
        """
        raise TypeError(f"{type(self).__name__} does not implement rows")

    def reader(self, raw: Path) -> Callable[[Row], bytes]:
        """Return a function that reads the encoded bytes of a row; by default the row's path is a file in `raw`."""
        return lambda row: read_file(raw / row.path)

    def published_for(self, raw: Path) -> Mapping[str, Counts]:
        """Return the published counts per role that hold for the raw folder; empty if there are none."""
        return {}

    def notes(self, raw: Path) -> Mapping[str, list[str]]:
        """Return what a check of the raw folder reports besides its own findings: a description, and the images or files that it is of."""
        return {}

    def materialise(self, raw: Path) -> None:
        """Ensure that the raw files are in `raw`, without overwriting anything.

        Raises:
            DataError: the files are missing and the user must provide them.
        """
        if not raw.is_dir() or not any(raw.iterdir()):
            raise DataError(f"{raw}: no raw files; {self.how_to_get}")

    def fetch(self, raw: Path, progress: Progress | None = None) -> None:
        """Provide the raw files in `raw`; `progress` is called with (bytes done, total bytes) during a download."""
        self.materialise(raw)

    def read(self, raw: Path) -> Manifest:
        """Return the checked manifest of the raw folder.

        Raises:
            DataError: as for `rows`, or the rows break a rule of every dataset or the published counts.
        """
        if not raw.is_dir():
            raise DataError(f"{raw}: no such folder; {self.how_to_get}")
        check_files(raw)
        rows = self.rows(raw)
        check_rows(rows, raw, self.single_image_classes, self.shares_classes)
        manifest = Manifest(rows, self.reader(raw))
        if self.stored_size is None:
            return manifest
        from dml_core.data.store.resized import resized  # imports torchvision, not needed to parse a configuration

        return resized(manifest, self.stored_size, self.stored_interpolation, self.own_images)


class OfficialDataset(DatasetConfig):
    """A published dataset; images and classes per role are checked against the published counts, archives against checksums.

    Attributes:
        landmarks: publisher's files or folders, any of which identifies the dataset's folder (they are relative to it) in or below the
            raw folder.
        published_counts: False for a tree in the official layout that is not the official archive (a generated one).
    """

    published: ClassVar[Mapping[str, Counts]] = {}
    archives: ClassVar[tuple[Archive, ...]] = ()
    landmarks: ClassVar[tuple[str, ...]] = ()
    published_counts: bool = True

    def folder(self, raw: Path) -> Path:
        """Return the folder that holds the dataset, `raw` or one below it.

        Raises:
            DataError: no such folder; the message lists what `raw` holds and what to fetch.
        """
        found = find_folder(raw, self.landmarks)
        if found is None:
            raise DataError(f"{raw}: has {names_there(raw)}, and neither {' nor '.join(self.landmarks)}; {self.how_to_get}")
        return found

    def published_for(self, raw: Path) -> Mapping[str, Counts]:
        """Return the published counts, unless the dataset is a part."""
        return self.published if self.published_counts else {}

    def materialise(self, raw: Path) -> None:
        """Unpack the archives in `raw` unless already unpacked, after verifying their published checksums."""
        folders = dict.fromkeys((raw, find_folder(raw, self.landmarks) or raw))
        for archive in self.archives:
            for folder in folders:
                self._unpack(archive, folder)
        super().materialise(raw)

    def fetch(self, raw: Path, progress: Progress | None = None) -> None:
        """Download missing files that have a working link, then `materialise`."""
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
        """Like `DatasetConfig.read`, with the published counts checked."""
        manifest = super().read(raw)
        if differing := published_differences(manifest.rows, self.published_for(raw)):
            raise DataError(f"{raw}: {differing[0]}; unpack the official archive again, or set published_counts: false")
        return manifest
