"""Choice of algorithms on GPUs: deterministic ones, for equal bits from run to run, or the convolutions measured as the fastest."""

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


@contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Let cuDNN measure its algorithms for each shape of a convolution and use the fastest; restore the process's setting at the end.

    The first batch of each shape takes longer. The algorithm may differ from run to run, and with it the last bits. No effect on CPUs.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
