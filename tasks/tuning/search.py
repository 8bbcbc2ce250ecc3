"""A search on a row of a table and a dataset: its space, its pairs of fold and seed, the runs of its trials, the winner's file.

A search reads no test classes. Its runs get only the training rows (`training_rows`), are scored on held-out training classes, and keep
only the weights of the last epoch; no option or file changes this.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dml_core.config import check_known, located, parse, refuse_repeats, unknown_name
from dml_core.data.registry import parse_dataset
from dml_core.data.store.info import read_info
from dml_core.data.store.rows import Counts
from dml_core.data.store.split_config import ValidationConfig, check_folds, num_held_out
from dml_core.errors import ConfigError, DataError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.evaluation.metric_info import recall_k
from dml_core.overrides import nested
from dml_core.training.config import TrainingConfig
from dml_core.training.optimisation.schedules import ScheduleConfig
from tasks.checks import check_parts, check_settings, prepared_folder
from tasks.data import has_new_raw_files
from tasks.environment import Project
from tasks.runs.identity import source_digest, step_identities
from tasks.runs.params.comparison import comparison_runs, row_name
from tasks.runs.params.file import load_params
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import SEEDS, RunSpec, ScaleSpec, Trial, tuning_comparison
from tasks.runs.specs import Params as ProjectParams
from tasks.runs.tuned import STANDING, Tried, TunedFile, read_before, tune_command
from tasks.tables.choice import Choice
from tasks.tables.file import TableFile, load_table
from tasks.tables.runs import at_scale, belongs, named_dataset, not_in_params, runs_of_tables, searched_on
from tasks.tuning.halving import METHOD, SearchResult
from tasks.tuning.space import Params, Space, changed_settings, lay_over, own_value, published_options, row_space

METRICS = ("map@r", "r_precision")  # in addition to every recall@K
ENGINE = ("tasks.tuning.halving", "tasks.tuning.proposals")  # modules that determine the trials
FIRST_SEED = 1_000_000  # first seed of a search's runs, higher than those of any comparison
SEEDS_OF_A_SEARCH = 1_000
LAST_SEED = (SEEDS.stop - FIRST_SEED) // SEEDS_OF_A_SEARCH - 1  # of a search: the seeds of its runs are seeds, too


@dataclass(frozen=True)
class Search:
    """A search of the settings of one row on one dataset.

    Attributes:
        table, row: those of the settings; column: the dataset's name in the table.
        dataset: the dataset's name in the project.
        training: the row's own settings, without those of validation, kept epochs and scores during training.
        space: search space.
        evaluation: how a fold is scored.
        metric: the score to maximise.
        folds: number of disjoint parts of the training classes; seed: seed of the search.
        num_classes: number of training classes; None before the dataset is prepared.
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
        """Title of the comparison that its runs form."""
        return tuning_comparison(f"{self.table}/{self.row}", self.dataset)

    @property
    def own(self) -> Params:
        """The row's own values of the searched settings (trial 0)."""
        return {path: own_value(self.training, path) for path in self.space}

    def changes(self, params: Params) -> Params:
        """Return those of a trial's settings that the row would not have without them."""
        return changed_settings(self.training, params)

    @property
    def guesses(self) -> list[Params]:
        """Settings to try first: the row's own, and those with the loss's published values of the searched options."""
        published = self.own | published_options(self.training, self.space)
        return [self.own] if published == self.own or not self.fits(published) else [self.own, published]

    def fits(self, params: Params) -> bool:
        """Return whether these settings can be run."""
        try:
            lay_over(self.training, params)
        except ConfigError:
            return False
        return True

    def spec(self, number: int, params: Params, pair: int) -> RunSpec:
        """Return the run of a trial on a pair of fold and seed.

        Pair 0 holds out the first fold, pair 1 the second, and so on; after the last fold the classes are split into new folds. Every pair
        has a different seed, which no comparison uses.

        Raises:
            ConfigError: the settings do not fit each other.
        """
        trial = Trial(row=self.row, number=number, pair=pair)
        training = lay_over(self.training, params) if number else self.training
        training = self._without_a_fold(training)
        first_seed = FIRST_SEED + SEEDS_OF_A_SEARCH * self.seed
        held_out = ValidationConfig(folds=self.folds, fold=pair % self.folds, seed=first_seed + pair // self.folds)
        return RunSpec(
            dataset=self.dataset,
            variant=trial.label,
            seed=first_seed + pair,
            training=training.model_copy(update={"validation": held_out}),
            evaluation=self.evaluation,
            table=self.table,
            trial=trial,
        )

    def identity(self, dataset: DatasetRecord) -> str:
        """Return a hash of everything that determines the search's result on these training rows, except the number of trials."""
        runs = [step_identities(self.spec(0, self.own, pair), dataset)["evaluate"] for pair in range(self.folds)]
        space = {path: search.model_dump(mode="json") for path, search in self.space.items()}
        parts = [self.table, self.row, self.training.model_dump(mode="json"), space, self.metric, runs, METHOD, source_digest(ENGINE)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def on(self, packed: Path) -> "Search":
        """Return the search on a prepared dataset, after checking that it fits.

        Raises:
            ConfigError: the dataset has too few training classes for the folds.
        """
        num_classes = read_info(packed).roles.get("train", Counts(0, 0)).num_classes
        with located(f"{self.table}/{self.row} on {self.dataset}"):
            check_folds(self.folds, num_classes)
        return replace(self, num_classes=num_classes)

    @property
    def draw(self) -> str:
        """Name and seed of the random draws, so that other rows draw other settings."""
        return f"{self.table}/{self.row} {self.column} {self.seed}"

    def _without_a_fold(self, training: TrainingConfig) -> TrainingConfig:
        """Adapt a training to the classes without one fold: as many steps as on all classes, and batches that they can fill."""
        if self.num_classes is None:
            return training
        num_left = self.num_classes - num_held_out(ValidationConfig(folds=self.folds, fold=0), self.num_classes)
        longer = self.num_classes / num_left
        stretched = {"num_epochs": round(training.num_epochs * longer), "schedule": _stretched(training.schedule, longer)}
        if (memory := training.cross_batch_memory) is not None:
            stretched["cross_batch_memory"] = memory.model_copy(update={"after_epochs": round(memory.after_epochs * longer)})
        training = training.model_copy(update=stretched)
        sampler = training.sampler
        if sampler.kind != "k_by_n" or sampler.num_classes_per_batch <= num_left:
            return training
        num_images = sampler.num_classes_per_batch * sampler.num_samples_per_class
        fitted = {"num_classes_per_batch": num_left, "num_samples_per_class": max(2, num_images // num_left)}
        return training.model_copy(update={"sampler": sampler.model_copy(update=fitted)})


def _stretched(schedule: ScheduleConfig, longer: float) -> ScheduleConfig:
    """Return the schedule of a training with `longer` times as many epochs."""
    drops = {"milestones": tuple(round(epoch * longer) for epoch in schedule.milestones)}
    every = {"every_epochs": round(schedule.every_epochs * longer)} if schedule.every_epochs else {}
    return schedule.model_copy(update={**drops, **every, "warmup_epochs": schedule.warmup_epochs * longer})


def checked_searches(
    project: Project, rows: Sequence[str], datasets: Sequence[str], folds: int, seed: int, metric: str, parallel: int | None
) -> tuple[ProjectParams, list[Search]]:
    """Return the parameters and the searches of rows, checked as far as possible before anything starts.

    Raises:
        ConfigError, DataError: the first problem.
    """
    refuse_repeats("row", rows)
    refuse_repeats("--dataset", datasets)
    params = load_params(project.params_file)
    searches = [search for row in rows for search in plan_searches(params, row, datasets, folds, seed, metric)]
    params = at_scale(params, {search.table: load_table(search.table) for search in searches})
    if parallel is not None:
        scale = parse(ScaleSpec, params.scale.model_dump() | {"concurrent_runs": parallel}, "--parallel")
        params = params.model_copy(update={"scale": scale})
    for search in searches:
        read_before(search.table, search.row, search.column)
        packed = prepared_folder(project, params, search.dataset)
        if packed is not None:
            try:
                check_on(search.on(packed), params, packed)
            except (ConfigError, DataError):  # the former images do not count: the flow checks the new ones
                if not has_new_raw_files(project, search.dataset, params.datasets[search.dataset]):
                    raise
    return params, searches


def plan_searches(params: ProjectParams, name: str, datasets: Sequence[str], folds: int, seed: int, metric: str) -> list[Search]:
    """Plan the searches of a row, one for each of its datasets or of the named ones. Imports torch and the row's loss.

    Args:
        name: `<paper>/<table>/<row>`, or `project/standing/<variant>`.
        datasets: names in the table's columns.

    Raises:
        ConfigError: unknown table, row, dataset or metric; too large a seed; a row that is not run or has nothing to search.
    """
    if seed > LAST_SEED:
        raise ConfigError(f"--seed {seed}: not a seed of a search; use 0 to {LAST_SEED}")
    table_name, _, row = name.rpartition("/")
    if "/" not in table_name:
        raise ConfigError(f"'{name}': name a row of a table, for example {STANDING}/softtriple or softtriple/table1/softtriple")
    table = load_table(table_name)
    row = row_name(row) if table_name == STANDING else row  # the variant's name will do
    if metric not in METRICS and recall_k(metric) is None:
        raise unknown_name("metric of a search", metric, [*METRICS, "recall@1"])
    check_known(f"row of {table_name}", row, table.rows)
    for dataset in datasets:
        check_known(f"dataset of {table_name}", dataset, table.datasets)
        if table.tuned_on(dataset) != dataset:
            raise ConfigError(f"{table_name}: tuned runs on {dataset} have the settings found on {table.tuned_on(dataset)}; tune there")
    has_row = [dataset for dataset in table.datasets if belongs(table, table.rows[row], dataset)]
    columns = datasets or [dataset for dataset in has_row if table.tuned_on(dataset) == dataset]
    if not columns:
        commands = dict.fromkeys(tune_command(table_name, row, table.tuned_on(dataset)) for dataset in has_row)
        raise ConfigError(f"{name}: tuned runs on {', '.join(has_row)} have the settings found elsewhere; run: {'; '.join(commands)}")
    return [_plan(params, table_name, table, row, column, folds, seed, metric) for column in columns]


def _plan(params: ProjectParams, table_name: str, table: TableFile, row: str, column: str, folds: int, seed: int, metric: str) -> Search:
    own = _own_run(params, table_name, row, column)
    options = table.dataset_options(column)
    dataset = named_dataset(params, column, options)
    if dataset is None:
        raise ConfigError(not_in_params({column: options}))
    spec = params.datasets[dataset]
    if parse_dataset(spec.reader, spec.options).shares_classes:
        raise ConfigError(
            f"dataset '{dataset}' is split by image: its training classes are its test classes, and a search must not use those"
        )
    training = own.training.model_copy(update={"validation": None, "keep_epochs": (), "recall_every_epochs": None})
    with located(f"{table_name}/{row} on {column}"):
        space = row_space(training, table.search, table.rows[row].search)
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
    """Return the row's run without a search."""
    if table == STANDING:
        variant = next(variant for variant in params.comparison.variants if row_name(variant) == row)
        return comparison_runs(params, column, (variant,), (0,), tuned=False)[0]
    runs, _ = runs_of_tables([table], Choice(rows=(row,), datasets=(column,), epochs=("last",)))
    return runs[table, column][0]


def check_on(search: Search, params: ProjectParams, packed: Path) -> None:
    """Check that the runs of a search fit a prepared dataset.

    Raises:
        ConfigError: the first setting that does not fit.
    """
    runs = [search.spec(0, search.own, pair) for pair in range(search.folds)]
    check_settings(runs, params.scale, packed)
    check_parts(runs, packed)


def tuned_file(
    search: Search,
    name: str,
    whole: DatasetRecord,
    dataset: DatasetRecord,
    result: SearchResult,
    tags: dict[str, str],
    requested_trials: int,
) -> TunedFile:
    """Return the file of a search (`TunedFile`).

    `name` is its identity, `whole` the dataset that is searched on, `dataset` has its training rows, `tags` the commit of the code.
    """
    winner = result.winner
    return TunedFile(
        table=search.table,
        row=search.row,
        dataset=search.column,
        training=nested(search.changes(winner.params)) if result.changes_settings else {},
        trial=winner.number,
        score=winner.mean,
        own_score=result.trials[0].mean,
        confirmation=result.confirmation,
        failed=result.failed,
        metric=search.metric,
        folds=search.folds,
        seed=search.seed,
        num_trials=len(result.trials),
        requested_trials=requested_trials,
        tried=tuple(Tried(params=search.changes(trial.params), scores=trial.scores, failed=trial.reason) for trial in result.trials),
        space=result.space,
        fingerprint=dataset.digest,
        searched_on=searched_on(search.training, whole),
        sampler=METHOD,
        commit=tags.get("git_commit"),
        dirty=tags.get("git_dirty") == "true",
        study=name,
    )
