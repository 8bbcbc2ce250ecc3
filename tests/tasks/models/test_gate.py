"""The registry's gate computed by hand: when a network replaces the champion, without a server."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import ConfigError
from dml_core.evaluation.evaluator import ClassRecall
from tasks.models import promotion
from tasks.models.promotion import Gain, class_recalls, gain_by_class, promote
from tasks.tracking.registered import TEST_VIEW, LoggedNetwork, _is_without_training
from tasks.tracking.tags import Tag
from tasks.tracking.versions import Version
from tests.tasks.models.test_card import NETWORK

TAGS = {Tag.VARIANT: "good", "dml.seed": "3", "dml.dataset_digest": "d1"}
NEW = replace(NETWORK, tags=TAGS)
OLD = replace(NETWORK, model_id="old", run_id="q", tags=TAGS | {Tag.VARIANT: "bad"})
HOLDER = Version("dml-own", "1", ("champion",), "old", "q", None)
MANY = 1000  # queries per class, so many that the floor of the standard deviation is below the observed one


class Registry:
    """A registry with one champion, which records promotions and attempts."""

    uri = "here"

    def __init__(self, holder: Version | None = HOLDER, old: LoggedNetwork | None = OLD) -> None:
        self.now, self.old, self.asked, self.promoted, self.attempts = holder, old, [], [], 0

    def promoting(self, name: str) -> Any:
        assert name == "dml-own"
        return nullcontext()

    def holder(self, name: str, alias: str) -> Version | None:
        return self.now

    def count_attempt(self, name: str, alias: str) -> int:
        self.attempts += 1
        return self.attempts

    def of_address(self, address: str) -> LoggedNetwork | None:
        return self.old

    def logged(self, tag: str, value: str) -> LoggedNetwork | None:
        self.asked.append((tag, value))
        return NEW

    def promote(self, name: str, alias: str, network: LoggedNetwork, said: str, card: str) -> Version:
        self.promoted.append((name, alias, network.model_id, said))
        assert said in card
        return Version(name, "2", (alias,), network.model_id, network.run_id, said)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs `promote` on a registry; the new network's gains in 12 classes are `differences`, repeated."""

    def run(registry: Registry, differences: Any = (0.1, 0.2), num_queries: int = MANY, **options: Any) -> promotion.Promotion:
        differences = (*differences,) * (12 // len(differences))
        recalls = {
            "r": {label: ClassRecall(0.5 + more, num_queries) for label, more in enumerate(differences)},
            "q": dict.fromkeys(range(12), ClassRecall(0.5, num_queries)),
        }
        monkeypatch.setattr(promotion, "Registry", lambda uri: registry)
        monkeypatch.setattr(promotion, "class_recalls", lambda registry, network: recalls[network.run_id])
        monkeypatch.setattr(promotion, "_reader", lambda project, network: None)
        params = SimpleNamespace(promotion=SimpleNamespace(min_gain=0.5))
        monkeypatch.setattr(promotion, "load_params", lambda file: params)
        project: Any = SimpleNamespace(tracking_uri="here", params_file=None)
        return promote(project, "0" * 32, **options)

    return run


def test_the_first_network_has_nobody_to_be_compared_with(gate: Any) -> None:
    registry = Registry(holder=None)
    assert gate(registry).reason == "the first; there was nothing to compare with"
    assert registry.promoted == [("dml-own", "champion", "m", "the first; there was nothing to compare with")]
    assert registry.asked == [("dml.trained", "0" * 32)]


def test_a_better_one_takes_the_place_with_the_least_gain_in_points(gate: Any) -> None:
    """Six times 10 and six times 20 points: standard deviation 5.22; at level 0.0304 of the first attempt, t(11) is 2.088."""
    found = gate(Registry())
    said = "better by 0.5 points or more: Recall@1 +15.0 points, at least +11.9 by a one-sided test at level 0.03 (attempt 1), paired by 12"
    assert found.reason == f"{said} test classes, against version 1 of dml-own (bad, seed 3)"
    assert found.version.number == "2"


def test_a_gain_just_below_the_required_one_does_not_look_like_it() -> None:
    """0.461 points were "+0.5", of which a refusal said that it is not 0.5 or more."""
    assert "+1.0 points, at least +0.461 by" in Gain(0.01, 0.0104, 12).describe(0.05)


def test_a_gain_that_is_certain_and_too_small_is_refused(gate: Any) -> None:
    """0.4 points in each of twelve classes of 1000 queries: significantly above 0, but below the required 0.5."""
    registry = Registry()
    with pytest.raises(ConfigError, match=r"no significant gain of 0.5 points or more: Recall@1 \+0.4 points, at least \+0.28 "):
        gate(registry, (0.004, 0.004))
    assert not registry.promoted


@pytest.mark.parametrize(
    ("points", "num_queries", "is_promoted"),
    [
        pytest.param((0,), 20, False, id="the same network"),
        pytest.param((10, -5, 5, 2), 20, False, id="better on the whole, within the noise"),  # mean 3, deviation 5.7: at least -0.5
        pytest.param((5, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), 20, False, id="one query more in two classes"),
        # floor 4.87, t(11) at 0.0304 is 2.089, so at least 5 - 2.089 * 4.87 / sqrt(12) = 2.06
        pytest.param((5,), 20, True, id="one query more in every class alike"),
        pytest.param((1, 0.2, 0.4, 0.4), 10**6, False, id="better, by less than the least gain"),  # at least 0.3
        pytest.param((10, 8, 12, 10), 20, True, id="better beyond the noise"),
        pytest.param((-10, -8, -12, -10), 20, False, id="worse beyond the noise"),
    ],
)
def test_the_gate_opens_where_the_gain_is_known_to_be_enough(
    gate: Any, points: tuple[float, ...], num_queries: int, is_promoted: bool
) -> None:
    registry, differences = Registry(), tuple(point / 100 for point in points)
    gain = f"0.5 points or more: Recall@1 {np.mean(points):+.1f} points, at least "
    if is_promoted:
        assert gate(registry, differences, num_queries).reason.startswith(f"better by {gain}+")
    else:
        with pytest.raises(ConfigError, match=rf"no significant gain of {re.escape(gain)}.*paired by 12 "):
            gate(registry, differences, num_queries)
    assert bool(registry.promoted) == is_promoted


def test_each_attempt_is_judged_more_strictly_than_the_last(gate: Any) -> None:
    """-4 and 10 points: mean 3, standard deviation 7.31; at least -1.4 at first, and less at each attempt."""
    registry = Registry()
    for least in ("-1.41", "-3.06"):
        with pytest.raises(ConfigError, match=rf"no significant gain of 0.5 points or more: Recall@1 \+3.0 points, at least {least} "):
            gate(registry, (-0.04, 0.1))
    assert not registry.promoted


def test_the_champion_stays_the_champion(gate: Any) -> None:
    registry = Registry(replace(HOLDER, model_id="m"))
    assert gate(registry).reason == f"{'0' * 32} is the champion of dml-own already (version 1)"
    assert not registry.promoted


def test_the_alias_of_the_best_run_is_not_given_away(gate: Any) -> None:
    with pytest.raises(ConfigError, match="--alias best: every comparison points it to its best run"):
        gate(Registry(), alias="best")


def test_force_goes_without_comparison_and_keeps_the_reason(gate: Any) -> None:
    assert gate(Registry(old=None), (-0.5, -0.6), forced_because="a rollback").reason == "forced, without comparison: a rollback"


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (None, "version 1 of dml-own: its run is no longer in MLflow"),
        (
            replace(OLD, tags=OLD.tags | {Tag.DIGEST: "d2"}),
            r"other images \(d2, this one d1\), so it cannot be compared; --force",
        ),
        (replace(OLD, tags={}, data=OLD.data | {"digest": "d2"}), r"was tested on other images \(d2, this one d1\)"),
    ],
)
def test_a_champion_that_cannot_be_compared_with_is_refused(gate: Any, old: LoggedNetwork | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gate(Registry(old=old))


def test_the_same_images_are_the_same_under_another_digest_of_mlflow_s_input(gate: Any) -> None:
    """DVC's digest covers options that leave the images unchanged, and is missing outside a checkout."""
    assert gate(Registry(old=replace(OLD, data=OLD.data | {"digest": "d41d8cd98f00b204.dir"}))).version.number == "2"


def held_out(network: LoggedNetwork, split: dict[str, Any] | None, role: str = "validation") -> LoggedNetwork:
    """Return the network with this split, scored on this role."""
    parameters = network.parameters
    training, evaluation = parameters["training"] | {"validation": split}, parameters["evaluation"] | {"role": role}
    return replace(network, parameters={"training": training, "evaluation": evaluation})


def test_other_held_out_classes_are_not_paired_by_their_numbers(gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every split numbers its classes from 0; test classes are the same for every split."""
    splits: list[dict[str, Any]] = [{"share": 0.2, "seed": seed} for seed in (0, 1)]
    for split, role, is_paired in ((splits[0], "validation", True), (splits[1], "validation", False), (splits[1], "test", True)):
        registry = Registry(old=held_out(OLD, split, role))
        monkeypatch.setattr(registry, "logged", lambda tag, value, role=role: held_out(NEW, splits[0], role))
        monkeypatch.setattr(registry, "promoting", lambda name: nullcontext())
        if is_paired:
            assert gate(registry).version.number == "2"
        else:
            with pytest.raises(
                ConfigError, match=r"tested on other held-out classes \({'share': 0.2, 'seed': 1}, this one {'share': 0.2, "
            ):
                gate(registry)


def test_the_reference_of_fine_tuning_saw_the_same_views_of_the_same_classes() -> None:
    """Settings of training views may differ."""
    split: dict[str, Any] = {"share": 0.2, "seed": 0}

    def with_training(network: LoggedNetwork, transform: dict[str, Any] | None = None, **changes: Any) -> LoggedNetwork:
        training = network.parameters["training"]
        changes["transform"] = training["transform"] | (transform or {})
        return replace(network, parameters=network.parameters | {"training": training | changes})

    frozen = with_training(held_out(OLD, split), num_epochs=0)
    network = held_out(NEW, split)
    assert _is_without_training(frozen, network)
    assert _is_without_training(with_training(frozen, {"flip": True, "train_resize": 300}), network)
    for other in (
        with_training(frozen, num_epochs=1),
        with_training(frozen, {"crop_size": 12}),
        with_training(frozen, {"test_resize": 300}),
        with_training(frozen, validation={"share": 0.2, "seed": 1}),
        held_out(frozen, split, "test"),
    ):
        assert not _is_without_training(other, network)
    assert _is_without_training(held_out(frozen, None, "test"), held_out(NEW, split, "test")), "the test classes are the same"


def test_every_setting_of_a_transform_is_of_training_views_or_of_test_views() -> None:
    of_training = {"train_resize", "crop", "crop_area", "crop_ratio", "padding", "flip", "jitter", "jitter_first"}
    assert {*TEST_VIEW} | of_training == TransformConfig.model_fields.keys()
    assert not {*TEST_VIEW} & of_training


def test_other_classes_are_not_paired() -> None:
    ten = {label: ClassRecall(0.5, MANY) for label in range(10)}
    assert gain_by_class({label: found._replace(recall=0.75) for label, found in ten.items()}, ten).mean == pytest.approx(0.25)
    with pytest.raises(ConfigError, match="10 and 10 test classes cannot be paired"):
        gain_by_class({label + 1: found for label, found in ten.items()}, ten)


def test_a_run_without_a_network_in_mlflow_is_refused(gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    monkeypatch.setattr(registry, "logged", lambda tag, value: None)
    with pytest.raises(ConfigError, match="MLflow at here has no such run with a network"):
        gate(registry)


def write_embeddings(folder: Path, **roles: tuple[list[list[float]], list[int]]) -> Path:
    folder.mkdir(exist_ok=True)
    manifest = {}
    for role, (rows, labels) in roles.items():
        np.save(folder / f"{role}-00000-of-00001.npy", np.array(rows, np.float32))
        np.save(folder / f"{role}-labels.npy", np.array(labels))
        shards, name = [f"{role}-00000-of-00001.npy"], f"{role}-labels.npy"
        manifest[role] = {"rows": len(rows), "dimensions": 2, "shards": shards, "labels": name}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


EAST, NORTH, NORTH_EAST = [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]


def test_recalls_are_of_the_run_s_own_embeddings(tmp_path: Path) -> None:
    """Test images search each other, or queries search the gallery if there is one."""
    test = write_embeddings(tmp_path / "a", test=([EAST, EAST, NORTH, NORTH, NORTH_EAST, NORTH_EAST], [0, 0, 1, 1, 0, 1]))
    registry = type("Registry", (), {"embeddings": lambda self, network, folder: test})()
    # the two north-east images are nearest to each other and of different classes
    assert class_recalls(registry, NEW) == {0: (pytest.approx(2 / 3), 3), 1: (pytest.approx(2 / 3), 3)}
    shop = write_embeddings(tmp_path / "c", query=([EAST, NORTH], [0, 1]), gallery=([EAST, NORTH_EAST], [0, 0]))
    registry = type("Registry", (), {"embeddings": lambda self, network, folder: shop})()
    assert class_recalls(registry, NEW) == {0: (1.0, 1)}, "class 1 has no image in the gallery"


def test_embeddings_that_cannot_be_compared_are_said(tmp_path: Path) -> None:
    endless = write_embeddings(tmp_path / "a", test=([EAST, [float("inf"), 0.0]], [0, 0]))
    registry = type("Registry", (), {"embeddings": lambda self, network, folder: endless})()
    with pytest.raises(ConfigError, match=r"^the run's embeddings cannot be compared: [^\n]+$"):
        class_recalls(registry, NEW)
