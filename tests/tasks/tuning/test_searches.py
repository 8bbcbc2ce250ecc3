"""What a search of a row is: its runs, when it is another one, what is kept of its winner."""

from dataclasses import replace

import pytest

from dml_core.errors import ConfigError
from dml_core.search import Search as Range
from tasks.checks import loss_learns
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import load_params
from tasks.tuning.proposals import TrialRecord
from tasks.tuning.search import Search, found_file, plan_searches
from tests.conftest import ROOT

PARAMS = load_params(ROOT / "params.yaml")
DATASET = DatasetRecord(name="d", folder="/somewhere", digest="0123", counts={"train": 1}, source="s")


def planned(name: str, folds: int = 2, seed: int = 0, metric: str = "recall@1", num_classes: int | None = 5) -> Search:
    (search,) = plan_searches(PARAMS, name, (), folds, seed, metric)
    return replace(search, num_classes=num_classes)


def test_batches_of_k_classes_are_made_to_fit_the_other_folds() -> None:
    """Of five classes the larger fold has three, which leaves two; the row has batches of 4 classes by 8 images."""
    search = planned("project/fashion_mnist/contrastive")
    sampler = search.spec(0, search.own, 0).training.sampler
    assert (sampler.num_classes_per_batch, sampler.num_samples_per_class) == (2, 16)
    roomy = replace(search, num_classes=20)
    assert roomy.spec(0, search.own, 0).training.sampler == search.training.sampler


def test_a_trial_is_the_row_with_its_settings_and_a_fold_held_out() -> None:
    search = planned("project/fashion_mnist/softtriple", num_classes=20)
    own, other = search.spec(0, search.own, 1), search.spec(3, search.own | {"loss.options.scale": 31.0}, 1)
    assert own.training.model_copy(update={"validation": None}) == search.training
    assert other.training.loss.options["scale"] == 31.0
    assert own.training.loss.options["scale"] == 20
    assert other.title == "project/fashion_mnist/softtriple on fashion-mnist: trial 3 fold 1"
    assert other.comparison == "tuning of project/fashion_mnist/softtriple on fashion-mnist (validation)"
    assert other.tags == {"table": "project/fashion_mnist", "row": "softtriple", "trial": "3", "fold": "1"}
    assert (other.evaluation.clustering, other.measurements) == (False, {})


def test_rates_of_the_losss_group_are_searched_where_it_has_parameters() -> None:
    path = "optimiser.groups.loss.learning_rate"
    for row, learns in (("softtriple", True), ("contrastive", False), ("discriminative", False), ("softtriple-pml", True)):
        search = planned(f"project/fashion_mnist/{row}")
        assert loss_learns(search.training) is learns
        assert (path in search.space) is learns, row


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


def test_of_the_winner_only_what_is_not_the_rows_own_is_kept() -> None:
    search = planned("project/fashion_mnist/softtriple")
    own = TrialRecord(0, search.own, "finished", (0.5, 0.7))
    best = TrialRecord(2, search.own | {"loss.options.scale": 31.0}, "finished", (0.7, 0.9))
    trials = [own, TrialRecord(1, search.own, "failed", (), "x"), best, TrialRecord(3, search.own, "pruned", (0.1,))]
    found = found_file(search, "study", DATASET, trials, best, {"git_commit": "c", "git_dirty": "true"})
    assert found.training == {"loss": {"options": {"scale": 31.0}}}
    assert (found.score, found.published_score) == (pytest.approx(0.8), pytest.approx(0.6))
    assert (found.trials.finished, found.trials.pruned, found.trials.failed, found.dirty) == (2, 1, 1, True)
    assert found_file(search, "study", DATASET, trials, own, {}).training == {}


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown metric of a search 'nmi'"):
        planned("project/fashion_mnist/softtriple", metric="nmi")
