"""What a person got wrong, said in one line: what, where, and what to do. The command line prints it and exits with 2."""


class DmlError(Exception):
    """Base of every error that a person can mend. Its text is one line: what is wrong, where, and what to do.

    Names and texts of others are in it, so every letter that is not printable is escaped, and line ends become spaces.

    Attributes:
        unforeseen: whether it tells of a fault of this program; the command then exits with 1.
    """

    unforeseen = False

    def __init__(self, text: str = "") -> None:
        super().__init__("".join(map(_printable, text)))


def _printable(letter: str) -> str:
    if letter.isprintable():
        return letter
    return " " if letter.isspace() else letter.encode("unicode_escape").decode()


class ConfigError(DmlError):
    """A setting that is unknown, of the wrong type, or does not fit another setting."""


class DataError(DmlError):
    """A dataset that is missing, damaged, or not what its publisher describes."""


class TrainingError(DmlError):
    """A training run that cannot start or cannot go on (a loss that is not finite, too few resources)."""


class EvaluationError(DmlError):
    """Embeddings or labels that cannot be scored."""


class StoreError(DmlError):
    """A store (folder or object store) that cannot be read or written."""


class SavedNetworkError(StoreError):
    """A network that this program has saved and that does not open again as it was."""

    unforeseen = True


class TrackingError(DmlError):
    """A tracking server that cannot be used for what was asked of it."""
