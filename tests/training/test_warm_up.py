"""Actions before the first epoch, and refusals of the training configuration."""

import pytest
import torch

from dml_core.config import merge, parse
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import ConfigError
from dml_core.training.config import TrainingConfig
from dml_core.training.loop import build_system, fit
from tests.conftest import MODEL, SETTINGS, small_training
from tests.one_view import plain_view

CPU = torch.device("cpu")
HEAD = {"model": {**MODEL, "head": {"kind": "bn", "embedding_dim": 8}}}


def test_the_batchnorm_pass_moves_averages_and_nothing_else(packed, tmp_path):
    dataset = PackedDataset(packed, "train")
    config = small_training(num_epochs=0, warm_up_batchnorm=True, **HEAD)
    warm = fit(config, dataset, 0, tmp_path, CPU).state_dict()
    reference = build_system(config, len(dataset.class_names), 0, CPU).train()
    before = {key: value.clone() for key, value in reference.state_dict().items()}
    views = torch.stack([plain_view(dataset.image(index), config.transform) for index in range(len(dataset))])
    for rows in (range(8), range(8, 16), range(16, 24), range(24, 36)):  # the short rest is added to the last batch
        reference.model(views[list(rows)])
    assert all(torch.allclose(warm[key], value, atol=1e-6) for key, value in reference.state_dict().items())
    assert {key.rpartition(".")[2] for key in warm if not torch.equal(warm[key], before[key])} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }


def test_class_means_are_taken_after_the_batchnorm_pass(packed, tmp_path):
    loss = {"loss": {"name": "heated_up_softmax", "options": {"better_init": True}}}
    values = merge(merge(SETTINGS, HEAD), loss) | {"num_epochs": 0}
    dataset = PackedDataset(packed, "train")
    started = [
        fit(parse(TrainingConfig, values | {"warm_up_batchnorm": warm}, "test"), dataset, 0, tmp_path / str(warm), CPU)
        for warm in (True, False)
    ]
    assert not torch.equal(*(system.loss.classifier.weight for system in started))


@pytest.mark.parametrize(("name", "scaling"), [("bn_inception", "bgr-caffe"), ("googlenet", "minus-one-one"), ("resnet50", "rgb-imagenet")])
def test_published_weights_are_tied_to_their_pixels(name, scaling):
    def config(found, weights):
        values = {"model": {"backbone": {"name": name, "weights": weights}}, "transform": {"crop_size": 24, "scaling": found}}
        base = {key: value for key, value in SETTINGS.items() if key not in ("model", "transform")}
        return parse(TrainingConfig, merge(base, values) | {"loss": {"name": "softmax"}}, "test")

    config(scaling, "imagenet")
    config("zero-one", "none")
    with pytest.raises(ConfigError, match=f"expects transform.scaling '{scaling}', found 'zero-one'"):
        config("zero-one", "imagenet")
