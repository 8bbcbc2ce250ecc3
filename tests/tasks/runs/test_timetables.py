"""Learning rate, weight decay and temperature of every group over whole schedules, compared with the papers' text (epochs from 0)."""

import pytest
import torch

from dml_core.losses.registry import build_loss
from dml_core.models.embedder import Embedder
from dml_core.training.optimisation.optimisers import TensorFlowAdam, build_optimiser, set_learning_rates
from dml_core.training.optimisation.schedules import learning_rate_factor
from dml_core.training.parallel.workers import TrainingSystem
from tasks.runs.protocols import load_protocol

NUM_STEPS = 100  # per epoch
FAST = {"resnet50": "resnet18"}


def timetable(paper, dataset, variant):
    """Return config, optimiser, and a function from (epoch, step) to {group: (rate, decay)} and the loss's alpha (or None)."""
    config = load_protocol(paper).training_config(dataset, variant)
    backbone = config.model.backbone
    backbone = backbone.model_copy(update={"weights": "none", "name": FAST.get(backbone.name, backbone.name)})
    model = Embedder(config.model.model_copy(update={"backbone": backbone}), num_classes=5)
    loss = build_loss(config.loss.name, config.loss.options, 5, model.head.output_dim)
    optimiser = build_optimiser(config.optimiser, TrainingSystem(model, loss))

    def at(epoch, step=0):
        loss.start_epoch(epoch, config.num_epochs)
        factor = learning_rate_factor(config.schedule, epoch, step, NUM_STEPS, config.num_epochs)
        set_learning_rates(optimiser, factor * loss.learning_rate_factor)
        return {group["name"]: (group["lr"], group["weight_decay"]) for group in optimiser.param_groups}, getattr(loss, "alpha", None)

    return config, optimiser, at


def check(at, rows):
    """Check the schedule at `rows`: (epoch, {group: (rate, decay)})."""
    for epoch, expected in rows:
        found, _ = at(epoch)
        assert found.keys() == expected.keys()
        for group, values in expected.items():
            assert found[group] == pytest.approx(values), (epoch, group)


def softtriple(backbone, centres, decay):
    return {"backbone": (backbone, decay), "head": (backbone, decay), "loss": (centres, decay)}


def test_softtriple_as_published():
    """1e-4 and 1e-2 (SOP 1e-1), divided by 10 at {20, 40} epochs of 50."""
    config, optimiser, at = timetable("softtriple", "cub200", "as_published")
    assert (config.num_epochs, type(optimiser), optimiser.defaults["eps"]) == (50, torch.optim.Adam, 1e-8)
    rows = [(0, 1.0), (19, 1.0), (20, 0.1), (39, 0.1), (40, 0.01), (49, 0.01)]
    check(at, [(epoch, softtriple(1e-4 * factor, 1e-2 * factor, 0.0)) for epoch, factor in rows])
    check(timetable("softtriple", "sop", "as_published")[2], [(0, softtriple(1e-4, 1e-1, 0.0))])


def test_softtriple_as_released():
    """The drop is after 19 and 39 epochs; decay 1e-4 on backbone and centres; eps 0.01."""
    config, optimiser, at = timetable("softtriple", "cars196", "as_released")
    assert (config.num_epochs, optimiser.defaults["eps"]) == (50, 0.01)
    rows = [(0, 1.0), (18, 1.0), (19, 0.1), (38, 0.1), (39, 0.01), (49, 0.01)]
    check(at, [(epoch, softtriple(1e-4 * factor, 1e-2 * factor, 1e-4)) for epoch, factor in rows])


def one_rate(rate, decay=0.0, groups=("backbone", "head", "loss")):
    return dict.fromkeys(groups, (rate, decay))


def test_heated_up_softmax_as_released():
    """61 epochs at 0.004 and alpha 16, then 19 at a tenth and alpha 4; one rate for every layer, no decay."""
    config, optimiser, at = timetable("heated_up_softmax", "cars196", "as_released")
    assert (config.num_epochs, type(optimiser), optimiser.defaults["momentum"]) == (80, torch.optim.SGD, 0.9)
    assert config.warm_up_batchnorm
    check(at, [(0, one_rate(4e-3)), (60, one_rate(4e-3)), (61, one_rate(4e-4)), (79, one_rate(4e-4))])
    assert [at(epoch)[1] for epoch in (0, 60, 61, 79)] == pytest.approx([16, 16, 4, 4])


@pytest.mark.parametrize(("variant", "inside"), [("as_published", True), ("as_released", False)])
def test_heated_up_softmax_starts_as_tf_slim_and_has_its_bias_where_each_reading_has_it(variant, inside):
    config = load_protocol("heated_up_softmax").training_config("cars196", variant)
    assert (config.loss.options["bias"], config.loss.options["bias_inside_alpha"]) == (True, inside)
    assert (config.loss.options["initial"], config.model.head.initial) == ("unit_norm", "slim")
    assert (config.model.batchnorm_momentum, config.transform.interpolation) == (0.05, "lanczos")


@pytest.mark.parametrize(("variant", "eps", "heated", "better"), [("as_published", 1e-8, 38, False), ("as_released", 0.01, 61, True)])
def test_heated_up_softmax_on_sop_is_adam(variant, eps, heated, better):
    config, optimiser, at = timetable("heated_up_softmax", "sop", variant)
    assert (type(optimiser), optimiser.defaults["eps"]) == (TensorFlowAdam, eps)
    check(at, [(0, one_rate(1e-2)), (heated - 1, one_rate(1e-2)), (heated, one_rate(1e-3))])
    assert [at(epoch)[1] for epoch in (heated - 1, heated)] == pytest.approx([16, 4])
    assert config.loss.options.get("better_init", False) == better


@pytest.mark.parametrize("variant", ["as_published", "as_published_vgg16"])
def test_discriminative(variant):
    """0.1 for the last two layers and a tenth for the others, halved every 5 epochs of 40; decay 5e-4."""
    config, _, at = timetable("discriminative", "cub200", variant)
    assert (config.num_epochs, config.sampler.batch_size) == (40, 128)
    rows = [(0, 1.0), (4, 1.0), (5, 0.5), (9, 0.5), (10, 0.25), (39, 0.5**7)]
    check(at, [(epoch, {"backbone": (0.01 * factor, 5e-4), "head": (0.1 * factor, 5e-4)}) for epoch, factor in rows])


def test_tuplet_margin():
    """0.01 divided by 10 for every 30 epochs, 100 epochs; momentum 0.9, decay 1e-4; no parameters in the loss."""
    config, optimiser, at = timetable("tuplet_margin", "sop", "as_published")
    assert (config.num_epochs, optimiser.defaults["momentum"]) == (100, 0.9)
    assert (config.sampler.num_classes_per_batch, config.sampler.num_samples_per_class) == (96, 4)
    rows = [(0, 1e-2), (29, 1e-2), (30, 1e-3), (59, 1e-3), (60, 1e-4), (89, 1e-4), (90, 1e-5), (99, 1e-5)]
    check(at, [(epoch, one_rate(rate, 1e-4, ("backbone", "head"))) for epoch, rate in rows])


@pytest.mark.parametrize(("dataset", "rate", "momentum"), [("cub200", 0.05, 0.0), ("cars196", 0.05, 0.0), ("sop", 3e-3, 0.99)])
def test_sgsl_as_released(dataset, rate, momentum):
    """0.1 to 1 over 1000 iterations, then 90 epochs of a cosine by epoch down to a hundredth; decay 5e-4, none on biases."""
    config, optimiser, at = timetable("sgsl", dataset, "as_released")
    assert (config.num_epochs, optimiser.defaults["momentum"], optimiser.defaults["nesterov"]) == (100, momentum, momentum > 0)
    assert at(0)[0]["loss"] == pytest.approx((0.1 * rate, 5e-4))
    assert at(5)[0]["loss"][0] == pytest.approx(0.55 * rate, rel=0.01)  # half of the 1000 iterations
    assert at(9, step=99)[0]["loss"][0] == pytest.approx(rate, rel=1e-3)  # the warm-up's last step
    assert at(54)[0]["backbone"] == pytest.approx((rate * 0.505, 5e-4))  # 45 of the 90 epochs after the first at the full rate
    assert at(54, step=99) == at(54)
    assert at(99)[0]["loss"][0] == pytest.approx(0.01 * rate)
    assert "head without decay" not in at(0)[0]  # the shift, its only bias, is frozen; the scale decays


def test_sgsl_as_published():
    """Boudiaf's settings: cosine by iteration to 0, no decay of one-dimensional parameters."""
    _, optimiser, at = timetable("sgsl", "cub200", "as_published")
    free = {"backbone without decay": (0.01, 0.0), "head without decay": (0.01, 0.0)}  # the head's is GeM's learned p
    check(at, [(50, {"backbone": (0.01, 5e-4), "loss": (0.01, 5e-4), **free})])
    assert [at(0, step)[0]["loss"][0] for step in (0, 49, 99)] == pytest.approx([0.0002, 0.01, 0.02], rel=1e-3)  # (i + 1) / 100
    assert at(50, step=50)[0]["loss"][0] < at(50)[0]["loss"][0]
    assert all(parameter.dim() < 2 for group in optimiser.param_groups if "without" in group["name"] for parameter in group["params"])


def test_cropped_rows_are_whole_where_there_are_no_boxes():
    protocol = load_protocol("tuplet_margin")
    boxes = {data: protocol.training_config(data, "as_published_cropped").transform.crop_to_box for data in protocol.datasets}
    assert boxes == {"cars196": True, "cub200": True, "sop": False}


def test_sgsls_two_readings_differ_where_boudiaf_and_the_released_code_do():
    published, released = (load_protocol("sgsl").training_config("cub200", variant) for variant in ("as_published", "as_released"))
    assert [config.loss.options.get("dropout", 0) for config in (published, released)] == [0.5, 0]
    assert [config.model.pooling.learn_gem_power for config in (published, released)] == [True, False]
    assert [config.loss.options["label_smoothing"] for config in (published, released)] == [0.1, 0.4]
    assert {config.transform.jitter_first for config in (published, released)} == {True}
    assert {config.sampler.class_frequency for config in (published, released)} == {"by_size"}


def test_frozen_batchnorm_is_as_each_paper_has_it():
    def frozen(paper, dataset, variant):
        return load_protocol(paper).training_config(dataset, variant).model.freeze_batchnorm

    assert [frozen("softtriple", dataset, "as_published") for dataset in ("cub200", "cars196", "sop")] == [
        "statistics",
        "statistics",
        "none",
    ]
    assert frozen("sgsl", "cub200", "as_released") == "all"
    assert frozen("heated_up_softmax", "cub200", "as_published") == "scale"


def test_the_common_track():
    """Our settings: AdamW, 1e-4 for the backbone, 1e-3 for the head, 1e-2 for the loss; linear over the first of 40 epochs, then cosine."""
    config, optimiser, at = timetable("common", "cub200", "softtriple")
    assert (config.num_epochs, type(optimiser)) == (40, torch.optim.AdamW)
    ours = torch.tensor([1e-4, 1e-3, 1e-2])
    for epoch, factor in ((0, 0.0), (1, 0.99847), (20, 0.505), (39, 0.01153)):  # 0.01 + 0.99 (1 + cos(pi e / 40)) / 2
        groups, _ = at(epoch)
        assert list(groups) == ["backbone", "head", "loss"]
        rates, decays = torch.tensor(list(groups.values())).T
        torch.testing.assert_close(rates, factor * ours, rtol=1e-3, atol=0.0)
        assert decays.tolist() == pytest.approx([1e-4] * 3)
