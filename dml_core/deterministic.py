"""torch's deterministic algorithms: equal bits from run to run on GPUs too, more slowly, for operations that have one."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dml_core.errors import TrainingError

_MISSING = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Use deterministic algorithms only; restore the process's setting at the end.

    cuBLAS reads its variable at the process's first product on a GPU, so no product may come before.

    Raises:
        TrainingError: an operation has no deterministic algorithm; the message names it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        operation = _MISSING.search(str(error))
        if operation is None:
            raise
        raise TrainingError(f"torch has no deterministic algorithm for {operation[1]}; train it without scale.deterministic") from error
    finally:
        torch.use_deterministic_algorithms(before)
