"""The search space of a row: the ranges declared by its loss, by its table, and by the row itself.

A path is one in `TrainingConfig`, for example `optimiser.groups.loss.learning_rate`. The paths of settings that decide which classes train,
which are held out and which weights are kept are refused.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dml_core.config import flatten, located
from dml_core.errors import ConfigError
from dml_core.losses.registry import PML_PREFIX, parse_loss_options
from dml_core.overrides import nested, parse_overridden
from dml_core.search_space import Search, declared_searches
from dml_core.training.config import TrainingConfig
from tasks.runs.params.without_effect import OPTIONS, why_idle

if TYPE_CHECKING:
    from dml_core.losses.contract import LossConfig

SEARCHED = ("loss.options.", "model.", "optimiser.", "sampler.", "schedule.", "transform.")
NAMES = ("model.backbone.name", "model.backbone.weights", "model.backbone.weights_sha256")
Space = dict[str, Search]
Params = dict[str, Any]


def row_space(training: TrainingConfig, of_table: Mapping[str, Search], of_row: Mapping[str, Search]) -> Space:
    """Return the search space of a row, sorted: dotted path -> range, each wide enough to include the row's own value.

    Args:
        of_table: ranges of the table's file; those of options that the row's loss does not have, and of settings without effect in the
            row, are skipped.
        of_row: ranges of the row; they replace those of the table and of the loss.

    Raises:
        ConfigError: a path must not be searched, has no value in the row or has no effect in it, or a run with the end of a range of the
            table or row is invalid. Ends that a loss declares may be invalid with the row's other options: such settings are not proposed.
    """
    if training.num_epochs == 0:
        raise ConfigError("it is not trained (num_epochs: 0), so there is nothing to search")
    options = loss_options(training)
    space: Space = {}
    for path, search in {**of_table, **of_row}.items():
        why = why_idle(training, (path,))
        is_foreign = path.startswith(OPTIONS) and path.removeprefix(OPTIONS) not in options
        if path not in of_row and (why is not None or is_foreign):
            continue
        with located(f"search: {path}"):
            _check_path(path)
            own = own_value(training, path)
            if why is not None:
                raise ConfigError(f"has no effect: {why}; leave it out of the search")
            space[path] = _holding(search, own)
            for value in _ends(space[path]):
                lay_over(training, {path: value})
    declared = {f"{OPTIONS}{name}": search for name, search in declared_searches(_loss_config(training)).items()}
    declared = {path: search for path, search in declared.items() if why_idle(training, (path,)) is None}
    space = dict(sorted((declared | space).items()))
    if not space:
        raise ConfigError(
            f"no setting to search: loss '{training.loss.name}' declares no range, and neither the table nor the row defines one"
        )
    return space


def own_value(training: TrainingConfig, path: str) -> Any:
    """Return the row's own value at a path; a setting missing in an optimiser group is that of the optimiser.

    Raises:
        ConfigError: the row has no value there.
    """
    value = _values(training).get(_source(training, path))
    if value is None:
        raise ConfigError("the row has no value at which the search can start; set one, or remove it from the search")
    return value


def changed_settings(training: TrainingConfig, params: Params) -> Params:
    """Return those of a trial's settings that the row would not have without them.

    A setting that an optimiser group inherits is compared with the optimiser's in the trial, which the group would follow.
    """
    changed = {}
    for path, value in params.items():
        source, without = _source(training, path), own_value(training, path)
        if source != path:
            without = params.get(source, without)
        if value != without:
            changed[path] = value
    return changed


def _source(training: TrainingConfig, path: str) -> str:
    """Return the path whose value the row uses at a path: the optimiser's, if a group has no value."""
    is_inherited = path.startswith("optimiser.groups.") and _values(training).get(path) is None
    return f"optimiser.{path.rpartition('.')[2]}" if is_inherited else path


def _values(training: TrainingConfig) -> dict[str, Any]:
    options = {f"{OPTIONS}{name}": value for name, value in loss_options(training).items()}
    return flatten(training.model_dump(mode="json", exclude={"loss"})) | options


def loss_options(training: TrainingConfig) -> dict[str, Any]:
    """Return the options of a row's loss by dotted name; for a loss of pytorch-metric-learning only those that are given."""
    is_foreign = training.loss.name.startswith(PML_PREFIX)
    return flatten(training.loss.options if is_foreign else _loss_config(training).model_dump(mode="json"))


def published_options(training: TrainingConfig, space: Space) -> Params:
    """Return the loss's published values (its defaults) of the searched options that have one within the range."""
    fields = type(_loss_config(training)).model_fields.items()
    defaults = {path: field.default for name, field in fields if (path := f"{OPTIONS}{name}") in space}
    return {path: value for path, value in defaults.items() if isinstance(value, int | float) and _is_in(space[path], value)}


def _is_in(search: Search, value: float) -> bool:
    if search.choices is not None:
        return value in search.choices
    return search.holding(value) == search and not (search.integer and value % 1)


def _loss_config(training: TrainingConfig) -> "LossConfig":
    return parse_loss_options(training.loss.name, training.loss.options)


def lay_over(training: TrainingConfig, params: Mapping[str, Any]) -> TrainingConfig:
    """Return a row's settings with the searched ones replaced.

    Raises:
        ConfigError: they do not fit each other.
    """
    changed = parse_overridden(TrainingConfig, "a trial's settings", training.model_dump(mode="json"), nested(params))
    parse_loss_options(changed.loss.name, changed.loss.options, "a trial's loss")
    return changed


def _check_path(path: str) -> None:
    if path in NAMES or not (path.startswith(SEARCHED) or path == "num_epochs"):
        raise ConfigError(f"cannot be searched; only settings below {', '.join(SEARCHED)} and num_epochs can")


def _holding(search: Search, own: Any) -> Search:
    """Return the range, extended to the row's own value."""
    if search.choices is not None:
        return search if own in search.choices else search.model_copy(update={"choices": (own, *search.choices)})
    if isinstance(own, bool) or not isinstance(own, int | float):
        raise ConfigError(f"the row's value {own!r} cannot be in a range; use choices")
    if search.log and own <= 0:
        raise ConfigError(f"the row's value {own:g} cannot be in a logarithmic range; remove log")
    if search.integer and not float(own).is_integer():
        raise ConfigError(f"the row's value {own:g} is not an integer; remove integer")
    return search.holding(own)


def _ends(search: Search) -> tuple[Any, ...]:
    if search.choices is not None:
        return search.choices
    assert search.low is not None
    assert search.high is not None
    return (int(search.low), int(search.high)) if search.integer else (search.low, search.high)
