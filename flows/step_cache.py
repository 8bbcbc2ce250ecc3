"""Validate Prefect's records of finished steps: a record counts only if it is intact, of this step, and its files are unchanged.

A step's result is a record of names, sizes and hashes, stored as sealed JSON (`tasks.sealed`). A damaged record (cut, garbled, a hash
changed, a file missing from its list) is set aside, and the step runs again.
"""

import logging
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from prefect._internal.result_records import ResultRecord
from prefect.client.schemas.objects import State
from prefect.serializers import JSONSerializer
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH
from pydantic import Field

from tasks.runs.finished import read_finished
from tasks.runs.records import StepRecord
from tasks.sealed import or_set_aside, seal, unseal
from tasks.storage import Store

logger = logging.getLogger(__name__)


class SealedJSON(JSONSerializer[Any]):
    """Prefect's JSON serializer with a SHA-256."""

    type: str = Field(default="sealed-json", frozen=True)

    def dumps(self, obj: Any) -> bytes:
        """Return the object as sealed JSON."""
        return seal(super().dumps(obj).decode()).encode()

    def loads(self, blob: bytes) -> Any:
        """Return the object from its sealed JSON.

        Raises:
            ValueError: it is damaged.
            NewerFormatError: a newer version of the program wrote it.
        """
        return super().loads(unseal(blob).encode())


def forget_failure(flow: Any, flow_run: Any, state: State[Any]) -> None:
    """Delete Prefect's file of a failed flow's or step's exception, which nothing reads. A hook of flows and of tasks."""
    if isinstance(state.data, ResultRecord):
        key = str(state.data.metadata.storage_key)
        (Path(PREFECT_LOCAL_STORAGE_PATH.value()) / key).unlink(missing_ok=True)


def finished_record(step: Any, identity: str, store: Store, title: str, warn: bool = True) -> StepRecord | None:
    """Return a step's stored record of this identity if every file is as recorded, or None, with a warning about damage.

    A damaged record is renamed, so that the rerun step does not overwrite it. The folder of a finished step gets the current time.

    Args:
        step: the step's Prefect task; its result is stored under `identity`.
        identity: identity of the step.
        store: store of its files.
        title: title of the run for the warning.
        warn: log the warning.

    Raises:
        NewerFormatError: a newer version of the program wrote the record.
    """
    records = Path(PREFECT_LOCAL_STORAGE_PATH.value())
    read = partial(read_finished, records, step.name, identity)
    record = or_set_aside(records / identity, read, f"; {step.name} of {title} runs again")
    if record is None:
        return None
    changed = store.changed_files(record)
    if changed and warn:
        logger.warning("%s: %s changed or missing in %s; %s runs again", title, ", ".join(changed), store.folder(record.key), step.name)
    if changed:
        return None
    with suppress(OSError):  # a remote store may have no folder here
        os.utime(store.folder(record.key))  # `dml gc` keeps what was used recently
    return record
