"""Reading of the publishers' text files; damage is reported in a one-line error message."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from dml_core.errors import DataError


def read_file(path: Path) -> bytes:
    """Return the bytes of one image file.

    Raises:
        DataError: the annotated file is missing, unreadable or empty.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: listed, but there is no such file; restore it or correct the list") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions and disk") from None
    if not data:
        raise DataError(f"{path}: the file is empty; restore it")
    return data


def read_lines(path: Path) -> list[str]:
    """Return the non-empty lines of an annotation file, without line ends.

    Raises:
        DataError: the file is missing, unreadable or not UTF-8 text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows programs write a byte order mark
    except FileNotFoundError:
        raise DataError(f"{path}: missing annotation file; unpack the archive again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions and disk") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text; unpack the archive again") from None
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def read_numbers(texts: Sequence[str], path: Path) -> list[float]:
    """Convert columns of an annotation file to numbers.

    Raises:
        DataError: one of them is not a finite number.
    """
    try:
        numbers = [float(text) for text in texts]
        if not all(map(isfinite, numbers)):
            raise ValueError
        return numbers
    except ValueError:
        raise DataError(f"{path}: '{' '.join(texts)}' should be numbers; unpack the archive again") from None
