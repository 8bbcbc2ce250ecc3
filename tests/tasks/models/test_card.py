"""A model card contains MLflow's data of the run, and "not known" for missing data."""

import re
from dataclasses import replace
from typing import Any

import pytest

from dml_core.data.registry import DATASETS
from dml_core.models.config import HeadConfig
from tasks.models.card import DATA_LICENCES, model_card
from tasks.tracking.registered import LoggedNetwork
from tasks.tracking.tags import Tag
from tests.conftest import small_training

TRAINING = small_training().model_dump(mode="json")
NETWORK = LoggedNetwork(
    run_id="r",
    model_id="m",
    parameters={"training": TRAINING, "evaluation": {"role": "test", "metric": "cosine"}},
    tags={Tag.VARIANT: "good", Tag.SEED: "3", Tag.TRAINED: "abc", "dml.git_commit": "c0ffee"},
    metrics={"recall_at_1": 0.625, "nmi": 0.5},
    data={"name": "own", "digest": "d1", "counts": {"train": 36, "test": 30}},
)
# mean 0.625, standard error 0.1768 / sqrt(2) = 0.125; logit 0.5108 ± 12.706 * 0.125 / (0.625 * 0.375) = 6.777: -6.266 and 7.288
RECALLS = {4: 0.5, 5: 0.75}


def card(network: LoggedNetwork = NETWORK, reader: str | None = "synthetic", recalls: dict[int, float] = RECALLS) -> str:
    return model_card(network, recalls, "better: by 3 points", reader)


def with_training(**changes: Any) -> LoggedNetwork:
    return replace(NETWORK, parameters={**NETWORK.parameters, "training": {**TRAINING, **changes}})


def test_every_fact_stands_in_the_card() -> None:
    text = card()
    for line in (
        "# own / good / seed 3",
        "An image in, 8 numbers out: images of one class lie close together by the cosine metric.",
        "- network: small_cnn, head linear",
        "- trained with: normalised_softmax, 3 epochs, from random weights",
        "- licence of the weights that it started from: none were taken",
        "- identity of the training: `abc`; code at git commit c0ffee",
        "- weights of the last epoch",
        "- dataset: own, content d1; images: 36 train, 30 test",
        "- licence of the images: drawn by this package, Apache-2.0",
        "- held out of training to choose settings: nothing",
        "On the 2 classes of the role `test`.",
        "| recall@1 | 0.6250 |",
        "| nmi | 0.5000 |",
        "| recall@1, mean of the classes | 0.6250, 95 % interval [0.0019, 0.9993] |",
        "| worst class's recall@1 | 0.5000 |",
        "better: by 3 points",
    ):
        assert f"\n{line}\n" in f"\n{text}", line


def test_an_interval_stays_within_0_and_1() -> None:
    text = card(recalls=dict.fromkeys(range(9), 1.0) | {9: 0.8})
    low, high = map(float, re.findall(r"95 % interval \[(.*), (.*)\] \|", text)[0])
    assert 0 < low < 0.98 < high < 1
    assert "\nThe interval is the jackknife's over the classes, Student's t on the logit.\n" in text


@pytest.mark.parametrize("recalls", [{0: 0.9}, {0: 0.9, 1: 0.9}])
def test_one_class_or_equal_classes_have_no_interval(recalls: dict[int, float]) -> None:
    text = card(recalls=recalls)
    assert "\n| recall@1, mean of the classes | 0.9000 |\n" in text
    assert "nan" not in text
    assert "The interval" not in text


def test_scores_on_other_classes_and_kept_epochs_are_called_so() -> None:
    parameters = {"training": TRAINING, "evaluation": {"role": "validation", "metric": "cosine", "epoch": "best_validation"}}
    text = card(replace(NETWORK, parameters=parameters))
    assert "On the 2 classes of the role `validation`." in text
    assert "- weights of the best_validation epoch\n" in text


@pytest.mark.parametrize(
    ("weights", "start"),
    [("imagenet", "the published ImageNet weights"), ("bird.pt", "`bird.pt`"), ("https://a:b@c/d?e=f", "`https://c/d`")],
)
def test_weights_that_it_started_from_have_no_known_licence(weights: str, start: str) -> None:
    sha256 = "a" * 64 if "://" in weights else None
    backbone, transform = (
        {"name": "resnet50", "weights": weights, "weights_sha256": sha256},
        {**TRAINING["transform"], "scaling": "rgb-imagenet"},
    )
    text = card(with_training(model={**TRAINING["model"], "backbone": backbone}, transform=transform))
    assert f"3 epochs, from {start}\n" in text
    assert "- licence of the weights that it started from: not known\n" in text


def test_what_is_not_known_is_called_so() -> None:
    text = card(replace(NETWORK, tags={Tag.VARIANT: "good", Tag.SEED: "3"}), reader=None)
    assert "- identity of the training: `not known`; code at git commit not known\n" in text
    assert "- licence of the images: not known\n" in text


def test_held_out_classes_and_a_network_without_a_head_are_named() -> None:
    head = {"kind": "bn_neck", "embedding_dim": None}
    text = card(with_training(validation={"share": 0.25}, model={**TRAINING["model"], "head": head}))
    assert "- held out of training to choose settings: share 0.25" in text
    assert "An image in, as many numbers as the backbone has features out" in text
    assert "- network: small_cnn, head bn_neck\n" in text


@pytest.mark.parametrize(
    ("head", "size"),
    [
        ({"kind": "identity"}, "as many numbers as the backbone has features"),
        ({"kind": "two_layer", "test_layer": "last"}, "as many numbers as there are training classes"),
        ({"kind": "two_layer", "embedding_dim": 32}, "32 numbers"),
    ],
)
def test_the_size_of_an_embedding_is_that_of_the_head_s_output(head: dict[str, Any], size: str) -> None:
    """Every head has an `embedding_dim`; some do not read it, or use it for an inner layer."""
    stored = HeadConfig(**head).model_dump(mode="json")
    assert f"An image in, {size} out" in card(with_training(model={**TRAINING["model"], "head": stored}))


def test_licences_are_those_of_readers() -> None:
    assert DATA_LICENCES.keys() <= DATASETS.keys()
    assert "MIT (Zalando SE)" in card(reader="fashion_mnist")
