"""What is to be run: `params.yaml` as typed, frozen specifications. Specifications flow down, records flow up.

The standing comparison is a cross of datasets, variants and seeds. A run's training configuration is the comparison's protocol with the
dataset's part and then the variant's part laid over it; every value is written once.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dml_core.config import Config, located, merge, parse, read_yaml, unknown_name
from dml_core.data.registry import parse_dataset
from dml_core.errors import ConfigError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.losses.registry import parse_loss_options
from dml_core.training.config import TrainingConfig


class DatasetSpec(Config):
    """One dataset of the project.

    Attributes:
        reader: which dataset module reads the raw files (`dml data list`).
        raw: folder of the raw files, relative to the project.
        mirror: `s3://bucket/prefix` with the raw files or the publisher's archives, for when they are not in `raw`.
        options: that module's options.
    """

    reader: str
    raw: str
    mirror: str | None = Field(default=None, pattern=r"^s3://.+")
    options: dict[str, Any] = {}


class ScaleSpec(Config):
    """What a run may use. Nothing here changes its result.

    Attributes:
        num_workers: training processes of one run.
        device: "cuda" fails where there is none; "auto" takes GPUs where there is one for each worker. The device used is recorded.
        concurrent_runs: how many runs train at the same time, each with its own workers.
        num_loader_workers: image-loading processes of each training process; 0 loads in the training process.
        max_failures: how often a run is taken up again from its checkpoint after a worker died.
    """

    num_workers: int = Field(default=1, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    concurrent_runs: int = Field(default=1, ge=1)
    num_loader_workers: int = Field(default=0, ge=0)
    max_failures: int = Field(default=2, ge=0)


class ComparisonSpec(Config):
    """The standing comparison.

    Attributes:
        datasets: dataset -> its changes to the protocol. Their order is the report's.
        default_datasets: what `dml reproduce` runs when none is named.
        seeds: every variant runs once with each.
        protocol: the training settings that all runs share.
        variants: variant -> its changes to the protocol.
    """

    default_datasets: tuple[str, ...]
    seeds: tuple[int, ...] = Field(min_length=1)
    protocol: dict[str, Any]
    datasets: dict[str, dict[str, Any]]
    variants: dict[str, dict[str, Any]]


class Params(Config):
    """The whole of `params.yaml`."""

    datasets: dict[str, DatasetSpec]
    comparison: ComparisonSpec
    evaluation: EvaluationConfig = EvaluationConfig()
    scale: ScaleSpec = ScaleSpec()


class RunSpec(Config):
    """One run: a variant on a dataset with a seed."""

    dataset: str
    variant: str
    seed: int
    training: TrainingConfig
    evaluation: EvaluationConfig

    @property
    def title(self) -> str:
        """How the run is called on screen."""
        return f"{self.dataset} / {self.variant} / seed {self.seed}"


def load_params(path: Path) -> Params:
    """Read and check `params.yaml`, including every dataset's options and every run of the comparison.

    Raises:
        ConfigError: the first thing that is wrong, in one line.
    """
    params = parse(Params, read_yaml(path), path.name)
    for name, dataset in params.datasets.items():
        with located(f"{path.name}: datasets.{name}"):
            parse_dataset(dataset.reader, dataset.options)
    for kind, names in (("datasets", params.comparison.datasets), ("default_datasets", params.comparison.default_datasets)):
        for name in names:
            if name not in params.datasets:
                raise ConfigError(f"{path.name}: comparison.{kind}: {unknown_name('dataset', name, list(params.datasets))}")
    for name in params.comparison.datasets:
        comparison_runs(params, name)
    return params


def comparison_runs(
    params: Params, dataset: str, variants: tuple[str, ...] | None = None, seeds: tuple[int, ...] | None = None
) -> list[RunSpec]:
    """The comparison's runs on one dataset, in the order of `params.yaml`; `variants` and `seeds` narrow it.

    Raises:
        ConfigError: an unknown dataset or variant, or a setting that is wrong in one of the runs.
    """
    comparison = params.comparison
    if dataset not in comparison.datasets:
        raise unknown_name("dataset of the comparison", dataset, list(comparison.datasets))
    for variant in variants or ():
        if variant not in comparison.variants:
            raise unknown_name("variant", variant, list(comparison.variants))
    runs = []
    for variant, changes in comparison.variants.items():
        if variants and variant not in variants:
            continue
        where = f"params.yaml: comparison: {dataset} / {variant}"
        training = parse(TrainingConfig, merge(merge(comparison.protocol, comparison.datasets[dataset]), changes), where)
        with located(where):
            parse_loss_options(training.loss.name, training.loss.options)
            if params.evaluation.role == "validation" and training.validation is None:
                raise ConfigError("evaluation.role is 'validation', but no classes are held out; set validation: {share: 0.2}")
        runs += [
            RunSpec(dataset=dataset, variant=variant, seed=seed, training=training, evaluation=params.evaluation)
            for seed in seeds or comparison.seeds
        ]
    return runs
