"""The search of a row: its runs, when it is a different search, and what is kept of its winner."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml

import tasks.tuning.search
from dml_core.config import flatten, merge, read_yaml
from dml_core.errors import ConfigError
from dml_core.overrides import nested
from dml_core.search_space import Search as Range
from dml_core.training.config import CrossBatchConfig
from tasks.environment import Project
from tasks.runs.params.file import load_params
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import SEEDS
from tasks.tables.file import load_table
from tasks.tables.runs import searched_on
from tasks.tuning.halving import SearchResult, measure_gain
from tasks.tuning.proposals import Trial, propose
from tasks.tuning.search import FIRST_SEED, LAST_SEED, SEEDS_OF_A_SEARCH, Search, plan_searches, tuned_file
from tasks.tuning.space import lay_over, own_value, row_space
from tests.conftest import ROOT, SYNTHETIC_OPTIONS

PARAMS = load_params(ROOT / "params.yaml")
DATASET = DatasetRecord(name="d", folder="/somewhere", digest="0123", counts={"train": 1}, source="s")
WHOLE = DATASET.model_copy(update={"digest": "4567"})


def planned(name: str, folds: int = 2, seed: int = 0, metric: str = "recall@1", num_classes: int | None = 5) -> Search:
    (search,) = plan_searches(PARAMS, name, (), folds, seed, metric)
    return replace(search, num_classes=num_classes)


def test_batches_of_k_classes_are_made_to_fit_the_other_folds() -> None:
    """Of five classes the larger fold has three, which leaves two; the row has batches of 4 classes with 8 images."""
    search = planned("project/fashion_mnist/contrastive")
    sampler = search.spec(0, search.own, 0).training.sampler
    assert (sampler.num_classes_per_batch, sampler.num_samples_per_class) == (2, 16)
    roomy = replace(search, num_classes=20)
    assert roomy.spec(0, search.own, 0).training.sampler == search.training.sampler


def test_a_trial_is_the_row_with_its_settings_and_a_fold_held_out() -> None:
    search = planned("project/fashion_mnist/softtriple", num_classes=20)
    own, other = search.spec(0, search.own, 1), search.spec(3, search.own | {"loss.options.scale": 31.0}, 1)
    steps = {"num_epochs": search.training.num_epochs, "schedule": search.training.schedule}
    assert own.training.model_copy(update={"validation": None, **steps}) == search.training
    assert other.training.loss.options["scale"] == 31.0
    assert own.training.loss.options["scale"] == 20
    assert other.title == "project/fashion_mnist/softtriple on fashion-mnist: trial 3 pair 1"
    assert other.comparison == "tuning of project/fashion_mnist/softtriple on fashion-mnist (validation)"
    assert other.tags == {"table": "project/fashion_mnist", "row": "softtriple", "trial": "3", "pair": "1"}
    assert (other.evaluation.clustering, other.measurements) == (False, {})


def test_rates_of_the_losss_group_are_searched_where_it_has_parameters() -> None:
    path = "optimiser.groups.loss.learning_rate"
    for row, learns in (("softtriple", True), ("contrastive", False), ("discriminative", False), ("softtriple-pml", True)):
        search = planned(f"project/fashion_mnist/{row}")
        assert (path in search.space) is learns, row


def test_more_runs_at_a_time_than_a_flow_has_threads_for_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--parallel: concurrent_runs: Input should be less than or equal to 64, found 65$"):
        tasks.tuning.search.checked_searches(
            Project(ROOT, ROOT / "state", "", ""), ["project/fashion_mnist/softtriple"], (), 4, 0, "recall@1", 65
        )


def test_classes_of_the_former_images_refuse_no_search_once_there_are_new_raw_files(tmp_path: Path, packed: Path) -> None:
    project = Project(tmp_path, tmp_path / "state", "", "")
    options = {"datasets": {"synthetic": {"options": {**SYNTHETIC_OPTIONS, "seed": 0}}}}
    project.params_file.write_text(yaml.safe_dump(merge(read_yaml(ROOT / "params.yaml"), options)))
    shutil.copytree(packed, project.packed("synthetic"))
    search = partial(tasks.tuning.search.checked_searches, project, ["project/standing/softtriple"], ("synthetic",), 4, 0, "recall@1", None)
    with pytest.raises(ConfigError, match="folds"):
        search()
    (tmp_path / "data/raw/synthetic").mkdir(parents=True)
    assert [found.dataset for found in search()[1]] == ["synthetic"]


@pytest.mark.parametrize("name", ["softtriple", "softtriple/table1"])
def test_a_name_that_is_no_row_is_refused_with_examples(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}': name a row of a table, for example project/standing/softtriple"):
        planned(name)


def test_what_makes_another_search_and_what_does_not() -> None:
    name = "project/fashion_mnist/softtriple"
    search = planned(name)
    narrower = replace(search, space=search.space | {"loss.options.scale": Range(low=10.0, high=30.0)})
    others = [planned(name, folds=3, num_classes=9), planned(name, seed=1), planned(name, metric="map@r"), narrower]
    others += [planned("project/fashion_mnist/softmax")]
    identities = [one.identity(DATASET) for one in (search, *others)]
    identities.append(search.identity(DATASET.model_copy(update={"digest": "4567"})))
    assert len(set(identities)) == len(identities)
    assert planned(name).identity(DATASET.model_copy(update={"folder": "/elsewhere"})) == identities[0]


def test_a_fold_trains_as_many_steps_as_all_classes() -> None:
    """Of 20 classes 5 are held out: 15 / 20 of the images, so 20 / 15 as many epochs, rounded, and the schedule is stretched equally."""
    (search,) = plan_searches(PARAMS, "project/standing/softtriple", ("synthetic",), 4, 0, "recall@1")
    memory = CrossBatchConfig(size=96, after_epochs=6)
    search = replace(search, num_classes=20, training=search.training.model_copy(update={"cross_batch_memory": memory}))
    training = search.spec(0, search.own, 0).training
    assert training.num_epochs == round(search.training.num_epochs * 20 / 15)
    assert training.cross_batch_memory == CrossBatchConfig(size=96, after_epochs=8)
    assert training.schedule.warmup_epochs == pytest.approx(search.training.schedule.warmup_epochs * 20 / 15)


def test_every_pair_has_a_seed_of_its_own_and_the_folds_rotate() -> None:
    search = planned("project/fashion_mnist/softtriple", folds=2, num_classes=20)
    runs = [search.spec(0, search.own, pair) for pair in range(6)]
    assert len({run.seed for run in runs}) == 6
    assert min(run.seed for run in runs) >= FIRST_SEED > max(PARAMS.comparison.seeds)
    held_out = [(run.training.validation.fold, run.training.validation.seed) for run in runs if run.training.validation]
    assert len(set(held_out)) == 6
    assert [fold for fold, _ in held_out] == [0, 1, 0, 1, 0, 1]
    other = planned("project/fashion_mnist/softtriple", seed=1)
    assert not {run.seed for run in runs} & {other.spec(0, search.own, pair).seed for pair in range(6)}


@pytest.mark.parametrize(
    "range_of_scale", [Range(low=30.0, high=60.0), Range(choices=(30.0, 60.0)), Range(low=30.0, high=60.0, integer=True)]
)
def test_a_published_value_outside_of_the_range_is_no_guess(range_of_scale: Range) -> None:
    """SoftTriple's scale of 20: proposals after the first round ended with an error of Optuna's, as they could not learn from it."""
    search = planned("project/fashion_mnist/softtriple")
    own = lay_over(search.training, {"loss.options.scale": 40.0, "loss.options.gamma": 0.3})
    space = row_space(own, {"loss.options.scale": range_of_scale}, {})
    search = replace(search, training=own, space=space)
    assert [guess["loss.options.scale"] for guess in search.guesses] == [40.0, 40.0]
    assert [guess["loss.options.gamma"] for guess in search.guesses] == [0.3, 0.1], "the other published values are tried"
    assert len(propose(space, [Trial(number, guess, (0.5,)) for number, guess in enumerate(search.guesses)], "a", 1, search.fits)) == 4


def test_the_seeds_of_a_search_are_seeds() -> None:
    """A date as the seed of a search gave its runs seeds above 2**32 - 1, with which their figures could not be drawn."""
    search = planned("project/fashion_mnist/softtriple", seed=LAST_SEED)
    assert search.spec(0, search.own, SEEDS_OF_A_SEARCH - 1).seed in SEEDS
    with pytest.raises(ConfigError, match=rf"--seed 20261129: not a seed of a search; use 0 to {LAST_SEED}"):
        planned("project/fashion_mnist/softtriple", seed=20261129)


def test_the_losss_published_values_are_the_second_guess() -> None:
    """The row's published scale is 20; its margin is not published."""
    search = planned("project/fashion_mnist/softtriple")
    changed = replace(search, training=lay_over(search.training, {"loss.options.scale": 31.0}))
    assert changed.guesses[0] == changed.own
    assert changed.guesses[1]["loss.options.scale"] == 20.0
    assert all(changed.guesses[1][path] == value for path, value in changed.own.items() if not path.startswith("loss.options"))


@pytest.mark.parametrize(("winner_scores", "kept"), [((0.7, 0.72, 0.74, 0.71, 0.73), True), ((0.7, 0.5, 0.6, 0.5, 0.62), False)])
def test_the_winners_settings_are_kept_where_its_gain_is_confirmed(winner_scores: tuple[float, ...], kept: bool) -> None:
    search = planned("project/fashion_mnist/softtriple")
    own = Trial(0, search.own, (0.5, 0.7))
    best = Trial(2, search.own | {"loss.options.scale": 31.0}, (0.7, 0.9))
    trials = (own, Trial(1, search.own | {"loss.options.scale": 7.0}, (), "not finite"), best)
    found = SearchResult(trials, best, measure_gain((0.5, 0.55, 0.52, 0.53, 0.51), winner_scores), search.space)
    file = tuned_file(search, "name", WHOLE, DATASET, found, {"git_commit": "c", "git_dirty": "true"}, 2)
    assert (file.fingerprint, file.searched_on) == ("0123", searched_on(search.training, WHOLE))
    assert file.training == ({"loss": {"options": {"scale": 31.0}}} if kept else {})
    assert (file.score, file.own_score) == (pytest.approx(0.8), pytest.approx(0.6))
    assert [one.params for one in file.tried] == [{}, {"loss.options.scale": 7.0}, {"loss.options.scale": 31.0}]
    assert (file.tried[1].failed, file.num_trials, file.dirty) == ("not finite", 3, True)
    options = "--dataset fashion-mnist --trials 2 --folds 2 --seed 0 --metric recall@1"
    assert file.command == f"dml tune project/fashion_mnist/softtriple {options}"
    assert tuned_file(search, "name", WHOLE, DATASET, SearchResult(trials, own, None, search.space), {}, 2).training == {}


def test_a_group_s_rate_that_was_tried_is_kept_although_the_row_inherits_it() -> None:
    """With the file's settings the group would follow the file's rate of the network."""
    network, group = "optimiser.learning_rate", "optimiser.groups.loss.learning_rate"
    search = planned("project/finetuned/proxy-nca")
    space = {network: Range(low=3e-5, high=1e-3, log=True), group: Range(choices=(1e-4, 1e-3))}
    search = replace(search, space=space)
    assert search.own == {network: 1e-4, group: 1e-4}
    for params, kept in (
        ({network: 5e-4, group: 1e-4}, {network: 5e-4, group: 1e-4}),
        ({network: 1e-4, group: 1e-3}, {group: 1e-3}),
        (search.own, {}),
    ):
        best = Trial(1, params, (0.8,) * 6)
        found = SearchResult((Trial(0, search.own, (0.6,)), best), best, measure_gain((0.6, 0.61, 0.6), (0.8, 0.8, 0.81)), search.space)
        file = tuned_file(search, "name", WHOLE, DATASET, found, {}, 2)
        assert (flatten(file.training), file.tried[1].params) == (kept, kept)
        tuned = lay_over(search.training, nested(kept))
        assert {path: own_value(tuned, path) for path in space} == params


def test_a_row_whose_datasets_have_the_settings_of_another_is_not_searched_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    table = load_table("project/glyphs")
    softmax = table.rows["softmax"].model_copy(update={"runs_on": ("glyphs",)})
    monkeypatch.setattr(
        tasks.tuning.search, "load_table", lambda name: table.model_copy(update={"rows": {**table.rows, "softmax": softmax}})
    )
    command = "dml tune project/glyphs/softmax --dataset glyphs-2000"
    with pytest.raises(ConfigError, match=f"tuned runs on glyphs have the settings found elsewhere; run: {command}$"):
        plan_searches(PARAMS, "project/glyphs/softmax", (), 4, 0, "recall@1")


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown metric of a search 'nmi'"):
        planned("project/fashion_mnist/softtriple", metric="nmi")
