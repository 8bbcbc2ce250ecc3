"""Prepared datasets, finished steps and measured rates on this machine. Imports neither torch nor servers."""

from functools import cache
from typing import Any

from dml_core.data.readers.shared.contract import OfficialDataset
from dml_core.data.registry import DATASETS, dataset_class
from dml_core.errors import DataError
from tasks.checks import prepared_folder
from tasks.data import read_dataset
from tasks.environment import Project, finished_records
from tasks.plans.cost import placement_here
from tasks.runs.rates import read_rates
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import Params
from tasks.storage import open_store
from tasks.tables.file import TableFile
from tasks.tables.runs import named_dataset

NOT_PREPARED = "not prepared: "


class LocalState:
    """Prepared datasets, finished steps and measured rates of a project on this machine.

    Args:
        project: its data and state are read; its environment is set.
        params: the project's parameters.
    """

    def __init__(self, project: Project, params: Params) -> None:
        self.project = project
        self.params = params
        self.rates = read_rates(project.state)
        self.placement = placement_here(params.scale)
        self._records = finished_records()
        self._store = open_store(project)
        self._found = cache(self._dataset)

    def dataset(self, dataset: str, table: TableFile) -> DatasetRecord:
        """Return a table's dataset; if it is not prepared, with its published counts, if any, and a digest that no run has."""
        return self._found(dataset, tuple(sorted(table.dataset_options(dataset).items())))

    def _dataset(self, dataset: str, options: tuple[tuple[str, Any], ...]) -> DatasetRecord:
        own = named_dataset(self.params, dataset, dict(options))
        try:
            if own is not None and prepared_folder(self.project, self.params, own) is not None:
                return read_dataset(self.project, own)
        except DataError:
            pass  # its raw files are missing: `dataset_need` reports it
        return DatasetRecord(name=own or dataset, folder="", digest=f"{NOT_PREPARED}{dataset}", counts=_published(dataset), source=dataset)

    def is_prepared(self, dataset: str, table: TableFile) -> bool:
        """Return whether a table's dataset is ready for training."""
        return not self.dataset(dataset, table).digest.startswith(NOT_PREPARED)

    def is_finished(self, step: str, identity: str) -> bool:
        """Return whether a step's record and, in a local store, its folder exist; a flow checks their bytes when it reuses them."""
        return (self._records / identity).is_file() and (self._store.is_remote or self._store.folder(f"{step}/{identity}").is_dir())


def _published(dataset: str) -> dict[str, int]:
    """Return the published number of images of each role; empty for a dataset without published counts."""
    kind = dataset_class(dataset) if dataset in DATASETS else None
    if kind is None or not issubclass(kind, OfficialDataset):
        return {}
    return {role: counts.num_images for role, counts in kind.published.items()}
