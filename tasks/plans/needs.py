"""Missing requirements of the runs of tables, and how to meet them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dml_core.data.registry import DATASETS, dataset_class, published_dataset
from dml_core.errors import ConfigError, DataError
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.published import PUBLISHED, how_to_get, hub_folder, is_kept
from dml_core.training.config import TrainingConfig
from tasks.checks import check_before, check_parts, class_names, is_prepared, is_prepared_or_damaged, prepared_folder
from tasks.environment import Project, shown
from tasks.runs.params.comparison import comparison_runs, row_name
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import Params, RunSpec
from tasks.runs.tuned import STANDING, TUNED, TunedFile, read_tuned
from tasks.tables.choice import Choice
from tasks.tables.file import load_table
from tasks.tables.runs import Chosen, check_metrics, named_dataset, not_in_params, params_block, row_training, searched_on


@dataclass(frozen=True)
class Need:
    """A missing requirement.

    Attributes:
        what: its name, in a word or two.
        do: what the user has to do, or what a run does automatically.
        stops: True if a run cannot start without it; otherwise a run downloads it when it starts.
    """

    what: str
    do: str
    stops: bool


def needs_of(project: Project, params: Params, datasets: Mapping[str, Mapping[str, Any]], runs: Iterable[RunSpec]) -> list[Need]:
    """Return the distinct needs of runs: datasets, named as in the tables' columns and with their options, and networks' weights."""
    backbones = dict.fromkeys(spec.training.model.backbone for spec in runs)
    needs = [dataset_need(project, params, dataset, options) for dataset, options in datasets.items()]
    needs += [weights_need(backbone) for backbone in backbones]
    return list(dict.fromkeys(need for need in needs if need is not None))


def dataset_need(project: Project, params: Params, dataset: str, options: Mapping[str, Any]) -> Need | None:
    """Return what a table's dataset lacks; None if it is prepared or can be prepared from its raw files."""
    what = f"dataset {dataset}"
    name = named_dataset(params, dataset, options)
    if name is None:
        how = dataset_class(dataset).how_to_get if dataset in DATASETS else "this project has no reader for it"
        by_command = f"dml data add {dataset} PATH (archive or folder), or " if published_dataset(dataset) and not options else ""
        return Need(what, f"{by_command}add below datasets in params.yaml: {params_block(dataset, options)}; {how}", stops=True)
    try:
        prepared_folder(project, params, name)
    except DataError as error:
        return Need(what, str(error).partition("; ")[2] or str(error), stops=True)
    return None


def weights_need(backbone: BackboneConfig) -> Need | None:
    """Return a need if the weights that a network starts from are missing or damaged. timm handles its own models' weights."""
    weights, what = backbone.weights, f"weights of {backbone.name}"
    if weights == "imagenet" and backbone.name in PUBLISHED:
        file = PUBLISHED[backbone.name]
        try:
            return None if is_kept(file) else Need(what, how_to_get(backbone.name), stops=file.address is None)
        except ConfigError as error:
            return Need(what, str(error), stops=True)
    if "://" in weights:
        address = shown(weights)
        path = hub_folder() / f"{backbone.weights_sha256}-{PurePosixPath(address).name[-100:]}"  # as `dml_core.models.backbones.weights`
        do = f"a run downloads them from {address}; without a network put the file at {path}"
        return None if path.is_file() else Need(what, do, stops=False)
    if weights in ("none", "imagenet") or Path(weights).is_file():
        return None
    return Need(what, f"put the file at {weights}", stops=True)


def check_tables(
    project: Project, params: Params, chosen: Chosen, choice: Choice, before_first: Callable[[], None] = lambda: None
) -> list[RunSpec]:
    """Check the chosen runs as far as possible before anything starts, and return them; `before_first` as in `check_parts`.

    Of `prepared_only` runs, those on a damaged dataset are returned unchecked if others are on sound ones: the flow reports them as failed.

    Raises:
        ConfigError: something is missing or does not fit, or nothing brings a metric; one line lists every problem.
        DataError: the only problem is that the raw files of one dataset are missing, or that it is damaged.
    """
    problems: list[ConfigError | DataError] = []
    damaged: dict[str, DataError] = {}
    if chosen.missing and not choice.prepared_only:
        problems.append(ConfigError(f"{not_in_params(chosen.missing)} (or run the pipeline on drawn images: --smoke)"))
    for name in dict.fromkeys(str(runs[0].table) for runs in chosen.runs):
        try:
            check_metrics(name, load_table(name))
        except ConfigError as error:
            problems.append(error)
    checked: list[RunSpec] = []
    for runs in chosen.runs:
        if choice.prepared_only and not is_prepared_or_damaged(project, params, runs[0].dataset):
            continue
        checked += runs
        packed = None
        try:
            if not choice.smoke:
                try:
                    packed = check_before(project, params, runs)
                except DataError as error:
                    if not choice.prepared_only:
                        raise
                    damaged[runs[0].dataset] = error
                    continue
                check_searched(project, params, runs)
            check_parts(runs, packed, before_first)
        except (ConfigError, DataError) as error:
            problems.append(error)
    if damaged.keys() >= {spec.dataset for spec in checked}:
        problems += damaged.values()
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError("; also ".join(dict.fromkeys(map(str, problems))))
    if not checked:
        raise ConfigError("none of the datasets of these tables is prepared; dml plan lists what is missing")
    return checked


def check_searched(project: Project, params: Params, runs: Sequence[RunSpec]) -> None:
    """Check that tuned settings of a table's runs on one dataset were not searched on its test classes (`tuned_on` in the table's file).

    Only datasets of one reader that are both prepared can be checked: another reader's classes may have the same names.

    Raises:
        ConfigError: a training class of the search's dataset is a test class of the runs'.
        DataError: a prepared dataset is damaged.
    """
    table = load_table(str(runs[0].table))
    tuned = next((run for run in runs if run.variant == TUNED and table.tuned_on(str(run.column)) != run.column), None)
    if tuned is None:
        return
    searched = table.tuned_on(str(tuned.column))
    own = named_dataset(params, searched, table.dataset_options(searched))
    names = [name for name in (own, tuned.dataset) if name is not None and is_prepared(project, params, name)]
    if len({params.datasets[name].reader for name in names}) != 1 or len(names) != 2:
        return
    seen, tested = ({*class_names(project.packed(name), comparison)} for name, comparison in zip(names, ("=", "!="), strict=True))
    if shared := sorted(seen & tested):
        raise ConfigError(
            f"{tuned.table}: the settings for {tuned.column} were searched on {searched}, whose training classes include test classes of "
            f"{tuned.column} ('{shared[0]}'{f' and {len(shared) - 1} more' if shared[1:] else ''}); correct tuned_on in the table's file"
        )


def search_notes(params: Params, runs: Sequence[RunSpec], prepared: Mapping[str, DatasetRecord]) -> list[str]:
    """Return a line for each row whose tuned settings in use were searched on another content of the dataset, or from other own settings.

    Searches on a dataset that is not `prepared` have none, and those whose file does not record it.
    """
    lines: dict[str, None] = {}
    known = [run for run in runs if run.dataset in prepared and not run.is_smoke]
    for run in {(run.table, run.column, run.dataset, run.label): run for run in known}.values():
        name, own, tuned = _search_of(params, run)
        if tuned is None or tuned.searched_on is None or name not in prepared or not tuned.training:
            continue
        if searched_on(own, prepared[name]) != tuned.searched_on:
            lines[
                f"{tuned.table}/{tuned.row}: its tuned settings were searched on other images of {name}, or from other settings of the "
                f"row: the search may have used today's test classes, and its gain is not today's; search again: {tuned.command}"
            ] = None
    return list(lines)


def _search_of(params: Params, run: RunSpec) -> tuple[str, TrainingConfig, TunedFile | None]:
    """Return the dataset of the search whose settings a run uses, the row's own settings there, and the search's file; None without."""
    if run.table is None:
        (own,) = comparison_runs(params, run.dataset, (run.variant,), (run.seed,), tuned=False)
        is_tuned = own.training != run.training
        return run.dataset, own.training, read_tuned(STANDING, row_name(run.variant), run.dataset) if is_tuned else None
    if run.variant != TUNED:
        return run.dataset, run.training, None
    table, row = load_table(run.table), str(run.row)
    column = table.tuned_on(str(run.column))
    name = named_dataset(params, column, table.dataset_options(column)) or column
    return name, row_training(run.table, table.rows[row], column), read_tuned(run.table, row, column)
