"""Work that falls into independent parts, on whatever a Ray cluster has: one part a free core or GPU, results in order.

Training has its worker groups (`tasks.workers.group`); this is for what needs none: embedding images that no run has.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from dml_core.errors import DmlError, TrainingError
from tasks.workers.group import connect, stop_ray

ShareT = TypeVar("ShareT")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
AHEAD = 2  # parts that are given out for each core or GPU: one is worked on while another waits there


def spread(work: Callable[[ShareT, ItemT], ResultT], shared: ShareT, items: Iterable[ItemT]) -> Iterator[ResultT]:
    """`work(shared, item)` of every item, in their order; a part whose process or node dies is done again elsewhere.

    Args:
        work: importable on every node, as is all that it uses.
        shared: what all parts need, sent to a node once.
        items: small; they are drawn as there is room for them.

    Raises:
        DmlError: of a part, as it raised it.
        TrainingError: the cluster of `RAY_ADDRESS` cannot be reached, or a part came to its end by something else.
    """
    import ray

    if not ray.is_initialized():
        connect(os.environ.get("RAY_ADDRESS", "local"))
    try:
        have = ray.cluster_resources()
        num_gpus = int(have.get("GPU", 0))
        task = ray.remote(num_cpus=1, num_gpus=min(1, num_gpus), max_retries=3)(work)
        held = ray.put(shared)
        room = AHEAD * max(1, num_gpus or int(have.get("CPU", 1)))
        waiting: deque[Any] = deque()
        for item in items:
            waiting.append(task.remote(held, item))
            if len(waiting) >= room:
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())
    finally:
        stop_ray()


def _result(reference: Any) -> Any:
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DmlError):
            raise error.cause from None
        raise TrainingError(f"a part failed on the cluster: {type(error.cause).__name__}: {error.cause}") from error
    except ray.exceptions.RayError as error:
        raise TrainingError(f"the cluster lost a part for good: {str(error).splitlines()[0]}") from error
