"""What Prefect keeps of finished steps, and when it may be believed: only whole, of the very step, and with the files that it names.

A step's result is a record of names, sizes and hashes, kept as sealed JSON (`tasks.sealed`). A damaged record (cut, garbled, a hash
changed, a file left out of its list) is set aside, and the step runs again.
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
    """Prefect's JSON with its SHA-256 beside it."""

    type: str = Field(default="sealed-json", frozen=True)

    def dumps(self, obj: Any) -> bytes:
        """The object as JSON, sealed."""
        return seal(super().dumps(obj).decode()).encode()

    def loads(self, blob: bytes) -> Any:
        """The object back.

        Raises:
            ValueError: it is damaged.
            NewerFormatError: a newer version of the program wrote it.
        """
        return super().loads(unseal(blob).encode())


def forget_failure(flow: Any, flow_run: Any, state: State[Any]) -> None:
    """Remove the file in which Prefect keeps a failed flow's or step's exception, which nothing reads. A hook of flows and of tasks."""
    if isinstance(state.data, ResultRecord):
        key = str(state.data.metadata.storage_key)
        (Path(PREFECT_LOCAL_STORAGE_PATH.value()) / key).unlink(missing_ok=True)


def is_finished(step: Any, identity: str, store: Store, title: str) -> bool:
    """Whether a step has a kept record of this identity, and every file as recorded; arguments as for `finished_record`."""
    return finished_record(step, identity, store, title) is not None


def finished_record(step: Any, identity: str, store: Store, title: str, warn: bool = True) -> StepRecord | None:
    """A step's kept record of this identity if every file is as recorded, or None; one line says what is damaged.

    A damaged record is renamed; it is not overwritten by the record of the step that runs again. The folder of a finished step gets the
    present time.

    Args:
        step: the step's Prefect task; its result is kept under `identity`.
        identity: of the step.
        store: where its files are.
        title: what the line calls the run.
        warn: print that line.

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
        logger.warning("%s: %s changed or gone in %s; %s runs again", title, ", ".join(changed), store.folder(record.key), step.name)
    if changed:
        return None
    with suppress(OSError):  # of a remote store there may be nothing here
        os.utime(store.folder(record.key))  # `dml gc` keeps what was used lately
    return record
