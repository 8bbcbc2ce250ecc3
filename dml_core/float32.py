"""Arithmetic in whole float32 on GPUs that would shorten it: by default torch's convolutions round their inputs to TF32's 10 bits there."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute convolutions and matrix products of float32 without TF32; what the process had set before comes back afterwards."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
