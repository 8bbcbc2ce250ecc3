"""Copies of the project, in which verifications train (`tasks.watch.fresh_runs`): what workers and `dml gc` know about them.

On the machine of its flow a copy, `state/verify/<time>`, is locked, and removed at its end. On a cluster's nodes it has only the cache of a
bucket, below the same path.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path

from tasks.locks import running_since
from tasks.storage import Store

FOLDER, LOCK = "verify", ".lock"  # in the state folder, and in each copy
DAY_SECONDS = 86_400


@cache
def datasets_of(store: Store) -> Store:
    """Return the store that has a flow's datasets: itself or, if it is a copy's in a bucket, the project's."""
    copy = store.cache.absolute().parents[1]
    is_copy = copy.parent.name == FOLDER and store.address.startswith("s3://") and store.address.endswith(f"/{FOLDER}/{copy.name}")
    return Store(store.address.rsplit("/", 2)[0], copy.parents[1] / "cache") if is_copy else store


def ended_copies(state: Path) -> Iterator[Path]:
    """Yield the copies that verifications left on a node, each tested when it is asked for.

    Copies that were used within the last day are left out: a running verification may have no job on this node for hours.
    """
    for copy in sorted(path for path in (state / FOLDER).glob("*") if path.is_dir()):
        locks = copy / "state/cache/.locks"  # to which each job adds a file that it removes
        with suppress(FileNotFoundError):  # another worker removes it
            used = max(copy.stat().st_mtime, locks.stat().st_mtime if locks.is_dir() else 0)
            if used < time.time() - DAY_SECONDS and not (copy / LOCK).exists() and running_since(locks) == inf:
                yield copy
