"""Limit the threads of numerical libraries in a process that scores several runs at the same time."""

import torch
from threadpoolctl import threadpool_limits


def limit_threads(num_threads: int) -> None:
    """Limit torch, BLAS and OpenMP to `num_threads` from now on.

    BLAS has one limit for the whole process, which `threadpoolctl` lets only the first of its threads change; OpenMP has one per thread. So
    every scoring thread calls this function, with the same number. The limit is never lifted: the first of two concurrent scorings to end
    would lift it for the other.
    """
    torch.set_num_threads(num_threads)
    threadpool_limits(num_threads)
