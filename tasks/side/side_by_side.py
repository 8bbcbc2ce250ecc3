"""Independent small jobs, one process for each core. A small network gains nothing from a second thread; a second run gains all of it."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

import torch

Job = TypeVar("Job")
Found = TypeVar("Found")


def side_by_side(work: Callable[[Job], Found], jobs: Sequence[Job]) -> Iterator[tuple[Job, Found]]:
    """Each job with what `work` finds for it, as they end; `work` and the jobs are pickled, and torch has one thread in each process.

    Raises:
        Whatever `work` raises, at once; jobs that have not begun are then dropped.
    """
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = {pool.submit(work, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)
