"""Specifications of runs: `params.yaml` as typed, frozen objects. Specifications flow down, records flow up.

The standing comparison is the product of datasets, variants and seeds. A run's training configuration is the comparison's protocol,
overridden by the dataset's part and then the variant's (`dml_core.overrides`); every value is written once.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from dml_core.config import Config, Name, check_known, flatten, located, read_value, read_yaml, refuse_repeats, tuples_for_lists
from dml_core.data.registry import parse_dataset
from dml_core.epochs import Epoch
from dml_core.errors import ConfigError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.losses.registry import check_loss_name
from dml_core.models.backbones.registry import backbone_module
from dml_core.overrides import PART, nested, override, parse_overridden
from dml_core.search_space import Search
from dml_core.training.config import TrainingConfig
from tasks.environment import state_folder
from tasks.runs.tuned import STANDING, TUNED, read_tuned, tune_command, tuned_path
from tasks.runs.without_effect import idle_notes, unreached_notes, why_idle

BY_DEFAULT = "by_default"  # key of a variant: whether `dml reproduce` runs it if none is named
PRETRAINED_ONLY = "pretrained_only"  # key of a variant: whether it runs only on datasets whose backbone has pretrained weights
OWN_KEYS = (TUNED, BY_DEFAULT, PRETRAINED_ONLY)  # of datasets and variants, beside settings of training
FROZEN = "frozen"  # variant of the pretrained network without training: what fine-tuning has to beat
SEEDS = range(2**32)  # accepted by every random number generator
WITHOUT_RESULTS = ("scale.", "promotion.", "comparison.default_datasets.")  # settings that change no result
SMOKE = "smoke"  # the comparison of all smoke runs


def _check_path(text: str) -> str:
    if not text.strip() or not text.isprintable() or "${" in text:
        raise ValueError(f"{text[:200]!r} is not a folder's path; use printable characters without ${{, which DVC replaces")
    return text


def _check_seed(seed: int) -> int:
    if seed not in SEEDS:
        raise ValueError(f"{seed} is not a seed; use 0 to {SEEDS[-1]}")
    return seed


class DatasetSpec(Config):
    """One dataset of the project.

    Attributes:
        reader: dataset module that reads the raw files (`dml data list`).
        raw: folder of the raw files, relative to the project.
        mirror: `s3://bucket/prefix` with the raw files or the publisher's archives, used if they are not in `raw`.
        options: that module's options.
    """

    reader: str
    raw: Annotated[str, AfterValidator(_check_path)]
    mirror: str | None = Field(default=None, pattern=r"^s3://.+")
    options: dict[str, Any] = {}


MOST_CONCURRENT_RUNS = 64  # each needs four threads of the flow (`flows.chain.STEPS_AT_ONCE`)


class ScaleSpec(Config):
    """Resources that a run may use. They change its result in the last bits only, except `precision: auto` (bfloat16 on a GPU).

    Attributes:
        num_workers: most training processes of one run; two numbers are the fewest and the most of a run that may lose and gain workers.
        device: "cuda" fails without a GPU; "auto" uses GPUs if there are any, one per worker unless runs share them. The device used is
            recorded.
        concurrent_runs: number of runs that train at the same time, each with its own workers.
        runs_per_gpu: number of runs that share a GPU, each with one worker; small networks leave most of a large GPU idle. More than one
            needs `num_workers: 1`.
        num_loader_workers: image-loading processes of each training process; 0 loads in the training process. "auto" is 0 on CPUs, where
            loaders would take cores from training, and on GPUs one per further core available to a training process, at most 16.
        max_failures: how often a run is resumed from its checkpoint after its workers died, hung, or did not start. The count begins again
            when it has trained for `checkpoint_every_minutes` (10 if there is none) beyond the place where they ended.
        hang_minutes: time without a sign of work after which workers are replaced.
        checkpoint_every_steps: steps between checkpoints, in addition to those at the ends of epochs; None for none.
        checkpoint_every_minutes: age of the last checkpoint at which another is written; None for none.
        deterministic: use torch's deterministic algorithms, which are slower: two runs have equal bits on GPUs too, whose sums otherwise
            have no fixed order. A run with an operation that has none fails with its name.
        image_cache_gb: with a store in a bucket, workers read single images from it, and each machine caches up to this many gigabytes of
            them; None: each machine fetches whole datasets.
    """

    num_workers: int | tuple[int, int] = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    concurrent_runs: int = Field(default=1, ge=1, le=MOST_CONCURRENT_RUNS)
    runs_per_gpu: int = Field(default=1, ge=1, le=MOST_CONCURRENT_RUNS)
    num_loader_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    max_failures: int = Field(default=2, ge=0)
    hang_minutes: float = Field(default=2.0, gt=0)
    checkpoint_every_steps: int | None = Field(default=None, ge=1)
    checkpoint_every_minutes: float | None = Field(default=10.0, gt=0)
    deterministic: bool = False
    image_cache_gb: float | None = Field(default=None, gt=0)

    @property
    def fewest_workers(self) -> int:
        """Fewest training processes with which a run starts; 1 if no minimum is given."""
        return 1 if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def most_workers(self) -> int:
        """Most training processes that a run may have."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def is_elastic(self) -> bool:
        """True if a run may lose and gain workers."""
        return not isinstance(self.num_workers, int)

    @field_validator("num_workers", mode="before")
    @classmethod
    def _is_a_number_or_a_range(cls, given: Any) -> Any:
        ends = list(given) if isinstance(given, list | tuple) else [given, given]
        if len(ends) != 2 or not all(type(end) is int for end in ends) or not 1 <= ends[0] <= ends[1]:
            raise ValueError(f"expected an integer of at least 1, or a minimum and a maximum such as [1, 4]; found {given}")
        return given

    @model_validator(mode="after")
    def _one_worker_on_a_shared_gpu(self) -> "ScaleSpec":
        if self.runs_per_gpu > 1 and self.num_workers != 1:
            raise ValueError("runs_per_gpu above 1 needs num_workers 1: NCCL connects no two workers of a run on the same GPU")
        return self


class ComparisonSpec(Config):
    """The standing comparison.

    Attributes:
        datasets: dataset -> its changes to the protocol; `tuned: true` applies the settings that `dml tune project/standing/<variant>`
            found for each variant there; variants without a search have their own, with a note. Their order is the report's.
        default_datasets: datasets that `dml reproduce` runs if none is named.
        num_default_seeds: how many of the first seeds it runs if none is named; None for all.
        seeds: every variant runs once with each.
        reference: variant that reports compare the others with; by default the best by the scores.
        protocol: training settings that all runs share.
        variants: variant -> its changes to the protocol; `tuned: true` or `false` overrides the dataset's; a variant with
            `by_default: false` runs only if it is named, or with `--all`, and one with `pretrained_only: true` only on datasets whose
            backbone has pretrained weights.
        search: dotted name -> range that `dml tune` searches for every variant, in addition to the ranges of the loss's own options.
    """

    default_datasets: tuple[str, ...]
    num_default_seeds: int | None = Field(default=None, ge=1)
    seeds: tuple[Annotated[int, AfterValidator(_check_seed)], ...] = Field(min_length=1)
    reference: str | None = None
    protocol: dict[str, Any]
    datasets: dict[Name, dict[str, Any]]
    variants: dict[Name, dict[str, Any]]
    search: dict[str, Search] = {}

    @field_validator("seeds", "default_datasets")
    @classmethod
    def _each_once(cls, given: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(given)) != len(given):
            raise ValueError(f"a value is given twice: {', '.join(map(str, given))}; give each value once")
        return given


class PromotionSpec(Config):
    """Settings of `dml models promote`: points of Recall@1 by which a network must beat the champion, beyond its uncertainty."""

    min_gain: float = Field(default=0.5, ge=0)


class Params(Config):
    """Contents of `params.yaml`."""

    datasets: dict[Name, DatasetSpec]
    comparison: ComparisonSpec
    evaluation: EvaluationConfig = EvaluationConfig()
    scale: ScaleSpec = ScaleSpec()
    promotion: PromotionSpec = PromotionSpec()


class Trial(Config):
    """Place of a run in a search: the row of its table, the number of the trial, the pair of fold and seed."""

    row: str
    number: int
    pair: int

    @property
    def label(self) -> str:
        """Name of the run within the search."""
        return f"trial {self.number} pair {self.pair}"


class RunSpec(Config):
    """One run: a variant on a dataset with a seed.

    Attributes:
        dataset: its name in the project.
        variant: a variant of the standing comparison; in a table, the protocol's variant; in a search, the trial's label.
        overrides: the `--set` settings that can change results, as `result_settings` returns them.
        table: the table that the run belongs to, as `softtriple/table1`; None for the standing comparison's runs.
        row: its row in the table; column: the dataset's name in the table's columns. None in the standing comparison and in searches.
        is_smoke: the run is on drawn images, to test the pipeline. All smoke runs form one comparison, whichever table requested them: a
            run that two tables share is trained once, and none appears next to a published value.
        measurements: measurements of the finished run, in addition to the evaluator's scores: name -> options (`dml_core.measurements`).
        trial: place in a search, for runs of `dml tune`.
    """

    dataset: str
    variant: str
    seed: int
    training: TrainingConfig
    evaluation: EvaluationConfig
    overrides: tuple[str, ...] = ()
    table: str | None = None
    row: str | None = None
    column: str | None = None
    is_smoke: bool = False
    measurements: dict[str, dict[str, Any]] = {}
    trial: Trial | None = None

    @property
    def label(self) -> str:
        """Name that the run shares with the other seeds, unique among the runs of its comparison on one dataset."""
        if self.row is None:
            return self.variant
        label = run_label(self.row, self.variant, self.evaluation.epoch)
        return f"{self.table} {label}" if self.is_smoke else label

    @property
    def _group(self) -> str | None:
        return SMOKE if self.is_smoke else self.table

    @property
    def title(self) -> str:
        """Name of the run on screen."""
        if self.trial is not None:
            return f"{self.table}/{self.trial.row} on {self.dataset}: {self.label}"
        where = f"{self._group}: " if self._group is not None else ""
        return f"{where}{self.dataset} / {self.label} / seed {self.seed}"

    @property
    def subject(self) -> str:
        """Subject of its figures, worded alike in every run of the same identity: tables share a run and the bytes of its figures."""
        trained = self.training.loss.name if self.training.num_epochs else f"untrained, {self.training.loss.name}"
        epoch = "" if self.evaluation.epoch == "last" else f" / {self.evaluation.epoch.replace('_', ' ')} epoch"
        return f"{self.dataset} / {trained} / seed {self.seed}{epoch}"

    @property
    def short(self) -> str:
        """Name of the run's steps on Prefect's pages: its table and row, or its variant."""
        label = f"{self.label} s{self.seed}"
        return label if self._group is None else f"{self._group} on {self.dataset}: {label}"

    @property
    def comparison(self) -> str:
        """Title of the comparison that the run belongs to."""
        if self.trial is not None:
            return tuning_comparison(f"{self.table}/{self.trial.row}", self.dataset)
        if self._group is not None:
            return table_comparison(self._group, self.dataset)
        return comparison_title(self.dataset, self.evaluation.role, self.overrides)

    @property
    def tags(self) -> dict[str, str]:
        """MLflow tags to filter a search's runs by."""
        if self.trial is None:
            return {}
        return {"table": str(self.table), "row": self.trial.row, "trial": str(self.trial.number), "pair": str(self.trial.pair)}

    @property
    def where(self) -> str:
        """Place of the run's settings in error messages."""
        return f"{self._group or 'params.yaml: comparison'}: {self.dataset} / {self.label}"


def run_label(row: str, variant: str, epoch: Epoch = "last") -> str:
    """Return the label of a row's runs in a variant, with the epoch if it is not the last; none of its parts contains a space."""
    return f"{row} {variant}" if epoch == "last" else f"{row} {variant} {epoch}"


def table_comparison(table: str, dataset: str) -> str:
    """Return the title of a table's runs on one dataset in MLflow."""
    return f"{table} on {dataset}"


def tuning_comparison(row: str, dataset: str) -> str:
    """Return the title of a search's runs in MLflow; `row` includes its table."""
    return f"tuning of {row} on {dataset} (validation)"


def comparison_title(dataset: str, role: str, overrides: Sequence[str] = ()) -> str:
    """Return the title of a comparison in MLflow and in reports; the standing one has only the dataset's name.

    Runs scored on validation classes and runs with other settings are separate comparisons: they replace nothing in the standing one.
    """
    validation = [] if role == "test" else [f"{role} classes"]
    named = [setting.replace("'", '"') for setting in result_settings(overrides)]  # MLflow's filters have no escape
    return ", ".join([f"comparison on {dataset}", *validation, *named])


def load_params(path: Path, overrides: Sequence[str] = ()) -> Params:
    """Read and check `params.yaml`, including every dataset's options and every run of the comparison. Imports no torch.

    `tasks.checks.check_parts` checks what needs torch (a loss's own options, parts that do not fit).

    The overrides are `dotted.path=value`, each with a YAML value. Their order does not matter.

    Raises:
        ConfigError: the first error, in one line.
    """
    values = read_yaml(path)
    refuse_repeats("--set", map(_path_of, overrides))
    for setting in sorted(overrides, key=_rank):
        values = override(values, _set_value(values, setting))
    params = parse_overridden(Params, path.name, values)
    for name, dataset in params.datasets.items():
        with located(f"{path.name}: datasets.{name}"):
            parse_dataset(dataset.reader, dataset.options)
    with located(path.name):
        check_raw_places(path.parent, params.datasets)
    for kind, names in (("datasets", params.comparison.datasets), ("default_datasets", params.comparison.default_datasets)):
        with located(f"{path.name}: comparison.{kind}"):
            for name in names:
                check_known("dataset", name, params.datasets)
    reference, variants = params.comparison.reference, params.comparison.variants
    if reference is not None:
        with located(f"{path.name}: comparison.reference"):
            check_known("variant", reference, variants)
    by_row: dict[str, str] = {}
    for variant in variants:
        if (other := by_row.setdefault(row_name(variant), variant)) != variant:
            where = f"{path.name}: comparison.variants"
            raise ConfigError(f"{where}: '{other}' and '{variant}' have the same row '{row_name(variant)}'; rename one")
    for name in params.comparison.datasets:
        # `dml tune` reads this file too: only runs refuse a variant with `tuned: true` that is not tuned
        trainings = {variant: _training(params, name, variant, tuned=False) for variant in variants}
        with located(f"{path.name}: comparison: {name}"):
            check_same_classes({variant: trainings[variant] for variant in variants_on(params, name)}, params.evaluation.role)
    return params


def check_same_classes(trainings: Mapping[str, TrainingConfig], role: str) -> None:
    """Check that runs of one comparison are scored on the same images, and hold out the same classes if they hold out any.

    On held-out classes the best trained run is chosen, also if the test classes are scored.

    Args:
        trainings: label of the runs -> their training settings.
        role: role that they are scored on.

    Raises:
        ConfigError: two hold out different classes; or one of them none, and another role than "test" is scored.
    """
    labels = {
        training.validation: label
        for label, training in trainings.items()
        if role != "test" or (training.validation is not None and training.num_epochs)
    }
    if len(labels) > 1:
        first, second, *_ = labels.values()
        raise ConfigError(
            f"'{first}' and '{second}' hold out different classes (validation), so they would be compared on different images; "
            "set the same validation for both"
        )


def dropped_options(path: Path, overrides: Sequence[str]) -> list[str]:
    """Return a line for each setting that names another part and thereby drops options of the file's: `--set a.name=b drops a.width: 16`.

    `load_params` must have accepted the overrides.
    """
    values, lines = read_yaml(path), []
    for setting in sorted(overrides, key=_rank):
        before = flatten(values)
        values = override(values, _set_value(values, setting))
        after = flatten(values)
        others = [part for part in after if part.endswith(f".{PART}") and part in before and before[part] != after[part]]
        parts = tuple(part.removesuffix(PART) for part in others)  # each with the dot before its options
        gone = [f"{name}: {value}" for name, value in before.items() if name not in after and name.startswith(parts)]
        lines += [f"--set {setting} drops {', '.join(gone)}"] if gone else []
    return lines


def check_raw_places(root: Path, datasets: Mapping[str, DatasetSpec]) -> None:
    """Check that no raw folder shares a file with another one or with what the project or DVC owns: DVC allows one owner per file.

    Raises:
        ConfigError: they overlap, links followed; of two datasets it names the later. Or `dvc add` tracks the folder, or one around it.
    """
    inside, top = _real(root), root.absolute()
    written = {"packed data": root / "data/packed", "reports": root / "results", "the state of runs": state_folder(root)}
    own = {what: _real(place) for what, place in written.items()}
    others: dict[str, str] = {}
    for name, spec in datasets.items():
        raw = _real(root / spec.raw)
        with located(f"datasets.{name}: raw: {raw}"):
            if inside.startswith(raw):
                raise ConfigError("contains the project; put the images into a separate folder")
            folder = (root / spec.raw).absolute()
            around = [folder, *folder.parents]
            for owner in (Path(f"{place}.dvc") for place in around[: around.index(top) if top in around else 0]):
                if os.path.isfile(owner):  # noqa: PTH113 - `Path.is_file` raises for a name that is too long
                    raise ConfigError(f"tracked by {owner}, and DVC allows one owner: run dvc remove {owner}, or use a `mirror` elsewhere")
            for what, place in (others | own).items():
                if raw.startswith(place) or place.startswith(raw):
                    raise ConfigError(f"overlaps {what} ({place}); put the images into a separate folder")
        others[f"the raw files of '{name}'"] = raw


def _real(path: Path) -> str:
    """Return a folder's path with a final "/" and its links followed as far as possible (`Path.resolve` raises if they form a circle)."""
    return f"{os.path.realpath(path).rstrip('/')}/"


def check_seeds(seeds: Iterable[int]) -> None:
    """Raise a ConfigError if a seed that a command names is none."""
    for seed in seeds:
        try:
            _check_seed(seed)
        except ValueError as error:
            raise ConfigError(f"--seed: {error}") from None


def result_settings(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the `--set` settings that can change a result, sorted, each value spelt in one way: 0.001 for 1e-3, [1, 2] for [1,2]."""
    values = {_path_of(setting): _value_of(setting) for setting in overrides if not f"{_path_of(setting)}.".startswith(WITHOUT_RESULTS)}
    spelt = {path: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for path, value in values.items()}
    return tuple(sorted(f"{path}={value}" for path, value in spelt.items()))


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
    path = _path_of(setting)
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
    section, kind, name, *_ = [*_path_of(setting).split("."), "", ""]
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
        if is_asked and not _is_searched(dataset, variant):
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
    given, reasons = _nested(setting), dict[str, str | None]()
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
    layers = {"comparison.protocol": params.comparison.protocol, **_layers(params, dataset, variant, tuned=True)}
    settings, values, place = dict[str, Any](), dict[str, Any](), None
    for layer, changes in layers.items():
        settings = override(settings, changes)
        own = {key: value for key, value in _within(given, layer.split(".")).items() if key not in OWN_KEYS}
        values |= flatten(own)
        applied = flatten(settings)
        is_applied = any(name in applied and applied[name] == value for name, value in values.items())
        place = None if is_applied or not values else place or layer
    return values, place


def variants_on(params: Params, dataset: str) -> list[str]:
    """Return the variants that the comparison has on a dataset, in the order of `params.yaml`.

    Raises:
        ConfigError: the dataset is unknown, or a setting is wrong.
    """
    check_known("dataset of the comparison", dataset, params.comparison.datasets)

    def applies(variant: str) -> bool:
        if not params.comparison.variants[variant].get(PRETRAINED_ONLY, False):
            return True
        return _training(params, dataset, variant, tuned=False).model.backbone.weights != "none"

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
        training = _training(params, dataset, variant, tuned)
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


def _layers(params: Params, dataset: str, variant: str, tuned: bool) -> dict[str, dict[str, Any]]:
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
    if tuned and asks_tuned and (TUNED in of_variant or _is_searched(dataset, variant)):
        with located(where):
            try:
                place = f"comparison.variants.{variant}" if TUNED in of_variant else f"comparison.datasets.{dataset}"
                layers[f"{place}.tuned"] = read_tuned(STANDING, row_name(variant), dataset).training
            except ConfigError as error:
                raise ConfigError(f"{error}, or set tuned: false for this variant") from None
    return layers


def _is_searched(dataset: str, variant: str) -> bool:
    return tuned_path(STANDING, row_name(variant), dataset).is_file()


def _training(params: Params, dataset: str, variant: str, tuned: bool) -> TrainingConfig:
    where = f"params.yaml: comparison: {dataset} / {variant}"
    layers = _layers(params, dataset, variant, tuned).values()
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


def _path_of(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _rank(setting: str) -> list[tuple[bool, str]]:
    """Return the key that sorts settings so that mappings apply before keys in them, and names of parts before their options."""
    return [(key != PART, key) for key in _path_of(setting).split(".")]


def _set_value(values: dict[str, Any], setting: str) -> dict[str, Any]:
    """Return a `--set` as nested settings; an unknown name on its path is refused here, an unknown last key by the parser."""
    keys = _path_of(setting).split(".")
    if "=" not in setting or not all(keys):
        raise ConfigError(f"--set {setting}: write it as key=value, for example --set comparison.protocol.num_epochs=3")
    if keys[0] == "datasets":
        raise ConfigError(f"--set {setting}: DVC prepares datasets from params.yaml; change it there")
    for kind, at in (("dataset of the comparison", ["comparison", "datasets"]), ("variant", ["comparison", "variants"])):
        known = list(_within(values, at))
        if keys[:2] == at and len(keys) > 3:
            with located(f"--set {setting}"):
                check_known(kind, keys[2], known)
    return _nested(setting)


def _nested(setting: str) -> dict[str, Any]:
    """Return a `--set` that has a path and a value as nested settings."""
    return nested({_path_of(setting): tuples_for_lists(_value_of(setting))})


def _value_of(setting: str) -> Any:
    return read_value(setting.partition("=")[2], f"--set {_path_of(setting)}")


def _within(values: Any, keys: Sequence[str]) -> dict[str, Any]:
    """Return the mapping at a path of keys; empty if there is none, which the parser refuses."""
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}
