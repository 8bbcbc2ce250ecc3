"""Errors that a user can fix. The command line prints the message and exits with 2."""


class DmlError(Exception):
    """Base of every error that a user can fix. Its message is one line: the problem, the place, and what to do.

    Messages contain names and texts from outside, so non-printable characters are escaped and line ends become spaces.

    Attributes:
        unforeseen: True if the error is a fault of this program; the command then exits with 1.
    """

    unforeseen = False

    def __init__(self, text: str = "") -> None:
        super().__init__(printable(text))


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or the name of its class if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: str) -> str:
    """Return a text as one line without characters that a terminal would obey: they are escaped, and line ends become spaces.

    The joiners of letters (U+200C and U+200D, of Persian, Hindi or emoji) remain.
    """
    return "".join(map(_printable, text))


def _printable(letter: str) -> str:
    if letter.isprintable() or letter in "\u200c\u200d":
        return letter
    return " " if letter.isspace() else letter.encode("unicode_escape").decode()


class ConfigError(DmlError):
    """A setting that is unknown, of the wrong type, or does not fit another setting."""


class DataError(DmlError):
    """A dataset that is missing, damaged, or not what its publisher describes."""


class TrainingError(DmlError):
    """A training run that cannot start or continue (a non-finite loss, too few resources)."""


class EvaluationError(DmlError):
    """Embeddings or labels that cannot be scored."""


class StoreError(DmlError):
    """A store (folder or object store) that cannot be read or written."""


class SavedNetworkError(StoreError):
    """A network saved by this program that cannot be loaded again or gives other embeddings than before."""

    unforeseen = True


class TrackingError(DmlError):
    """A tracking server that cannot be used as requested."""
