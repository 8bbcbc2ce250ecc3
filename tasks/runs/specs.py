"""Specifications of runs: `params.yaml` as typed, frozen objects. Specifications flow down, records flow up."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from dml_core.config import Config, Name
from dml_core.epochs import Epoch
from dml_core.evaluation.config import EvaluationConfig
from dml_core.search_space import Search
from dml_core.training.config import TrainingConfig
from tasks.runs.params.set_options import result_settings
from tasks.runs.tuned import TUNED

BY_DEFAULT = "by_default"  # key of a variant: whether `dml reproduce` runs it if none is named
PRETRAINED_ONLY = "pretrained_only"  # key of a variant: whether it runs only on datasets whose backbone has pretrained weights
OWN_KEYS = (TUNED, BY_DEFAULT, PRETRAINED_ONLY)  # of datasets and variants, beside settings of training
FROZEN = "frozen"  # variant of the pretrained network without training: what fine-tuning has to beat
SEEDS = range(2**32)  # accepted by every random number generator
SMOKE = "smoke"  # the comparison of all smoke runs


def _check_path(text: str) -> str:
    if not text.strip() or not text.isprintable() or "${" in text:
        raise ValueError(f"{text[:200]!r} is not a folder's path; use printable characters without ${{, which DVC replaces")
    return text


def check_seed(seed: int) -> int:
    """Return a seed, or raise a ValueError if it is none."""
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
    seeds: tuple[Annotated[int, AfterValidator(check_seed)], ...] = Field(min_length=1)
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
