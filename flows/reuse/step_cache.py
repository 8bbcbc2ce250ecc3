"""Prefect's copy of a step's result: the record of its files, as sealed JSON (`tasks.sealed`); of a failure nothing."""

from pathlib import Path
from typing import Any

from prefect._internal.result_records import ResultRecord
from prefect.client.schemas.objects import State
from prefect.serializers import JSONSerializer
from pydantic import Field

from tasks.sealed import seal, unseal


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
        Path(str(state.data.metadata.storage_key)).unlink(missing_ok=True)  # absolute where results are in files
