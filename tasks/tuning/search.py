"""What a search is: a row of a table on a dataset, its space, its folds; which run a trial without a fold is; what is kept of the winner.

Nothing of it reads test classes. Its runs get the training rows packed alone (`training_rows`), are scored on held-out training classes,
and keep no weights but the last epoch's; no option and no file changes that.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dml_core.config import located, unknown_name
from dml_core.data.registry import parse_dataset
from dml_core.data.store.info import read_info
from dml_core.data.store.split_config import ValidationConfig, check_folds, num_held_out
from dml_core.errors import ConfigError
from dml_core.evaluation.columns import recall_k
from dml_core.evaluation.config import EvaluationConfig
from dml_core.training.config import TrainingConfig
from tasks.checks import check_parts, check_settings, loss_learns, prepared_folder
from tasks.environment import Project
from tasks.runs.identity import evaluate_identity, source_digest
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import Params as ProjectParams
from tasks.runs.specs import RunSpec, Trial, comparison_runs, load_params, row_name, tuning_comparison
from tasks.runs.tuned import STANDING, TrialCounts, TunedFile, tune_command
from tasks.tables.choice import Choice
from tasks.tables.file import TableFile, load_table
from tasks.tables.runs import asked_runs, at_scale, belongs, datasets_of, named_dataset, not_in_params
from tasks.tuning.proposals import SAMPLER, TrialRecord
from tasks.tuning.space import Params, Space, lay_over, nested, own_values, row_space

METRICS = ("map@r", "r_precision")  # beside every recall@K
ENGINE = ("tasks.tuning.study", "tasks.tuning.proposals")  # what they do decides which trials there are


@dataclass(frozen=True)
class Search:
    """One search.

    Attributes:
        table, row: whose settings; column: the dataset as the table names it.
        dataset: the project's.
        training: the row's own settings, without what says which classes train and which weights are kept.
        space: what is searched of them.
        evaluation: how a fold is scored.
        metric: the higher, the better.
        folds, seed: of the search.
        num_classes: that train; None before the dataset is prepared.
    """

    table: str
    row: str
    column: str
    dataset: str
    training: TrainingConfig
    space: Space
    evaluation: EvaluationConfig
    metric: str
    folds: int
    seed: int
    num_classes: int | None = None

    @property
    def title(self) -> str:
        """How its runs are called together."""
        return tuning_comparison(f"{self.table}/{self.row}", self.dataset)

    @property
    def command(self) -> str:
        """What makes its file."""
        return tune_command(self.table, self.row, self.column)

    @property
    def own(self) -> Params:
        """The row's own values of what is searched: trial 0."""
        return own_values(self.training, self.space)

    def spec(self, number: int, params: Params, fold: int) -> RunSpec:
        """The run of a trial without a fold.

        Raises:
            ConfigError: settings that do not fit each other.
        """
        trial = Trial(row=self.row, number=number, fold=fold)
        training = lay_over(self.training, params) if number else self.training
        training = self._on_the_other_folds(training)
        held_out = ValidationConfig(folds=self.folds, fold=fold, seed=self.seed)
        return RunSpec(
            dataset=self.dataset,
            variant=trial.label,
            seed=self.seed,
            training=training.model_copy(update={"validation": held_out}),
            evaluation=self.evaluation,
            table=self.table,
            trial=trial,
        )

    def identity(self, dataset: DatasetRecord) -> str:
        """Of the search on these training rows: with anything else it is another one. How many trials it has is no part of it."""
        runs = [evaluate_identity(self.spec(0, self.own, fold), dataset) for fold in range(self.folds)]
        space = {path: search.model_dump(mode="json") for path, search in self.space.items()}
        parts = [self.table, self.row, self.training.model_dump(mode="json"), space, self.metric, runs, SAMPLER, source_digest(ENGINE)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def on(self, packed: Path) -> "Search":
        """The search on a prepared dataset, checked against it.

        Raises:
            ConfigError: more folds than its training classes have room for.
        """
        num_classes = read_info(packed).roles["train"].num_classes
        with located(f"{self.table}/{self.row} on {self.dataset}"):
            check_folds(self.folds, num_classes)
        return replace(self, num_classes=num_classes)

    def _on_the_other_folds(self, training: TrainingConfig) -> TrainingConfig:
        """Batches of k classes as the fewer classes of the other folds have them: of all classes, and about as many images as before."""
        sampler = training.sampler
        if self.num_classes is None or sampler.kind != "k_by_n":
            return training
        num_left = self.num_classes - num_held_out(ValidationConfig(folds=self.folds, fold=0), self.num_classes)
        if sampler.num_classes_per_batch <= num_left:
            return training
        num_images = sampler.num_classes_per_batch * sampler.num_samples_per_class
        fitted = {"num_classes_per_batch": num_left, "num_samples_per_class": max(2, num_images // num_left)}
        return training.model_copy(update={"sampler": sampler.model_copy(update=fitted)})


def planned(
    project: Project, rows: Sequence[str], datasets: Sequence[str], folds: int, seed: int, metric: str, parallel: int | None
) -> tuple[ProjectParams, list[Search]]:
    """The searches of rows, checked as far as they can be before anything starts, and the parameters that they run with.

    Raises:
        ConfigError, DataError: the first thing that is wrong.
    """
    params = load_params(project.params_file)
    searches = [search for row in rows for search in plan_searches(params, row, datasets, folds, seed, metric)]
    params = at_scale(params, [load_table(search.table) for search in searches])
    if parallel is not None:
        params = params.model_copy(update={"scale": params.scale.model_copy(update={"concurrent_runs": parallel})})
    for search in searches:
        check_search(project, params, search)
    return params, searches


def plan_searches(params: ProjectParams, name: str, datasets: Sequence[str], folds: int, seed: int, metric: str) -> list[Search]:
    """The searches of a row, one for each of its datasets, or of those that are named. Imports torch and the row's loss.

    Args:
        params: the project's.
        name: `<paper>/<table>/<row>`.
        datasets: as the table's columns or the project name them.
        folds, seed, metric: of the search.

    Raises:
        ConfigError: no such table, row, dataset or metric; a row that is not run or has nothing to search.
    """
    table_name, _, row = name.rpartition("/")
    table = load_table(table_name)
    if metric not in METRICS and recall_k(metric) is None:
        raise unknown_name("metric of a search", metric, [*METRICS, "recall@1"])
    if row not in table.rows:
        raise unknown_name(f"row of {table_name}", row, list(table.rows))
    for dataset in datasets:
        if dataset not in datasets_of(table):
            raise unknown_name(f"dataset of {table_name}", dataset, list(datasets_of(table)))
    chosen = tuple(datasets) or tuple(dataset for dataset in datasets_of(table) if belongs(table, table.rows[row], dataset))
    return [_plan(params, table_name, table, row, dataset, folds, seed, metric) for dataset in chosen]


def _plan(params: ProjectParams, table_name: str, table: TableFile, row: str, column: str, folds: int, seed: int, metric: str) -> Search:
    own = _own_run(params, table_name, row, column)
    dataset = named_dataset(params, column, table.dataset_options(column))
    if dataset is None:
        raise ConfigError(not_in_params({column: table.dataset_options(column)}))
    spec = params.datasets[dataset]
    if parse_dataset(spec.reader, spec.options).shares_classes:
        raise ConfigError(
            f"dataset '{dataset}' is split by image: its training classes are its test classes, and a search may not see those"
        )
    training = own.training.model_copy(update={"validation": None, "keep_epochs": ()})
    with located(f"{table_name}/{row} on {column}"):
        space = row_space(training, table.search, table.rows[row].search, lambda: loss_learns(training))
    evaluation = EvaluationConfig(
        role="validation",
        recall_at=tuple(sorted({1, recall_k(metric) or 1})),
        metric=own.evaluation.metric,
        clustering=False,
        max_block_bytes=own.evaluation.max_block_bytes,
        device=own.evaluation.device,
    )
    return Search(table_name, row, column, dataset, training, space, evaluation, metric, folds, seed)


def _own_run(params: ProjectParams, table: str, row: str, column: str) -> RunSpec:
    """The row as it is run without a search."""
    if table == STANDING:
        variant = next(variant for variant in params.comparison.variants if row_name(variant) == row)
        return comparison_runs(params, column, (variant,), (0,), tuned=False)[0]
    asked = asked_runs([table], Choice(rows=(row,), datasets=(column,), epochs=("last",)))
    return asked.runs[table, column][0]


def check_search(project: Project, params: ProjectParams, search: Search) -> None:
    """Refuse what can be known not to fit before anything is started.

    Raises:
        ConfigError: settings that do not fit each other or the folds.
        DataError: the dataset is not prepared, and only a person can bring its raw files.
    """
    packed = prepared_folder(project, params, search.dataset)
    if packed is not None:
        check_on(search.on(packed), params, packed)


def check_on(search: Search, params: ProjectParams, packed: Path) -> None:
    """Refuse a search whose runs would not fit a prepared dataset.

    Raises:
        ConfigError: the first setting that does not.
    """
    runs = [search.spec(0, search.own, fold) for fold in range(search.folds)]
    check_settings(runs, params.scale, packed)
    check_parts(runs, packed)


def found_file(
    search: Search, study: str, dataset: DatasetRecord, trials: Sequence[TrialRecord], best: TrialRecord, tags: dict[str, str]
) -> TunedFile:
    """What is kept of a search: the best trial's settings where they are not the row's own, and how they were found.

    Args:
        search, study: which, and its identity.
        dataset: the training rows.
        trials: all.
        best: the best one.
        tags: git's, of the code.
    """
    counts = {state: sum(trial.state == state for trial in trials) for state in ("finished", "pruned", "failed")}
    changed = {path: value for path, value in best.params.items() if value != search.own[path]}
    return TunedFile(
        table=search.table,
        row=search.row,
        dataset=search.column,
        training=nested(changed) if best.number else {},
        trial=best.number,
        score=best.mean,
        published_score=trials[0].mean,
        fold_scores=best.scores,
        metric=search.metric,
        folds=search.folds,
        seed=search.seed,
        trials=TrialCounts(**counts),
        space=search.space,
        fingerprint=dataset.digest,
        sampler=SAMPLER,
        commit=tags.get("git_commit"),
        dirty=tags.get("git_dirty") == "true",
        study=study,
    )
