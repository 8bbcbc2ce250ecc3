"""What runs of tables need that is not here, and what a person does about it."""

from collections.abc import Mapping
from typing import Any

from dml_core.errors import ConfigError, DataError
from tasks.checks import check_before, check_parts, prepared_folder
from tasks.environment import Project
from tasks.runs.specs import Params, RunSpec
from tasks.tables.choice import Choice
from tasks.tables.runs import Chosen


def check_tables(project: Project, params: Params, chosen: Chosen, choice: Choice) -> list[RunSpec]:
    """The chosen runs, checked as far as they can be before anything is started.

    Raises:
        ConfigError: whatever is missing or does not fit, all of it in one line.
        DataError: where that is one dataset's raw files alone.
    """
    problems: list[ConfigError | DataError] = []
    if chosen.missing and not choice.prepared_only:
        problems.append(ConfigError(f"{not_in_params(chosen.missing)} (or see the chain run on drawn images: --smoke)"))
    checked: list[RunSpec] = []
    for runs in chosen.by_dataset():
        if choice.prepared_only and not _is_prepared(project, params, runs[0].dataset):
            continue
        try:
            check_parts(runs, None if choice.smoke else check_before(project, params, runs))
        except (ConfigError, DataError) as error:
            problems.append(error)
        checked += runs
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError("; also ".join(dict.fromkeys(map(str, problems))))
    if not checked:
        raise ConfigError("none of the datasets of these tables is prepared; see what they need: dml plan")
    return checked


def not_in_params(datasets: Mapping[str, Mapping[str, Any]]) -> str:
    """What is said of datasets that the project has not with these options, with the lines that bring them in."""
    blocks = ", ".join(_block(name, options) for name, options in datasets.items())
    quoted = [f"'{name}'{f' ({_listed(options)})' if options else ''}" for name, options in datasets.items()]
    if len(datasets) == 1:
        return f"dataset {quoted[0]} is not in params.yaml; add below datasets: {blocks}"
    return f"datasets {', '.join(quoted[:-1])} and {quoted[-1]} are not in params.yaml; add below datasets: {blocks}"


def _block(dataset: str, options: Mapping[str, Any]) -> str:
    """A dataset as `params.yaml` has it; one that is split in its own way is called by it."""
    name = f"{dataset}-by-image" if options.get("split") == "images" else dataset
    return f"{name}: {{reader: {dataset}, raw: data/raw/{name}{f', options: {{{_listed(options)}}}' if options else ''}}}"


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{option}: {value}" for option, value in options.items())


def _is_prepared(project: Project, params: Params, dataset: str) -> bool:
    try:
        return prepared_folder(project, params, dataset) is not None
    except DataError:
        return False
