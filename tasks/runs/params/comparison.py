"""Runs of the standing comparison: the product of datasets, variants and seeds.

A run's training configuration is the comparison's protocol, overridden by the dataset's part and then the variant's
(`dml_core.overrides`); every value is written once.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from dml_core.config import check_known, located, refuse_repeats
from dml_core.errors import ConfigError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.losses.registry import check_loss_name
from dml_core.models.backbones.registry import backbone_module
from dml_core.overrides import parse_overridden
from dml_core.training.config import TrainingConfig
from tasks.runs.params.set_options import result_settings
from tasks.runs.specs import OWN_KEYS, PRETRAINED_ONLY, Params, RunSpec, check_seed
from tasks.runs.tuned import STANDING, TUNED, read_tuned, tuned_path


def check_seeds(seeds: Iterable[int]) -> None:
    """Raise a ConfigError if a seed that a command names is none."""
    for seed in seeds:
        try:
            check_seed(seed)
        except ValueError as error:
            raise ConfigError(f"--seed: {error}") from None


def variants_on(params: Params, dataset: str) -> list[str]:
    """Return the variants that the comparison has on a dataset, in the order of `params.yaml`.

    Raises:
        ConfigError: the dataset is unknown, or a setting is wrong.
    """
    check_known("dataset of the comparison", dataset, params.comparison.datasets)

    def applies(variant: str) -> bool:
        if not params.comparison.variants[variant].get(PRETRAINED_ONLY, False):
            return True
        return training_of(params, dataset, variant, tuned=False).model.backbone.weights != "none"

    return [variant for variant in params.comparison.variants if applies(variant)]


def is_whole(params: Params, runs: Iterable[RunSpec]) -> bool:
    """Return whether these are all runs of the standing comparison on their dataset."""
    present = {(spec.dataset, spec.variant, spec.seed) for spec in runs}
    datasets = {dataset for dataset, _, _ in present}
    whole = {run for name in datasets for run in product([name], variants_on(params, name), params.comparison.seeds)}
    return bool(present) and present == whole


def comparison_runs(
    params: Params,
    dataset: str,
    variants: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    tuned: bool = True,
) -> list[RunSpec]:
    """Return the comparison's runs on one dataset, in the order of `params.yaml`, filtered by `variants` and `seeds`.

    Args:
        overrides: those applied to `params`, for the runs' comparison title.
        tuned: apply the settings that a search found to the variants that request them.

    Raises:
        ConfigError: the dataset or a variant is unknown, a variant or seed is given twice, a setting of a run is wrong, or a variant must
            be tuned and is not.
    """
    comparison = params.comparison
    refuse_repeats("--variant", variants or ())
    refuse_repeats("--seed", seeds or ())
    check_seeds(seeds or ())
    present = variants_on(params, dataset)
    for variant in variants or ():
        check_known("variant", variant, comparison.variants)
        if variant not in present:
            raise ConfigError(f"variant '{variant}' needs a backbone with pretrained weights; that of '{dataset}' starts from random ones")
    named = result_settings(overrides)
    runs = []
    for variant in present:
        if variants and variant not in variants:
            continue
        training = training_of(params, dataset, variant, tuned)
        with located(f"params.yaml: comparison: {dataset} / {variant}"):
            _check_scored(training, params.evaluation, dataset)
        runs += [
            RunSpec(dataset=dataset, variant=variant, seed=seed, training=training, evaluation=params.evaluation, overrides=named)
            for seed in seeds or comparison.seeds
        ]
    return runs


def runnable_runs(params: Params, dataset: str, seeds: Sequence[int] | None = None, overrides: Sequence[str] = ()) -> list[RunSpec]:
    """Return what `comparison_runs` does, without the runs of variants that cannot run, for example because they are not tuned yet."""
    runs = []
    for variant in params.comparison.variants:
        with suppress(ConfigError):
            runs += comparison_runs(params, dataset, (variant,), seeds, overrides)
    return runs


def row_name(variant: str) -> str:
    """Return a variant's row in the standing comparison's table: its name in the characters that rows allow."""
    return re.sub(r"[^a-z0-9.-]+", "-", variant.lower())


def layers_of(params: Params, dataset: str, variant: str, tuned: bool) -> dict[str, dict[str, Any]]:
    """Return place -> the settings there that override the protocol for a run, in the order in which they apply."""
    comparison, where = params.comparison, f"params.yaml: comparison: {dataset} / {variant}"
    of_dataset, of_variant = comparison.datasets[dataset], comparison.variants[variant]
    asks_tuned = of_variant.get(TUNED, of_dataset.get(TUNED, False))
    own_keys = {key: of_variant.get(key, False) for key in OWN_KEYS} | {TUNED: asks_tuned}
    for name, value in own_keys.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: {name}: expected true or false, found {value!r}")
    blocks = {f"comparison.datasets.{dataset}": of_dataset, f"comparison.variants.{variant}": of_variant}
    layers = {place: {key: value for key, value in block.items() if key not in own_keys} for place, block in blocks.items()}
    if tuned and asks_tuned and (TUNED in of_variant or is_searched(dataset, variant)):
        with located(where):
            try:
                place = f"comparison.variants.{variant}" if TUNED in of_variant else f"comparison.datasets.{dataset}"
                layers[f"{place}.tuned"] = read_tuned(STANDING, row_name(variant), dataset).training
            except ConfigError as error:
                raise ConfigError(f"{error}, or set tuned: false for this variant") from None
    return layers


def is_searched(dataset: str, variant: str) -> bool:
    """Return whether `dml tune` has searched settings for a variant on a dataset."""
    return tuned_path(STANDING, row_name(variant), dataset).is_file()


def training_of(params: Params, dataset: str, variant: str, tuned: bool) -> TrainingConfig:
    """Return the training settings of a variant on a dataset, with those of its search if `tuned`.

    Raises:
        ConfigError: a setting is wrong, or a variant must be tuned and is not.
    """
    where = f"params.yaml: comparison: {dataset} / {variant}"
    layers = layers_of(params, dataset, variant, tuned).values()
    training = parse_overridden(TrainingConfig, where, params.comparison.protocol, *layers)
    with located(where):
        check_loss_name(training.loss.name)
        backbone_module(training.model.backbone.name)
    return training


def _check_scored(training: TrainingConfig, evaluation: EvaluationConfig, dataset: str) -> None:
    """Check that a run of the comparison has the held-out classes and the epoch that are scored."""
    if evaluation.role == "validation" and training.validation is None:
        setting = f"comparison.datasets.{dataset}.validation={{share: 0.2}}"
        raise ConfigError(f"evaluation.role is 'validation', but no classes are held out; add --set '{setting}', or set it in params.yaml")
    epoch = evaluation.epoch
    if epoch == "oracle":
        raise ConfigError("evaluation.epoch: the comparison must not choose the epoch on the test classes; use another than oracle")
    if epoch == "best_validation" and evaluation.role == "validation":
        raise ConfigError("evaluation.epoch 'best_validation' is chosen on the classes that role 'validation' scores; set one to another")
    if epoch != "last" and epoch not in training.keep_epochs:
        raise ConfigError(f"evaluation.epoch is '{epoch}', which the run does not keep; set keep_epochs: [{epoch}]")
