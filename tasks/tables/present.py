"""Present state of a table's runs: content of the prepared datasets, and settings in its file or params.yaml."""

from dml_core.errors import ConfigError
from tasks.environment import Project
from tasks.runs.comparable import Today, present_digest, spec_settings
from tasks.runs.specs import Params, RunSpec, comparison_runs, row_name
from tasks.runs.tuned import STANDING
from tasks.tables.file import TableFile
from tasks.tables.result import MeasuredRun, TableResult
from tasks.tables.runs import named_dataset, present_run


def table_today(project: Project, params: Params, name: str, table: TableFile, result: TableResult) -> Today:
    """Return digests and settings of the measured datasets and lines, without those unprepared or no longer in the file."""
    digests, settings = {}, {}
    for dataset in dict.fromkeys(run.dataset for run in result.runs):
        digest = _digest(project, params, name, table, dataset)
        if digest is not None:
            digests[dataset] = digest
    for run in {(run.dataset, run.label): run for run in result.runs}.values():
        spec = _spec_today(params, name, table, run)
        if spec is not None:
            settings[run.dataset, run.label] = spec_settings(spec, digests.get(run.dataset, run.digest))
    return Today(digests, settings, is_one_protocol=name == STANDING)


def _digest(project: Project, params: Params, name: str, table: TableFile, dataset: str) -> str | None:
    try:
        own = dataset if name == STANDING else named_dataset(params, dataset, table.dataset_options(dataset))
    except ConfigError:
        return None
    return None if own is None else present_digest(project, own)


def _spec_today(params: Params, name: str, table: TableFile, run: MeasuredRun) -> RunSpec | None:
    if name != STANDING:
        return present_run(name, table, run)
    variants = [variant for variant in params.comparison.variants if row_name(variant) == run.row]
    try:
        return comparison_runs(params, run.dataset, variants, (0,))[0] if variants else None
    except ConfigError:
        return None  # the dataset is no longer in the comparison, or the variant is not tuned
