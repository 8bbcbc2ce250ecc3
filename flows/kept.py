"""What Prefect keeps of finished steps, and when it may be believed: only whole, of the very step, and with the files that it names.

A step's result is a record of names, sizes and hashes, kept as JSON with its own SHA-256. Any damage to it (cut, garbled, a hash changed,
a file left out of its list) makes it a record that is not there, and the step runs again. The seal is against damage, not against a person
who changes a file, the record and the seal together.
"""

import logging
from pathlib import Path
from typing import Any

from prefect.results import get_result_store
from prefect.serializers import JSONSerializer
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH
from pydantic import Field

from tasks.runs.records import StepRecord, seal, unseal
from tasks.storage import Store

logger = logging.getLogger(__name__)


class SealedJSON(JSONSerializer[Any]):
    """Prefect's JSON with its SHA-256 beside it."""

    type: str = Field(default="sealed-json", frozen=True)

    def dumps(self, obj: Any) -> bytes:
        """The object as JSON, sealed."""
        return seal(super().dumps(obj).decode()).encode()

    def loads(self, blob: bytes) -> Any:
        """The object back.

        Raises:
            ValueError: it is damaged.
        """
        return super().loads(unseal(blob).encode())


def is_finished(step: Any, identity: str, store: Store, title: str) -> bool:
    """Whether a step has a kept record of this identity, and every file as recorded; arguments as for `finished_record`."""
    return finished_record(step, identity, store, title) is not None


def finished_record(step: Any, identity: str, store: Store, title: str, warn: bool = True) -> StepRecord | None:
    """A step's kept record of this identity, if every file is as recorded; a line says so where that is no longer true.

    Args:
        step: the step's Prefect task; its result is kept under `identity`.
        identity: of the step.
        store: where its files are.
        title: what the line calls the run.
        warn: say that line.
    """
    kept: Any = get_result_store().update_for_task(step)
    kept.cache.clear()  # another process may have kept one since
    record = kept.read(identity).result if kept.exists(identity) else None
    if not (isinstance(record, StepRecord) and (record.step, record.identity) == (step.name, identity)):
        if warn and (Path(PREFECT_LOCAL_STORAGE_PATH.value()) / identity).exists():
            logger.warning("%s: the record of a finished %s is damaged; the step runs again", title, step.name)
        return None
    changed = store.changed_files(record)
    if changed and warn:
        logger.warning("%s: %s changed or gone in %s; %s runs again", title, ", ".join(changed), store.folder(record.key), step.name)
    return None if changed else record
