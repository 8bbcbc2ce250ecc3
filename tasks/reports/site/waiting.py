"""Reasons why rows were not run: a dataset missing from the project, raw files, weights."""

from dml_core.errors import ConfigError, DataError
from tasks.checks import check_before
from tasks.environment import Project
from tasks.runs.specs import Params, RunSpec
from tasks.tables.file import TableFile
from tasks.tables.result import TableResult
from tasks.tables.runs import is_run, project_dataset, row_training, scoring_of
from tasks.tables.view import unmeasured


def waits(project: Project, params: Params, name: str, table: TableFile, result: TableResult) -> dict[tuple[str, str], str]:
    """Return (row, dataset) -> what is missing, as one line; rows that only have to be run are omitted."""
    found: dict[tuple[str, str], str] = {}
    for key, row in table.rows.items():
        for dataset in unmeasured(table, key, result) if is_run(row) else ():
            try:
                _check(project, params, name, table, key, dataset)
            except (ConfigError, DataError) as error:
                found[key, dataset] = str(error)
    return found


def _check(project: Project, params: Params, name: str, table: TableFile, key: str, dataset: str) -> None:
    own = project_dataset(params, dataset, table.dataset_options(dataset))
    row = table.rows[key]
    training = row_training(name, row, dataset)
    evaluation = scoring_of(name, table, dataset)
    check_before(
        project, params, [RunSpec(dataset=own, variant=row.variants[0], seed=0, training=training, evaluation=evaluation, table=name)]
    )
