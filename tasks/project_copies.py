"""Copies of the project, in which verifications train (`tasks.watch.fresh_runs`): what workers and `dml gc` know about them.

On the machine of its flow a copy, `state/verify/<time>`, is locked, and removed at its end. On a cluster's nodes it has only the cache of a
bucket, below the same path.
"""

from functools import cache
from math import inf
from pathlib import Path

from tasks.locks import running_since
from tasks.storage import Store

FOLDER, LOCK = "verify", ".lock"  # in the state folder, and in each copy


@cache
def datasets_of(store: Store) -> Store:
    """Return the store that has a flow's datasets: itself or, if it is a copy's in a bucket, the project's."""
    copy = store.cache.absolute().parents[1]
    is_copy = copy.parent.name == FOLDER and store.address.startswith("s3://") and store.address.endswith(f"/{FOLDER}/{copy.name}")
    return Store(store.address.rsplit("/", 2)[0], copy.parents[1] / "cache") if is_copy else store


def ended_copies(state: Path) -> list[Path]:
    """Return the copies that verifications left on a node, unless a worker uses them."""
    copies = [path for path in sorted((state / FOLDER).glob("*")) if path.is_dir() and not (path / LOCK).exists()]
    return [copy for copy in copies if running_since(copy / "state/cache/.locks") == inf]
