"""What runs of tables need that is not here, and what a person does about it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dml_core.data.registry import DATASETS, dataset_class
from dml_core.errors import ConfigError, DataError
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.published import PUBLISHED, how_to_get, hub_folder, is_kept
from tasks.checks import check_before, check_parts, prepared_folder
from tasks.environment import Project
from tasks.runs.specs import Params, RunSpec
from tasks.tables.choice import Choice
from tasks.tables.runs import Chosen, check_loss, named_dataset, not_in_params, params_block


@dataclass(frozen=True)
class Need:
    """Something that is not here.

    Attributes:
        what: in a word or two.
        do: what a person does about it, or what a run does by itself.
        stops: whether a run cannot begin without it; otherwise a run fetches it when it starts.
    """

    what: str
    do: str
    stops: bool


def dataset_need(project: Project, params: Params, dataset: str, options: Mapping[str, Any]) -> Need | None:
    """What is missing of a table's dataset; None where it is prepared, or its raw files are there to be prepared."""
    own = named_dataset(params, dataset, options)
    if own is None:
        how = dataset_class(dataset).how_to_get if dataset in DATASETS else "this project has no reader of it"
        return Need(f"dataset {dataset}", f"add below datasets in params.yaml: {params_block(dataset, options)}; {how}", stops=True)
    try:
        prepared_folder(project, params, own)
    except DataError as error:
        return Need(f"dataset {dataset}", str(error).partition("; ")[2] or str(error), stops=True)
    return None


def weights_need(backbone: BackboneConfig) -> Need | None:
    """What is missing or damaged of the weights that a network starts from. A timm model's are timm's own concern."""
    weights, what = backbone.weights, f"weights of {backbone.name}"
    if weights == "imagenet":
        return _published_need(backbone.name, what) if backbone.name in PUBLISHED else None
    if "://" in weights:
        path = hub_folder() / f"{backbone.weights_sha256}-{PurePosixPath(weights).name}"
        do = f"a run downloads them from {weights}; without a network put the file at {path}"
        return None if path.is_file() else Need(what, do, stops=False)
    if weights == "none" or Path(weights).is_file():
        return None
    return Need(what, f"put the file at {weights}", stops=True)


def _published_need(backbone: str, what: str) -> Need | None:
    try:
        if is_kept(PUBLISHED[backbone]):
            return None
    except ConfigError as error:
        return Need(what, str(error), stops=True)
    return Need(what, how_to_get(backbone), stops=not PUBLISHED[backbone].addresses)


def needs_of(project: Project, params: Params, datasets: Mapping[str, Mapping[str, Any]], runs: Iterable[RunSpec]) -> list[Need]:
    """What runs lack, each thing once: datasets as the tables' columns name them with their options, weights of the runs' networks."""
    found = [dataset_need(project, params, dataset, options) for dataset, options in datasets.items()]
    backbones = {spec.training.model.backbone.model_dump_json(): spec.training.model.backbone for spec in runs}
    found += [weights_need(backbone) for backbone in backbones.values()]
    return list(dict.fromkeys(need for need in found if need is not None))


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
    for runs in chosen.runs:
        if choice.prepared_only and not _is_prepared(project, params, runs[0].dataset):
            continue
        try:
            for spec in runs:
                check_loss(spec)
            check_parts(runs, None if choice.smoke else check_before(project, params, runs))
        except (ConfigError, DataError) as error:
            problems.append(error)
        checked += runs
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError("; also ".join(dict.fromkeys(map(str, problems))))
    if not checked:
        raise ConfigError("none of the datasets of these tables is prepared; dml plan says what they need")
    return checked


def _is_prepared(project: Project, params: Params, dataset: str) -> bool:
    try:
        return prepared_folder(project, params, dataset) is not None
    except DataError:
        return False
