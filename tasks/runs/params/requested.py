"""Runs of the standing comparison that a command requests, and the settings that have no effect on them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from dml_core.config import flatten, refuse_repeats
from dml_core.data.registry import parse_dataset
from dml_core.errors import ConfigError
from dml_core.overrides import override
from tasks.runs.params.comparison import comparison_runs, is_searched, layers_of, row_name, runnable_runs, variants_on
from tasks.runs.params.set_options import mapping_at, nested_setting, path_of
from tasks.runs.params.without_effect import idle_notes, unreached_notes, why_idle
from tasks.runs.specs import BY_DEFAULT, OWN_KEYS, Params, RunSpec
from tasks.runs.tuned import STANDING, TUNED, tune_command


def standing_runs(
    params: Params,
    datasets: Sequence[str] | None = None,
    variants: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    whole: bool = False,
) -> dict[str, list[RunSpec]]:
    """Return dataset -> the comparison's runs on it. What is not given has its default: of variants and seeds all, if `whole`.

    Raises:
        ConfigError: as `comparison_runs`, a dataset is given twice, or an override has no effect, or none on a dataset.
    """
    comparison = params.comparison
    refuse_repeats("--dataset", datasets or ())
    of_runs = seeds if whole else seeds or comparison.seeds[: comparison.num_default_seeds]

    def chosen(dataset: str) -> Sequence[str] | None:
        if whole or variants:
            return variants
        return [name for name in variants_on(params, dataset) if comparison.variants[name].get(BY_DEFAULT, True)]

    runs = {name: comparison_runs(params, name, chosen(name), of_runs, overrides) for name in datasets or comparison.default_datasets}
    every = [spec for specs in runs.values() for spec in specs]
    for setting in overrides:
        if (why := _why_unread(every, setting, datasets, seeds, whole)) is not None:
            raise ConfigError(f"--set {setting} has no effect: {why}")
    for name, specs in runs.items():
        for setting in overrides:
            reasons = _why_not_applied(params, name, specs, setting).values()
            if reasons and None not in reasons:
                ((reason, _),) = Counter(reasons).most_common(1)
                raise ConfigError(f"--set {setting} has no effect on {name}: {reason}; change that instead")
    return runs


def _why_unread(
    runs: Sequence[RunSpec], setting: str, datasets: Sequence[str] | None, seeds: Sequence[int] | None, whole: bool
) -> str | None:
    """Return why no run reads a `--set`, for settings that are not of training; None if one does."""
    reasons = {
        "promotion": "only `dml models promote` reads it, from params.yaml",
        "comparison.search": "only `dml tune` reads it, from params.yaml",
        "comparison.default_datasets": "the datasets are named" if datasets else None,
        "comparison.seeds": "--seed or --seeds chooses the seeds" if seeds else None,
        "comparison.num_default_seeds": "--seed, --seeds or --all chooses the seeds" if seeds or whole else None,
        **idle_evaluation(runs),
    }
    path = path_of(setting)
    return next((why for place, why in reasons.items() if f"{path}.".startswith(f"{place}.")), None)


def limited_overrides(params: Params, runs: Mapping[str, Sequence[RunSpec]], overrides: Sequence[str]) -> list[str]:
    """Return a line for each override that is itself overridden, or has no effect, for some of `standing_runs`; it names their variants.

    An override of a dataset or variant that is not requested has a line, too: it may be part of a comparison that is run in parts.
    """
    lines = [f"--set {setting} applies to none of the requested runs" for setting in overrides if _is_of_others(setting, runs)]
    for setting, (dataset, specs) in product(overrides, runs.items()):
        by_reason: dict[str, list[str]] = {}
        for variant, reason in _why_not_applied(params, dataset, specs, setting).items():
            if reason is not None:
                by_reason.setdefault(reason, []).append(variant)
        lines += [
            f"--set {setting} does not apply to {', '.join(variants)} on {dataset}: {reason}" for reason, variants in by_reason.items()
        ]
    return lines


def _is_of_others(setting: str, runs: Mapping[str, Sequence[RunSpec]]) -> bool:
    """Return whether a setting is in the block of a dataset or variant without a run."""
    requested = {"datasets": {*runs}, "variants": {spec.variant for specs in runs.values() for spec in specs}}
    section, kind, name, *_ = [*path_of(setting).split("."), "", ""]
    return section == "comparison" and kind in requested and bool(name) and name not in requested[kind]


def setting_notes(params: Params, runs: Sequence[RunSpec]) -> list[str]:
    """Return a line for each setting without effect on `standing_runs`, and for what their epochs do not reach. Builds parts of the runs.

    A setting of the protocol or of a dataset is named if it has no effect on any variant, requested or not.
    """
    comparison = params.comparison
    trained = {(run.dataset, run.variant): run for run in runs if run.training.num_epochs}

    def blocks_of(run: RunSpec) -> dict[str, dict[str, Any]]:
        shared = {"comparison.protocol": comparison.protocol, f"comparison.datasets.{run.dataset}": comparison.datasets[run.dataset]}
        own = {f"comparison.variants.{run.variant}": comparison.variants[run.variant]}
        return shared | own if (run.dataset, run.variant) in trained else shared

    datasets = dict.fromkeys(dataset for dataset, _ in trained)
    every = [run for dataset in datasets for run in runnable_runs(params, dataset, (0,)) if run.training.num_epochs]
    of_evaluation = [f"{path} has no effect: {why}" for path, why in idle_evaluation(runs).items()]
    idle = idle_notes((run.dataset, run.training, blocks_of(run)) for run in every)
    unreached = unreached_notes((run.dataset, run.label, run.training) for run in trained.values())
    return [*of_evaluation, *idle, *unreached]


def unsearched_notes(params: Params, runs: Iterable[RunSpec]) -> list[str]:
    """Return a line for each dataset with `tuned: true` that names its variants without a search, which have their own settings."""
    comparison = params.comparison
    own: dict[str, list[str]] = {}
    for dataset, variant in dict.fromkeys((run.dataset, run.variant) for run in runs if run.training.num_epochs):
        is_asked = comparison.datasets[dataset].get(TUNED, False) and TUNED not in comparison.variants[variant]
        if is_asked and not is_searched(dataset, variant):
            own.setdefault(dataset, []).append(variant)
    lines = []
    for dataset, variants in own.items():
        line = f"comparison.datasets.{dataset}.tuned: not searched there, so with their own settings: {', '.join(variants)}"
        spec = params.datasets[dataset]
        is_refused = parse_dataset(spec.reader, spec.options).shares_classes  # by `dml tune`
        lines.append(line if is_refused else f"{line}; to search: {tune_command(STANDING, row_name(variants[0]), dataset)}")
    return lines


def idle_evaluation(runs: Sequence[RunSpec]) -> dict[str, str]:
    """Return dotted path -> why the setting of the runs' evaluation has no effect on any of them, for those that are given."""
    idle = {}
    if all("kmeans" in run.evaluation.model_fields_set and not run.evaluation.clustering for run in runs):
        idle["evaluation.kmeans"] = "evaluation.clustering is false"
    if all(run.evaluation.metric == "euclidean" and run.training.model.head.normalise_at_test for run in runs):
        idle["evaluation.metric"] = "the test embeddings are unit vectors (model.head.normalise_at_test), which both metrics rank alike"
    return idle if runs else {}


def _why_not_applied(params: Params, dataset: str, runs: Iterable[RunSpec], setting: str) -> dict[str, str | None]:
    """Return variant of the runs -> why a setting has no effect there, or None; empty if it is no setting of their training.

    If there are trained variants, untrained ones are left out unless the setting is of the network or of its images: they read no other.
    """
    given, reasons = nested_setting(setting), dict[str, str | None]()
    trainings = {run.variant: run.training for run in runs} if "comparison" in given else {}
    for variant, training in trainings.items():
        values, place = _overriding(params, dataset, variant, given)
        is_trained = training.num_epochs > 0
        is_read = is_trained or not any(other.num_epochs for other in trainings.values())
        if values and (is_read or any(name.startswith(("model.", "transform.")) for name in values)):
            set_here = [name for name, value in values.items() if value is not None]
            idle = why_idle(training, set_here) if is_trained and set_here else None
            reasons[variant] = idle if place is None else f"{place} overrides it"
    return reasons


def _overriding(params: Params, dataset: str, variant: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return a `--set`'s values for a run's training, and the place of the settings that override them all; None if one applies."""
    layers = {"comparison.protocol": params.comparison.protocol, **layers_of(params, dataset, variant, tuned=True)}
    settings, values, place = dict[str, Any](), dict[str, Any](), None
    for layer, changes in layers.items():
        settings = override(settings, changes)
        own = {key: value for key, value in mapping_at(given, layer.split(".")).items() if key not in OWN_KEYS}
        values |= flatten(own)
        applied = flatten(settings)
        is_applied = any(name in applied and applied[name] == value for name, value in values.items())
        place = None if is_applied or not values else place or layer
    return values, place
