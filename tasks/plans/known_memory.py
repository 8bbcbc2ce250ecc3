"""The memory of trainings as earlier plans computed it: a plan of the same settings need not load torch, which takes seconds.

`state/training_memory.json` only saves time: it counts for the code and libraries that wrote it. If it is damaged or cannot be written,
memory is computed again.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import dml_core
from dml_core.errors import StoreError
from dml_core.files import json_sha256
from tasks.files import hash_of_states
from tasks.runs.surroundings import versions
from tasks.sealed import read_or_set_aside, write_sealed

MEMORY_FILE = "training_memory.json"


@dataclass(frozen=True)
class Memory:
    """Bytes that a training holds on one device, in addition to those of CUDA and its libraries.

    Attributes:
        num_images: number of images whose activations are held at a time.
        weights: network, loss and cross-batch memory, and their moving average if any.
        gradients: those of the trained parameters.
        optimiser: state of the optimiser.
        activations: those of the network; the loss's, N x C for a classifier, are not counted.
        trained: bytes of a finished training on disk: its checkpoint (weights and optimiser), and in MLflow a copy of it and the network.
        embedding_dim: dimensions of the network's output.
    """

    num_images: int
    weights: int
    gradients: int
    optimiser: int
    activations: int
    trained: int
    embedding_dim: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimiser + self.activations


@dataclass(frozen=True)
class _File:
    code: str
    trainings: dict[str, dict[str, int]]


class KnownMemory:
    """The memory of trainings by all that it depends on, of a project's state folder."""

    def __init__(self, state: Path) -> None:
        self._path = state / MEMORY_FILE
        self._code = _code()
        self._trainings: dict[str, dict[str, int]] = {}
        self._is_new = False
        try:
            file = read_or_set_aside(self._path, _File)
        except StoreError:  # of a newer version, which reads it again
            self._code = file = None
        if file is not None and file.code == self._code:
            self._trainings = file.trainings

    def of(self, settings: object, compute: Callable[[], Memory | None]) -> Memory | None:
        """Return the memory of a training with these settings, which JSON can write; a failure is not kept."""
        key = json_sha256(settings)
        if key not in self._trainings:
            if (memory := compute()) is None:
                return None
            self._trainings[key] = asdict(memory)
            self._is_new = True
        return Memory(**self._trainings[key])

    def save(self) -> None:
        """Write what was computed, if it can be written."""
        if self._is_new and self._code is not None:
            with suppress(StoreError):
                write_sealed(self._path, _File(self._code, self._trainings))


def _code() -> str | None:
    """Return a hash of the state of all files that compute memory and of the libraries' versions; None if a file cannot be read."""
    files = hash_of_states([Path(dml_core.__file__).parent, Path(__file__).parent])
    return None if files is None else json_sha256([files, versions()])
