"""Search space of a row: the ranges of the loss, the table and the row, without settings that select the classes to read."""

from typing import Any

import pytest

from dml_core.config import merge
from dml_core.errors import ConfigError
from dml_core.overrides import nested
from dml_core.search_space import Search
from dml_core.training.config import TrainingConfig
from tasks.tuning.proposals import ROUND_SIZE, propose
from tasks.tuning.space import lay_over, own_value, row_space
from tests.conftest import small_training

RATE = {"optimiser.learning_rate": Search(low=1e-3, high=1e-1, log=True)}
SOFTTRIPLE = small_training("softtriple")


def space_of(
    training: TrainingConfig, of_table: dict[str, Search] | None = None, of_row: dict[str, Search] | None = None
) -> dict[str, Search]:
    return row_space(training, of_table or {}, of_row or {})


def test_it_is_the_losss_own_with_the_tables_and_the_rows() -> None:
    own = {"loss.options.gamma", "loss.options.margin", "loss.options.regulariser_weight", "loss.options.scale"}
    assert set(space_of(SOFTTRIPLE)) == own
    assert set(space_of(SOFTTRIPLE, RATE)) == own | set(RATE)
    narrow = Search(low=10.0, high=30.0)
    found = space_of(SOFTTRIPLE, RATE | {"loss.options.scale": Search(low=1.0, high=2.0)}, {"loss.options.scale": narrow})
    assert found["loss.options.scale"] == narrow
    assert list(found) == sorted(found)


def test_the_rows_own_values_are_in_it() -> None:
    found = space_of(SOFTTRIPLE, {"optimiser.learning_rate": Search(low=0.1, high=1.0, log=True)})
    assert found["optimiser.learning_rate"] == Search(low=0.05, high=1.0, log=True)
    assert own_value(SOFTTRIPLE, "optimiser.learning_rate") == 0.05
    assert own_value(SOFTTRIPLE, "loss.options.scale") == 20.0


def test_a_groups_rate_is_the_optimisers_where_it_has_none() -> None:
    assert own_value(SOFTTRIPLE, "optimiser.groups.loss.learning_rate") == 0.5
    assert own_value(SOFTTRIPLE, "optimiser.groups.head.learning_rate") == 0.05


def test_rates_of_a_loss_without_parameters_are_left_out_of_a_tables_ranges_and_refused_in_a_rows() -> None:
    group = {"optimiser.groups.loss.learning_rate": Search(low=1e-3, high=1.0, log=True)}
    assert "optimiser.groups.loss.learning_rate" in space_of(SOFTTRIPLE, group)
    pairs = small_training("contrastive", sampler={"kind": "k_by_n", "num_classes_per_batch": 4, "num_samples_per_class": 2})
    assert "optimiser.groups.loss.learning_rate" not in space_of(pairs, group)
    with pytest.raises(ConfigError, match=r"search: optimiser.groups.loss.learning_rate: has no effect: the loss has no parameters"):
        space_of(pairs, {}, group)


def test_another_losss_option_in_the_table_is_left_out_and_in_the_row_refused() -> None:
    gate = {"loss.options.gate": Search(low=1.0, high=4.0)}
    assert "loss.options.gate" not in space_of(SOFTTRIPLE, gate)
    with pytest.raises(ConfigError, match=r"search: loss.options.gate: the row has no value at which the search can start"):
        space_of(SOFTTRIPLE, {}, gate)


@pytest.mark.parametrize(
    ("path", "search", "said"),
    [
        ("validation.share", {"low": 0.1, "high": 0.5}, "cannot be searched"),
        ("validation.folds", {"low": 2.0, "high": 3.0, "integer": True}, "cannot be searched"),
        ("validation", {"choices": ("none", "all")}, "cannot be searched"),
        ("keep_epochs", {"choices": ("oracle", "last")}, "cannot be searched"),
        ("evaluation.role", {"choices": ("test", "validation")}, "cannot be searched"),
        ("role", {"choices": ("test", "validation")}, "cannot be searched"),
        ("loss.name", {"choices": ("softmax", "softtriple")}, "cannot be searched"),
        ("model.backbone.weights", {"choices": ("none", "imagenet")}, "cannot be searched"),
        ("optimiser.learnin_rate", {"low": 0.1, "high": 0.5}, "no value at which"),
        ("optimiser.learning_rate", {"low": -1.0, "high": 0.5}, "learning_rate"),
        ("optimiser.weight_decay", {"low": 1e-5, "high": 1e-2, "log": True}, "cannot be in a logarithmic range"),
        ("transform.flip", {"low": 0.0, "high": 1.0}, "cannot be in a range"),
        ("num_epochs", {"low": 1.0, "high": 5.0}, "num_epochs"),
    ],
)
def test_what_may_not_be_searched_or_could_not_be_run_is_refused(path: str, search: dict[str, Any], said: str) -> None:
    for where in ({"of_table": {path: Search(**search)}}, {"of_row": {path: Search(**search)}}):
        with pytest.raises(ConfigError, match=said) as refused:
            space_of(SOFTTRIPLE, **where)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("options", [{"heated_alpha": 16.0}, {"heated_alpha": 8.0}, {"alpha": 10.0}])
def test_a_declared_range_is_searched_although_its_ends_do_not_fit_the_rows_other_options(options: dict[str, float]) -> None:
    """Heating lowers alpha: the declared ends alpha 4 and heated_alpha 16 are invalid with these options."""
    plain = small_training("heated_up_softmax")
    training = plain.model_copy(update={"loss": plain.loss.model_copy(update={"options": options})})
    space = space_of(training)
    assert set(space) == {"loss.options.alpha", "loss.options.heated_alpha"}

    def fits(params: dict[str, Any]) -> bool:
        return bool(params["loss.options.heated_alpha"] <= params["loss.options.alpha"])

    proposed = propose(space, [], "draw", 0, fits)
    assert len(proposed) == ROUND_SIZE
    for params in proposed:
        lay_over(training, params)
    low = Search(low=4.0, high=64.0, log=True)
    if "heated_alpha" in options:
        with pytest.raises(ConfigError, match=r"search: loss.options.alpha: .* that cools; heating lowers alpha"):
            space_of(training, {"loss.options.alpha": low})


def test_nothing_to_search_is_said() -> None:
    with pytest.raises(ConfigError, match="no setting to search: loss 'discriminative' declares no range"):
        space_of(small_training("discriminative", model={"head": {"kind": "two_layer"}, "backbone": {"name": "small_cnn"}}))
    with pytest.raises(ConfigError, match="it is not trained"):
        space_of(small_training("softtriple", num_epochs=0), RATE)


def test_pytorch_metric_learnings_options_are_searched_where_the_row_says_so() -> None:
    training = SOFTTRIPLE.model_copy(
        update={"loss": SOFTTRIPLE.loss.model_copy(update={"name": "pml:SoftTripleLoss", "options": {"la": 20}})}
    )
    found = space_of(training, {}, {"loss.options.la": Search(low=5.0, high=80.0, log=True)})
    assert list(found) == ["loss.options.la"]
    assert lay_over(training, {"loss.options.la": 31.5}).loss.options == {"la": 31.5}


def test_laid_over_settings_are_the_rows_with_these_alone() -> None:
    params = {"loss.options.scale": 31.0, "optimiser.learning_rate": 0.01, "sampler.batch_size": 16, "transform.flip": False}
    changed = lay_over(SOFTTRIPLE, params)
    expected = merge(
        SOFTTRIPLE.model_dump(),
        {
            "loss": {"options": {"scale": 31.0}},
            "optimiser": {"learning_rate": 0.01},
            "sampler": {"batch_size": 16},
            "transform": {"flip": False},
        },
    )
    assert changed.model_dump() == expected
    assert nested(params)["loss"] == {"options": {"scale": 31.0}}
    with pytest.raises(ConfigError, match="scale"):
        lay_over(SOFTTRIPLE, {"loss.options.scale": -1.0})


def test_settings_without_effect_are_left_out_of_a_tables_ranges_and_refused_in_a_rows() -> None:
    batches = {path: Search(choices=(4, 8)) for path in ("sampler.batch_size", "sampler.num_classes_per_batch")}
    pairs = small_training("contrastive", sampler={"kind": "k_by_n", "num_classes_per_batch": 4, "num_samples_per_class": 2})
    assert set(space_of(SOFTTRIPLE, batches)) - set(space_of(SOFTTRIPLE)) == {"sampler.batch_size"}
    assert set(space_of(pairs, batches)) - set(space_of(pairs)) == {"sampler.num_classes_per_batch"}
    with pytest.raises(ConfigError, match=r"search: sampler.batch_size: has no effect: sampler.kind is 'k_by_n'; leave it out"):
        space_of(pairs, {}, {"sampler.batch_size": Search(choices=(4, 8))})
    one_centre = SOFTTRIPLE.model_copy(update={"loss": SOFTTRIPLE.loss.model_copy(update={"options": {"num_centres": 1}})})
    assert set(space_of(one_centre)) == {"loss.options.margin", "loss.options.scale"}
    with pytest.raises(ConfigError, match=r"search: loss.options.gamma: has no effect"):
        space_of(one_centre, {}, {"loss.options.gamma": Search(low=0.1, high=1.0)})
