"""Parameters of the flows in Prefect's forms: datasets, variants and tables are offered as choices from the project.

Prefect builds a flow's form from its annotations when the flow is deployed, from within the project. The choices become part of the form's
schema; a server refuses other values, and a flow started otherwise raises its own error, with the nearest name.
"""

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from dml_core.config import read_yaml
from dml_core.errors import DmlError
from tasks.environment import find_project
from tasks.tables.file import table_names


@cache
def _names(kind: str) -> tuple[str, ...]:
    """Return the tables, or the keys of `comparison.<kind>`; empty outside a project or if its file is unreadable."""
    if kind == "tables":
        return tuple(table_names())
    try:
        return tuple(read_yaml(find_project().params_file)["comparison"][kind])
    except (DmlError, KeyError, TypeError):
        return ()


@dataclass(frozen=True)
class _OneOf:
    """Restricts a string to the names of a kind."""

    kind: str

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        return {**schema, "enum": list(_names(self.kind))} if _names(self.kind) else schema


DatasetName = Annotated[str, _OneOf("datasets")]
VariantName = Annotated[str, _OneOf("variants")]
TableName = Annotated[str, _OneOf("tables")]
