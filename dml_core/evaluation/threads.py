"""Blocks of work shared out to threads that do not wait for each other.

A kernel that spreads over several threads ends when the slowest of them does. If another process holds a core, that is one turn of the
scheduler later, and thousands of short kernels lose as many turns: k-means of 60 points, 2 ms of work, has taken 20 s. So small work stays
in one thread, and large work goes to threads that compute block after block by themselves: a delayed one only computes fewer.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

from threadpoolctl import ThreadpoolController

Item = TypeVar("Item")
Result = TypeVar("Result")
SMALLEST_WORK = 2**34  # multiplications from which several threads, or bfloat16, are worth it
BLOCKS_AHEAD = 2  # for each thread, submitted before the first of them is taken


class BlockThreads:
    """Threads that compute blocks, each with a single OpenMP thread; use it as a context.

    BLAS and MKL have one number of threads for the whole process, which stays as it is: blocks should multiply in bfloat16, which does not
    use them.

    Attributes:
        number: how many there are: as many as torch has in the creating thread, or 1 if not `is_worth_it`, which is the calling thread.
    """

    def __init__(self, is_worth_it: bool = True) -> None:
        import torch  # an index is searched without it

        self.number = torch.get_num_threads() if is_worth_it else 1
        self._pool = ThreadPoolExecutor(self.number, "blocks", _use_one_thread) if self.number > 1 else None

    def __enter__(self) -> "BlockThreads":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield `work(item)` in the order of the items, few of which are computed ahead."""
        if self._pool is None:
            yield from map(work, items)
            return
        pending: deque[Future[Result]] = deque()
        for item in items:
            if len(pending) == BLOCKS_AHEAD * self.number:
                yield pending.popleft().result()
            pending.append(self._pool.submit(work, item))
        for future in pending:
            yield future.result()


def is_large(num_multiplications: int) -> bool:
    """Return whether the work is worth several threads."""
    return num_multiplications >= SMALLEST_WORK


@contextmanager
def one_thread(is_wanted: bool = True) -> Iterator[None]:
    """Limit torch and FAISS (all OpenMP) to one thread, if wanted, and only in the calling thread.

    `torch.set_num_threads` would also affect threads started meanwhile. Where that was called, MKL keeps its number.
    """
    if not is_wanted:
        yield
        return
    _settle_torch()
    with _openmp("torch" in sys.modules).limit(limits=1):
        yield


def _use_one_thread() -> None:
    _settle_torch()
    _openmp("torch" in sys.modules).limit(limits=1)


def _settle_torch() -> None:
    """Let torch, if it is loaded, set this thread's number of threads, which its first call in a thread does."""
    if "torch" in sys.modules:
        sys.modules["torch"].get_num_threads()


@cache
def _openmp(with_torch: bool) -> ThreadpoolController:
    """Return the OpenMP libraries of the process, with or without torch's; looking for them takes 15 ms."""
    return ThreadpoolController().select(user_api="openmp")
