"""Parameters of the flows as Prefect's forms show them: datasets, variants and tables are choices, those that the project has.

Prefect makes a flow's form from its annotations when the flow is deployed, from within the project. The choices are put into the form's
schema then; a server refuses what is not among them, and a flow started in another way says so itself, with the nearest name.
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
    """The tables, or the keys of `comparison.<kind>`; none outside a project, or where its file cannot be read (the flow will say why)."""
    if kind == "tables":
        return tuple(table_names())
    try:
        return tuple(read_yaml(find_project().params_file)["comparison"][kind])
    except (DmlError, KeyError, TypeError):
        return ()


@dataclass(frozen=True)
class _OneOf:
    """Marks a text that is one of the names of a kind."""

    kind: str

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        return {**schema, "enum": list(_names(self.kind))} if _names(self.kind) else schema


DatasetName = Annotated[str, _OneOf("datasets")]
VariantName = Annotated[str, _OneOf("variants")]
TableName = Annotated[str, _OneOf("tables")]
