"""Run independent parts of work on a Ray cluster: one part per free core or GPU, results in order.

Training uses worker groups (`tasks.workers.group`); this is for work without them: embedding images that belong to no run.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from dml_core.errors import DmlError, TrainingError, first_line
from tasks.workers.connection import connect, stop_ray

ShareT = TypeVar("ShareT")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
AHEAD = 2  # parts submitted per core or GPU: one runs while another waits there


def spread(work: Callable[[ShareT, ItemT], ResultT], shared: ShareT, items: Iterable[ItemT]) -> Iterator[ResultT]:
    """Yield `work(shared, item)` of every item, in order; a part whose process or node dies is repeated elsewhere.

    Args:
        work: importable on every node, with all it uses.
        shared: data for all parts, sent to a node once.
        items: small, and taken when there is room for them.

    Raises:
        DmlError: a part raised it.
        TrainingError: the cluster of `RAY_ADDRESS` cannot be reached, or a part failed otherwise.
    """
    import ray

    connect()
    try:
        resources = ray.cluster_resources()
        num_gpus = int(resources.get("GPU", 0))
        task = ray.remote(num_cpus=1, num_gpus=min(1, num_gpus), max_retries=3)(work)
        shared_once = ray.put(shared)
        room = AHEAD * max(1, num_gpus or int(resources.get("CPU", 1)))
        waiting: deque[Any] = deque()
        for item in items:
            waiting.append(task.remote(shared_once, item))
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
        raise TrainingError(f"a part failed on the cluster: {type(error.cause).__name__}: {first_line(error.cause)}") from error
    except ray.exceptions.RayError as error:
        raise TrainingError(f"the cluster lost a part and could not restart it: {first_line(error)}") from error
