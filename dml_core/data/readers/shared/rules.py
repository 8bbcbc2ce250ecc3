"""Checks of the rows of every dataset, and of the published ones."""

import math
import os
import unicodedata
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from dml_core.data.store.rows import Counts, Role, Row, role_counts
from dml_core.errors import DataError

_UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")  # Unicode's controls, halves of pairs and ends of lines; macOS puts U+202F into screenshots' names
_SCORED_ROLES: tuple[set[Role], ...] = (set(), {"test"}, {"query", "gallery"})  # besides "train"


def check_files(folder: Path) -> None:
    """Check that a raw folder is readable throughout, and that everything in it is a regular file or a folder. It may itself be a link.

    Raises:
        DataError: a pipe, a socket, a device, a dangling link, a link to a folder, an unreadable folder, or a name that is not UTF-8.
    """
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                check_utf8(entry.name, folder)  # DVC's message would not name the file
                if entry.is_file(follow_symlinks=False):
                    continue
                path = folder / entry.name
                if path.is_dir() and path.is_symlink():
                    raise DataError(f"{path}: a link to a folder, whose changes DVC does not notice; move the folder here, or mount it")
                if path.is_dir():
                    check_files(path)
                elif not path.is_file():
                    raise DataError(f"{path}: neither a file nor a folder (a dangling link, a pipe, a socket or a device); remove it")
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}); check its permissions and disk") from None


def check_utf8(name: str, folder: Path) -> None:
    """Check that the name of a file in `folder` is text.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"{folder}: the name of {name.encode(errors='backslashreplace').decode()} is not UTF-8; rename the file") from None


def check_rows(rows: list[Row], where: Path, single_image_classes: bool, shares_classes: bool = False) -> None:
    """Check the rules of every dataset: safe unique paths, finite boxes, roles that fit, one name per class, disjoint classes, positives.

    In a dataset that is split by image (`shares_classes`), training and test must have the same classes instead of disjoint ones.

    Raises:
        DataError: the first broken rule, and the image or class that breaks it.
    """
    if not rows:
        raise DataError(f"{where}: the dataset has no images")
    _check_paths(rows, where)
    _check_boxes(rows, where)
    _check_roles(rows, where)
    _check_names(rows, where)
    (_check_shared if shares_classes else _check_disjoint)(rows, where)
    _check_positives(rows, where, single_image_classes)


def published_differences(rows: list[Row], published: Mapping[str, Counts]) -> list[str]:
    """Return one sentence for each role whose number of images or classes differs from the published one."""
    counts = role_counts(rows)
    differences = []
    for role, expected in published.items():
        actual = counts.get(role, Counts(0, 0))
        if actual != expected:
            differences.append(
                f"{role} has {actual.num_images} images of {actual.num_classes} classes, "
                f"published are {expected.num_images} of {expected.num_classes}"
            )
    return differences


def _check_paths(rows: list[Row], where: Path) -> None:
    path, times = Counter(PurePosixPath(row.path) for row in rows).most_common(1)[0]  # './a.png' is 'a.png'
    if times > 1:
        raise DataError(f"{where}: image '{path}' is listed {times} times; remove the duplicates")
    for row in rows:
        pure = PurePosixPath(row.path)
        if pure.is_absolute() or ".." in pure.parts:
            raise DataError(f"{where}: image path '{row.path}' leads out of the folder; paths must be relative to it")
        if not row.path.isprintable() and any(unicodedata.category(letter) in _UNPRINTABLE for letter in row.path):
            raise DataError(f"{where}: image path {row.path!r} is not printable UTF-8; rename the file")


def _check_boxes(rows: list[Row], where: Path) -> None:
    for row in rows:
        if row.box is not None and not all(map(math.isfinite, row.box)):
            raise DataError(f"{where}: image '{row.path}' has a box with a side that is not a finite number; correct or empty it")


def _check_roles(rows: list[Row], where: Path) -> None:
    """Check that every image is trained on or scored: either test, or query and gallery, are scored."""
    roles = {row.role for row in rows} - {"train"}
    if roles not in _SCORED_ROLES:
        raise DataError(f"{where}: has images in {', '.join(sorted(roles))}; besides train, use either test, or query and gallery")


def _check_names(rows: list[Row], where: Path) -> None:
    names: dict[int, str] = {}
    numbers: dict[str, int] = {}
    for row in rows:
        if names.setdefault(row.label, row.label_name) != row.label_name:
            raise DataError(f"{where}: class {row.label} has two names, '{names[row.label]}' and '{row.label_name}'")
        if numbers.setdefault(row.label_name, row.label) != row.label:
            raise DataError(f"{where}: two classes have the name '{row.label_name}'; names must tell classes apart")


def _check_disjoint(rows: list[Row], where: Path) -> None:
    roles: dict[int, Role] = {}
    for row in rows:
        before = roles.setdefault(row.label, row.role)
        if (before == "train") != (row.role == "train"):
            scored = row.role if before == "train" else before
            raise DataError(
                f"{where}: class '{row.label_name}' is in train and in {scored}; classes must be disjoint, tested are unseen ones"
            )


def _check_shared(rows: list[Row], where: Path) -> None:
    """Check that no class is only in training or only in test, because their class numbers are compared with each other."""
    names = {row.label: row.label_name for row in rows}
    trained, tested = ({row.label for row in rows if (row.role == "train") == is_train} for is_train in (True, False))
    for label in sorted(trained ^ tested):
        lacking = "test" if label in trained else "train"
        raise DataError(f"{where}: class '{names[label]}' has no image in {lacking}; a split by image has every class in both: keep more")


def _check_positives(rows: list[Row], where: Path, single_image_classes: bool) -> None:
    names = {row.label: row.label_name for row in rows}
    sizes = Counter((row.role, row.label) for row in rows)
    for role, label in sizes:
        if role == "query" and ("gallery", label) not in sizes:
            raise DataError(f"{where}: class '{names[label]}' is in query but not in gallery; its images have nothing to find")
    paired = ("test",) if single_image_classes else ("test", "train")
    single = [(role, names[label]) for (role, label), size in sizes.items() if size == 1 and role in paired]
    if single:
        others = "" if len(single) == 1 else f", the first of {len(single)} such classes"
        raise DataError(f"{where}: class '{single[0][1]}' has one image in {single[0][0]}{others}; at least two are needed")
