"""Runs that may be averaged: settings identities compared with the settings, and a selection with its definition."""

import hashlib
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dml_core.config import flatten, merge
from dml_core.errors import EvaluationError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.files import json_sha256
from tasks.runs import comparable
from tasks.runs.comparable import (
    KEEPING,
    NEUTRAL_EVALUATION,
    NEUTRAL_TRAINING,
    Facts,
    Today,
    scores_by_seed,
    select,
    settings_identity,
    standing_today,
)
from tasks.runs.params.comparison import variants_on
from tasks.runs.params.file import load_params
from tasks.runs.specs import RunSpec
from tasks.watch.storage import protocol_of
from tests.conftest import ROOT, small_training

TRAINING = small_training().model_dump(mode="json")
EVALUATION = EvaluationConfig().model_dump(mode="json")
OTHER: dict[str, Any] = {  # another valid value of each kind of setting
    "loss.name": "softmax",
    "sampler.batch_size": 16,
    "transform.padding": 3,
    "optimiser.learning_rate": 0.01,
    "optimiser.groups.loss.learning_rate": 0.25,
    "schedule.warmup_epochs": 0.5,
    "num_epochs": 4,
    "precision": "float32",
    "model.head.embedding_dim": 4,
    "validation": {"share": 0.25},
    "average": {"decay": 0.9},
    "warm_up_batchnorm": True,
}


def nested(name: str, value: Any) -> dict[str, Any]:
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


def identity(training: dict[str, Any] | None = None, evaluation: dict[str, Any] | None = None, digest: str | None = "d") -> str:
    return settings_identity(merge(TRAINING, training or {}), merge(EVALUATION, evaluation or {}), digest, {})


def test_every_setting_but_those_that_change_no_result_makes_another_identity() -> None:
    changed = [identity(nested(name, value)) for name, value in OTHER.items()]
    changed += [
        identity(evaluation=part) for part in ({"role": "train"}, {"recall_at": [1]}, {"metric": "euclidean"}, {"clustering": False})
    ]
    changed += [identity(), identity(digest="e"), identity(digest=None)]
    changed += [settings_identity(TRAINING, EVALUATION, "d", {"m": options}) for options in ({}, {"count": 1}, {"count": 2})]
    assert len(set(changed)) == len(changed)
    assert identity({"checkpoint_every_epochs": 2}, {"device": "cuda", "max_block_bytes": 2**20}) == identity()
    keeping = {"validation": {"share": 0.25}, "keep_epochs": ["best_validation"]}
    assert identity(keeping) == identity({"validation": {"share": 0.25}}), "of the last epoch, what else is kept changes nothing"
    best = {"epoch": "best_validation"}
    assert identity(keeping | {"keep_every_epochs": 2}, best) != identity(keeping, best)


def test_a_setting_that_did_not_exist_yet_has_its_default() -> None:
    older = {name: value for name, value in TRAINING.items() if name not in ("compile", "keep_every_epochs", "warm_up_batchnorm")}
    assert settings_identity(older, {}, "d", {}) == identity()
    assert settings_identity(TRAINING | {"gone": 1}, EVALUATION, "d", {}) != identity(), "settings of a program that has others"


def test_hashes_recorded_before_a_setting_was_added_are_those_of_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hashes of this test's first settings are those of 30 November 2026, which MLflow and accepted references have."""
    added = {
        "training.warm_up_batchnorm": False,
        "training.sampler.batch_size": TRAINING["sampler"]["batch_size"],
        "evaluation.metric": "cosine",
    }
    trained = {name: value for name, value in TRAINING.items() if name not in ("warm_up_batchnorm", *NEUTRAL_TRAINING, *KEEPING)}
    trained["sampler"] = {name: value for name, value in TRAINING["sampler"].items() if name != "batch_size"}
    scored = {name: value for name, value in EVALUATION.items() if name not in ("metric", *NEUTRAL_EVALUATION)}
    recorded = hashlib.sha256(json.dumps([trained, scored, "d"], sort_keys=True).encode()).hexdigest()[:32]
    assert identity() != recorded
    monkeypatch.setattr(comparable, "ADDED", added)
    changed = [
        identity({"warm_up_batchnorm": True}),
        identity({"sampler": {"batch_size": 16}}),
        identity(evaluation={"metric": "euclidean"}),
    ]
    assert identity() == recorded
    assert len({recorded, *changed}) == 4
    params = load_params(ROOT / "params.yaml")
    scored = {name: value for name, value in params.evaluation.model_dump(mode="json").items() if name != "metric"}
    of_reference = json_sha256([params.comparison.protocol, params.comparison.datasets["synthetic"], scored])
    assert protocol_of(params, "synthetic") == of_reference


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.floats(0, 1))))
def test_two_values_of_one_seed_are_refused(values: list[tuple[str, int, float]]) -> None:
    repeated = [place for place, count in Counter((system, seed) for system, seed, _ in values).items() if count > 1]
    if repeated:
        with pytest.raises(EvaluationError, match="has two results for seed"):
            scores_by_seed(values)
    else:
        found = scores_by_seed(values)
        assert sorted((system, seed, value) for system, by_seed in found.items() for seed, value in by_seed.items()) == sorted(values)


FACTS = st.builds(
    Facts,
    st.sampled_from(["d", "e"]),
    st.sampled_from("ab"),
    st.integers(0, 5),
    st.sampled_from([None, "1", "2"]),
    st.sampled_from([None, "x", "y", "z"]),
)
TODAY = st.builds(
    Today,
    st.dictionaries(st.sampled_from(["d", "e"]), st.sampled_from(["1", "2", "3"])),
    st.dictionaries(st.tuples(st.sampled_from(["d", "e"]), st.sampled_from("ab")), st.sampled_from("xyz")),
    st.booleans(),
)


@given(st.lists(FACTS, max_size=12), TODAY)
def test_no_two_unlike_runs_are_selected_and_none_is_lost_without_a_line(runs: list[Facts], today: Today) -> None:
    selected, left_out = select(runs, lambda run: run, today)
    for dataset in {run.dataset for run in runs}:
        on = [run for run in runs if run.dataset == dataset]
        kept = [run for run in selected if run.dataset == dataset]
        digests = {run.digest for run in kept}
        assert len(digests) <= 1
        assert dataset not in today.digests or digests <= {today.digests[dataset]}
        for system in {run.system for run in on}:
            own = [run for run in on if run.system == system]
            staying = [run for run in kept if run.system == system]
            settings, asked = {run.settings for run in staying}, today.settings.get((dataset, system))
            assert len(settings) <= 1
            present = [run for run in own if run.digest in digests]
            if staying and asked in {run.settings for run in present} - {None}:
                assert settings == {asked}
            if today.is_one_protocol and today.settings:
                assert settings <= {asked} - {None}
            lines = [line for line in left_out if line.startswith(f"left out: {system} on {dataset}, ")]
            num_named = sum(line.split(":")[1].count(",") for line in lines)
            assert num_named == len(own) - len(staying)
            former = [line for line in left_out if line.startswith(f"shown: {system} on {dataset}, ")]
            assert bool(former) == (asked is not None and bool(staying) and settings != {asked}), "judged with former settings: reported"


def test_unknown_present_content_is_the_one_of_most_runs_and_says_what_is_left_out() -> None:
    runs = [Facts("d", "a", seed, digest, "x") for seed, digest in enumerate(["1", "2", "2", None])]
    selected, left_out = select(runs, lambda run: run)
    assert [run.seed for run in selected] == [1, 2]
    assert left_out == (
        "left out: a on d, seed 0: measured on other data than the present",
        "left out: a on d, seed 3: measured on data that was not recorded",
    )
    assert [run.seed for run in select(runs, lambda run: run, Today({"d": "1"}))[0]] == [0]


def test_a_run_without_recorded_settings_does_not_replace_most_runs_where_the_present_settings_are_unknown() -> None:
    selected, left_out = select([Facts("d", "a", seed, "1", settings) for seed, settings in enumerate(["x", None, "x"])], lambda run: run)
    assert [run.seed for run in selected] == [0, 2]
    assert left_out == ("left out: a on d, seed 1: measured with other settings",)
    not_tuned_yet = select([Facts("d", "a", 0, "1", None)], lambda run: run, Today({}, {("d", "b"): "x"}, is_one_protocol=True))
    assert not_tuned_yet == ((), ("left out: a on d, seed 0: measured with other settings",))


def test_the_present_of_the_standing_comparison_has_every_variant_and_follows_its_settings() -> None:
    params = load_params(ROOT / "params.yaml")
    today = standing_today(params, "fashion-mnist", "1")
    assert {variant for _, variant in today.settings} == set(variants_on(params, "fashion-mnist"))
    assert today.is_one_protocol
    changed = load_params(ROOT / "params.yaml", ["comparison.datasets.fashion-mnist.num_epochs=1"])
    other = standing_today(changed, "fashion-mnist", "1")
    assert not {*today.settings.values()} & {found for (_, variant), found in other.settings.items() if variant != "untrained"}
    assert not {*today.settings.values()} & {*standing_today(params, "fashion-mnist", "2").settings.values()}


def test_a_specification_and_what_was_recorded_of_it_have_one_identity() -> None:
    spec = RunSpec(dataset="d", variant="a", seed=3, training=small_training(), evaluation=EvaluationConfig())
    recorded = spec.model_dump(mode="json")
    assert settings_identity(recorded["training"], recorded["evaluation"], "d", {}) == identity()
    assert flatten(recorded["training"]) == flatten(TRAINING)
