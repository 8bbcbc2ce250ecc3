"""Memory that jemalloc keeps in a worker (`MALLOC_CONF`, tasks/environment.py)."""

import ctypes

_PURGE_ALL_ARENAS = b"arena.4096.purge"  # MALLCTL_ARENAS_ALL


def return_freed_memory() -> None:
    """Return freed memory to the operating system; does nothing in a process without jemalloc.

    jemalloc joins free pieces of memory only when it returns them. Memory that was never returned grew by 10 MB in each step of a training
    with 11,318 classes.
    """
    mallctl = getattr(ctypes.CDLL(None), "mallctl", None)
    if mallctl is not None:
        mallctl(_PURGE_ALL_ARENAS, None, None, None, ctypes.c_size_t(0))
